"""A generated class initialises every weight that upstream's does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from patchgen.commands.generation import committed
from patchgen.runtime import registry
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.small_config import small_config


@pytest.fixture
def memory_is_filled():
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", committed())
@pytest.mark.usefixtures("memory_is_filled")
def test_no_weight_keeps_what_was_in_memory(name: str) -> None:
    """A class outside of transformers counts as custom code there, and modules without weights of their own are skipped:
    Qwen3-Omni initialises its experts in such a module."""
    generated = registry.find_model(name)
    model_class = getattr(generated.load(), generated.heads[0])
    model = build_model(model_class, small_config(model_class.config_class).config)
    assert [path for path, weight in model.named_parameters() if not weight.isfinite().all()] == []


def from_nothing(model_class: type, config) -> nn.Module:
    """As `from_pretrained` initialises what a checkpoint lacks: from the outermost model, nothing done on the way up."""
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32)
    model.to_empty(device="cpu")
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    for one in (*model.modules(), *tensors):
        vars(one).pop("_is_hf_initialized", None)
    torch.manual_seed(0)
    model.initialize_weights()
    return model


@pytest.mark.parametrize("name", committed())
def test_every_weight_is_initialised_as_upstreams(name: str) -> None:
    """Bit for bit from the same seed, upstream's towers inside a generated model included (gemma3's has biases with a
    deviation of 1e-6)."""
    generated = registry.find_model(name)
    for head in generated.heads:
        ours, theirs = (
            getattr(generated.load(), head),
            getattr(generated.upstream(), head),
        )
        config = small_config(ours.config_class).config
        got, expected = (from_nothing(one, config) for one in (ours, theirs))
        values = {**dict(got.named_parameters()), **dict(got.named_buffers())}
        wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
        assert values.keys() == wanted.keys()
        other = [
            path for path, value in wanted.items() if not torch.equal(values[path].nan_to_num(9), value.nan_to_num(9))
        ]
        assert other == []


def test_a_class_derived_in_another_file_is_custom_code() -> None:
    """Its own `_init_weights` may write in place, over what was loaded."""
    model_class = registry.find_model("llama").load().LlamaForCausalLM
    derived = type("Derived", (model_class,), {"__module__": "somewhere.else_"})
    assert not model_class.is_custom_code()
    assert derived.is_custom_code()
