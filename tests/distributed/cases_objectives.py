"""What each rank does in the tests of objectives; see test_objectives.py."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases_sequence import state_of
from cases_trainer import Kept
from torch.distributed.tensor import DTensor

from patchgen.runtime import parallel
from patchgen.runtime.data import Loader
from patchgen.runtime.data.collate import collate, text_sample
from patchgen.runtime.data.problems import Counters, DataError
from patchgen.runtime.objectives import Batch, Objective
from patchgen.runtime.objectives.learning import evaluate
from patchgen.runtime.objectives.reference import ReferenceTable
from patchgen.runtime.parallel.batch import slice_batch
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

    def places(self) -> list[str]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._place * self._batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["rows"] // self._batches

    def position_of(
        self, saved: dict[str, Any] | None, all_ranks: Callable[[], list[dict[str, Any]]]
    ) -> dict[str, Any]:
        return saved if saved is not None else all_ranks()[0]


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


def stopped_and_resumed(values: dict, steps: int) -> list[float]:
    """The losses of a run that is stopped after some steps and started again."""
    first, before = trainer_of({**values, "train": {**values["train"], "steps": steps}}, 2)
    first.run()
    second, after = trainer_of(values, 2)
    second.run()
    return [record.loss for record in (*before.steps, *after.steps)]


class StoppedLoader(DocumentLoader):
    """Asks this process to stop, as the launcher does, while the row of one place is drawn."""

    place = 2

    def __next__(self) -> dict[str, Any]:
        if self._place == self.place:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__next__()


def stopped_while_referring(values: dict) -> tuple[str, list[float]]:
    """Why a run ended that was asked to stop while it computed its reference, and the losses of its steps."""
    trainer, kept = trainer_of(values, 2)
    trainer.loader = StoppedLoader(2, trainer.state.batch_index, trainer.state.config.num_batches)
    return trainer.run().reason, [record.loss for record in kept.steps]


class DrawingLoader(DocumentLoader):
    """Draws a random number for each row, as a transform may."""

    def __next__(self) -> dict[str, Any]:
        torch.rand(())
        return super().__next__()


def draws_around_the_reference(values: dict) -> bool:
    """Whether the random numbers after the reference was computed are those without it."""
    trainer, _ = trainer_of(values, 2)
    trainer.loader = DrawingLoader(2, trainer.state.batch_index, trainer.state.config.num_batches)
    before = torch.get_rng_state()
    trainer.compute_reference()
    assert trainer.learning.table.values
    return torch.equal(torch.get_rng_state(), before)


def errors_of_a_reference(directory: str) -> list[str]:
    """The errors of loading and of saving the table of a run; empty where there is none."""
    table, errors = ReferenceTable(Path(directory), "this model"), []
    for work in (table.load, table.save):
        try:
            work()
            errors.append("")
        except DataError as error:
            errors.append(str(error))
    return errors


def teacher_after_a_row(values: dict) -> list[bool]:
    """Whether each parameter of the teacher is a shard, before it is asked about a row and after."""
    trainer, _ = trainer_of(values, 1)
    rows = slice_batch(next(trainer.loader), sp=1, sp_rank=0)
    found = []
    for _ in range(2):
        found += [isinstance(parameter, DTensor) for parameter in trainer.learning.teacher.parameters()]
        with parallel.using(trainer.state):
            trainer.learning.prepare(rows)
    return found + [isinstance(parameter, DTensor) for parameter in trainer.learning.teacher.parameters()]


def evaluated(values: dict, together: int) -> tuple[float, float]:
    """The loss of an evaluation before any training, and that of the first step over the same rows."""
    trainer, kept = trainer_of(values, together)
    trainer.eval_loader = DocumentLoader(together, trainer.state.batch_index, trainer.state.config.num_batches)
    trainer.eval_start = trainer.eval_loader.state_dict()
    trainer.recipe = dataclasses.replace(
        trainer.recipe, train=dataclasses.replace(trainer.recipe.train, eval_batches=4)
    )
    trainer.compute_reference()
    with parallel.using(trainer.state):
        found = trainer.evaluate().loss
    trainer.recipe = from_dict(values)
    trainer.run()
    return found, kept.steps[0].loss


def curve_and_log_probs(values: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run; of the documents of this rank's first row, what the model and its reference gave around it."""
    trainer, kept = trainer_of(values, 2)
    row = trainer.loader._rows[trainer.state.batch_index]
    rows = slice_batch(row, sp=trainer.state.sp, sp_rank=trainer.state.sp_rank)
    found = {}
    for when in ("before", "after"):
        with parallel.using(trainer.state):
            inputs, batch = trainer.learning._split(rows)
            found[f"model {when}"] = evaluate(trainer.model, inputs, batch, Batch.document_log_probs).clone()
            found[f"reference {when}"] = trainer.learning._reference(inputs, batch).clone()
        if when == "before":
            trainer.run()
    return [record.loss for record in kept.steps], found


def trained_scores(values: dict) -> tuple[list[list[int]], torch.Tensor]:
    """Documents of a row, and their scores after a run, as the objective sees them."""
    trainer, _ = trainer_of(values, 2)
    trainer.run()
    row = DocumentLoader(2, 0, 1)._rows[0]
    rows = slice_batch(row, sp=1, sp_rank=0)
    with parallel.using(trainer.state):
        inputs, batch = trainer.learning._split(rows)
        scores = evaluate(trainer.model, inputs, batch, Batch.document_scores)[: batch.num_samples, 0]
    bounds = row["cu_seq_lens_q"].tolist()[: batch.num_samples + 1]
    return [row["input_ids"][0, a:b].tolist() for a, b in itertools.pairwise(bounds)], scores.clone()


def document_maxima_are_differentiated_over_slices() -> None:
    """The maxima of documents and their gradients, of two documents of which one spans both slices."""
    state = state_of(sp=2)
    whole = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    index, weights = torch.arange(12) // 8, torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def gradient_and_maxima(maxima_of, values):
        values = values.clone().requires_grad_()
        maxima = maxima_of(values)
        (maxima * weights).sum().backward()
        return values.grad, maxima.detach()

    mine = slice(6 * state.sp_rank, 6 * state.sp_rank + 6)
    batch = Batch(
        targets=index[mine], ids=index[mine], index=index[mine], num_documents=2, num_samples=2, padding=None,
        state=state, extra={},
    )  # fmt: skip
    expected, maxima = gradient_and_maxima(lambda values: torch.stack([values[:8].amax(0), values[8:].amax(0)]), whole)
    found, own_maxima = gradient_and_maxima(batch.document_max, whole[mine])
    assert torch.equal(own_maxima, maxima)
    assert torch.equal(found / state.sp, expected[mine])  # each rank computed the full sum


@dataclasses.dataclass(frozen=True)
class Unlikely(Objective):
    """An objective of the user's own: what is learned becomes less likely."""

    strength: float = 1.0

    def loss(self, batch: Batch) -> torch.Tensor:
        """The sum over the tokens of this rank's slice."""
        log_probs = batch.token_log_probs().clamp(max=-1e-6)
        return -self.strength * torch.log(-torch.expm1(log_probs)).where(batch.is_learned, 0).sum()


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
