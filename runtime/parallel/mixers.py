"""Layers that mix tokens without attention: short convolutions, linear-attention recurrences and state-space scans.

All need the full sequence, so each rank gets all of it for some channels or heads, as in attention. The kernels of
`causal_conv1d`, `fla` and `mamba_ssm` (scans by heads) separate packed documents; upstream's torch implementations mix
them or raise, so those are called once per document.

    B rows   S full sequence   s this rank's slice   C channels   N_k, N_v key and value heads   D head size
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patchgen.runtime import model_calls
from patchgen.runtime.parallel import checkpointing, sequence
from patchgen.runtime.parallel.mixer_arguments import (
    CHANNEL_SCAN_ROLES,
    CONVOLUTION_ROLES,
    HEAD_SCAN_ROLES,
    LENGTHS,
    RULE_ROLES,
    TOKENS,
    Call,
    Role,
    separates_documents,
)
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.tensor_cache import TensorCache


def causal_conv1d(
    convolution: Callable[..., Tensor], *args: Any, state: ParallelState | None, **kwargs: Any
) -> Tensor:
    """`ops.causal_conv1d`, with `state` and packed documents; the first argument is `(B, C, s)`, the same shape back.

    Raises:
        ValueError: channels that do not divide by the number of ranks; a decoding cache, or `seq_idx` without document
            lengths, while the sequence is divided or packed; a tensor with an unknown role.
    """
    call = Call.of(convolution, CONVOLUTION_ROLES, args, kwargs)
    return _over_channels(call, state, takes_seq_idx=separates_documents(convolution, "causal_conv1d"))


def selective_scan(scan: Callable[..., Tensor], *args: Any, state: ParallelState | None, **kwargs: Any) -> Tensor:
    """`ops.selective_scan`, with `state` and packed documents; the first argument is `(B, C, s)`, the same shape back.

    Raises:
        ValueError: see `causal_conv1d`.
    """
    return _over_channels(Call.of(scan, CHANNEL_SCAN_ROLES, args, kwargs), state)  # its kernel ignores documents


def fused_scan(kernel: Callable[..., Any], *args: Any, state: ParallelState | None, **kwargs: Any) -> Any:
    """`ops.fused_scan`: the result of upstream's kernel, or None if the sequence is divided or packed."""
    possible_bounds = [_call_bounds(), *(kwargs.pop(name, None) for name in LENGTHS)]
    is_one_sequence = (state is None or state.sp == 1) and all(bounds is None for bounds in possible_bounds)
    return kernel(*args, **kwargs) if is_one_sequence else None


def _over_channels(call: Call, state: ParallelState | None, *, takes_seq_idx: bool = False) -> Tensor:
    """A call on `(B, C, s)`, computed by each rank on the full sequence for some channels."""
    state = state if state is not None and state.sp > 1 else None
    call, bounds = _take_bounds(call)
    if state is None and bounds is None:
        return call.run()
    call.require_roles()
    B, channels, s = next(iter(call.tensors_with(Role.SEQUENCE).values())).shape
    call.require_shapes({Role.SEQUENCE: (B, channels, s), Role.CHANNELS: (channels,)})
    for name, value in call.tensors_with(Role.STATE_SEQUENCE).items():
        if value.ndim != 3 or (value.shape[0], value.shape[2]) != (B, s):
            raise ValueError(
                f"'{name}' of {call.name} has the shape {tuple(value.shape)}: expected ({B}, states, {s})."
            )
    if (
        call.tensors_with(Role.DECODING_CACHE)
        or call.values.get("return_final_states")
        or call.values.get("return_last_state")
    ):
        raise ValueError(
            f"The cache of {call.name} cannot be used while the sequence is divided or packed: set use_cache=False."
        )
    if bounds is None and call.tensors_with(Role.DOCUMENTS):
        raise ValueError(
            f"{call.name} got seq_idx of a slice of the sequence. To fix: pass cu_seq_lens_q of the full sequence, as "
            "batch.slice_batch computes it."
        )
    call = call.without(Role.DOCUMENTS)
    tensors = {
        name: value.transpose(1, 2) for name, value in call.tensors_with(Role.SEQUENCE, Role.STATE_SEQUENCE).items()
    }
    if state is not None:
        size = state.sp
        if channels % size:
            raise ValueError(f"{call.name} over {channels} channels cannot be divided over sp={size} ranks.")
        replicated = call.tensors_with(Role.STATE_SEQUENCE)  # each rank gets all of it
        parts = [
            tensor.unsqueeze(2).expand(-1, -1, size, -1) if name in replicated else tensor.unsqueeze(-1)
            for name, tensor in tensors.items()
        ]
        exchanged = sequence.scatter_heads(parts, state, operation=f"exchange channels of {call.name}")
        tensors = dict(zip(tensors, (tensor.flatten(2) for tensor in exchanged), strict=True))
        call = call.with_values(_local_chunks(call, Role.CHANNELS, state))

    def run(*parts_BSC: Tensor, **more: Any) -> Tensor:
        transposed = {name: part.transpose(1, 2) for name, part in zip(tensors, parts_BSC, strict=True)}
        return call.with_values(transposed | more).run().transpose(1, 2)

    values = list(tensors.values())
    if bounds is None:
        out_BSC = run(*values)
    elif takes_seq_idx:
        flat = [value.flatten(0, 1)[None] for value in values]
        out_BSC = run(*flat, seq_idx=_document_ids(bounds, flat[0])).view_as(values[0])
    else:
        out_BSC = _per_document(run, values, bounds)
    if state is not None:
        out_BsC1 = sequence.gather_heads(out_BSC.unsqueeze(-1), state, operation=f"return channels of {call.name}")
        out_BSC = out_BsC1.squeeze(-1)
    return out_BSC.transpose(1, 2)


