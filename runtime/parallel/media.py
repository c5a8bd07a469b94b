"""Images, videos and audio on ranks that share a sequence: a tower's rows, and which features a rank's tokens take.

The ranks of an SP group hold the same images, videos and audio, and different tokens. A tower gives every rank all
features; each then takes those whose placeholder tokens it holds. So every feature row is used on exactly one rank, and
the sum of the tower's gradients over the ranks counts each row once, whether a tower divides its rows or not.

    features    0 1 2 3 4 5 6 7          8 placeholders of one image, across the boundary of two slices
    rank 0      . . 0 1 2 3 4 . .        tokens of its slice, and the rows they take
    rank 1      5 6 7 . . . . . .

A tower whose layers attend by lengths works on a slice of its rows (`TowerRows`): attention exchanges heads, as in the
language model. Any other is computed whole on every rank (`mark_replicated`).

    B batch   s tokens per row of this rank   n ranks   P rows of a tower (patches, frames)   F feature rows   H width
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from patchgen.runtime import parallel
from patchgen.runtime.parallel import collectives
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.tensor_cache import TensorCache

HELD = "patchgen_holds_whole"
_HEADS = ("num_heads", "num_attention_heads")


def mark_replicated(modules: Iterable[object]) -> None:
    """Marks modules that are handed whole inputs on every rank of an SP group; what is no module is passed over.

    Their attention exchanges no heads: a mark on each module inside, not a setting around the call, because activation
    checkpointing runs layers again in the backward. Masks are made once, around them.
    """
    for module in modules:
        if isinstance(module, nn.Module) and not is_replicated(module):
            mark(module, whole=True)
            module.register_forward_pre_hook(_enter_whole)
            module.register_forward_hook(_leave_whole, always_call=True)


def mark(module: nn.Module, *, whole: bool) -> None:
    """Says of a module and all inside whether their attention sees whole inputs."""
    for one in module.modules():
        setattr(one, HELD, whole)


def is_replicated(module: nn.Module) -> bool:
    """Whether the attention of this module sees whole inputs."""
    return getattr(module, HELD, False)


def _enter_whole(module: nn.Module, arguments: object) -> None:
    parallel.context().replicated_depth += 1


def _leave_whole(module: nn.Module, arguments: object, output: object) -> None:
    parallel.context().replicated_depth -= 1


def inside_replicated() -> bool:
    """Whether a module that holds whole inputs runs now: masks made here are of its own sequence."""
    return parallel.context().replicated_depth > 0


# ------------------------------------------------------------------------------------- the rows of a tower


@dataclass(frozen=True)
class TowerRows:
    """How the ranks of an SP group divide the rows of a tower; `state` None: they do not, and all methods change nothing.

    Attributes:
        total: P, the rows of all images (or sounds) together.
        group: rows that stay together, because the tower merges them after its layers.
    """

    state: ParallelState | None
    total: int
    group: int

    @property
    def per_rank(self) -> int:
        """The rows of a rank: P padded to a multiple of `group * n`, divided by n."""
        groups = -(-self.total // self.group)
        return -(-groups // (self.state.sp if self.state is not None else 1)) * self.group

    def shard(self, rows: Any) -> Any:
        """This rank's rows of a tensor `(P, ...)`, zeros where it ends before them; of each tensor in a tuple or list."""
        if self.state is None or rows is None:
            return rows
        if isinstance(rows, tuple | list):
            return type(rows)(self.shard(one) for one in rows)
        if rows.shape[0] != self.total:
            raise ValueError(
                f"A tower has {self.total} rows, and something that its layers read has the shape {tuple(rows.shape)}: "
                "the passes vision_sp and audio_sp divide tensors with one row per patch or frame only. Train this "
                "model with sp=1."
            )
        start = min(self.state.sp_rank * self.per_rank, self.total)
        mine = rows[start : start + self.per_rank]
        missing = self.per_rank - mine.shape[0]
        return F.pad(mine, (0, 0) * (mine.ndim - 1) + (0, missing)) if missing else mine

    def lengths(self, bounds: Tensor) -> Tensor:
        """`cu_seqlens` of the whole, with an entry for the padding rows where there are any."""
        padded = self.per_rank * self.state.sp if self.state is not None else self.total
        return F.pad(bounds, (0, 1), value=padded) if padded > self.total else bounds

    def longest(self, length: int | Tensor | None) -> int | Tensor | None:
        """The longest of `lengths`, from the longest without the padding."""
        if self.state is None or length is None:
            return length
        padding = self.per_rank * self.state.sp - self.total
        return length.clamp(min=padding) if isinstance(length, Tensor) else max(length, padding)

    def gather(self, rows: Any) -> Any:
        """The rows of all ranks without the padding, merged as far as they are; of each tensor in a tuple or list."""
        if self.state is None or rows is None:
            return rows
        if isinstance(rows, tuple | list):
            return type(rows)(self.gather(one) for one in rows)
        merged = self.per_rank // rows.shape[0]
        whole = collectives.gather_rows(rows, self.state.sp_group, operation="gather the features of a tower over SP")
        return whole[: self.total // merged]


def tower_rows(layers: nn.Module, hidden_states: Tensor, group: int, state: ParallelState | None) -> TowerRows:
    """How a tower divides its rows; see `ops.tower_rows`."""
    total = hidden_states.shape[0]
    if state is None or state.sp == 1:
        return TowerRows(None, total, group)
    divides = hidden_states.ndim == 2 and _heads_divide(layers, state.sp)
    if is_replicated(layers) == divides:
        mark(layers, whole=not divides)
    return TowerRows(state if divides else None, total, group)


def chunk_rows(chunks: Tensor, state: ParallelState | None) -> TowerRows:
    """How chunks that are computed one by one are divided; see `ops.chunk_rows`."""
    return TowerRows(state if state is not None and state.sp > 1 else None, chunks.shape[0], 1)


# layers -> {number of ranks: whether their heads divide}
_DIVIDES: TensorCache[dict[int, bool]] = TensorCache(lambda _layers: {})


def _heads_divide(layers: nn.Module, size: int) -> bool:
    """Whether every attention below has heads that `size` ranks can share; unknown numbers do not."""
    known = _DIVIDES(layers)
    if size not in known:
        counts = [
            getattr(module, name)
            for module in layers.modules()
            for name in _HEADS
            if isinstance(getattr(module, name, None), int)
        ]
        known[size] = bool(counts) and all(count % size == 0 for count in counts)
    return known[size]


def describe(model: nn.Module, size: int) -> dict[str, str]:
    """How each tower of a model that has run is computed on `size` ranks that share a sequence: by path."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in found):
            continue
        if (divides := _DIVIDES(module).get(size)) is not None:
            found[path] = "each rank a slice of the rows" if divides else "whole: heads do not divide"
        elif path and is_replicated(module):
            found[path] = "whole on every rank"
    return found


# -------------------------------------------------------------------------- features to the tokens of a rank


def local_features(features: Tensor, mask: Tensor, state: ParallelState) -> Tensor:
    """The rows of `features` whose placeholder tokens this rank holds, `(F_local, H)`; see `ops.local_features`."""
    total, spans = _own_spans(mask, state)
    in_one = features.ndim == 1 and total > 0 and features.numel() % total == 0  # the rows one after the other
    rows = features.reshape(-1, features.numel() // total if in_one else features.shape[-1])
    if total != rows.shape[0]:
        raise ValueError(
            f"{rows.shape[0]} feature rows for {total} placeholder tokens in the whole sequence of {state.sp} ranks. Every "
            "rank of an SP group must be handed the same images, videos and audio, whole, with its slice of the tokens."
        )
    return torch.cat([rows[start:end] for start, end in spans])


_SPANS = WeakIdKeyDictionary()  # mask -> (placeholders, spans): deepstack asks again with the same mask


def _own_spans(mask: Tensor, state: ParallelState) -> tuple[int, list[tuple[int, int]]]:
    """The placeholders of all ranks, and which feature rows belong to this rank's: a span for each row of the batch. One
    host sync.

    Features are in the order of their placeholders, row after row of the batch, and a row is spread over the ranks.
    """
    if mask in _SPANS:
        return _SPANS[mask]
    tokens = mask[..., 0] if mask.ndim == 3 else mask
    counts = collectives.all_gather(
        tokens.sum(dim=1)[None], state.sp_group, dim=0, operation="count the placeholders of each rank"
    )
    by_row = counts.t().tolist()  # [B][n]
    _SPANS[mask] = sum(map(sum, by_row)), spans_of(by_row, state.sp_rank)
    return _SPANS[mask]


def spans_of(by_row: Sequence[Sequence[int]], rank: int) -> list[tuple[int, int]]:
    """The spans of feature rows of one rank, from the placeholders of each rank in each row of the batch."""
    ends = list(itertools.accumulate(itertools.chain.from_iterable(by_row), initial=0))
    places = [place + rank for place in range(0, len(ends) - 1, len(by_row[0]))]
    return [(ends[place], ends[place + 1]) for place in places]


def local_levels(levels: Iterable[Any], mask: Tensor, state: ParallelState) -> list[tuple[Tensor]]:
    """As `local_features` for each level of deepstack; see `ops.local_levels`."""
    own = []
    for level in levels:
        rows = level if isinstance(level, Tensor) else torch.cat(tuple(level), dim=0)
        own.append((local_features(rows, mask, state),))
    return own
