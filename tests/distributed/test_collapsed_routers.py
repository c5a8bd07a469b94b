"""A run whose routers send every token to the same experts says so once; one whose routers do not says nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import cases_trainer as cases
import torch
from transformers import Qwen3MoeForCausalLM

from patchgen.runtime.train import run_log

BUSY = [2, 5]


def collapse(source: Path, target: Path) -> None:
    """A checkpoint whose tokens have a large first coordinate, which the routers turn into the experts `BUSY`."""
    shutil.copytree(source, target)
    model = Qwen3MoeForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 5.0
        for layer in model.model.layers:
            layer.mlp.gate.weight[BUSY, 0] = 20.0
    model.save_pretrained(target)


def run(folder: Path, ranks, source: Path, directory: Path) -> list[dict]:
    changes = {"model": {"source": str(source)}, "log": {"directory": str(directory)}, "parallel": {"ep": 2}}
    ranks.run(
        cases.train_and_log, cases.recipe_of(folder, optim={"lr": 1e-5, "warmup_steps": 0}, **changes), timeout=900
    )
    return run_log.read(directory)


def test_a_collapsed_router_is_told_once_with_what_to_do(trainer_folder, tmp_path, two_ranks):
    collapse(trainer_folder / "start", tmp_path / "collapsed")
    entries = run(trainer_folder, two_ranks, tmp_path / "collapsed", tmp_path / "run")
    told = {entry["step"]: entry["warning"] for entry in entries if "warning" in entry}
    assert list(told) == [3], "after three readings, and once"
    assert (
        "Routers have collapsed in 2 of 2 layers (model.layers.0.mlp.experts, model.layers.1.mlp.experts)" in told[3]
    )
    assert "the 2 busiest of 8 got 100%, the busiest 4.0x the even share; 6 got none" in told[3]
    assert "train.router_balance: loss" in told[3], "a key of the recipe"
    assert entries[-1]["expert_shares"] == [1.0, 1.0]
    experts = run_log.read_experts(tmp_path / "run")
    assert experts is not None and experts["step"] == 6
    for counts in experts["counts"].values():
        assert [index for index, count in enumerate(counts) if count] == BUSY
    page = (tmp_path / "run" / "index.html").read_text()
    assert '<p class="warning"><strong>Step 3</strong> Routers have collapsed' in page
    assert "load of each expert at step 6" in page


def test_a_router_that_spreads_its_tokens_is_not_warned_of(trainer_folder, tmp_path, two_ranks):
    entries = run(trainer_folder, two_ranks, trainer_folder / "start", tmp_path / "run")
    assert not [entry["warning"] for entry in entries if "warning" in entry]
    assert all(0.25 <= share < 0.8 for entry in entries for share in entry["expert_shares"])
    page = (tmp_path / "run" / "index.html").read_text()
    assert "load of each expert at step 6" in page and '<p class="warning"' not in page
