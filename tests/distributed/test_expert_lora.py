"""Adapters of stacked experts in five layouts, on one rank, and by PEFT on plain transformers: the same training."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import cases_lora as cases
import cases_trainer
import pytest
import torch
from plain_training import plain_loop
from rounding import UNITS, error, require_equal_up_to_rounding
from safetensors.torch import load_file

from patchgen.runtime.checkpoint import CheckpointError, export_run

LORA = {
    "rank": 3,
    "alpha": 6.0,
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
# With layers that are computed again in the backward here and there: their units of FSDP2 lie inside one another.
ON_TWO = {
    "FSDP": {"activation_checkpointing": "selective"},
    "EP2": {"ep": 2, "activation_checkpointing": "full"},
    "SP2": {"sp": 2},
}
ON_FOUR = {"EP2 x FSDP": {"ep": 2, "activation_checkpointing": "selective"}, "SP2 x EP2": {"sp": 2, "ep": 2}}


def values_of(folder: Path, place: Path, steps: int, parallel: dict | None = None, **lora: object) -> dict:
    """A recipe whose run is in `place`."""
    run = {"log": {"directory": str(place)}, "train": {"steps": steps, "batches_per_step": 4}}
    return cases_trainer.recipe_of(
        folder, lora=LORA | lora, parallel=parallel or {}, checkpoint={"export": True}, **run
    )


def upstream(folder: Path) -> torch.nn.Module:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder / "start", attn_implementation="eager")


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=torch.tensor([cases_trainer.PROBE])).logits


def by_peft(folder: Path, start: Path, steps: int, rows: list[dict]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and trained adapters of PEFT alone on transformers' model, from the same first adapters."""
    import peft

    model = peft.PeftModel.from_pretrained(upstream(folder), start, is_trainable=True)
    losses = plain_loop(model.train(), steps, rows)
    return losses, peft.get_peft_model_state_dict(model)


def loaded_by_peft(folder: Path, adapter: Path) -> torch.nn.Module:
    import peft

    return peft.PeftModel.from_pretrained(upstream(folder), adapter)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of the adapters' relative errors."""
    assert found.keys() == expected.keys()
    return max(error(found[name], expected[name]) for name in found)


def compare(folder: Path, place: Path, steps: int, one_rank, two_ranks, four_ranks, *, among: Container[str]) -> None:
    alone = values_of(folder, place / "alone", steps)
    found = one_rank.run(cases.train_all, {"one rank": (alone, str(place / "start"))})[0]
    for ranks, layouts in ((two_ranks, ON_TWO), (four_ranks, ON_FOUR)):
        chosen = {name: layout for name, layout in layouts.items() if name in among}
        runs = {name: (values_of(folder, place / name, steps, layout), None) for name, layout in chosen.items()}
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
    untouched = logits_of(upstream(folder))
    for name, run in found.items():
        folder_of = place / ("alone" if name == "one rank" else name) / "adapter"
        worst = error(run["losses"], losses), distance(load_file(folder_of / "adapter_model.safetensors"), adapters)
        print(f"{name}: losses differ from PEFT's by {worst[0]:.1e}, adapters by {worst[1]:.1e}")
        assert worst[0] < 1e-6 and worst[1] < 1e-5, (name, worst)
        require_equal_up_to_rounding(run["off"], untouched, what=f"{name}, the adapters switched off")
        require_equal_up_to_rounding(
            run["logits"], logits_of(loaded_by_peft(folder, folder_of)), what=f"{name}, loaded by PEFT"
        )


@pytest.mark.slow
def test_four_steps_in_products_of_layouts_are_those_of_peft(
    trainer_folder, tmp_path, one_rank, two_ranks, four_ranks
):
    compare(trainer_folder, tmp_path, 4, one_rank, two_ranks, four_ranks, among=("EP2", *ON_FOUR))


@pytest.mark.slow
def test_twenty_steps_in_five_layouts_are_those_of_peft(trainer_folder, tmp_path, one_rank, two_ranks, four_ranks):
    compare(trainer_folder, tmp_path, 20, one_rank, two_ranks, four_ranks, among=(*ON_TWO, *ON_FOUR))


def test_a_run_goes_on_in_another_layout_and_exports_the_merged_model(trainer_folder, tmp_path, one_rank, two_ranks):
    from transformers import Qwen3MoeForCausalLM

    def part(steps: int, name: str, **changes: object) -> dict:
        values = values_of(trainer_folder, tmp_path / name, steps, **changes)
        return values | {"optim": values["optim"] | {"schedule": "constant", "warmup_steps": 0}}

    straight = one_rank.run(cases.train, part(3, "straight"))[0]["losses"]
    first = two_ranks.run(cases.train, part(2, "run"))[0]["losses"]
    then = two_ranks.run(cases.train, part(3, "run", parallel={"ep": 2}))[0]["losses"]
    require_equal_up_to_rounding(first + then, straight)
    with pytest.raises(
        CheckpointError, match=r"step-00000003 holds adapters and weights separately\. .* set lora.merge: true"
    ):
        export_run(tmp_path / "run", tmp_path / "merged")

    assert not (tmp_path / "run" / "export").exists()
    again = two_ranks.run(cases.train, part(3, "run", parallel={"ep": 2}, merge=True))[0]
    assert again["losses"] == [], "nothing is left to train"

    merged = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "run" / "export", attn_implementation="eager")
    adapted = logits_of(loaded_by_peft(trainer_folder, tmp_path / "run" / "adapter"))
    require_equal_up_to_rounding(logits_of(merged), adapted)
    assert error(adapted, logits_of(upstream(trainer_folder))) > 1e-3, "the adapter must do something"


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_transposed_and_interleaved_experts_with_biases_are_those_of_peft(ranks, tmp_path, request):
    """gpt_oss keeps `[E, K, N]`, where A and B of PEFT's file change sides."""
    import cases_models
    import peft

    which = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    logits, gradients = request.getfixturevalue(ranks).run(cases.adapted, "gpt_oss", which, str(tmp_path))[0]
    plain = cases_models.build("gpt_oss", generated=False, attention_name="eager")
    model = peft.PeftModel.from_pretrained(plain, tmp_path, is_trainable=True)
    expected = model(input_ids=torch.tensor([cases_trainer.PROBE]) % cases_models.VOCABULARY, use_cache=False).logits
    expected.square().sum().backward()
    require_equal_up_to_rounding(logits, expected.detach())
    theirs = {path.replace(".default", ""): p.grad for path, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == theirs.keys() and len(theirs) == 8
    for name, gradient in theirs.items():
        require_equal_up_to_rounding(gradients[name], gradient, units=4 * UNITS, what=name)
