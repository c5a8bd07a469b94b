"""The micro-batches of a step, and what all ranks agree on before they begin it.

Ranks must take the same number of steps, or one waits forever for the others. So before each step they add up, in one
collective on the host, whether anyone's data have ended or were refused, whether anyone was asked to stop, and what the
step holds:

    rank 0: has 2 batches, 1,950 labels           total: 0 ended, 1 asked to stop, 7,801 labels
    rank 1: has 2 batches, 1,947 labels, Ctrl-C     ->  nobody begins; all save and leave
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from patchgen.runtime import model_calls
from patchgen.runtime.data import DataError
from patchgen.runtime.data.agreement import raise_on_all_ranks
from patchgen.runtime.objectives.base import NextToken, Objective, sources_of
from patchgen.runtime.objectives.reference import keys_of
from patchgen.runtime.parallel.batch import IGNORED, slice_batch
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.loss import real_tokens
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import sources
from patchgen.runtime.train.flops import ModelCost
from patchgen.runtime.train.recipe import RecipeError


@dataclass(frozen=True)
class StepBatches:
    """One step of this rank, and its totals over all ranks.

    Attributes:
        micro_batches: slices of this rank, on the host.
        position: of the loader, after these.
        tokens, labels, flops: of the whole step.
        items: what the loss of the step is divided by: labels, or documents or pairs.
        real_tokens: tokens of the whole step that are not padding.
        sources: tokens and labels of each source of the whole step.
    """

    micro_batches: list[dict[str, Any]]
    position: dict[str, Any]
    tokens: int
    labels: int
    flops: float
    real_tokens: int
    items: int
    sources: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class End:
    """There is no further step: `reason` is "data" or "stop"."""

    reason: str


def micro_batches_per_step(batches_per_step: int, num_batches: int, *, router_loss: str = "row") -> int:
    """What each batch group accumulates.

    Raises:
        RecipeError: the batches of a step do not divide evenly, or the router loss is over the whole step and the step
            is accumulated.
    """
    if batches_per_step % num_batches:
        raise RecipeError(
            f"train.batches_per_step = {batches_per_step} does not divide over the {num_batches} batch groups of this "
            f"layout (dp_replicate * dp_shard). Make it a multiple of {num_batches}, or share sequences (parallel.sp)."
        )
    if router_loss == "global" and batches_per_step > num_batches:
        raise RecipeError(
            f"train.router_loss = global counts the loads of the experts over the whole step, which are not known at its "
            f"first backward when train.batches_per_step = {batches_per_step} batches are accumulated by the "
            f"{num_batches} batch groups of this layout (dp_replicate * dp_shard). Make batches_per_step "
            f"{num_batches}, or take router_loss: row."
        )
    return batches_per_step // num_batches


class Batches(Protocol):
    """What micro-batches are read from; a `Loader` is one."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position behind what was read."""
        ...


