"""A training step of a recipe, and a second one for its time, without a run: in this process, or as one of several ranks.

python -c "from patchgen.runtime.doctor.rank_step import main; main()" RECIPE_AS_JSON FOLDER

with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from patchgen.runtime import launch, parallel
from patchgen.runtime.data import DataError
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.reshard import reshard
from patchgen.runtime.parent_process import end_with_parent, parent_of_ranks
from patchgen.runtime.process_exit import end_process
from patchgen.runtime.train import setup
from patchgen.runtime.train.feed import End
from patchgen.runtime.train.recipe import Recipe, from_dict
from patchgen.runtime.train.setup import DataParts


@dataclass(frozen=True)
class StepFigures:
    """What `measure_step` measured: on the first step, and on a second one, when kernels are warm.

    Attributes:
        loss, norm: of the first step.
        seconds: of the second step.
        tokens, flops: of one step.
        state_bytes: of the parameters, gradients and optimizer states of this rank.
        peak_bytes: the peak memory of the device; None on a CPU.
    """

    loss: float
    norm: float
    seconds: float
    tokens: int
    flops: float
    state_bytes: int
    peak_bytes: int | None


def measure_step(recipe: Recipe, device: torch.device, scratch: Path, *, groups: int = 1) -> StepFigures:
    """Takes two steps of a recipe on this rank; every rank calls it.

    Args:
        scratch: a folder that all ranks can write to; the caller deletes it.
        groups: how many batch groups the compared layout has: this rank reads the batches of all of them. Each group reads its
            own part of the data.
    """
    from patchgen.runtime.train.trainer import Trainer

    log = replace(recipe.log, directory=str(scratch / "step"), trackers=())
    recipe = replace(recipe.without_evaluation(), log=log)
    trainer = Trainer(recipe, device)
    loader = (
        trainer.loader if groups == 1 else _LoaderOfGroups(recipe, trainer.parts, groups, trainer.num_micro_batches)
    )
    feed = trainer.feed(loader, trainer.num_micro_batches)
    with parallel.using(trainer.state):
        batches = feed.next()
        if isinstance(batches, End):
            raise DataError("The data ended before the first step.")
        if trainer.learning.table is not None:  # from these batches; a run reads all of its data for it
            trainer.learning.fill_table(batches.micro_batches)
            reshard(trainer.model)
        loss = float(all_reduce(trainer.forward_backward(batches), operation="add up the loss"))
        gradient_bytes = sum(_bytes(p.grad) for p in trainer.model.parameters() if p.grad is not None)
        norm, _ = trainer.update()
        started = time.perf_counter()
        trainer.forward_backward(batches)
        trainer.update()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    states = [
        value
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    state_bytes = (
        gradient_bytes
        + sum(map(_bytes, trainer.model.parameters()))
        + sum(_bytes(tensor) for tensor in states if tensor.ndim)
    )
    peak = trainer.peak_memory() if device.type == "cuda" else None
    return StepFigures(loss, norm, seconds, batches.tokens, batches.flops, state_bytes, peak)


class _LoaderOfGroups:
    """A loader of several batch groups' batches: in each step those of the first group, then those of the next."""

    def __init__(self, recipe: Recipe, parts: DataParts, groups: int, num_micro_batches: int) -> None:
        self._loaders = [setup.loader_of_group(recipe.data, parts, index, groups) for index in range(groups)]
        self._micro_batches_per_group = num_micro_batches // groups

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while step := [
            row for loader in self._loaders for row in itertools.islice(loader, self._micro_batches_per_group)
        ]:
            yield from step

    def state_dict(self) -> dict[str, Any]:
        """Empty: nothing is resumed from here."""
        return {}


def _bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def main() -> None:
    end_with_parent(parent_of_ranks())
    recipe = from_dict(json.loads(sys.argv[1]))
    with launch.process_group() as device:
        figures = measure_step(recipe, device, Path(sys.argv[2]))
        if dist.get_rank() == 0:
            print(json.dumps(asdict(figures)), flush=True)
    end_process(0)
