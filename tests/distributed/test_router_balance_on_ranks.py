"""`train.router_balance: bias` on ranks: the same biases in every layout and through a resume; no router collapses."""

from __future__ import annotations

import json
from pathlib import Path

import cases_router_balance as cases
import cases_trainer
import pytest

BIAS = {"router_balance": "bias"}


@pytest.fixture(scope="module")
def checkpoints(trainer_folder, tmp_path_factory) -> dict[str, Path]:
    """Model type -> weights of a collapsed model."""
    place = tmp_path_factory.mktemp("collapsed")
    start = trainer_folder / "start"
    return {name: cases.collapsed_checkpoint(start, place / name, name) for name in cases.OPTIONS}


def recipe(folder: Path, source: Path, run: Path, steps: int, balance: dict, **changes: dict) -> dict:
    sections = {
        "model": {"source": str(source)},
        "optim": {"lr": 1e-3, "warmup_steps": 0, "schedule": "constant"},
        "train": {"steps": steps, **balance},
        "log": {"directory": str(run)},
    }
    return cases_trainer.recipe_of(
        folder, **{name: sections.get(name, {}) | changes.get(name, {}) for name in sections | changes}
    )


@pytest.mark.parametrize("model_type", list(cases.OPTIONS))
def test_biases_are_the_same_to_the_bit_in_every_layout_and_through_a_resume(
    model_type, checkpoints, trainer_folder, tmp_path, one_rank, two_ranks
):
    """A buffer and a frozen parameter; steps of four micro-batches on one rank, and of two on each of two. Rows of odd lengths are
    padded under sp, and layers are computed again in the backward: neither is counted."""
    source = checkpoints[model_type]
    balance = BIAS | {"router_bias": {"rate": 0.1, "by": "size", "warmup_steps": 2, "bound": 0.25}}

    def values(name: str, steps: int, **changes: dict) -> dict:
        return recipe(trainer_folder, source, tmp_path / name, steps, balance, **changes)

    expected = one_rank.run(cases.train, values("one", 4))[0][2]
    assert len(expected) == 2
    for bias in expected.values():
        assert len(bias) == cases.EXPERTS and len({*bias}) > 2 and max(map(abs, bias)) <= 0.25
        assert max(bias[expert] for expert in cases.BUSY) < 0 < max(bias)
    assert two_ranks.run(cases.train, values("sp", 4, parallel={"sp": 2}))[0][2] == expected
    two_ranks.run(cases.train, values("resumed", 2))  # FSDP
    again = {"ep": 2, "activation_checkpointing": "full"}
    resumed = two_ranks.run(
        cases.train, values("resumed", 4, parallel=again, checkpoint={"export": True}), timeout=300
    )
    assert [found[2] for found in resumed] == [expected, expected]
    assert cases.exported_biases(tmp_path / "resumed" / "export") == expected


def test_the_loss_is_that_of_a_config_with_it_on_and_the_exported_config_has_it_off(
    trainer_folder, tmp_path, one_rank
):
    def run(name: str, balance: dict, overrides: dict):
        source, changes = trainer_folder / "start", {"checkpoint": {"export": True}}
        values = recipe(trainer_folder, source, tmp_path / name, 2, balance, **changes)
        values["model"]["overrides"] = {"router_aux_loss_coef": 0.5, **overrides}
        losses = one_rank.run(cases.train, values)[0][0]
        return losses, json.loads((tmp_path / name / "export" / "config.json").read_text())["output_router_logits"]

    switched, is_on = run("switched", {"router_balance": "loss"}, {})
    by_config, is_on_by_config = run("by config", {}, {"output_router_logits": True})
    plain, _ = run("plain", {}, {})
    assert switched == by_config and switched[0] > plain[0] + 0.4
    assert (is_on, is_on_by_config) == (False, True)


def test_a_collapsed_router_is_balanced_by_its_bias_and_stays_collapsed_without(
    checkpoints, trainer_folder, tmp_path, one_rank
):
    source, log = checkpoints["deepseek_v3"], {"every": 8}

    def run(name: str, steps: int, balance: dict):
        values = recipe(trainer_folder, source, tmp_path / name, steps, balance, log={"every": log["every"]})
        return one_rank.run(cases.train, values)[0]

    plain, even = cases.EXPERTS / cases.PER_TOKEN, 1.0
    losses, loads, biases, _ = run("without", 16, {})
    assert loads == [pytest.approx(plain, rel=0.02)] * 2 and not any(map(any, biases.values()))
    balanced, loads, _, _ = run("with", 24, BIAS | {"router_bias": {"rate": 0.05, "by": "size"}})
    assert even < loads[-1] < 2 * even < loads[0]
    assert balanced[15] < 0.95 * balanced[0] and balanced[15] == pytest.approx(losses[15], rel=0.05)
