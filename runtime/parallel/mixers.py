"""Layers that mix tokens without attention: short convolutions and linear-attention recurrences.

Both run over the whole sequence, so each rank gets all of it for some channels or heads, as attention does. Packed
documents are kept apart by the kernels of `causal_conv1d` and `fla`; upstream's torch forms mix them or refuse, so
there one call is made per document.

    B rows   S whole sequence   s this rank's slice   C channels   N_k, N_v key and value heads   D head size
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patchgen.runtime.parallel import sequence
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.per_tensor import PerTensor

LENGTH_ARGUMENTS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens")


def causal_conv1d(
    convolution: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    *args: Any,
    state: ParallelState | None,
    **kwargs: Any,
) -> Tensor:
    """`ops.causal_conv1d`, with `state` and packed documents; `hidden_states (B, C, s)`, the same shape back."""
    size = state.sp if state is not None else 1
    bounds, kwargs = _lengths(kwargs)
    if size == 1 and bounds is None:
        return convolution(hidden_states, weight, *args, **kwargs)
    channels = hidden_states.shape[1]
    values_BsC1 = hidden_states.transpose(1, 2).unsqueeze(-1)
    if size > 1:
        if channels % size:
            raise ValueError(f"A convolution over {channels} channels cannot be divided over sp={size} ranks.")
        (values_BsC1,) = sequence.scatter_heads([values_BsC1], state, operation="exchange channels of a convolution")
        weight, *args = (_own_channels(value, channels, state) for value in (weight, *args))
        kwargs = {name: _own_channels(value, channels, state) for name, value in kwargs.items()}
    kwargs.pop("seq_idx", None)
    values_BSC = values_BsC1.squeeze(-1)

    def convolve(part_BSC: Tensor, **more: Any) -> Tensor:
        return convolution(part_BSC.transpose(1, 2), weight, *args, **kwargs, **more).transpose(1, 2)

    if bounds is None:
        out_BSC = convolve(values_BSC)
    elif _installed("causal_conv1d"):
        flat = values_BSC.flatten(0, 1)[None]
        tokens = torch.arange(flat.shape[1], device=flat.device, dtype=torch.int32)
        document = torch.searchsorted(bounds[1:].to(torch.int32), tokens, right=True, out_int32=True)[None]
        out_BSC = convolve(flat, seq_idx=document).view_as(values_BSC)
    else:
        out_BSC = _per_document(lambda part: convolve(part), [values_BSC], bounds)
    if size > 1:
        out_BsC1 = sequence.gather_heads(out_BSC.unsqueeze(-1), state, operation="return channels of a convolution")
        out_BSC = out_BsC1.squeeze(-1)
    return out_BSC.transpose(1, 2)


def delta_rule(
    rule: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    state: ParallelState | None,
    **kwargs: Any,
) -> Any:
    """`ops.delta_rule`, with `state` and packed documents; the result has the form that `rule` returns.

    Tensors `(B, s, N, ...)` with N key or value heads are exchanged; tensors `(N, ...)` of the value heads are sliced.

    Raises:
        ValueError: a recurrent state is handed in or asked for while the sequence is divided: it is a decoding cache.
    """
    size = state.sp if state is not None else 1
    names = [*(f"argument {place}" for place in range(len(args))), *kwargs]
    values = [query, key, value, *args, *kwargs.values()]
    if size > 1:
        if kwargs.get("initial_state") is not None or kwargs.get("output_final_state"):
            raise ValueError(
                "A linear-attention cache cannot be used while the sequence is divided: set use_cache=False."
            )
        values = _scatter(values, state, rule)
    bounds, kwargs = _lengths(dict(zip(names[len(args) :], values[3 + len(args) :], strict=True)))
    query, key, value, *args = values[: 3 + len(args)]

    if bounds is None:
        result = rule(query, key, value, *args, **kwargs)
    elif _installed("fla"):
        result = _flattened(rule, [query, key, value, *args], {**kwargs, "cu_seqlens": bounds})
    else:
        result = _rule_per_document(rule, [query, key, value, *args], kwargs, bounds)
    if size == 1:
        return result
    if isinstance(result, tuple):
        return (sequence.gather_heads(result[0], state, operation="return heads of a recurrence"), *result[1:])
    return sequence.gather_heads(result, state, operation="return heads of a recurrence")


# ----------------------------------------------------------------------------------------------- slices


def _own_channels(value: Any, channels: int, state: ParallelState) -> Any:
    """This rank's part of a tensor `(C, ...)`; anything else as it is."""
    if isinstance(value, Tensor) and value.ndim in (1, 2) and value.shape[0] == channels:
        return value.chunk(state.sp)[state.sp_rank]
    return value


