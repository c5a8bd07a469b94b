"""Layers that mix tokens without attention: short convolutions, linear-attention recurrences and state-space scans.

All run over the whole sequence, so each rank gets all of it for some channels or heads, as attention does. Packed
documents are kept apart by the kernels of `causal_conv1d`, `fla` and `mamba_ssm` (scans by heads); upstream's torch forms
mix them or refuse, so there one call is made per document.

    B rows   S whole sequence   s this rank's slice   C channels   N_k, N_v key and value heads   D head size
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
    keeps_documents_apart,
)
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.tensor_cache import TensorCache


def causal_conv1d(
    convolution: Callable[..., Tensor], *args: Any, state: ParallelState | None, **kwargs: Any
) -> Tensor:
    """`ops.causal_conv1d`, with `state` and packed documents; the first argument is `(B, C, s)`, the same shape back.

    Raises:
        ValueError: channels that the ranks do not divide; a decoding cache, or `seq_idx` without the lengths of the
            documents, while the sequence is divided or packed; a tensor of which nothing says what it spans.
    """
    call = Call.of(convolution, CONVOLUTION_ROLES, args, kwargs)
    return _over_channels(call, state, keeps_apart=keeps_documents_apart(convolution, "causal_conv1d"))


def selective_scan(scan: Callable[..., Tensor], *args: Any, state: ParallelState | None, **kwargs: Any) -> Tensor:
    """`ops.selective_scan`, with `state` and packed documents; the first argument is `(B, C, s)`, the same shape back.

    Raises:
        ValueError: see `causal_conv1d`.
    """
    return _over_channels(Call.of(scan, CHANNEL_SCAN_ROLES, args, kwargs), state)  # its kernel knows no documents


def fused_scan(kernel: Callable[..., Any], *args: Any, state: ParallelState | None, **kwargs: Any) -> Any:
    """`ops.fused_scan`: what upstream's kernel gives, None where the sequence is divided or packed."""
    lengths = [_noted_bounds(), *(kwargs.pop(name, None) for name in LENGTHS)]
    is_whole = (state is None or state.sp == 1) and all(one is None for one in lengths)
    return kernel(*args, **kwargs) if is_whole else None


def _over_channels(call: Call, state: ParallelState | None, *, keeps_apart: bool = False) -> Tensor:
    """A call on `(B, C, s)`, by each rank for some channels of the whole sequence; `keeps_apart`: it takes `seq_idx`."""
    state = state if state is not None and state.sp > 1 else None
    call, bounds = _take_lengths(call)
    if state is None and bounds is None:
        return call.run()
    call.require_roles()
    B, channels, s = next(iter(call.having(Role.SEQUENCE).values())).shape
    call.require_shapes({Role.SEQUENCE: (B, channels, s), Role.CHANNELS: (channels,)})
    for name, value in call.having(Role.STATES).items():
        if value.ndim != 3 or (value.shape[0], value.shape[2]) != (B, s):
            raise ValueError(
                f"'{name}' of {call.name} has the shape {tuple(value.shape)}: expected ({B}, states, {s})."
            )
    if call.having(Role.STATE) or call.values.get("return_final_states") or call.values.get("return_last_state"):
        raise ValueError(
            f"The cache of {call.name} cannot be used while the sequence is divided or packed: set use_cache=False."
        )
    if bounds is None and call.having(Role.DOCUMENTS):
        raise ValueError(
            f"{call.name} is told by seq_idx which document each token belongs to, of a slice of the sequence: hand over "
            "cu_seq_lens_q of the whole, as batch.slice_batch makes it."
        )
    call = call.without(Role.DOCUMENTS)
    tensors = {name: value.transpose(1, 2) for name, value in call.having(Role.SEQUENCE, Role.STATES).items()}
    if state is not None:
        size = state.sp
        if channels % size:
            raise ValueError(f"{call.name} over {channels} channels cannot be divided over sp={size} ranks.")
        is_whole = call.having(Role.STATES)  # each rank gets all of it
        parts = [
            one.unsqueeze(2).expand(-1, -1, size, -1) if name in is_whole else one.unsqueeze(-1)
            for name, one in tensors.items()
        ]
        exchanged = sequence.scatter_heads(parts, state, operation=f"exchange channels of {call.name}")
        tensors = dict(zip(tensors, (one.flatten(2) for one in exchanged), strict=True))
        call = call.with_values(_own_parts(call, Role.CHANNELS, state))

    def run(*parts_BSC: Tensor, **more: Any) -> Tensor:
        turned = {name: part.transpose(1, 2) for name, part in zip(tensors, parts_BSC, strict=True)}
        return call.with_values(turned | more).run().transpose(1, 2)

    values = list(tensors.values())
    if bounds is None:
        out_BSC = run(*values)
    elif keeps_apart:
        flat = [value.flatten(0, 1)[None] for value in values]
        out_BSC = run(*flat, seq_idx=_documents(bounds, flat[0])).view_as(values[0])
    else:
        out_BSC = _per_document(run, values, bounds)
    if state is not None:
        out_BsC1 = sequence.gather_heads(out_BSC.unsqueeze(-1), state, operation=f"return channels of {call.name}")
        out_BSC = out_BsC1.squeeze(-1)
    return out_BSC.transpose(1, 2)


