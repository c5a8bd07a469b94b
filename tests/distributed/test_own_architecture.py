"""docs/own_architecture.md as it stands: generated, trained by the command line on two ranks, exported, loaded again."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rounding import require_rounding
from typer.testing import CliRunner

from patchgen.cli import app
from patchgen.commands import checkpoints
from patchgen.runtime.train import run_log

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_architecture.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^    patchgen (.*)$", PAGE, flags=re.MULTILINE)]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def place(tmp_path, monkeypatch, trainer_folder) -> Path:
    """What the reader brings: the code, a checkpoint of it with a tokenizer, a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(ROOT / "tests" / "patchgen" / "data" / "lattice_moe", "lattice_moe")
    shutil.copytree(
        trainer_folder / "start", "checkpoint", ignore=shutil.ignore_patterns("*config.json", "*.safetensors")
    )
    shutil.copy(trainer_folder / "start" / "tokenizer_config.json", "checkpoint")
    shutil.copy(trainer_folder / "text.jsonl", "text.jsonl")
    Path("recipe.yaml").write_text(blocks("yaml")[0])
    return tmp_path


def test_the_page_works_as_written(place):
    from lattice_moe.configuration_lattice_moe import LatticeMoeConfig
    from lattice_moe.modeling_lattice_moe import LatticeMoeForCausalLM

    torch.manual_seed(0)
    before = LatticeMoeForCausalLM(LatticeMoeConfig())
    before.save_pretrained("checkpoint")
    for command in COMMANDS:
        if command[0] != "train":  # what starts no ranks needs no process of its own
            done = CliRunner().invoke(app, command, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            continue
        words = [sys.executable, "-m", "patchgen.cli", *command]
        started = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert started.returncode == 0, started.stdout + started.stderr
        assert "sp 2, ep 2" in started.stdout and "tokens exchanged over ep 2" in started.stdout
    assert len(run_log.read(Path("run"))) == 3
    names = {}
    exec(blocks("python")[0], names)
    after = names["model"]
    assert type(after) is LatticeMoeForCausalLM
    moved = [name for name, one in after.named_parameters() if not torch.equal(one, before.get_parameter(name))]
    assert any(".experts.3.down_proj" in name for name in moved), (
        "a list of experts, and the second rank's are trained"
    )
    again = LatticeMoeForCausalLM.from_pretrained("exported")
    ids = torch.arange(24)[None]
    require_rounding(again(ids).logits, after(ids).logits)

    Path("pyproject.toml").write_text(blocks("toml")[0])
    checkpoints.convert(Path("exported"), Path("stacked"), layout="stacked", dtype=None, code=None, generated=None)
    assert json.loads(Path("stacked/config.json").read_text())["model_type"] == "lattice_moe"