class Feed:
    """Draws the micro-batches of one step after another from a loader.

    Args:
        loader: of this rank's batch group; SP ranks of a group read the same.
        num_micro_batches: per step and batch group.
        cost: of the model, for the FLOPs of a step.
        objective: that learns from them.
        num_sources: of the data, which are counted apart; 0: they are not.
        should_stop: whether this rank was asked to stop.
    """

    def __init__(
        self,
        loader: Batches,
        state: ParallelState,
        num_micro_batches: int,
        cost: ModelCost,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        objective: Objective | None = None,
        num_sources: int = 0,
    ) -> None:
        self.num_sources = num_sources
        self.loader, self.state, self.cost = loader, state, cost
        self.num_micro_batches = num_micro_batches
        self.should_stop = should_stop
        self.objective = objective or NextToken()
        self._rows = iter(loader)

    def next(self) -> StepBatches | End:
        """The next step; every rank must call this, and all get a step or all get the end.

        Raises:
            DataError: on all ranks, a whole step without a label, or data that any rank refuses.
        """
        failure, whole, mine, own = None, [], [], [0.0] * (6 + 2 * self.num_sources)
        try:
            whole = [row for row in (next(self._rows, None) for _ in range(self.num_micro_batches)) if row is not None]
            mine = [self._slice(row) for row in whole]
            for row in whole:
                self.objective.require_valid(row)
            own = [not whole, *self._figures(whole, mine)]
        except Exception as error:  # whatever it is, the other ranks must hear of it: they would wait
            failure = error
        # The last step of finite data may be short. All groups get equally many rounds, so it is equally short for all.
        short = len(whole) < self.num_micro_batches
        ended, tokens, labels, flops, real, items, *apart, stops, failures = all_reduce(
            torch.tensor([*own, self.should_stop(), failure is not None], dtype=torch.float64),
            operation="agree on the next step",
        ).tolist()
        if failures:
            raise_on_all_ranks(failure)
        if stops:
            return End("stop")
        if ended or (short and not items):
            return End("data")
        if not items:
            raise DataError(
                f"A step holds {int(tokens)} tokens and not one {self.objective.per}: there is nothing to learn from it. "
                "Look at how the samples of the data become labels (chat templates, truncation, data.kind), and at the "
                "tokenizer."
            )
        of_sources = tuple(zip(map(int, apart[: self.num_sources]), map(int, apart[self.num_sources :]), strict=True))
        totals = (int(tokens), int(labels), flops, int(real), int(items), of_sources)
        return StepBatches(mine, self.loader.state_dict(), *totals)

    def steps(self, count: int) -> Iterator[StepBatches]:
        """The next steps, no more than `count`; every rank must read them."""
        for _ in range(count):
            found = self.next()
            if isinstance(found, End):
                return
            yield found

    def _slice(self, row: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole micro-batch; documents that have a reference are named while they are whole."""
        if self.objective.needs_reference:
            row = row | {"document_keys": keys_of(row, int((sources_of(row) >= 0).sum()))}
        return slice_batch(row, sp=self.state.sp, sp_rank=self.state.sp_rank)

    def _figures(self, whole: list[dict[str, Any]], mine: list[dict[str, Any]]) -> list[float]:
        """Tokens, labels, FLOPs, tokens without padding and items that this rank adds to the step; then the tokens of each
        source, and the labels of each."""
        # SP ranks hold the same rows: the first of them counts. Labels and real tokens are counted in slices.
        lengths = [length for row in whole for length in document_lengths(row)] if self.state.sp_rank == 0 else []
        labels = sum(int((row["shift_labels"] != IGNORED).sum()) for row in mine)
        real = sum(int(real_tokens(row)) for row in mine)
        items = labels if self.objective.per == "label" else self._documents(whole)
        own = [sum(lengths), labels, self.cost.flops(lengths), real, items]
        if not self.num_sources:
            return own
        nothing = torch.zeros(2, self.num_sources, dtype=torch.long)
        counts = [sources.count(row, self.num_sources) for row in whole] if self.state.sp_rank == 0 else []
        return own + sum(counts, nothing).flatten().tolist()

    def _documents(self, whole: list[dict[str, Any]]) -> int:
        """The documents or pairs of this rank's rows; SP ranks hold the same."""
        return sum(map(self.objective.count, whole)) if self.state.sp_rank == 0 else 0


def document_lengths(row: dict[str, Any]) -> Iterable[int]:
    """The tokens of each document of a whole micro-batch."""
    bounds = row.get("cu_seq_lens_q")
    if isinstance(bounds, Tensor):
        return bounds.diff().tolist()
    B, S = row["input_ids"].shape
    return [S] * B


def to_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors of a micro-batch on the device, without waiting for them; now or when its mask is made."""
    found = {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for key, value in inputs.items()
    }
    if "cu_seq_lens_q" not in inputs and isinstance(found.get("position_ids"), Tensor):
        model_calls.note_counted_through(found["position_ids"])  # `slice_batch` found no documents in them
    return found
