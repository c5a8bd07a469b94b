"""Video and omni processors: samples against the processors called by hand, and on two ranks to the loss and the
gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_processors import TORCHVISION

HERE = Path(__file__).parent
needs_torchvision = pytest.mark.skipif(
    not TORCHVISION.exists(), reason=f"video processors need torchvision: make setup-test puts it into {TORCHVISION}"
)


def run(script: str, timeout: float) -> list[dict]:
    """The JSON objects that a script of this folder prints."""
    root = HERE.parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, HERE / script], capture_output=True, text=True, timeout=timeout, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@needs_torchvision
def test_samples_are_what_the_processor_makes():
    rows = {row["processor"]: row for row in run("processor_samples.py", timeout=120)}
    assert len(rows) == 7
    assert all(row["samples"] == 10 and row["pixel_values"] == 4 for row in rows.values())
    assert sum("pixel_values_videos" in row for row in rows.values()) == 6
    assert sum("input_features" in row for row in rows.values()) == 2
    assert {row["odd"] for row in rows.values()} == {2, 4, 5}


@needs_torchvision
def test_images_videos_and_sounds_give_the_loss_and_gradients_of_one_rank_on_two():
    """A row without media gives its towers no gradients: the ranks that share it need none, as one rank alone."""
    rows = run("omni_on_ranks.py", timeout=240)
    assert len(rows) == 3
    assert {len(row["media"]) for row in rows} == {0, 3}
    assert any(row["documents"] > 1 and row["media"] for row in rows)
    for row in rows:
        assert row["without_gradients"] == [[] if row["media"] else ["audio_tower", "visual"]] * 3
        assert row["ranks"] == pytest.approx(row["one_rank"], rel=1e-5)
        assert row["gradient_errors"].keys() == {"audio_tower", "visual", "language_model", "lm_head"}
        assert all(error <= 1e-5 for error in row["gradient_errors"].values()), row["gradient_errors"]