def delta_rule(rule: Callable[..., Any], *args: Any, state: ParallelState | None, **kwargs: Any) -> Any:
    """`ops.delta_rule`, with `state` and packed documents; returns what `rule` returns.

    Tensors `(B, s, N, ...)` with N key or value heads are exchanged; tensors `(N, ...)` of the value heads are sliced.
    The role of an argument follows from its name (`mixer_arguments.py`).

    Raises:
        ValueError: a recurrent state (a decoding cache) is passed while the sequence is divided or packed, or requested while it
            is divided; heads that do not divide by the number of ranks; `seq_idx` without document lengths; a tensor with
            an unknown role, or with another shape than its role.
    """
    documents_argument = "cu_seqlens" if separates_documents(rule, "fla") else None
    return _over_heads(Call.of(rule, RULE_ROLES, args, kwargs), state, documents_argument)


def state_space_scan(scan: Callable[..., Any], *args: Any, state: ParallelState | None, **kwargs: Any) -> Any:
    """`ops.state_space_scan`, with `state` and packed documents: its groups of B and C are key heads of `delta_rule`.

    Raises:
        ValueError: see `delta_rule`.
    """
    documents_argument = "seq_idx" if separates_documents(scan, "mamba_ssm") else None
    return _over_heads(Call.of(scan, HEAD_SCAN_ROLES, args, kwargs), state, documents_argument)


def _over_heads(call: Call, state: ParallelState | None, documents_argument: str | None) -> Any:
    """A call on `(B, s, N, ...)`, computed by each rank on the full sequence for some heads.

    Args:
        documents_argument: the name of its argument for the documents of one row; None if it takes only one document.
    """
    state = state if state is not None and state.sp > 1 else None
    call, bounds = _take_bounds(call)
    if state is None and bounds is None:
        return call.run()
    call.require_roles()
    keys, values = (list(call.tensors_with(role).values()) for role in TOKENS)
    call.require_shapes(dict(zip(TOKENS, (tuple(keys[0].shape[:3]), tuple(values[0].shape[:3])), strict=True)))
    returns_state = call.values.get("output_final_state") or call.values.get("return_final_states")
    if call.tensors_with(Role.DECODING_CACHE) or (state is not None and returns_state):
        raise ValueError(
            f"{call.name} cannot continue a recurrent state while the sequence is divided or packed, nor return one while it is "
            "divided: set use_cache=False."
        )
    if bounds is None and call.tensors_with(Role.DOCUMENTS):
        raise ValueError(
            f"{call.name} got seq_idx of a slice of the sequence. To fix: pass cu_seq_lens_q of the full sequence."
        )
    call = call.without(Role.DOCUMENTS)
    if state is not None:
        call = _scatter(call, state)

    if bounds is None:
        result = call.run()
    elif documents_argument is not None:
        result = _run_as_one_row(call, bounds, documents_argument)
    else:
        result = _run_per_document(call, bounds)
    if state is None:
        return result
    if isinstance(result, tuple):
        return (sequence.gather_heads(result[0], state, operation="return heads of a recurrence"), *result[1:])
    return sequence.gather_heads(result, state, operation="return heads of a recurrence")


# ----------------------------------------------------------------------------------------------- slices


def _local_chunks(call: Call, role: Role, state: ParallelState) -> dict[str, Tensor]:
    """This rank's chunk of each tensor of a role, divided along the first dimension."""
    return {name: value.chunk(state.sp)[state.sp_rank] for name, value in call.tensors_with(role).items()}


