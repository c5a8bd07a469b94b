"""What `auto` took is told by kind of call, after a step of a real model."""

from __future__ import annotations

import pytest
import torch

from patchgen.kernels import choices
from patchgen.runtime import registry, seams
from patchgen.runtime.parallel import report
from patchgen.runtime.verify.small_config import small_config


@pytest.fixture(autouse=True)
def anew():
    choices.reset()
    yield
    choices.reset()


def step(model, tokens: int) -> None:
    ids = torch.arange(3, 3 + tokens)[None]
    model(input_ids=ids, labels=ids).loss.backward()


def test_each_kind_of_call_has_a_line_with_its_kernel_and_shape():
    cls = registry.find_model("qwen3_moe").load().Qwen3MoeForCausalLM
    config = small_config(cls.config_class).config
    model = cls._from_config(config).train()
    with seams.using(fused_moe="auto", causal_lm_loss="auto"):
        assert report.auto_choices() == ""
        step(model, 9)
        step(model, 12)
        lines = report.auto_choices().splitlines()
    experts = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    shape = list(model.get_submodule(experts[0]).gate_up_proj.shape)
    expected = f"auto took torch for {shape} float32, 9 to 12 rows, {2 * len(experts)} calls"
    assert [line for line in lines if "fused_moe" in line] == [f"  {'fused_moe':<16} {expected}"]
    loss = [line for line in lines if "causal_lm_loss" in line]
    assert len(loss) == 1 and f"for {list(model.lm_head.weight.shape)} float32, 9 to 12 rows, 2 calls" in loss[0]
    assert "auto took linear" in loss[0] or "auto took chunked" in loss[0]


def test_what_was_named_is_not_told_as_chosen():
    cls = registry.find_model("qwen3_moe").load().Qwen3MoeForCausalLM
    model = cls._from_config(small_config(cls.config_class).config).train()
    with seams.using(fused_moe="torch", causal_lm_loss="chunked"):
        step(model, 9)
        assert report.auto_choices() == ""
    assert choices.summary("fused_moe") == [] == choices.summary("causal_lm_loss")
