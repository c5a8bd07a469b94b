"""The checkpoints of a run: resuming, saving, and handling failed saves as the recipe says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from patchgen.runtime.checkpoint import Checkpointer, CheckpointError
from patchgen.runtime.data import Loader
from patchgen.runtime.data.agreement import run_on_all_ranks
from patchgen.runtime.parallel import watch
from patchgen.runtime.parallel.collectives import broadcast_object
from patchgen.runtime.train import resume_changes, run_log
from patchgen.runtime.train.evaluation import BestStep
from patchgen.runtime.train.recipe import Recipe, to_yaml

Result = TypeVar("Result")

PENDING_SAVE_TIMEOUT = 10.0
"""Seconds that a run which ends with an error waits for a pending save, which its other ranks may never finish."""


class RunCheckpoints:
    """Loads and saves the checkpoints of a run; the constructor, `resume`, `save` and `wait_for_pending` are collective.

    Attributes:
        saved_step: the step of the newest save; 0: there is none.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer, loader: Loader) -> None:
        self.recipe, self.model, self.optimizer, self.loader = recipe, model, optimizer, loader
        self.checkpointer = Checkpointer(recipe.directory / "checkpoints", keep=recipe.checkpoint.keep)
        self.saved_step = 0

    def resume(self) -> dict[str, Any]:
        """Resumes from the newest intact checkpoint of the run, if there is a complete one; returns the loader's position.

        Raises:
            RecipeError: on all ranks, if this recipe cannot continue the checkpoint.
            CheckpointError: every complete checkpoint is damaged.
            DataError: on all ranks, if rank 0 cannot read the folder of checkpoints, or on any rank the data are others than
                those of the saved position.
        """
        if not _on_rank_0(lambda: self.checkpointer.latest() is not None):
            return self.loader.state_dict()
        changes = _on_rank_0(lambda: resume_changes.since(self.recipe))
        changes.require_resumable()  # before anything is loaded
        groups = self.optimizer.param_groups
        recipe_options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        saved = self.checkpointer.load(model=self.model, optimizer=self.optimizer)
        for group, options in zip(groups, recipe_options, strict=True):
            group.update(options)  # the current recipe overrides the saved options
        if saved["step"] != changes.step:  # the newest was damaged, and an older one was loaded
            changes = _on_rank_0(lambda: resume_changes.since(self.recipe, saved["step"]))
            changes.require_resumable()
        if dist.get_rank() == 0 and changes.description:
            print(changes.description, flush=True)
        self.saved_step = saved["step"]
        return run_on_all_ranks(lambda: self._load_position(saved))

    def _load_position(self, saved: dict[str, Any]) -> dict[str, Any]:
        own_position = saved["rank"]["loader"] if saved["rank"] is not None else None
        position = self.loader.position_of(own_position, lambda: [rank["loader"] for rank in saved["ranks"]])
        self.loader.load_state_dict(position)
        return position

    def save(self, step: int, position: dict[str, Any], *, asynchronous: bool) -> None:
        """Saves a checkpoint; `position` is the loader's after the steps taken so far."""
        with watch.paused():
            self.wait_for_pending()
            try:
                self.checkpointer.save(
                    step,
                    model=self.model,
                    optimizer=self.optimizer,
                    extra_state={"rank": {"loader": position}},
                    files={resume_changes.RECIPE_FILE: to_yaml(self.recipe)},
                    asynchronous=asynchronous,
                )
            except CheckpointError as error:
                self._handle_failure(error)
                return
        self.saved_step = step

    def best_of_log(self, patience: int) -> BestStep:
        """The best step of the run so far, whose checkpoint is kept from now on (collective).

        With `checkpoint.keep_best` a step without a checkpoint, of a start without that option, is told and forgotten.
        """

        def read() -> BestStep:
            best = BestStep.of_log(run_log.read(self.recipe.directory), self.saved_step, patience)
            is_lost = best.step is not None and best.step not in self.checkpointer.complete_steps()
            if not (self.recipe.checkpoint.keep_best and is_lost):
                return best
            print(f"Step {best.step}, the best so far, has no checkpoint: the best from here on is kept.", flush=True)
            return BestStep(patience)

        best = _on_rank_0(read)
        if best.step is not None and self.recipe.checkpoint.keep_best:
            self.keep(best.step)
        return best

    def keep(self, step: int) -> None:
        """Keeps the checkpoint of this step, the best so far, besides the newest ones; the one kept before until it is there."""
        self.checkpointer.keep_besides(step)

    def step_to_export(self, best: int | None, last: int) -> int:
        """The step whose weights the recipe exports: the last, or the best, whose checkpoint must be there (collective)."""
        if self.recipe.checkpoint.export != "best" or best == last:
            return last
        found = _on_rank_0(lambda: best if best in self.checkpointer.complete_steps() else None)
        if found is None and dist.get_rank() == 0:
            why = "no best step is kept" if best is None else f"step {best}, the best, has no checkpoint"
            print(f"WARNING: {why}: what is exported is the model of step {last}.", flush=True)
        return last if found is None else found

    def load_weights(self, step: int) -> None:
        """Loads the weights of a step into the model, and nothing else (collective)."""
        self.checkpointer.load(step, model=self.model)

    def wait_for_pending(self) -> None:
        """Waits for a pending save; whether a failed one ends the run is `checkpoint.on_failed`."""
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            self._handle_failure(error)

    def _handle_failure(self, error: CheckpointError) -> None:
        """Reports a failed save; all ranks have the same error.

        Raises:
            CheckpointError: if `checkpoint.on_failed` is stop.
        """
        if self.recipe.checkpoint.on_failed == "stop":
            raise error
        steps = self.checkpointer.complete_steps() if dist.get_rank() == 0 else []
        self.saved_step = broadcast_object(steps[-1] if steps else 0)  # ranks may see shared storage differently
        if dist.get_rank() == 0:
            print(f"{error}\nThe run continues without this checkpoint (checkpoint.on_failed: continue).", flush=True)

    def print_failed_save(self, exc_type: type | None, error: BaseException | None, _trace: object) -> None:
        """An exit callback of `ExitStack`: if an error ends the run, prints the failure of a save in the background."""
        save_error = self.checkpointer.failure(PENDING_SAVE_TIMEOUT) if exc_type is not None else None
        if save_error is not None and save_error is not error and dist.get_rank() == 0:
            print(save_error, file=sys.stderr, flush=True)


def _on_rank_0(work: Callable[[], Result]) -> Result:
    """What `work` returns on rank 0, on all ranks; its error reaches them, too (collective)."""
    return cast("Result", broadcast_object(run_on_all_ranks(work if dist.get_rank() == 0 else lambda: None)))
