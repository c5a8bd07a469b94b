"""What each rank does in the tests of the check of slices at the start of a run; see test_selfcheck_on_ranks.py."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
from collections.abc import Callable

import cases_models
import cases_sequence
import cases_training
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from patchgen.runtime import attention, parallel, seams
from patchgen.runtime.parallel import batch, checkpointing, gradients, loss, sharding, unused
from patchgen.runtime.parallel.reshard import reshard
from patchgen.runtime.parallel.selfcheck import require_router_order, require_sliceable
from patchgen.runtime.verify.reference_model import reference_model


def a_sliceable_model_passes() -> float:
    model, state = cases_training.sharded_model("qwen3_next", sp=2, ep=2)
    return require_sliceable(model, state, vocab_size=cases_models.VOCABULARY)


def what_slices_would_hide_is_refused() -> None:
    """Tokens that are mixed in training alone, with dropout too, factors that repeat every few tokens, values of a first call,
    and mixing too weak for the logits to show; the model keeps its buffers and attributes."""
    model, state = cases_training.sharded_model("llama", sp=2)
    norm = model.model.norm
    norm.seen = torch.nn.Buffer(torch.zeros(()))

    def counts(module, _, out):
        module.seen += 1

    def rolls(module, _, out):
        return out + out.roll(1, 1) if module.training else out

    def drops(module, _, out):
        return F.dropout(out * torch.rand(()), 0.5) if module.training else out

    def drops_and_rolls(module, inputs, out):
        return rolls(module, inputs, drops(module, inputs, out))

    def keeps_the_first(module, _, out):
        if not hasattr(module, "first"):
            module.first = out.detach().mean()
        return out * module.first

    def uses_what_it_keeps(module, _, out):
        mean, module.mean = getattr(module, "mean", torch.ones(())), out.detach().mean()
        return out * mean

    def repeats(module, _, out):
        return out * (1 + torch.arange(out.shape[1]) % 4)[:, None]

    def divides(module, _, out):
        return out / (1 + 1e-3 * out.std())

    for module, hook, message in (
        (norm, counts, ""),
        (norm, drops, ""),
        (norm, rolls, "in training mode"),
        (norm, drops_and_rolls, "in training mode"),
        (norm, keeps_the_first, "other logits on slices"),
        (norm, uses_what_it_keeps, "other logits on slices"),
        (norm, repeats, r"LlamaForCausalLM computes other logits on slices of a sequence \(sp=2\)"),
        (model.model.layers[1].mlp, divides, r"other hidden states on slices .* first in model\.layers\.1\.mlp"),
    ):
        _check_with_hook(model, state, module.register_forward_hook, hook, message)
    assert norm.seen == 0
    assert not hasattr(norm, "first")


def what_several_rows_or_training_with_gradients_show_is_refused() -> None:
    """Tokens that are mixed where there are several rows, rows that are taken one for another, and tokens that are mixed in a
    training step alone, with layers recomputed in the backward too."""
    model, state = cases_training.sharded_model("llama", sp=2)
    norm = model.model.norm

    def rolls_in_several_rows(_, __, out):
        return out + out.roll(1, 1) if len(out) > 1 else out

    def mixes_over_swapped_dimensions(_, __, out):
        return out.transpose(0, 1).reshape(out.shape)

    def rolls_in_a_step(module, _, out):
        return out + out.roll(1, 1) if module.training and torch.is_grad_enabled() else out

    for recomputed in (False, True):
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for hook, message in (
            (lambda *_: None, ""),
            (rolls_in_several_rows, "other logits on slices"),
            (mixes_over_swapped_dimensions, "other logits on slices"),
            (rolls_in_a_step, "in training mode"),
        ):
            model.train()
            _check_with_hook(model, state, norm.register_forward_hook, hook, message)


def what_reads_the_mask_or_the_number_of_labels_is_refused() -> None:
    """Lengths of padded rows, unless the rows of a run have no padding, and tokens that are mixed where a step counts its labels;
    what differs at padding alone is no difference, however large, and no measure of one."""
    model, state = cases_training.sharded_model("llama", sp=2)
    given = {}

    def notes(_, __, kwargs):
        given.clear()
        given.update(kwargs)

    def scales_by_length(_, __, out):
        mask = given.get("attention_mask")
        return out if mask is None else out * (1 + 1e-2 * mask.sum(1)[:, None, None])

    def scales_padding(factor):
        def scales(_, __, out):
            mask = given.get("attention_mask")
            return out if mask is None else out.where(mask[..., None] > 0, out * factor)

        return scales

    def scales_by_length_and_padding(*arguments):
        return scales_padding(1e5)(*arguments[:2], scales_by_length(*arguments))

    def moves_padding(_, __, out):
        mask = given.get("attention_mask")
        return out if mask is None else out + (1 - mask)[..., None] * torch.arange(out.shape[1])[:, None]

    def takes_no_padding(_, __, out):
        if given.get("attention_mask") is not None:
            raise RuntimeError("padding")

    def mixes_in_a_step(_, __, out):
        return out + out.mean(1, keepdim=True) if given.get("num_items_in_batch") is not None else out

    model.model.register_forward_pre_hook(notes, with_kwargs=True)
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    for module, hook, padded, message in (
        (norm, scales_by_length, True, r"other logits .*\(rows with padding\)"),
        (mlp, scales_by_length, True, r"first in model\.layers\.0\.mlp.*\(rows with padding\)"),
        (norm, scales_by_length_and_padding, True, r"other logits .*\(rows with padding\)"),
        (mlp, scales_by_length_and_padding, True, r"first in model\.layers\.0\.mlp.*\(rows with padding\)"),
        (norm, scales_by_length, False, ""),
        (norm, moves_padding, True, ""),
        (mlp, moves_padding, True, ""),
        (norm, scales_padding(math.nan), True, ""),
        (norm, takes_no_padding, True, "padded=False"),
        (norm, mixes_in_a_step, False, "other logits on slices"),
    ):
        _check_with_hook(model, state, module.register_forward_hook, hook, message, padded=padded)


def what_gradients_alone_show_is_refused() -> None:
    """Tokens that are mixed in the backward, in a layer, before, between and after layers, and gradients that slices alone
    lack; the parameters keep their gradients."""
    model, state = cases_training.sharded_model("llama", sp=2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    first, last = model.model.layers

    def changes_in_place(_, args):
        return (args[0].mul_(2), *args[1:])

    def turns(hidden):
        mean = hidden.mean(1, keepdim=True)
        return hidden + mean - mean.detach()

    def turns_output(_, __, out):
        return turns(out)

    def turns_input(_, args):
        return (turns(args[0]), *args[1:])

    def stops(_, __, out):
        return out * 0 + out.detach() if parallel.sequence_parallel_state() else out

    _check_with_hook(model, state, last.input_layernorm.register_forward_pre_hook, changes_in_place, "")
    for register, hook, place in (
        (last.mlp.register_forward_hook, turns_output, "the input of model.layers.1"),
        (last.register_forward_hook, turns_output, "the input of model.layers.1"),
        (model.model.norm.register_forward_hook, turns_output, "the input of model.layers.1"),
        (first.register_forward_hook, turns_output, "the input of model.layers.0"),
        (first.register_forward_pre_hook, turns_input, "model.embed_tokens"),
        (first.mlp.register_forward_hook, stops, "the input of model.layers.0"),
        (first.register_forward_hook, stops, "the input of model.layers.0"),
    ):
        _check_with_hook(model, state, register, hook, rf"other gradients .* first in {re.escape(place)}\)")
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))
    assert not any(gradient.to_local().any() for gradient in gradients)


def _check_with_hook(
    model: nn.Module, state, register: Callable, hook: Callable, message: str, *, padded: bool = False
) -> None:
    """The check of the model with a hook passes, or raises an error with this message."""
    handle = register(hook)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        require_sliceable(model, state, vocab_size=cases_models.VOCABULARY, packed=False, padded=padded)
    handle.remove()


def the_check_leaves_no_trace(reshard_after_forward: bool) -> None:
    def build():
        attention.register()
        return cases_models.build("qwen3_moe", generated=True, attention_name="patchgen_eager")

    options = sharding.ShardingOptions(reshard_after_forward=reshard_after_forward, param_dtype=torch.bfloat16)
    require_no_trace(build, cases_sequence.state_of(sp=2, ep=2), cases_models.VOCABULARY, "full", options)


def require_no_trace(build: Callable, state, vocab_size: int, mode: str, options, device: str = "cpu") -> None:
    """All parameters are shards after the check, where an optimizer will take them, and after two steps of SGD they have the bits
    of a run without it."""
    results = []
    for is_checked in (False, True):
        model = build().train().to(device)
        checkpointing.apply(model, mode)
        sharding.shard_model(model, state, options=options)
        if is_checked:
            require_sliceable(model, state, vocab_size=vocab_size)
            _require_shards_without_gradients(model)
            assert not any(vars(parameter).get(unused.LEFT_OUT) for parameter in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.arange(64)[None] % vocab_size
        inputs = batch.slice_batch({"input_ids": ids, "labels": ids}, sp=2, sp_rank=state.sp_rank)
        inputs = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }
        for _ in range(2):
            with parallel.using(state), loss.step(loss.count_items([inputs], device)):
                model(**inputs, use_cache=False).loss.backward()
            assert gradients.accept(model, gradients.clip(model, max_norm=1.0), on_nonfinite="stop")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        results.append([parameter.to_local().clone() for parameter in model.parameters()])
    assert all(torch.equal(without, checked) for without, checked in zip(*results, strict=True))


def _require_shards_without_gradients(model: nn.Module) -> None:
    assert all(isinstance(parameter, DTensor) and parameter.grad is None for parameter in model.parameters())


def the_check_of_rows_with_images_leaves_no_gradients() -> None:
    """These have a forward alone, which leaves gathered parameters, and rows with a backward follow."""
    reference, state = reference_model("qwen3_vl", "Qwen3VLForConditionalGeneration"), cases_sequence.state_of(sp=2)
    model = sharding.shard_model(reference.generated(), state).train()
    with seams.using(**reference.seams):
        require_sliceable(model, state, vocab_size=model.config.get_text_config().vocab_size)
    _require_shards_without_gradients(model)


def an_error_of_slices_alone_is_a_refusal() -> None:
    model, state = cases_training.sharded_model("llama", sp=2)
    model.model.norm.register_forward_hook(lambda _, __, out: out[:, torch.arange(22)])
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM does not take a slice of a sequence \(sp=2, input_ids\): IndexError"
    ):
        require_sliceable(model, state, vocab_size=cases_models.VOCABULARY)


def router_logits_that_depend_on_other_tokens_are_refused() -> None:
    """Only the loss of the routers would show it: what chooses the experts is not changed."""
    model, state = cases_training.sharded_model("qwen3_moe", sp=2)
    check = functools.partial(require_sliceable, model, state, vocab_size=cases_models.VOCABULARY, packed=False)
    check()

    def centres(_, __, output):
        logits, *others = output
        return (logits - logits.mean(0), *others)

    def takes_tokens_of_all_rows_in_turn(_, __, output):
        logits, *others = output
        return (logits.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1), *others)

    for hook in (centres, takes_tokens_of_all_rows_in_turn):
        handle = model.model.layers[1].mlp.gate.register_forward_hook(hook)
        with pytest.raises(
            ValueError, match=r"other router logits on slices .* first in model\.layers\.1\.mlp\.gate\)"
        ):
            check()
        handle.remove()


def routers_that_take_rows_in_turn_are_refused() -> None:
    """Without slices as well, if their loss is asked for."""
    model, state = cases_training.sharded_model("qwen3_moe", ep=2)
    check = functools.partial(require_router_order, model, state, vocab_size=cases_models.VOCABULARY)

    def takes_tokens_of_all_rows_in_turn(_, __, output):
        logits, *others = output
        return (logits.unflatten(0, (-1, 11)).transpose(0, 1).flatten(0, 1), *others)

    model.config.output_router_logits = True
    check()
    model.model.layers[1].mlp.gate.register_forward_hook(takes_tokens_of_all_rows_in_turn)
    with pytest.raises(ValueError, match=r"another order .* \(first in model\.layers\.1\.mlp\.gate\)"):
        check()
    model.config.output_router_logits = False
    check()


def routers_of_a_model_that_raises_leave_shards(has_reset: bool) -> None:
    """What takes no rows of text alone is a warning, after which the model trains; torch before 2.13 cannot reset its units."""
    model, state = cases_training.sharded_model("qwen3_moe", ep=2)
    model.config.output_router_logits = True
    ids = torch.arange(1, 9)[None]

    def raises(*_):
        raise RuntimeError("no images")

    def logits():
        with parallel.using(state):
            return model(input_ids=ids).logits

    expected = logits()
    reshard(model)
    handle = model.model.norm.register_forward_hook(raises)
    with pytest.MonkeyPatch.context() as patch:
        if not has_reset:
            patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        with pytest.warns(UserWarning, match="no images"):
            require_router_order(model, state, vocab_size=cases_models.VOCABULARY)
    handle.remove()
    model.config.output_router_logits = False
    _require_shards_without_gradients(model)
    assert torch.equal(logits(), expected)
    logits().sum().backward()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def what_a_delta_rule_hands_from_chunk_to_chunk_is_compared() -> None:
    """Rows are longer than a chunk: a state whose heads are mixed shows itself, though slices divide the heads."""
    model, state = cases_training.sharded_model("qwen3_next", sp=2)
    model.config.max_position_embeddings = 128  # the small form has too few for rows of that length
    mixer = next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn"))
    module = sys.modules[type(mixer).__module__]
    original = module.torch_chunk_gated_delta_rule

    def mixes_heads(query, *args, **kwargs):
        out, last = original(query, *args, **kwargs)
        late = torch.arange(out.shape[1]) >= 64
        return torch.where(late[None, :, None, None], out - out.mean(2, keepdim=True), out), last

    module.torch_chunk_gated_delta_rule = mixes_heads
    try:
        with pytest.raises(ValueError, match="on slices of a sequence"):
            require_sliceable(model, state, vocab_size=cases_models.VOCABULARY)
    finally:
        module.torch_chunk_gated_delta_rule = original


def what_mixes_features_of_images_is_refused() -> None:
    """Features from which a rank subtracts the mean of its own, added between two layers: text alone does not show it."""
    reference, state = reference_model("qwen3_vl", "Qwen3VLForConditionalGeneration"), cases_sequence.state_of(sp=2)
    model = sharding.shard_model(reference.generated(), state)
    decoder = model.model.language_model
    adds = decoder._deepstack_process

    def centres(hidden, mask, features):
        return adds(hidden, mask, features - features.mean(0))

    check = functools.partial(require_sliceable, model, state, vocab_size=decoder.config.vocab_size, packed=False)
    with seams.using(**reference.seams):
        check()
        decoder._deepstack_process = centres
        with pytest.raises(
            ValueError, match=r"first in the input of model\.language_model\.layers\.1\).*\(a row with image\)"
        ):
            check()
