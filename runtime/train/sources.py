"""Tokens, labels and loss of each data source, over all ranks.

The losses of tokens are read from the step, which computes them anyway (`loss.step(read_losses=...)`).

n sources   s tokens of this rank's slice
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
from patchgen.runtime.train import host_copies


@dataclass(frozen=True)
class SourceFigures:
    """One source in a step or an evaluation; `loss` is the mean over its labels, None without labels or if none is read."""

    tokens: int
    labels: int
    loss: float | None


def count(row: Mapping[str, Any], num_sources: int) -> Tensor:
    """Tokens and labels of each source in a full micro-batch on the host, `(2, n)`; padding is not counted."""
    bounds = row["cu_seq_lens_q"].long()
    sources = row["document_sources"].repeat_interleave(bounds.diff()) + 1
    is_label = row["labels"][0] != IGNORED
    is_label[bounds[:-1]] = False  # nothing predicts the first token of a document
    tokens = torch.bincount(sources, minlength=num_sources + 1)
    labels = torch.bincount(sources[is_label], minlength=num_sources + 1)
    return torch.stack([tokens, labels])[:, 1:]


class SourceLosses:
    """Accumulates the losses of each source between calls of `figures`.

    Args:
        names: of the sources.
        reads_losses: the step computes the next-token loss, which can be read for each token.
    """

    def __init__(
        self, names: Sequence[str], state: ParallelState, device: torch.device, *, reads_losses: bool
    ) -> None:
        self.names, self.state, self.reads_losses = list(names), state, reads_losses
        self._sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)

    def reader(self, rows: Mapping[str, Any]) -> Callable[[Tensor], None] | None:
        """A function that adds the token losses `(s,)` of this rank's micro-batch; None: none are read."""
        if not self.reads_losses:
            return None
        s = rows["input_ids"].shape[1]
        bounds = rows.get("cu_seq_lens_q", torch.tensor([0, s * self.state.sp]))
        position = torch.arange(s) + s * self.state.sp_rank
        document = torch.bucketize(position, bounds[1:-1].to(position.dtype), right=True)
        # A row that was padded for slicing ends with an extra document, which the loader does not count.
        padding = len(bounds) - 1 - len(rows["document_sources"])
        sources = torch.nn.functional.pad(rows["document_sources"], (0, max(0, padding)), value=-1)
        index = host_copies.on_device(sources[document] + 1, self._sums.device)

        def read(losses: Tensor) -> None:
            document_rows = model_calls.documents_apart()
            packed = (
                losses
                if document_rows is None
                else document_rows.packed(losses.view(document_rows.is_token.shape)).flatten()
            )
            self._sums.index_add_(0, index, packed.to(self._sums.dtype))

        return read

    def take_sums(self) -> Tensor | None:
        """The sums of losses since the last call over all ranks (collective; does not wait for the device), for `figures`; None: no
        losses are read."""
        if not self.reads_losses:
            return None
        sums = all_reduce(self._sums, operation="add up the losses of the sources")
        self._sums = torch.zeros_like(self._sums)
        return sums

    def figures(self, counts: Sequence[Sequence[int]], sums: Tensor | None) -> dict[str, SourceFigures]:
        """The figures of each source.

        Args:
            counts: tokens and labels of each source, summed over all ranks.
            sums: what `take_sums` returned, of the same steps.
        """
        totals = [None] * len(self.names) if sums is None else sums.tolist()[1:]
        return {
            name: SourceFigures(tokens, labels, None if total is None or not labels else total / labels)
            for name, (tokens, labels), total in zip(self.names, counts, totals, strict=True)
        }
