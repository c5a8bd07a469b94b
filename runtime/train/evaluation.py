"""What follows from evaluations: their loss, the best step so far, and the end of a run that no longer improves."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch

from patchgen.runtime.parallel import loss
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.reshard import reshard
from patchgen.runtime.train import host_copies, reading
from patchgen.runtime.train.feed import micro_batches_per_step
from patchgen.runtime.train.records import Evaluation

if TYPE_CHECKING:
    from patchgen.runtime.train.trainer import Trainer


@dataclass
class BestStep:
    """The evaluation with the lowest loss so far; a loss that is not finite is never the lowest.

    Attributes:
        patience: evaluations in a row without a lower loss after which training is over; 0: it never is.
        step: the step of the lowest loss; None: there is none yet.
        loss: that loss, in nats per item.
        later: evaluations since then.
    """

    patience: int = 0
    step: int | None = None
    loss: float = math.inf
    later: int = 0

    @classmethod
    def of_log(cls, entries: Iterable[dict], last_step: int, patience: int) -> BestStep:
        """What the evaluations up to `last_step` of a run's log (`run_log.read`) say."""
        best = cls(patience)
        for entry in entries:
            if "eval_loss" in entry and entry["step"] <= last_step:
                best.add(entry["step"], entry["eval_loss"])
        return best

    def add(self, step: int, loss: float) -> bool:
        """Counts an evaluation; whether it is the best so far."""
        is_best = math.isfinite(loss) and loss < self.loss
        self.later = 0 if is_best else self.later + 1
        if is_best:
            self.step, self.loss = step, loss
        return is_best

    @property
    def is_over(self) -> bool:
        """Whether the last `patience` evaluations had no lower loss."""
        return bool(self.patience) and self.later >= self.patience


@torch.no_grad()
@reading.kept_generators()
def measure(trainer: Trainer) -> Evaluation:
    """The mean loss per item, without router losses, over the first `eval_batches` packed batches (collective).

    Raises:
        DataError: on all ranks, if there is no batch.
    """
    loader, state, model = trainer.eval_loader, trainer.state, trainer.model
    assert loader is not None, "only called with evaluation data"
    loader.load_state_dict(copy.deepcopy(trainer.eval_start))
    steps = micro_batches_per_step(trainer.recipe.train.eval_batches, state.config.num_batches)
    feed, source_losses = trainer.feed(loader, 1), trainer.eval_source_losses
    started, total, labels, num_items = time.perf_counter(), torch.zeros((), device=trainer.device), 0, 0
    counts = numpy.zeros((feed.num_sources, 2), dtype=numpy.int64)
    model.eval()
    for batches in feed.steps(steps):
        items = host_copies.on_device(max(1, batches.items), trainer.device)
        inputs, objective = trainer.learning.prepare(batches.micro_batches[0])
        read = source_losses.reader(batches.micro_batches[0]) if source_losses else None
        with loss.step(items, router_loss=False, objective=objective, read_losses=read):
            total += model(**inputs, num_items_in_batch=items, use_cache=False).loss * items
        labels, num_items = labels + batches.labels, num_items + batches.items
        counts += numpy.array(batches.sources, dtype=numpy.int64).reshape(counts.shape)
    model.train()
    reshard(model)
    if not num_items:
        raise reading.nothing_to_evaluate(loader, state)
    mean = float(all_reduce(total, operation="add up the evaluation loss")) / num_items
    by_source = source_losses.figures(counts.tolist(), source_losses.take_sums()) if source_losses else None
    seconds = time.perf_counter() - started
    return Evaluation(step=trainer.step, loss=mean, labels=labels, seconds=seconds, sources=by_source)
