"""Adapters on one rank and on two: the same curve, and what is saved loads in plain PEFT on upstream's model."""

from __future__ import annotations

import cases_trainer as cases
import torch
from rounding import require_equal_up_to_rounding


def values_of(folder, place, lora, **parallel) -> dict:
    return cases.recipe_of(
        folder,
        parallel=parallel,
        lora=lora,
        optim={"lr": 1e-2, "warmup_steps": 0},
        train={"steps": 3, "batches_per_step": 2},
        checkpoint={"export": True},
        log={"directory": str(place)},
    )


def test_adapters_train_alike_on_two_ranks_and_load_in_plain_peft(trainer_folder, tmp_path, one_rank, two_ranks):
    from peft import PeftModel
    from transformers import Qwen3MoeForCausalLM

    wanted = {"rank": 4, "alpha": 8.0}
    alone = one_rank.run(cases.train_adapters, values_of(trainer_folder, tmp_path / "one", wanted))[0]
    both = two_ranks.run(cases.train_adapters, values_of(trainer_folder, tmp_path / "two", wanted, ep=2))[0]
    require_equal_up_to_rounding(both["losses"], alone["losses"])
    assert alone["losses"][-1] < alone["losses"][0]
    assert alone["trained"] == both["trained"] and all("lora_" in name for name in alone["trained"])

    base = Qwen3MoeForCausalLM.from_pretrained(trainer_folder / "start", attn_implementation="eager").eval()
    ids = torch.tensor([cases.PROBE])
    with torch.no_grad():
        before = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "two" / "adapter").eval()
        after = adapted(input_ids=ids).logits
    assert (after - before).abs().max() > 1e-3, "the adapter must do something, or equality says nothing"
    require_equal_up_to_rounding(after, both["logits"])


def test_targets_that_match_nothing_are_refused_on_all_ranks(trainer_folder, tmp_path, two_ranks):
    wanted = {"target_modules": ["qqq_proj"]}
    for told in two_ranks.run(cases.refusal, values_of(trainer_folder, tmp_path / "run", wanted)):
        assert "lora.target_modules: nothing in" in told and "matches qqq_proj" in told
