"""Tokens, labels and loss of each source of the data, over all ranks: which of them a run learns, and which it does not.

The loss of a token is read where the step computes it anyway (`loss.step(read_losses=...)`); nothing is computed twice.

n sources   D documents of a whole row   s tokens of this rank's slice
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchgen.runtime import model_calls
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.state import ParallelState


@dataclass(frozen=True)
class SourceFigures:
    """Of one source in a step or an evaluation: `loss` is the mean over its labels; None: it had none, or nobody reads it."""

    tokens: int
    labels: int
    loss: float | None


def count(row: Mapping[str, Any], num_sources: int) -> Tensor:
    """Tokens and labels of each source in a whole micro-batch on the host, `(2, n)`; padding is of none."""
    bounds = row["cu_seq_lens_q"].long()
    sources = row["document_sources"].repeat_interleave(bounds.diff()) + 1
    learned = row["labels"][0] != IGNORED
    learned[bounds[:-1]] = False  # nothing predicts the first token of a document
    tokens = torch.bincount(sources, minlength=num_sources + 1)
    labels = torch.bincount(sources[learned], minlength=num_sources + 1)
    return torch.stack([tokens, labels])[:, 1:]


class Sources:
    """The figures of the sources of one step after another.

    Args:
        names: of the sources.
        reads_losses: the step computes the next token's loss, which can be read by token.
    """

    def __init__(
        self, names: Sequence[str], state: ParallelState, device: torch.device, *, reads_losses: bool
    ) -> None:
        self.names, self.state, self.reads_losses = list(names), state, reads_losses
        self._sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)

    def reader(self, rows: Mapping[str, Any]) -> Callable[[Tensor], None] | None:
        """What takes in the losses `(s,)` of a micro-batch of this rank; None: none are read."""
        if not self.reads_losses:
            return None
        s = rows["input_ids"].shape[1]
        bounds = rows.get("cu_seq_lens_q", torch.tensor([0, s * self.state.sp]))
        place = torch.arange(s) + s * self.state.sp_rank
        document = torch.bucketize(place, bounds[1:-1].to(place.dtype), right=True)
        # A row that is filled up to be sliced ends with a document that the loader does not know.
        padding = len(bounds) - 1 - len(rows["document_sources"])
        sources = torch.nn.functional.pad(rows["document_sources"], (0, max(0, padding)), value=-1)
        index = (sources[document] + 1).to(self._sums.device, non_blocking=True)

        def read(losses: Tensor) -> None:
            apart = model_calls.documents_apart()
            packed = losses if apart is None else apart.packed(losses.view(apart.is_token.shape)).flatten()
            self._sums.index_add_(0, index, packed.to(self._sums.dtype))

        return read

    def figures(self, counts: Sequence[Sequence[int]]) -> dict[str, SourceFigures]:
        """The figures since the last call; every rank must call it.

        Args:
            counts: tokens and labels of each source, of all ranks.
        """
        sums: list[float | None] = [None] * len(self.names)
        if self.reads_losses:
            sums = all_reduce(self._sums, operation="add up the losses of the sources").tolist()[1:]
            self._sums = torch.zeros_like(self._sums)
        return {
            name: SourceFigures(tokens, labels, None if total is None or not labels else total / labels)
            for name, (tokens, labels), total in zip(self.names, counts, sums, strict=True)
        }
