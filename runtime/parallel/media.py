"""Images, videos and audio under sequence parallelism: how a tower's rows are divided, and which features a rank uses.

The ranks of an SP group have the same images, videos and audio, and different tokens. A tower returns all features on
every rank; each then takes those whose placeholder tokens it has. So every feature row is used on exactly one rank, and
the sum of the tower's gradients over the ranks counts each row once, whether the tower divides its rows or not.

    features    0 1 2 3 4 5 6 7          8 placeholders of one image, across the boundary of two slices
    rank 0      . . 0 1 2 3 4 . .        tokens of its slice, and the rows they take
    rank 1      5 6 7 . . . . . .

A tower whose layers attend by lengths computes a slice of its rows (`TowerRows`): attention exchanges heads, as in the
language model. Any other is computed in full on every rank (`mark_replicated`).

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

REPLICATED = "patchgen_replicated"
HEADS = ("num_heads", "num_attention_heads")
"""The attributes of upstream's attention classes for the number of their query heads."""


def mark_replicated(modules: Iterable[object]) -> None:
    """Marks modules that get full inputs on every rank of an SP group; other objects are ignored.

    Their attention exchanges no heads. The mark is on each submodule, not a context around the call, because activation
    checkpointing reruns layers in the backward.
    """
    for module in modules:
        if isinstance(module, nn.Module) and not is_replicated(module):
            set_replicated(module, replicated=True)
            module.register_forward_pre_hook(_enter_replicated)
            module.register_forward_hook(_leave_replicated, always_call=True)


def set_replicated(module: nn.Module, *, replicated: bool) -> None:
    """Sets on a module and all submodules whether their attention gets full inputs."""
    for submodule in module.modules():
        setattr(submodule, REPLICATED, replicated)


def is_replicated(module: nn.Module) -> bool:
    """Whether the attention of this module gets full inputs."""
    return getattr(module, REPLICATED, False)


def _enter_replicated(module: nn.Module, arguments: object) -> None:
    parallel.context().replicated_depth += 1


def _leave_replicated(module: nn.Module, arguments: object, output: object) -> None:
    parallel.context().replicated_depth -= 1


def inside_replicated() -> bool:
    """Whether a module with full inputs is running, so that masks created now are for its own sequence."""
    return parallel.context().replicated_depth > 0


# ------------------------------------------------------------------------------------- the rows of a tower


@dataclass(frozen=True)
class TowerRows:
    """How the ranks of an SP group divide the rows of a tower; with `state` None every method is the identity.

    Attributes:
        total: P, the rows of all images (or sounds).
        group: the number of consecutive rows that stay on one rank, because the tower merges them after its layers.
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
        """This rank's rows of a tensor `(P, ...)`, padded with zeros; of each tensor in a tuple or list."""
        if self.state is None or rows is None:
            return rows
        if isinstance(rows, tuple | list):
            return type(rows)(self.shard(item) for item in rows)
        if rows.shape[0] != self.total:
            raise ValueError(
                f"A tower has {self.total} rows, but an input of its layers has the shape {tuple(rows.shape)}: the passes "
                "vision_sp and audio_sp divide only tensors with one row per patch or frame. To fix: train this model with "
                "sp=1."
            )
        start = min(self.state.sp_rank * self.per_rank, self.total)
        shard = rows[start : start + self.per_rank]
        missing = self.per_rank - shard.shape[0]
        return F.pad(shard, (0, 0) * (shard.ndim - 1) + (0, missing)) if missing else shard

    def lengths(self, cu_seqlens: Tensor) -> Tensor:
        """`cu_seqlens` of all rows, with an entry for the padding rows if there are any."""
        padded = self.per_rank * self.state.sp if self.state is not None else self.total
        return F.pad(cu_seqlens, (0, 1), value=padded) if padded > self.total else cu_seqlens

    def longest(self, max_seqlen: int | Tensor | None) -> int | Tensor | None:
        """The maximum sequence length including the padding, from the one without it."""
        if self.state is None or max_seqlen is None:
            return max_seqlen
        padding = self.per_rank * self.state.sp - self.total
        return max_seqlen.clamp(min=padding) if isinstance(max_seqlen, Tensor) else max(max_seqlen, padding)

    def gather(self, rows: Any) -> Any:
        """The rows of all ranks without the padding, of features if rows were merged; of each tensor in a tuple or list."""
        if self.state is None or rows is None:
            return rows
        if isinstance(rows, tuple | list):
            return type(rows)(self.gather(item) for item in rows)
        merge_factor = self.per_rank // rows.shape[0]
        gathered = collectives.gather_rows(
            rows, self.state.sp_group, operation="gather the features of a tower over SP"
        )
        return gathered[: self.total // merge_factor]


def tower_rows(layers: nn.Module, hidden_states: Tensor, group: int, state: ParallelState | None) -> TowerRows:
    """How a tower divides its rows; see `ops.tower_rows`."""
    total = hidden_states.shape[0]
    if state is None or state.sp == 1:
        return TowerRows(None, total, group)
    divides = hidden_states.ndim == 2 and _heads_divide(layers, state.sp)
    if is_replicated(layers) == divides:
        set_replicated(layers, replicated=not divides)
    return TowerRows(state if divides else None, total, group)


def chunk_rows(chunks: Tensor, state: ParallelState | None) -> TowerRows:
    """How independently computed chunks are divided; see `ops.chunk_rows`."""
    return TowerRows(state if state is not None and state.sp > 1 else None, chunks.shape[0], 1)


# layers -> {number of ranks: whether the heads of all their attention are divisible by it}
_DIVISIBLE_BY: TensorCache[dict[int, bool]] = TensorCache(lambda _layers: {})


def _heads_divide(layers: nn.Module, size: int) -> bool:
    """Whether `size` divides the heads of every attention inside; False if no number of heads is known."""
    divisible_by = _DIVISIBLE_BY(layers)
    if size not in divisible_by:
        counts = [
            getattr(module, name)
            for module in layers.modules()
            for name in HEADS
            if isinstance(getattr(module, name, None), int)
        ]
        divisible_by[size] = bool(counts) and all(count % size == 0 for count in counts)
    return divisible_by[size]


def describe(model: nn.Module, size: int) -> dict[str, str]:
    """Path of a tower -> how it is computed on `size` ranks that share a sequence; the model must have run."""
    layouts: dict[str, str] = {}
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in layouts):
            continue
        if (divides := _DIVISIBLE_BY(module).get(size)) is not None:
            layouts[path] = "each rank a slice of the rows" if divides else "whole on every rank: heads not divisible"
        elif path and is_replicated(module):
            layouts[path] = "whole on every rank"
    return layouts


