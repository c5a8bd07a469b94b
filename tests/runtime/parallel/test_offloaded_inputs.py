"""Layers' inputs in host memory: the same gradients to the bit, device memory that is let go of, host memory used again."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from patchgen.kernels.loss import chunking
from patchgen.runtime import attention, registry, seams
from patchgen.runtime.parallel import checkpointing, offloaded_inputs

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
LAYERS = SIZES["num_hidden_layers"]
PIECE = 4096
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

MODES = {"inputs": ("full", False), "selective": ("selective", False), "attention": ("full", True)}


def model_of(mode: str, *, attention_name: str = "patchgen_sdpa", **changed):
    """A model of small layers that are checkpointed."""
    attention.register()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES | changed, use_cache=False)
    model = registry.build_model(config, attn_implementation=attention_name).train()
    checkpointing.apply(model, mode)
    return model


def offloading(mode: str, keeps_attention: bool, **options):
    """The same with inputs in host memory, and what its layers share."""
    model = model_of(mode, **options)
    return model, offloaded_inputs.apply(model, attention=keeps_attention, piece_bytes=PIECE)


def loss_of(model, number: int, tokens: int = 96) -> torch.Tensor:
    ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(number))
    with seams.using(fused_moe="torch"):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


def one_after_the_other(model) -> None:
    for number in range(3):
        loss_of(model, number, 96 - 16 * number).backward()


def two_forwards_first(model) -> None:
    (loss_of(model, 0) + loss_of(model, 1)).backward()


def two_forwards_backward_in_their_order(model) -> None:
    losses = [loss_of(model, number) for number in range(2)]
    for loss in losses:
        loss.backward()


def backward_twice(model) -> None:
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()


STEPS = (one_after_the_other, two_forwards_first, two_forwards_backward_in_their_order, backward_twice)


def gradients_after(step, model) -> list[torch.Tensor]:
    step(model)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_inputs_on_the_device_to_the_bit(mode, step):
    checkpoint, keeps_attention = MODES[mode]
    if step is backward_twice and checkpoint == "selective":
        pytest.skip("torch's selective checkpointing has no second backward")
    model, transfers = offloading(checkpoint, keeps_attention)
    found = gradients_after(step, model)
    expected = gradients_after(step, model_of(checkpoint))
    for (name, _), got, wanted in zip(model.named_parameters(), found, expected, strict=True):
        assert torch.equal(got, wanted), name
    num_forwards = {one_after_the_other: 3, backward_twice: 1}.get(step, 2)
    assert transfers.num_attention_calls == (num_forwards * LAYERS if keeps_attention else 0)
    assert transfers.num_sent == num_forwards * LAYERS * (3 if keeps_attention else 1), "input, result, log-sum-exp"


def test_the_device_has_no_input_between_forward_and_backward():
    assert inputs_alive_after_forward(model_of("full")) == [True] * LAYERS
    for keeps_attention in (False, True):
        assert inputs_alive_after_forward(offloading("full", keeps_attention)[0]) == [False] * LAYERS


def inputs_alive_after_forward(model) -> list[bool]:
    inputs: list[weakref.ref] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0])))
    loss = loss_of(model, 0)
    alive = [one() is not None for one in inputs]
    loss.backward()
    return alive


def test_host_memory_is_used_again_and_none_is_lost():
    model, transfers = offloading("full", True)
    sizes = []
    for number, tokens in enumerate((96, 96, 32, 64, 96)):
        loss_of(model, number, tokens).backward()
        gc.collect()
        sizes.append(transfers.host_bytes)
        assert sum(map(len, transfers._free[False])) == transfers.host_bytes, "all pieces are back after a backward"
    assert set(sizes) == {sizes[0]}, "shorter rows and later steps need no more than the first"
    values = 96 * SIZES["hidden_size"] * 4
    assert sizes[0] >= LAYERS * 2 * values, "inputs and results of attention are as large as each other here"
    assert sizes[0] <= LAYERS * (2 * values + 3 * PIECE), "of each tensor at most a piece more"


def test_a_forward_without_a_backward_gives_its_memory_back():
    model, transfers = offloading("full", True)
    loss_of(model, 0)
    gc.collect()
    assert sum(map(len, transfers._free[False])) == transfers.host_bytes > 0


def test_without_gradients_nothing_is_sent():
    model, transfers = offloading("full", True)
    with torch.no_grad():
        loss_of(model, 0)
    loss_of(model.eval(), 0)
    assert (transfers.num_sent, transfers.num_attention_calls) == (0, 0)


class Calls(TorchDispatchMode):
    """Counts operators, also those of a backward on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("keeps_attention", "times"), [(False, 2), (True, 1)])
def test_kept_attention_is_computed_once(keeps_attention, times):
    model, _ = offloading("full", keeps_attention)
    with Calls() as calls:
        loss_of(model, 0).backward()
    assert calls.counts[ATTENTION] == times * LAYERS


@torch.library.custom_op("flash_attn::in_place_of_a_kernel", mutates_args=())
def attend(states: torch.Tensor, dropout_p: float) -> torch.Tensor:
    return nn.functional.dropout(states, dropout_p).clone()


