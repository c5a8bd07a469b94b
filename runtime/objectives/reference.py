"""Log-probabilities of each document before training, computed once and saved in the run directory.

    <run>/reference.json    {"model": "...", "log_probs": {"<hash of ids and labels>": -41.25, ...}}

Before the first step, and before a checkpoint is loaded, all batches of the run are read once; those with a document that is
not in the file are computed by the initial model. A document has the same value in every layout and epoch and after a resume.
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

from patchgen.runtime.data.agreement import run_on_all_ranks
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.parallel.collectives import all_reduce, broadcast_object, gather_objects
from patchgen.runtime.verify.verdict import one_line_error

FILE = "reference.json"
SAVE_EVERY = 256
"""Micro-batches of each rank that are computed between saves; a killed run continues from the last save."""


class ReferenceTable:
    """Log-probabilities by document.

    Args:
        directory: of the run.
        model: hash that identifies the model; a file of another model is not used.
    """

    def __init__(self, directory: Path, model: str) -> None:
        self._path, self._model = directory / FILE, model
        self.values: dict[str, float] = {}

    def load(self) -> None:
        """Loads the file that rank 0 sees (collective).

        Raises:
            DataError: on all ranks, if it cannot be read.
        """
        self.values = broadcast_object(run_on_all_ranks(self._read if dist.get_rank() == 0 else dict))

    def _read(self) -> dict[str, float]:
        """The values in the file; none if there is no file, or one of another model."""
        if not self._path.is_file():
            return {}
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            return {**saved["log_probs"]} if saved["model"] == self._model else {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self._path} cannot be read: {one_line_error(error)} To fix: delete it; the "
                "log-probabilities are computed again before the first step."
            ) from error

    def save(self) -> None:
        """Rank 0 writes the file (collective).

        Raises:
            DataError: on all ranks, if it cannot be written.
        """
        run_on_all_ranks(self._write if dist.get_rank() == 0 else lambda: None)

    def _write(self) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}")
        try:
            temporary.write_text(json.dumps({"model": self._model, "log_probs": self.values}), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            raise DataError(
                f"{self._path} cannot be written: {error}. To fix: make room in {self._path.parent}, or make it writable."
            ) from error

    def of(self, keys: Sequence[str], count: int) -> Tensor:
        """The values of some documents, zero-padded to `(count,)`, float64.

        Raises:
            DataError: one was not computed before the run.
        """
        missing = [key for key in keys if key not in self.values]
        if missing:
            raise DataError(
                f"{len(missing)} documents have no log-probability in {self._path}: the batches differ from those read before "
                "the first step. Start anew with --fresh."
            )
        values = torch.zeros(count, dtype=torch.float64)
        values[: len(keys)] = torch.tensor([self.values[key] for key in keys], dtype=torch.float64)
        return values

    def fill(
        self, micro_batches: Iterable[Mapping[str, Any]], compute: Callable[[Mapping[str, Any]], Sequence[float]]
    ) -> int:
        """Computes and saves missing values (collective). Returns how many documents were computed.

        Args:
            micro_batches: of this rank, equally many on every rank, with `document_keys`.
            compute: returns the values of a micro-batch's documents without padding, in the order of the keys.
        """
        before, rounds = len(self.values), 0
        for rows in micro_batches:
            keys = rows["document_keys"]
            is_missing = torch.tensor(any(key not in self.values for key in keys), dtype=torch.int32)
            if not int(all_reduce(is_missing, op=dist.ReduceOp.MAX, operation="agree on missing reference values")):
                continue
            if rounds == 0:
                _print(f"Computing reference log-probabilities before the first step; {self._path} has {before}.")
            for part in gather_objects(dict(zip(keys, compute(rows), strict=True))):
                self.values.update({key: value for key, value in part.items() if key not in self.values})
            rounds += 1
            if rounds % SAVE_EVERY == 0:
                self.save()
        if rounds % SAVE_EVERY:
            self.save()
        if rounds:
            _print(f"Computed the reference log-probabilities of {len(self.values) - before} documents.")
        return len(self.values) - before


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def keys_of(row: Mapping[str, Any], num_samples: int) -> list[str]:
    """Hashes of the tokens and labels of the first `num_samples` documents of a full micro-batch.

    Args:
        row: `input_ids`, `labels` `(1, S)`, `cu_seq_lens_q`.
    """
    bounds = row["cu_seq_lens_q"].tolist()[: num_samples + 1]
    ids_and_labels = torch.stack([row["input_ids"][0], row["labels"][0]]).long()
    return [
        hashlib.sha256(ids_and_labels[:, start:end].contiguous().numpy().tobytes()).hexdigest()[:32]
        for start, end in itertools.pairwise(bounds)
    ]
