"""The doctor passes a sound vision model and finds each fault that is planted in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import planted
import pytest
from small_processors import TORCHVISION

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def vision(home) -> dict[str, dict]:
    """What the doctor finds in a vision model: in a process of its own, where torchvision is there before transformers."""
    if not TORCHVISION.exists():
        pytest.skip(f"video processors need torchvision: make setup-test puts it into {TORCHVISION}")
    path = os.pathsep.join(filter(None, (str(HERE.parents[2]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = [sys.executable, HERE / "doctor_on_vision.py"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["fault"]: row for row in rows}


@pytest.mark.parametrize(("case", "left"), [("", []), ("layer by layer", ["proof", "step", "layout"])])
def test_a_sound_vision_model_passes(vision, case, left):
    sound = vision[case]
    assert sound["failed"] == [], sound["text"]
    assert sound["not_checked"] == left, sound["text"]


@pytest.mark.parametrize("fault", planted.PROMISED)
def test_a_fault_planted_in_a_vision_model_is_found(vision, fault):
    assert vision[fault]["is_found"], vision[fault]["text"]
