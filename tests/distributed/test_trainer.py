"""A recipe on one rank, on four in several layouts, and a plain loop around upstream's model: the same curve.

The plain loop uses nothing of the runtime but the packed rows themselves: transformers' model in fp32 with its own loss,
torch's AdamW and clipping, and a schedule written out again.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import cases_trainer as cases
import pytest
import torch
from rounding import UNITS, error, require_rounding

LAYOUTS = {
    "FSDP": {},
    "EP2": {"ep": 2},
    "SP2": {"sp": 2},
    "EP2 x SP2": {"ep": 2, "sp": 2},
    "EP4 x SP2": {"ep": 4, "sp": 2},
    "replicas, EP2": {"dp_replicate": 2, "ep": 2},
}


def plain_loop(folder: Path, steps: int, rows: list[dict]) -> list[float]:
    """Thirty lines of transformers and torch: the losses before each update."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folder / "start", attn_implementation="eager").train()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(steps):
        documents = []
        for row in rows[4 * step : 4 * step + 4]:
            bounds = row["cu_seq_lens_q"].tolist()
            documents += [row["input_ids"][:, a:b] for a, b in itertools.pairwise(bounds)]
        count = sum(ids.shape[1] - 1 for ids in documents)
        total = 0.0
        for ids in documents:
            if ids.shape[1] > 1:  # unpacked: each document is a row of its own
                loss = model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) / count
                loss.backward()
                total += float(loss.detach())
        done = (step - 3) / (steps - 3)
        share = (step + 1) / 3 if step < 3 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * share
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def curves(folder: Path, tmp_path: Path, steps: int, layouts: dict, one_rank, four_ranks) -> dict[str, list[float]]:
    """The losses of each layout, and those of one rank and of the plain loop."""
    found = {}
    for name, layout in {"one rank": {}, **layouts}.items():
        run = {"log": {"directory": str(tmp_path / name)}, "train": {"steps": steps, "batches_per_step": 4}}
        values = cases.recipe_of(folder, parallel=layout, **run)
        found[name] = (one_rank if name == "one rank" else four_ranks).run(cases.train, values, timeout=900)[0][0]
    rows = one_rank.run(cases.global_rows, values, 4 * steps)[0]
    found["transformers"] = plain_loop(folder, steps, rows)
    return found


def compare(found: dict[str, list[float]]) -> None:
    expected = found.pop("transformers")
    assert expected[-1] < expected[0] - 0.1, "the curve must fall, or equality says little"
    for name, losses in found.items():
        worst = error(losses, expected)
        print(f"{name}: {len(losses)} steps, {losses[0]:.4f} to {losses[-1]:.4f}, from transformers by {worst:.1e}")
        require_rounding(losses, expected, units=UNITS * math.sqrt(len(losses)), what=name)


def test_six_steps_on_one_rank_and_four_are_those_of_a_plain_loop(trainer_folder, tmp_path, one_rank, four_ranks):
    layouts = {name: LAYOUTS[name] for name in ("EP2 x SP2", "EP4 x SP2")}
    compare(curves(trainer_folder, tmp_path, 6, layouts, one_rank, four_ranks))


@pytest.mark.slow
def test_fifty_steps_on_one_rank_and_four_are_those_of_a_plain_loop(trainer_folder, tmp_path, one_rank, four_ranks):
    compare(curves(trainer_folder, tmp_path, 50, LAYOUTS, one_rank, four_ranks))