def delta_rule(rule: Callable[..., Any], *args: Any, state: ParallelState | None, **kwargs: Any) -> Any:
    """`ops.delta_rule`, with `state` and packed documents; the result has the form that `rule` returns.

    Tensors `(B, s, N, ...)` with N key or value heads are exchanged; tensors `(N, ...)` of the value heads are sliced.
    Which an argument is, its name says (`mixer_arguments.py`).

    Raises:
        ValueError: a recurrent state is handed in or asked for while the sequence is divided: it is a decoding cache; a
            tensor of which nothing says what it spans, or that does not span what its name says.
    """
    lengths = "cu_seqlens" if keeps_documents_apart(rule, "fla") else ""
    return _over_heads(Call.of(rule, RULE_ROLES, args, kwargs), state, lengths)


def state_space_scan(scan: Callable[..., Any], *args: Any, state: ParallelState | None, **kwargs: Any) -> Any:
    """`ops.state_space_scan`, with `state` and packed documents: its groups of B and C are key heads of `delta_rule`.

    Raises:
        ValueError: see `delta_rule`.
    """
    lengths = "seq_idx" if keeps_documents_apart(scan, "mamba_ssm") else ""
    return _over_heads(Call.of(scan, HEAD_SCAN_ROLES, args, kwargs), state, lengths)


def _over_heads(call: Call, state: ParallelState | None, lengths: str) -> Any:
    """A call on `(B, s, N, ...)`, by each rank for some heads of the whole sequence.

    `lengths` is the argument that tells it the documents of one row; empty where it knows none.
    """
    state = state if state is not None and state.sp > 1 else None
    call, bounds = _take_lengths(call)
    if state is None and bounds is None:
        return call.run()
    call.require_roles()
    keys, values = (list(call.having(role).values()) for role in TOKENS)
    call.require_shapes(dict(zip(TOKENS, (tuple(keys[0].shape[:3]), tuple(values[0].shape[:3])), strict=True)))
    asked = call.values.get("output_final_state") or call.values.get("return_final_states")
    if call.having(Role.STATE) or (state is not None and asked):
        raise ValueError(
            "A linear-attention cache cannot be used while the sequence is divided or packed: set use_cache=False."
        )
    if bounds is None and call.having(Role.DOCUMENTS):
        raise ValueError(
            f"{call.name} is told by seq_idx the documents of a slice: hand over cu_seq_lens_q of the whole."
        )
    call = call.without(Role.DOCUMENTS)
    if state is not None:
        call = _scatter(call, state)

    if bounds is None:
        result = call.run()
    elif lengths:
        result = _flattened(call, bounds, lengths)
    else:
        result = _rule_per_document(call, bounds)
    if state is None:
        return result
    if isinstance(result, tuple):
        return (sequence.gather_heads(result[0], state, operation="return heads of a recurrence"), *result[1:])
    return sequence.gather_heads(result, state, operation="return heads of a recurrence")


# ----------------------------------------------------------------------------------------------- slices


def _own_parts(call: Call, role: Role, state: ParallelState) -> dict[str, Tensor]:
    """This rank's part of each tensor of a role, whose first dimension is divided."""
    return {name: value.chunk(state.sp)[state.sp_rank] for name, value in call.having(role).items()}


