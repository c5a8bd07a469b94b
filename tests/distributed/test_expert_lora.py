"""Adapters of stacked experts in five layouts, on one rank, and by PEFT on plain transformers: the same training."""

from __future__ import annotations

from pathlib import Path

import cases_lora as cases
import cases_trainer
import pytest
import torch
from plain_training import plain_loop
from rounding import error
from safetensors.torch import load_file

LORA = {
    "rank": 3,
    "alpha": 6.0,
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
ON_TWO = {"FSDP": {}, "EP2": {"ep": 2}, "SP2": {"sp": 2}}
ON_FOUR = {"EP2 x FSDP": {"ep": 2}, "SP2 x EP2": {"sp": 2, "ep": 2}}


def values_of(folder: Path, place: Path, steps: int, parallel: dict | None = None, **lora: object) -> dict:
    run = {"log": {"directory": str(place)}, "train": {"steps": steps, "batches_per_step": 4}}
    return cases_trainer.recipe_of(
        folder, lora=LORA | lora, parallel=parallel or {}, checkpoint={"export": True}, **run
    )


def upstream(folder: Path) -> torch.nn.Module:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder / "start", attn_implementation="eager")


def by_peft(folder: Path, start: Path, steps: int, rows: list[dict]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and trained adapters of PEFT alone on transformers' model, from the same first adapters."""
    import peft

    model = peft.PeftModel.from_pretrained(upstream(folder), start, is_trainable=True)
    losses = plain_loop(model.train(), steps, rows)
    return losses, peft.get_peft_model_state_dict(model)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of the adapters' relative errors."""
    assert found.keys() == expected.keys()
    return max(error(found[name], expected[name]) for name in found)


def compare(folder: Path, place: Path, steps: int, one_rank, two_ranks, four_ranks) -> None:
    alone = values_of(folder, place / "alone", steps)
    found = one_rank.run(cases.train_all, {"one rank": (alone, str(place / "start"))})[0]
    for ranks, layouts in ((two_ranks, ON_TWO), (four_ranks, ON_FOUR)):
        runs = {name: (values_of(folder, place / name, steps, layout), None) for name, layout in layouts.items()}
        for rank, mine in enumerate(ranks.run(cases.train_all, runs, timeout=900)):
            found |= mine if rank == 0 else {}
            for name, run in mine.items():
                held = run["held"]
                assert held["gradients"] == held["adapters"] and held["optimizer"] == 2 * held["adapters"], (
                    name,
                    held,
                )
    rows = one_rank.run(cases_trainer.global_rows, alone, 4 * steps)[0]
    losses, adapters = by_peft(folder, place / "start", steps, rows)
    assert losses[-1] < losses[0] - 0.02, "the curve must fall, or equality says little"
    start = load_file(place / "start" / "adapter_model.safetensors")
    assert min(error(adapters[name], start[name]) for name in start) > 1e-2, "every adapter must have moved"
    for name, run in found.items():
        folder_of = place / ("alone" if name == "one rank" else name) / "adapter"
        worst = error(run["losses"], losses), distance(load_file(folder_of / "adapter_model.safetensors"), adapters)
        print(f"{name}: losses differ from PEFT's by {worst[0]:.1e}, adapters by {worst[1]:.1e}")
        assert worst[0] < 1e-6 and worst[1] < 1e-5, (name, worst)


def test_four_steps_in_five_layouts_are_those_of_peft(trainer_folder, tmp_path, one_rank, two_ranks, four_ranks):
    compare(trainer_folder, tmp_path, 4, one_rank, two_ranks, four_ranks)


@pytest.mark.slow
def test_twenty_steps_in_five_layouts_are_those_of_peft(trainer_folder, tmp_path, one_rank, two_ranks, four_ranks):
    compare(trainer_folder, tmp_path, 20, one_rank, two_ranks, four_ranks)
