"""The micro-batches of a step, and what all ranks agree on before it.

Ranks must take the same number of steps, or one waits forever for the others. So before each step one all-reduce sums whether
any rank's data ended or failed, whether any rank was asked to stop, and the counts of the step:

    rank 0: has 2 batches, 1,950 labels           total: 0 ended, 1 asked to stop, 3,897 labels
    rank 1: has 2 batches, 1,947 labels, Ctrl-C     ->  no rank starts the step; all save and exit
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from patchgen.runtime import model_calls
from patchgen.runtime.data import DataError, Loader
from patchgen.runtime.data.agreement import raise_on_all_ranks
from patchgen.runtime.objectives.base import NextToken, Objective, sources_of
from patchgen.runtime.objectives.reference import keys_of
from patchgen.runtime.parallel.batch import IGNORED, slice_batch
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.loss import real_tokens
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import host_copies, reading, sources
from patchgen.runtime.train.flops import ModelCost
from patchgen.runtime.train.recipe import RecipeError


@dataclass(frozen=True)
class StepBatches:
    """One step of this rank, and its totals over all ranks.

    Attributes:
        micro_batches: this rank's slices, on the host.
        position: the loader's, after these.
        tokens, labels, flops: totals of the step.
        items: what the step's loss is divided by: the number of labels, documents or pairs.
        real_tokens: non-padding tokens of the step.
        sources: tokens and labels of the step from each source.
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
    """There is no further step: `reason` is "data" or "stop" from a `Feed`, "steps" from the trainer."""

    reason: str


def micro_batches_per_step(batches_per_step: int, num_batches: int, *, router_loss: str = "row") -> int:
    """The number of micro-batches that each batch group accumulates.

    Raises:
        RecipeError: the batches of a step do not divide evenly, or a global router loss is combined with accumulation.
    """
    if batches_per_step % num_batches:
        raise RecipeError(
            f"train.batches_per_step = {batches_per_step} is not divisible by the {num_batches} batch groups of this "
            f"layout (dp_replicate * dp_shard). Make it a multiple of {num_batches}, or let ranks share "
            "sequences (parallel.sp)."
        )
    if router_loss == "global" and batches_per_step > num_batches:
        raise RecipeError(
            f"train.router_loss = global counts expert loads over the full step, which are unknown at its first "
            f"backward when train.batches_per_step = {batches_per_step} batches are accumulated by the "
            f"{num_batches} batch groups of this layout (dp_replicate * dp_shard). Make batches_per_step "
            f"{num_batches}, or set train.router_loss: row."
        )
    return batches_per_step // num_batches


class Batches(Protocol):
    """A source of micro-batches, such as a `Loader`."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches read so far."""
        ...