def _scatter(call: Call, state: ParallelState) -> Call:
    """The call on the full sequence and this rank's heads."""
    heads_k, heads_v = (next(iter(call.tensors_with(role).values())).shape[2] for role in TOKENS)
    repeats = sequence.key_value_repeats(heads_v, heads_k, state.sp, where=call.name)
    call.require_shapes({Role.VALUE_HEADS: (heads_v,)})
    tensors = call.tensors_with(*TOKENS)
    by_head = []
    for name, tensor in tensors.items():
        flat = tensor.flatten(3) if tensor.ndim > 3 else tensor.unsqueeze(-1)
        is_repeated = call.roles[name] is Role.KEY_TOKENS and repeats > 1
        by_head.append(flat.repeat_interleave(repeats, dim=2) if is_repeated else flat)
    exchanged = sequence.scatter_heads(by_head, state, operation=f"exchange heads of {call.name}")
    gathered = {
        name: flat.unflatten(-1, tensor.shape[3:]) if tensor.ndim > 3 else flat.squeeze(-1)
        for (name, tensor), flat in zip(tensors.items(), exchanged, strict=True)
    }
    return call.with_values(gathered | _local_chunks(call, Role.VALUE_HEADS, state))


# -------------------------------------------------------------------------------------------- documents


def _take_bounds(call: Call) -> tuple[Call, Tensor | None]:
    """The call without document bounds, and the bounds: its argument, else those of the model's call."""
    bounds = [
        value for name, value in call.values.items() if call.roles.get(name) is Role.LENGTHS and value is not None
    ]
    return call.without(Role.LENGTHS), bounds[0] if bounds else _call_bounds()


def _call_bounds() -> Tensor | None:
    """The document bounds of the model's call; those of the first run while a layer is recomputed."""
    return checkpointing.remember(model_calls.bounds_of_call)


_spans = TensorCache(
    lambda bounds: list(itertools.pairwise(bounds.tolist()))
)  # one host sync per batch, not per layer


def _per_document(call: Callable[..., Tensor], tensors: list[Tensor], bounds: Tensor) -> Tensor:
    """`call` on each document's `(1, length, ...)` slices, concatenated as `(B, S, ...)`."""
    B, S = tensors[0].shape[:2]
    spans = _spans(bounds)
    if spans[-1][1] != B * S:
        raise ValueError(
            f"The document lengths end at {spans[-1][1]}, but there are {B} rows of {S} = {B * S} tokens. To fix: pass those "
            "of the full batch, not of a slice."
        )
    flat = [tensor.flatten(0, 1)[None] for tensor in tensors]
    parts = [call(*(tensor[:, start:end] for tensor in flat)) for start, end in spans if end > start]
    out = torch.cat(parts, dim=1)
    return out.view(B, S, *out.shape[2:])


def _run_per_document(call: Call, bounds: Tensor) -> Any:
    """One call on each document; final states are those of each document, as of `_run_as_one_row`."""
    tensors = call.tensors_with(*TOKENS)
    others_of_documents: list[list] = []

    def run_document(*parts: Tensor) -> Tensor:
        result = call.with_values(dict(zip(tensors, parts, strict=True))).run()
        out, *others = result if isinstance(result, tuple) else (result,)
        others_of_documents.append(others)
        return out

    out = _per_document(run_document, list(tensors.values()), bounds)
    others = [
        torch.cat(values) if isinstance(values[0], Tensor) else values[0]
        for values in zip(*others_of_documents, strict=True)
    ]
    return (out, *others) if others else out


def _document_ids(bounds: Tensor, row: Tensor) -> Tensor:
    """The document index of each token of one row, `(1, tokens)` int32."""
    tokens = torch.arange(row.shape[1], device=row.device, dtype=torch.int32)
    return torch.searchsorted(bounds[1:].to(torch.int32), tokens, right=True, out_int32=True)[None]


def _run_as_one_row(call: Call, bounds: Tensor, documents_argument: str) -> Any:
    """One call on all rows concatenated: `fla` and `mamba_ssm` separate the documents of one row."""
    tensors = call.tensors_with(*TOKENS)
    B, S = next(iter(tensors.values())).shape[:2]
    one_row = {name: tensor.flatten(0, 1)[None] for name, tensor in tensors.items()}
    documents = bounds if documents_argument == "cu_seqlens" else _document_ids(bounds, next(iter(one_row.values())))
    result = call.with_values({**one_row, documents_argument: documents}).run()
    out = result[0] if isinstance(result, tuple) else result
    out = out.view(B, S, *out.shape[2:])
    return (out, *result[1:]) if isinstance(result, tuple) else out
