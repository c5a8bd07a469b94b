"""What each rank does in the tests of objectives; see test_objectives.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases_trainer import Kept

from patchgen.runtime.data import Loader
from patchgen.runtime.data.collate import collate, text_sample
from patchgen.runtime.data.problems import Counters
from patchgen.runtime.train.recipe import from_dict
from patchgen.runtime.train.trainer import Trainer

TOKENS, VOCABULARY, PROMPT = 96, 300, 3


def documents(count: int, *, seed: int = 0) -> list[torch.Tensor]:
    """Random documents of many lengths; two in turn begin alike, as the answers to one prompt."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = int(torch.randint(PROMPT + 2, 24, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        if number % 2:
            ids[:PROMPT] = found[-1][:PROMPT]
        found.append(ids)
    return found


class DocumentLoader(Loader):
    """Rows of whole samples, `together` documents each, in order: the same batches for any number of ranks."""

    def __init__(self, together: int, batch_index: int, num_batches: int, *, count: int = 48) -> None:
        self.counters, self._place = Counters(), 0
        self._index, self._batches = batch_index, num_batches
        self._rows = self._packed(documents(count), together)

    def _packed(self, found: list[torch.Tensor], together: int) -> list[dict[str, Any]]:
        rows, row, room = [], [], TOKENS
        for start in range(0, len(found), together):
            sample = found[start : start + together]
            if sum(map(len, sample)) > room:
                rows.append(row)
                row, room = [], TOKENS
            row = [*row, *sample]
            room -= sum(map(len, sample))
        return [self._collated(row, number) for number, row in enumerate([*rows, row])]

    def _collated(self, row: list[torch.Tensor], number: int) -> dict[str, Any]:
        samples = [text_sample(ids, torch.arange(len(ids)) >= PROMPT) for ids in row]
        batch = collate(samples, pad_to=TOKENS if number % 3 == 0 else None, pad_token_id=0)
        padding = [-1] * (len(batch["cu_seq_lens_q"]) - 1 - len(row))
        labels = [int(ids[-1]) % 3 for ids in row]
        return batch | {
            "document_sources": torch.tensor([*[0] * len(row), *padding]),
            "document_labels": torch.tensor([*labels, *(float("nan") for _ in padding)], dtype=torch.float64),
        }

    def __next__(self) -> dict[str, Any]:
        row = self._rows[(self._place * self._batches + self._index) % len(self._rows)]
        self._place += 1
        return dict(row)

    @property
    def epoch(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._place * self._batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["rows"] // self._batches

    def position_of(self, own: dict[str, Any] | None, all_ranks: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
        return own if own is not None else all_ranks()[0]


def trainer_of(values: dict, together: int) -> tuple[Trainer, Kept]:
    """The trainer of a recipe on documents that come in twos or alone."""
    kept = Kept()
    trainer = Trainer(from_dict(values), torch.device("cpu"), (kept,))
    trainer.loader = DocumentLoader(together, trainer.state.batch_index, trainer.state.config.num_batches)
    return trainer, kept


def curve(values: dict, together: int = 2) -> list[float]:
    """The losses of a run."""
    trainer, kept = trainer_of(values, together)
    trainer.run()
    return [record.loss for record in kept.steps]


def recipe_of(folder: Path, run: Path, objective: dict, **changes: dict) -> dict:
    """A small recipe whose weights are in `folder/start` and whose run in `run`."""
    values = {
        "model": {"source": str(folder / "start")},
        "data": {"sources": [{"path": str(folder / "text.jsonl")}], "cache_dir": str(folder / "cache")},
        "objective": objective,
        "optim": {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.0},
        "train": {"steps": 6, "batches_per_step": 4},
        "checkpoint": {"export": False},
        "log": {"directory": str(run)},
    }
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields} if isinstance(fields, dict) else fields
    return values