def _gradient(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    states, out = ctx.saved_tensors
    return gradient * out / states, None


attend.register_autograd(_gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output))


class Attends(GradientCheckpointingLayer):
    """A layer that calls attention twice, first with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, states):
        return states + attend(attend(self.linear(states), 0.5) + states, 0.0)


def test_attention_with_dropout_is_computed_again_with_the_same_draws():
    found = []
    for keeps_attention in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(Attends(), Attends()).train()
        checkpointing.apply(layers, "full")
        transfers = offloaded_inputs.apply(layers, attention=keeps_attention, piece_bytes=PIECE)
        states = layers(torch.randn(4, 8, requires_grad=True))
        nn.functional.dropout(states, 0.5).square().sum().backward()
        found.append([parameter.grad for parameter in layers.parameters()])
        assert transfers.num_attention_calls == (2 if keeps_attention else 0)
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted) and wanted.any()


class Shared(GradientCheckpointingLayer):
    """A layer with a second argument, which all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states, shared):
        return hidden_states + self.linear(hidden_states).tanh() * shared


def test_what_layers_share_does_not_travel():
    layers = nn.ModuleList([Shared(), Shared(), Shared()]).train()
    checkpointing.apply(layers, "full")
    transfers = offloaded_inputs.apply(layers, piece_bytes=PIECE)
    hidden, shared = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)  # the first input needs no gradient
    states = hidden
    for layer in layers:
        states = layer(states, shared)
    states.sum().backward()
    assert transfers.num_sent == 2
    expected = torch.autograd.grad(_plain(layers, hidden, shared).sum(), shared)[0]
    assert torch.equal(shared.grad, expected)


def _plain(layers, hidden, shared):
    for layer in layers:
        hidden = hidden + layer.linear(hidden).tanh() * shared
    return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda base: base,
        lambda base: base.transpose(1, 2),
        lambda base: base.permute(3, 0, 2, 1),
        lambda base: base[1:],
        lambda base: base[:, :, ::2],
        lambda base: base[:1].expand(3, -1, -1, -1),
        lambda base: base[:, :0],
    ],
    ids=["whole", "transposed", "permuted", "offset", "gaps", "overlapping", "empty"],
)
def test_a_tensor_comes_back_with_its_values_and_if_dense_its_strides(make, dtype):
    transfers = offloaded_inputs.Transfers(piece_bytes=64)
    tensor = make(torch.randn(3, 4, 6, 5).to(dtype))
    copy = offloaded_inputs.HostCopy(tensor, transfers)
    for _ in range(2):
        found = copy.fetch()
        assert torch.equal(found, tensor) and found.dtype == dtype
        assert found.data_ptr() != tensor.data_ptr() or not tensor.numel()
        is_dense = torch.empty_like(tensor).stride() == tensor.stride()
        assert found.stride() == (tensor.stride() if is_dense else tensor.contiguous().stride())
    pieces = transfers.host_bytes // 64
    assert pieces == -(-tensor.numel() * tensor.element_size() // 64)
    del copy
    assert len(transfers._free[False]) == pieces


def test_layers_are_known_as_checkpointed_by_us_and_lose_it_by_another_mode():
    """`is_ours` keeps other code from wrapping the function again; `checkpointing.apply` sets a mode anew."""
    model, transfers = offloading("full", True)
    functions = [vars(layer)[checkpointing.CHECKPOINT_ATTRIBUTE] for layer in model.model.layers]
    assert all(checkpointing.is_ours(function) for function in functions)
    checkpointing.apply(model, "full")
    loss_of(model, 0).backward()
    assert transfers.num_sent == 0


def test_layers_that_keep_no_input_are_refused():
    for mode in ("none", "offload"):
        model = model_of(mode)
        with pytest.raises(ValueError, match="no layer whose input is kept"):
            offloaded_inputs.apply(model)


def test_attention_that_cannot_be_kept_is_refused_with_those_that_can():
    model, _ = offloading("full", True, attention_name="patchgen_eager")
    loss = loss_of(model, 0)
    with pytest.raises(ValueError, match=r"set model\.attention to one of patchgen_flash_attention_3"):
        loss.backward()


def largest_tensor(mode: str, tokens: int) -> int:
    """Elements of the largest tensor that forward and backward make, on this thread."""
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            results = func(*args, **kwargs or {})
            for result in results if isinstance(results, tuple | list) else (results,):
                if isinstance(result, torch.Tensor):
                    largest = max(largest, result.numel())
            return results

    model, _ = offloading(*MODES[mode], vocab_size=2048, num_hidden_layers=2)
    with Largest(), seams.using(causal_lm_loss="linear"), chunking.largest_chunk(128):
        loss_of(model, 0, tokens).backward()
    return largest


@pytest.mark.parametrize("mode", MODES)
def test_no_tensor_grows_faster_than_the_row(mode):
    """Neither S x S (masks, scores) nor S x V (logits): four times the tokens make no tensor more than four times as large."""
    short, long = (largest_tensor(mode, tokens) for tokens in (512, 2048))
    assert long <= 4 * short
    assert long < 2048 * 512, "a mask would have 2,048 elements per token, and logits as many"