def _scatter(values: list[Any], state: ParallelState, rule: Callable) -> list[Any]:
    key, value = values[1:3]
    where = getattr(rule, "__name__", "a recurrence")
    heads_v, heads_k = value.shape[2], key.shape[2]
    repeats = sequence.key_value_repeats(heads_v, heads_k, state.sp, where=where)
    out = list(values)
    places, tensors = [], []
    for place, one in enumerate(values):
        if not isinstance(one, Tensor):
            continue
        if one.ndim >= 3 and one.shape[:2] == value.shape[:2] and one.shape[2] in (heads_v, heads_k):
            by_head = one.flatten(3) if one.ndim > 3 else one.unsqueeze(-1)
            if one.shape[2] != heads_v or place < 2:
                by_head = by_head.repeat_interleave(repeats, dim=2) if repeats > 1 else by_head
            places.append(place)
            tensors.append(by_head)
        elif one.ndim in (1, 2) and one.shape[0] == heads_v:
            out[place] = one.chunk(state.sp)[state.sp_rank]
    exchanged = sequence.scatter_heads(tensors, state, operation=f"exchange heads of {where}")
    for place, tensor in zip(places, exchanged, strict=True):
        inner = values[place].shape[3:]
        out[place] = tensor.unflatten(-1, inner) if inner else tensor.squeeze(-1)
    return out


# -------------------------------------------------------------------------------------------- documents


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _lengths(kwargs: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    """The document bounds among the arguments, and the arguments without them."""
    given = [kwargs[name] for name in LENGTH_ARGUMENTS if kwargs.get(name) is not None]
    return (given[0] if given else None), {k: v for k, v in kwargs.items() if k not in LENGTH_ARGUMENTS}


_spans = PerTensor(lambda bounds: list(itertools.pairwise(bounds.tolist())))  # one host sync per batch, not per layer


def _per_document(call: Callable[..., Tensor], tensors: list[Tensor], bounds: Tensor) -> Tensor:
    """`call` on each document's `(1, length, ...)` slices, put together as `(B, S, ...)`."""
    B, S = tensors[0].shape[:2]
    flat = [tensor.flatten(0, 1)[None] for tensor in tensors]
    parts = [call(*(tensor[:, start:end] for tensor in flat)) for start, end in _spans(bounds) if end > start]
    out = torch.cat(parts, dim=1)
    return out.view(B, S, *out.shape[2:])


def _sequences(values: list[Any], B: int, S: int) -> list[bool]:
    return [isinstance(value, Tensor) and value.ndim >= 3 and value.shape[:2] == (B, S) for value in values]


def _rule_per_document(rule: Callable, args: list[Any], kwargs: dict[str, Any], bounds: Tensor) -> Any:
    names, values = list(kwargs), [*args, *kwargs.values()]
    along = _sequences(values, *args[0].shape[:2])
    tensors = [value for value, is_sequence in zip(values, along, strict=True) if is_sequence]
    rest: tuple = ()

    def call(*parts: Tensor) -> Tensor:
        nonlocal rest
        given = iter(parts)
        mixed = [next(given) if is_sequence else value for value, is_sequence in zip(values, along, strict=True)]
        result = rule(*mixed[: len(args)], **dict(zip(names, mixed[len(args) :], strict=True)))
        rest = result[1:] if isinstance(result, tuple) else ()
        return result[0] if isinstance(result, tuple) else result

    out = _per_document(call, tensors, bounds)
    return (out, *rest) if rest else out


def _flattened(rule: Callable, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One call on all rows as one: `fla` keeps documents of a single row apart."""
    B, S = args[0].shape[:2]

    def flat(value: Any, is_sequence: bool) -> Any:
        return value.flatten(0, 1)[None] if is_sequence else value

    args = [flat(*pair) for pair in zip(args, _sequences(args, B, S), strict=True)]
    keyword_values = list(kwargs.values())
    kwargs = dict(zip(kwargs, map(flat, keyword_values, _sequences(keyword_values, B, S)), strict=True))
    result = rule(*args, **kwargs)
    out = result[0] if isinstance(result, tuple) else result
    out = out.view(B, S, *out.shape[2:])
    return (out, *result[1:]) if isinstance(result, tuple) else out
