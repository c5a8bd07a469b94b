"""What the model gave for each document before it was trained: computed once, kept in the directory of the run.

    <run>/reference.json    {"model": "...", "log_probs": {"<hash of ids and labels>": -41.25, ...}}

Before the first step, and before a checkpoint is loaded, the batches of the whole run are read once; those that hold a
document that is not in the file are computed by the model as it starts. A document has the same number in every layout,
in every epoch, and after a resume.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from patchgen.runtime.data.problems import DataError
from patchgen.runtime.parallel.collectives import all_reduce, broadcast_object, gather_objects

FILE = "reference.json"
SAVE_EVERY = 256
"""Rows that are computed between two saves, so that a run which is killed goes on from there."""


class ReferenceTable:
    """Log-probabilities by document.

    Args:
        directory: of the run.
        model: names the model that they are of; a file of another is not used.
    """

    def __init__(self, directory: Path, model: str) -> None:
        self._path, self._model = directory / FILE, model
        self.values: dict[str, float] = {}

    def load(self) -> None:
        """Takes what rank 0 finds in the file; every rank must call it."""
        found: dict[str, float] = {}
        if dist.get_rank() == 0 and self._path.is_file():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            found = kept["log_probs"] if kept["model"] == self._model else {}
        self.values = broadcast_object(found)

    def save(self) -> None:
        """Rank 0 writes the file."""
        if dist.get_rank() == 0:
            unfinished = self._path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps({"model": self._model, "log_probs": self.values}), encoding="utf-8")
            unfinished.replace(self._path)

    def of(self, keys: Sequence[str], count: int) -> Tensor:
        """The numbers of some documents, `(count,)` float64, 0 behind them.

        Raises:
            DataError: one was not computed before the run.
        """
        missing = [key for key in keys if key not in self.values]
        if missing:
            raise DataError(
                f"{len(missing)} documents have no reference in {self._path}: the batches are others than those that were "
                "read before the first step. Start anew with --fresh."
            )
        found = torch.zeros(count, dtype=torch.float64)
        found[: len(keys)] = torch.tensor([self.values[key] for key in keys], dtype=torch.float64)
        return found

    def fill(
        self, micro_batches: Iterable[Mapping[str, Any]], compute: Callable[[Mapping[str, Any]], Sequence[float]]
    ) -> int:
        """Computes what is not there yet, and saves it; every rank must call it. Returns how many documents were computed.

        Args:
            micro_batches: of this rank, as many as of any other; `document_keys` names their documents.
            compute: the numbers of the documents of one.
        """
        before, rounds = len(self.values), 0
        for rows in micro_batches:
            keys = rows["document_keys"]
            lacks = torch.tensor(any(key not in self.values for key in keys), dtype=torch.int32)
            if not int(all_reduce(lacks, op=dist.ReduceOp.MAX, operation="agree on what the reference lacks")):
                continue
            if rounds == 0:
                _tell(f"Before the first step the reference of the documents is computed; {self._path} has {before}.")
            for part in gather_objects(dict(zip(keys, compute(rows), strict=True))):
                self.values.update({key: value for key, value in part.items() if key not in self.values})
            rounds += 1
            if rounds % SAVE_EVERY == 0:
                self.save()
        if rounds % SAVE_EVERY:
            self.save()
        if rounds:
            _tell(f"The reference of {len(self.values) - before} documents was computed.")
        return len(self.values) - before


def _tell(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def keys_of(row: Mapping[str, Any], samples: int) -> list[str]:
    """Names the first documents of a whole micro-batch by their tokens and labels.

    Args:
        row: `input_ids`, `labels` `(1, S)`, `cu_seq_lens_q`.
        samples: how many.
    """
    bounds = row["cu_seq_lens_q"].tolist()[: samples + 1]
    both = torch.stack([row["input_ids"][0], row["labels"][0]]).long()
    return [
        hashlib.sha256(both[:, start:end].contiguous().numpy().tobytes()).hexdigest()[:32]
        for start, end in itertools.pairwise(bounds)
    ]
