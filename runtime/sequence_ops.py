"""The functions of `ops.py` that mix tokens along a sequence, of which each rank has a slice.

    B batch   S sequence of this rank   D head size   N heads   C channels

On one process every function computes exactly what upstream does, except that documents of packed rows stay apart.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from patchgen.runtime import parallel

if TYPE_CHECKING:
    from torch import Tensor


def sequence_position_ids(position_ids: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """The position ids of this rank's slice of the sequence.

    Args:
        position_ids: `[..., S]` of this rank, `[..., S * sp]` of the full sequence, or None for `0, 1, 2, ...`.
        hidden_states: `[B, S, H]`, this rank's slice.

    Returns:
        `[..., S]`; without sequence parallelism the argument itself, None included.
    """
    state = parallel.sequence_parallel_state()
    if state is None:
        return position_ids
    from patchgen.runtime.parallel.sequence import position_slice

    return position_slice(position_ids, hidden_states, state)


def look_up_positions(
    table: Callable[..., Tensor], *args: object, tokens: Tensor, cu_seq_lens: Tensor | None = None, **kwargs: object
) -> Tensor:
    """Positions that a model counts along its rows, looked up: on a slice those of the full sequence, in packed rows those within
    each document.

    Args:
        table: called with the arguments that follow; takes `position_ids` `[T]`.
        tokens: this rank's tokens or embeddings, `[B, S, ...]`.
        cu_seq_lens: `[documents + 1]` over the flattened rows of the full sequence; None: those of the running call, if any.

    Returns:
        `[B, S, H]`; on one rank, of rows that are not packed, what the table returns.

    Raises:
        UnsupportedError: the table takes no positions.
    """
    from patchgen.runtime import model_calls

    state = parallel.sequence_parallel_state()
    if cu_seq_lens is None:
        cu_seq_lens = model_calls.bounds_of_call()
    if state is None and cu_seq_lens is None:
        return table(*args, **kwargs)
    from patchgen.runtime.parallel.sequence import counted_positions

    if not _takes_positions(type(table)):
        from patchgen.runtime.attention_masks import UnsupportedError

        raise UnsupportedError(
            f"{type(table).__name__} takes no position_ids, so it cannot count those of a slice, or within the documents of packed "
            "rows. Train this model with sp=1, and with one document per row."
        )
    B, S = tokens.shape[:2]
    positions_BS = counted_positions(B, S, cu_seq_lens, state, device=tokens.device)
    return table(*args, **kwargs | {"position_ids": positions_BS.flatten()}).view(B, S, -1)


def causal_conv1d(
    convolution: Callable[..., Tensor], hidden_states: Tensor, weight: Tensor, *args, **kwargs
) -> Tensor:
    """A causal depthwise convolution over the full sequence, of which each rank has a slice.

    It does not cross documents of a packed row (`cu_seq_lens` among the keywords), even on one rank; upstream's torch form
    treats a row as one document.

    Args:
        convolution: upstream's function, called with the arguments that follow.
        hidden_states: `[B, C, S]`.
        weight: `[C, width]`.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.causal_conv1d(convolution, hidden_states, weight, *args, state=parallel.current(), **kwargs)


def delta_rule(rule: Callable[..., object], query: Tensor, key: Tensor, value: Tensor, *args, **kwargs) -> object:
    """A linear-attention recurrence over the full sequence, of which each rank has a slice.

    Args:
        rule: upstream's function, called with the arguments that follow.
        query, key: `[B, S, N_k, D_k]`.
        value: `[B, S, N_v, D_v]`; further tensors (decay, beta) are `[B, S, N_v, ...]`.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.delta_rule(rule, query, key, value, *args, state=parallel.current(), **kwargs)


def state_space_scan(scan: Callable[..., object], hidden_states: Tensor, *args, **kwargs) -> object:
    """A state-space recurrence by heads (Mamba-2) over the full sequence, of which each rank has a slice.

    Args:
        scan: upstream's function, called with the arguments that follow.
        hidden_states: `[B, S, N, D]`; `dt` is `[B, S, N]`, `A` `[N]`, `B` and `C` are `[B, S, groups, states]`.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.state_space_scan(scan, hidden_states, *args, state=parallel.current(), **kwargs)


def selective_scan(scan: Callable[..., Tensor], hidden_states: Tensor, *args, **kwargs) -> Tensor:
    """A state-space recurrence by channels (Mamba) over the full sequence, of which each rank has a slice.

    Args:
        scan: upstream's function, called with the arguments that follow.
        hidden_states: `[B, C, S]`, as `dt`; `A` is `[C, states]`, `B` and `C` are `[B, states, S]`.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.selective_scan(scan, hidden_states, *args, state=parallel.current(), **kwargs)


def fused_scan(kernel: Callable[..., object], *args, **kwargs) -> object:
    """A kernel for a complete state-space mixer, for which upstream has no torch form.

    Returns:
        The kernel's result; None if the sequence is sliced or packed, so that upstream's separate steps run.
    """
    from patchgen.runtime.parallel import mixers

    return mixers.fused_scan(kernel, *args, state=parallel.current(), **kwargs)


def refuse_slices(mixer: str) -> None:
    """Raises `UnsupportedError` on a slice of the sequence: sequence parallelism does not support `mixer`."""
    state = parallel.sequence_parallel_state()
    if state is not None:
        from patchgen.runtime.attention_masks import UnsupportedError

        raise UnsupportedError(
            f"{mixer} mixes tokens along the sequence in a form that sequence parallelism does not support "
            f"(sp={state.sp}). Train this model with sp=1."
        )


def tokens_of_any_rank(tokens: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """The mask `(B, S)` of a branch's tokens if it has any on any rank, maybe none on this one, so that all ranks take the
    branch; otherwise None. Host sync.

    Args:
        hidden_states: `(B, S, H)` of this rank.
    """
    state = parallel.current()
    if state is None or state.config.world == 1:
        return tokens if tokens is not None and bool(tokens.any()) else None
    from patchgen.runtime.parallel import checkpointing
    from patchgen.runtime.parallel.collectives import all_reduce

    def agree() -> bool:
        has_tokens = hidden_states.new_tensor(tokens is not None and bool(tokens.any()), dtype=torch.int32)
        return bool(all_reduce(has_tokens, operation="agree on a branch of tokens"))

    if not checkpointing.remember(agree):
        return None
    return hidden_states.new_zeros(hidden_states.shape[:-1], dtype=torch.bool) if tokens is None else tokens


def mrope_position_ids(
    position_ids: Tensor | None, batch: Tensor, stacked_position_ids: Tensor | None = None
) -> Tensor | None:
    """Multimodal position ids in upstream's layout; the argument's name decides the layout, not its sizes.

    Args:
        position_ids: `(rows, B or 1, S)`, as upstream has it: 3 rows (time, height, width), 4 (text first) or 1; text
            position ids `(B, S)`, and None, are returned unchanged.
        batch: token ids or embeddings of the same batch, `(B, ...)`.
        stacked_position_ids: `(B, rows, S)`, positions of single samples as a collator stacks them.

    Raises:
        ValueError: both are given, or a shape does not match the layout.
    """
    if stacked_position_ids is None and (position_ids is None or position_ids.ndim != 3):
        return position_ids
    from patchgen.runtime.parallel.batch import rows_first

    return rows_first(position_ids, stacked_position_ids, batch.shape[0])


@functools.cache
def _takes_positions(table: type) -> bool:
    return "position_ids" in inspect.signature(table.forward).parameters
