"""A step on one rank and on several: what is left out of it is told, and nothing of it stays behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchgen.runtime.doctor import rank_step, step_checks
from patchgen.runtime.doctor.step_checks import Layout, Step, StepFigures, single_step, unexamined_options
from patchgen.runtime.train import trainer
from patchgen.runtime.train.feed import micro_batches_per_step
from patchgen.runtime.train.recipe import Recipe, from_dict

FIGURES = StepFigures(loss=1.0, norm=1.0, seconds=1.0, tokens=8, flops=1.0, state_bytes=0, peak_bytes=None)


def recipe_of(**sections: Any) -> Recipe:
    return from_dict({"model": {"source": "qwen3_moe"}, "data": {}, **sections})


class Built(Exception):
    """The recipe that a trainer was built with."""


def test_a_recipe_with_evaluations_takes_its_step_without_them(tmp_path, monkeypatch):
    def build(recipe: Recipe, device: torch.device) -> None:
        raise Built(recipe)

    monkeypatch.setattr(trainer, "Trainer", build)
    with pytest.raises(Built) as built:
        train = {"eval_every": 2, "patience": 3, "prompts": ["a"]}
        kept = {"keep_best": True, "export": "best"}
        rank_step.measure_step(recipe_of(train=train, checkpoint=kept, eval_data={}), torch.device("cpu"), tmp_path)
    (recipe,) = built.value.args
    assert (recipe.train.eval_every, recipe.train.prompts, recipe.eval_data) == (0, (), None)


def test_one_rank_takes_the_batches_of_several_whatever_the_recipe_counts_over_a_step():
    recipe = recipe_of(train={"router_loss": "global", "cuda_graph": True})
    train = single_step(recipe, 2).train
    assert micro_batches_per_step(train.batches_per_step, 1, router_loss=train.router_loss) == 2
    assert single_step(recipe, 1).train.router_loss == "global"  # a single batch
    assert unexamined_options(recipe_of(), 2) == ""
    assert "router_loss" not in unexamined_options(recipe, 1)


@pytest.mark.parametrize("check", [Step(), Layout()])
def test_a_finding_names_what_was_not_examined(check, monkeypatch):
    parts = step_checks.memory.Estimate(*[0] * 9, "in the loss")
    monkeypatch.setattr(step_checks, "single_rank_figures", lambda patient: FIGURES)
    monkeypatch.setattr(step_checks, "estimate_of", lambda patient, world: parts)
    monkeypatch.setattr(step_checks, "ranks_for", lambda patient: 2)
    monkeypatch.setattr(step_checks, "step_on_ranks", lambda recipe, ranks: FIGURES)
    recipe = recipe_of(train={"router_loss": "global", "cuda_graph": True})
    patient = SimpleNamespace(recipe=recipe, device=torch.device("cpu"), dtype=torch.float32)
    finding = check.run(patient)
    assert finding.status == "passed"
    assert "capture was not examined" in finding.summary and "'global' was not examined" in finding.summary
    patient.recipe = replace(recipe, train=replace(recipe.train, router_loss="row", cuda_graph=False))
    assert "not examined" not in check.run(patient).summary


def test_ranks_leave_no_folder_behind_even_if_they_fail(monkeypatch):
    folders = []

    def fail(command: list[str], environments: list[dict[str, str]], seconds: float) -> str:
        folders.append(Path(command[-1]))
        assert folders[0].is_dir(), "the ranks write their step there"
        raise RuntimeError("rank 1 was killed")

    monkeypatch.setattr(step_checks, "run_ranks", fail)
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        step_checks.step_on_ranks(recipe_of(), 2)
    assert not folders[0].exists()


def test_of_ranks_that_end_together_none_is_called_the_first():
    codes = (None, 1, -9)
    running = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    told = step_checks._wait(running, 10)
    assert (
        told
        == "rank 1 with exit status 1, rank 2 with exit status -9 were the first to end, within 0.1 s of each other"
    )
    assert step_checks._wait(running[:2], 10) == "rank 1 was the first to end, with exit status 1"
