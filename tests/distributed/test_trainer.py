"""A recipe on one rank, on four in several layouts, and a plain loop around upstream's model: the same curve."""

from __future__ import annotations

import math
from pathlib import Path

import cases_trainer as cases
import pytest
import torch
from plain_training import plain_loop
from rounding import UNITS, error, require_equal_up_to_rounding

LAYOUTS = {
    "FSDP": {},
    "EP2": {"ep": 2},
    "SP2": {"sp": 2},
    "EP2 x SP2": {"ep": 2, "sp": 2},
    "EP2 x SP2, parameters kept": {"ep": 2, "sp": 2, "reshard_after_forward": False},
    "EP4 x SP2": {"ep": 4, "sp": 2},
    "replicas, EP2": {"dp_replicate": 2, "ep": 2},
}


def upstream(folder: Path) -> torch.nn.Module:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder / "start", attn_implementation="eager").train()


def curves(folder: Path, tmp_path: Path, steps: int, layouts: dict, one_rank, four_ranks) -> dict[str, list[float]]:
    """The losses of each layout, and those of one rank and of the plain loop."""
    found = {}
    for name, layout in {"one rank": {}, **layouts}.items():
        run = {"log": {"directory": str(tmp_path / name)}, "train": {"steps": steps, "batches_per_step": 4}}
        values = cases.recipe_of(folder, parallel=layout, **run)
        found[name] = (one_rank if name == "one rank" else four_ranks).run(cases.train, values, timeout=900)[0][0]
    rows = one_rank.run(cases.global_rows, values, 4 * steps)[0]
    found["transformers"] = plain_loop(upstream(folder), steps, rows)
    return found


def compare(found: dict[str, list[float]]) -> None:
    expected = found.pop("transformers")
    assert expected[-1] < expected[0] - 0.1, "the curve must fall, or equality says little"
    for name, losses in found.items():
        worst = error(losses, expected)
        print(f"{name}: {len(losses)} steps, {losses[0]:.4f} to {losses[-1]:.4f}, from transformers by {worst:.1e}")
        require_equal_up_to_rounding(losses, expected, units=UNITS * math.sqrt(len(losses)), what=name)


def test_six_steps_on_one_rank_and_four_are_those_of_a_plain_loop(trainer_folder, tmp_path, one_rank, four_ranks):
    layouts = {name: LAYOUTS[name] for name in ("EP2 x SP2, parameters kept", "EP4 x SP2")}
    compare(curves(trainer_folder, tmp_path, 6, layouts, one_rank, four_ranks))


@pytest.mark.slow
def test_fifty_steps_on_one_rank_and_four_are_those_of_a_plain_loop(trainer_folder, tmp_path, one_rank, four_ranks):
    compare(curves(trainer_folder, tmp_path, 50, LAYOUTS, one_rank, four_ranks))