def _scatter(call: Call, state: ParallelState) -> Call:
    """The call on the whole sequence and this rank's heads."""
    heads_k, heads_v = (next(iter(call.having(role).values())).shape[2] for role in TOKENS)
    repeats = sequence.key_value_repeats(heads_v, heads_k, state.sp, where=call.name)
    call.require_shapes({Role.VALUE_HEADS: (heads_v,)})
    tensors = call.having(*TOKENS)
    by_head = []
    for name, tensor in tensors.items():
        one = tensor.flatten(3) if tensor.ndim > 3 else tensor.unsqueeze(-1)
        repeated = call.roles[name] is Role.KEY_TOKENS and repeats > 1
        by_head.append(one.repeat_interleave(repeats, dim=2) if repeated else one)
    exchanged = sequence.scatter_heads(by_head, state, operation=f"exchange heads of {call.name}")
    whole = {
        name: one.unflatten(-1, tensor.shape[3:]) if tensor.ndim > 3 else one.squeeze(-1)
        for (name, tensor), one in zip(tensors.items(), exchanged, strict=True)
    }
    return call.with_values(whole | _own_parts(call, Role.VALUE_HEADS, state))


# -------------------------------------------------------------------------------------------- documents


def _take_lengths(call: Call) -> tuple[Call, Tensor | None]:
    """The call without the document bounds among its arguments, and the bounds, else those that the model was called with."""
    given = [
        value for name, value in call.values.items() if call.roles.get(name) is Role.LENGTHS and value is not None
    ]
    return call.without(Role.LENGTHS), given[0] if given else _noted_bounds()


def _noted_bounds() -> Tensor | None:
    """The bounds that the model was called with; those of its first run where a layer is computed again."""
    return checkpointing.remember(model_calls.bounds_of_call)


_spans = TensorCache(
    lambda bounds: list(itertools.pairwise(bounds.tolist()))
)  # one host sync per batch, not per layer


def _per_document(call: Callable[..., Tensor], tensors: list[Tensor], bounds: Tensor) -> Tensor:
    """`call` on each document's `(1, length, ...)` slices, put together as `(B, S, ...)`."""
    B, S = tensors[0].shape[:2]
    spans = _spans(bounds)
    if spans[-1][1] != B * S:
        raise ValueError(
            f"The lengths of the documents end at {spans[-1][1]}, and there are {B} rows of {S} = {B * S} tokens. Hand over "
            "those of the whole batch, not of a slice."
        )
    flat = [tensor.flatten(0, 1)[None] for tensor in tensors]
    parts = [call(*(tensor[:, start:end] for tensor in flat)) for start, end in spans if end > start]
    out = torch.cat(parts, dim=1)
    return out.view(B, S, *out.shape[2:])


def _rule_per_document(call: Call, bounds: Tensor) -> Any:
    tensors = call.having(*TOKENS)
    rest: tuple = ()

    def of_document(*parts: Tensor) -> Tensor:
        nonlocal rest
        result = call.with_values(dict(zip(tensors, parts, strict=True))).run()
        rest = result[1:] if isinstance(result, tuple) else ()
        return result[0] if isinstance(result, tuple) else result

    out = _per_document(of_document, list(tensors.values()), bounds)
    return (out, *rest) if rest else out


def _documents(bounds: Tensor, row: Tensor) -> Tensor:
    """The document of each token of one row, `(1, tokens)` int32."""
    tokens = torch.arange(row.shape[1], device=row.device, dtype=torch.int32)
    return torch.searchsorted(bounds[1:].to(torch.int32), tokens, right=True, out_int32=True)[None]


def _flattened(call: Call, bounds: Tensor, lengths: str) -> Any:
    """One call on all rows as one: `fla` and `mamba_ssm` keep documents of a single row apart, told by `lengths`."""
    tensors = call.having(*TOKENS)
    B, S = next(iter(tensors.values())).shape[:2]
    one_row = {name: tensor.flatten(0, 1)[None] for name, tensor in tensors.items()}
    told = bounds if lengths == "cu_seqlens" else _documents(bounds, next(iter(one_row.values())))
    result = call.with_values({**one_row, lengths: told}).run()
    out = result[0] if isinstance(result, tuple) else result
    out = out.view(B, S, *out.shape[2:])
    return (out, *result[1:]) if isinstance(result, tuple) else out