# -------------------------------------------------------------------------- features to the tokens of a rank


def local_features(features: Tensor, mask: Tensor, state: ParallelState) -> Tensor:
    """The rows of `features` for this rank's placeholder tokens, `(F_local, H)`; see `ops.local_features`."""
    total, spans = _local_spans(mask, state)
    is_flat = features.ndim == 1 and total > 0 and features.numel() % total == 0
    rows = features.reshape(-1, features.numel() // total if is_flat else features.shape[-1])
    if total != rows.shape[0]:
        raise ValueError(
            f"{rows.shape[0]} feature rows for {total} placeholder tokens in the full sequence of {state.sp} ranks. To fix: "
            "pass all images, videos and audio to every rank of an SP group, with its slice of the tokens."
        )
    return torch.cat([rows[start:end] for start, end in spans])


def counted_from_the_start(counts: Tensor, state: ParallelState) -> Tensor:
    """`counts` `(..., s)` plus those of earlier slices; see `ops.counted_from_the_start`."""
    last = collectives.all_gather(
        counts[None, ..., -1], state.sp_group, dim=0, operation="count tokens of earlier slices"
    )
    return counts + last[: state.sp_rank].sum(dim=0)[..., None]


_SPANS = WeakIdKeyDictionary()  # mask -> (placeholders, spans): deepstack reuses one mask


def _local_spans(mask: Tensor, state: ParallelState) -> tuple[int, list[tuple[int, int]]]:
    """The number of placeholders on all ranks, and the spans of this rank's feature rows, one per batch row. One host sync.

    Features are in the order of their placeholders, batch row by batch row, and each row is divided over the ranks.
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
    """The spans of one rank's feature rows, from the number of placeholders of each rank in each batch row."""
    ends = list(itertools.accumulate(itertools.chain.from_iterable(by_row), initial=0))
    indices = range(rank, len(ends) - 1, len(by_row[0]))
    return [(ends[index], ends[index + 1]) for index in indices]


def local_levels(levels: Iterable[Any], mask: Tensor, state: ParallelState) -> list[Tensor | tuple[Tensor]]:
    """`local_features` for each deepstack level; see `ops.local_levels`."""

    def local(level: Any) -> Tensor | tuple[Tensor]:
        if isinstance(level, Tensor):
            return local_features(level, mask, state)
        return (local_features(torch.cat(tuple(level), dim=0), mask, state),)

    return [local(level) for level in levels]