class Feed:
    """Reads the micro-batches of each step from a loader.

    Args:
        loader: of this rank's batch group; SP ranks of a group read the same batches.
        num_micro_batches: per step and batch group.
        cost: of the model, for the FLOPs of a step.
        num_sources: the number of data sources to count separately; 0: no separate counts.
        should_stop: whether this rank was asked to stop.
        objective: of the run; None: next-token loss.
        require_row: a further check of each full micro-batch, beside the objective's; an error in it ends every rank.
        section: of the recipe, which errors about data name.
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
        require_row: Callable[[Mapping[str, Any]], None] | None = None,
        section: str = "data",
    ) -> None:
        self.num_sources, self.section = num_sources, section
        self.loader, self.state, self.cost = loader, state, cost
        self.num_micro_batches = num_micro_batches
        self.should_stop = should_stop
        self.objective = objective or NextToken()
        self.require_row = require_row
        self._rows = iter(loader)

    def next(self) -> StepBatches | End:
        """The next step (collective): all ranks get a step, or all get the end.

        Raises:
            DataError: on all ranks, if a step has no item (label, document or pair) or the data of any rank are refused.
        """
        with reading.naming_section(self.section):
            return self._next()

    def _next(self) -> StepBatches | End:
        failure, full_rows, slices, counts = None, [], [], [0.0] * (6 + 2 * self.num_sources)
        try:
            batches = (next(self._rows, None) for _ in range(self.num_micro_batches))
            full_rows = [row for row in batches if row is not None]
            slices = [self._slice(row) for row in full_rows]
            for row in full_rows:
                self.objective.require_valid(row)
                if self.require_row is not None:
                    self.require_row(row)
            counts = [not full_rows, *self._local_counts(full_rows, slices)]
        except Exception as error:  # any error must reach the other ranks, which would wait otherwise
            failure = error
        # The last step of finite data may be short. All groups read the same number of batches, so it is short for all.
        short = len(full_rows) < self.num_micro_batches
        ended, tokens, labels, flops, real, items, *source_counts, stops, failures = all_reduce(
            torch.tensor([*counts, self.should_stop(), failure is not None], dtype=torch.float64),
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
                f"A step has {int(tokens)} tokens and no {self.objective.per}: there is nothing to learn from it. "
                "Check how samples become labels (chat templates, truncation, data.kind), and the tokenizer."
            )
        by_source = [int(count) for count in source_counts]
        by_source = tuple(zip(by_source[: self.num_sources], by_source[self.num_sources :], strict=True))
        totals = (int(tokens), int(labels), flops, int(real), int(items), by_source)
        return StepBatches(slices, self.loader.state_dict(), *totals)

    def steps(self, count: int) -> Iterator[StepBatches]:
        """At most `count` further steps (collective)."""
        for _ in range(count):
            step = self.next()
            if isinstance(step, End):
                return
            yield step

    def _slice(self, row: dict[str, Any]) -> dict[str, Any]:
        """This rank's slice of a micro-batch; the keys that look up references of documents are computed from the full
        one."""
        if self.objective.needs_reference:
            row = row | {"document_keys": keys_of(row, int((sources_of(row) >= 0).sum()))}
        return slice_batch(row, sp=self.state.sp, sp_rank=self.state.sp_rank)

    def _local_counts(self, full_rows: list[dict[str, Any]], slices: list[dict[str, Any]]) -> list[float]:
        """Tokens, labels, FLOPs, non-padding tokens and items that this rank adds to the step; then the tokens of each
        source, and the labels of each."""
        # SP ranks read the same rows, which the first of them counts. Labels and non-padding tokens are counted in slices.
        counted = full_rows if self.state.sp_rank == 0 else []
        lengths = [length for row in counted for length in document_lengths(row)]
        labels = sum(int((row["shift_labels"] != IGNORED).sum()) for row in slices)
        real = sum(int(real_tokens(row)) for row in slices)
        items = labels if self.objective.per == "label" else sum(map(self.objective.count, counted))
        counts = [sum(lengths), labels, self.cost.flops(lengths), real, items]
        if not self.num_sources:
            return counts
        by_source = torch.zeros(2, self.num_sources, dtype=torch.long)
        for row in counted:
            by_source += sources.count(row, self.num_sources)
        return counts + by_source.flatten().tolist()


def require_first_step(feed: Feed, loader: Loader, start: dict[str, Any]) -> None:
    """Refuses evaluation data that have no loss, before the run trains for hours until its first evaluation (collective).

    Args:
        loader: of the feed, at `start`, where it is left.
        start: its position; the loader may change this mapping.

    Raises:
        DataError: on all ranks.
    """
    with reading.kept_generators():
        first = feed.next()
    if isinstance(first, End):
        raise reading.nothing_to_evaluate(loader, feed.state)
    loader.load_state_dict(start)


def document_lengths(row: dict[str, Any]) -> Iterable[int]:
    """The number of tokens of each document of a full micro-batch."""
    bounds = row.get("cu_seq_lens_q")
    if isinstance(bounds, Tensor):
        return bounds.diff().tolist()
    B, S = row["input_ids"].shape
    return [S] * B


def to_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies the tensors of a micro-batch to the device without waiting for it, here or when the mask is built."""
    on_device = {
        key: host_copies.on_device(value, device) if isinstance(value, Tensor) else value
        for key, value in inputs.items()
    }
    if "cu_seq_lens_q" not in inputs and isinstance(on_device.get("position_ids"), Tensor):
        model_calls.mark_consecutive(on_device["position_ids"])  # `slice_batch` found one document in each row
    return on_device
