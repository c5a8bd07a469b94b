"""The checkpoints of a run: resuming, saving, and handling failed saves as the recipe says."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from patchgen.runtime.checkpoint import Checkpointer, CheckpointError
from patchgen.runtime.data import Loader
from patchgen.runtime.parallel import watch
from patchgen.runtime.parallel.collectives import broadcast_object
from patchgen.runtime.train import resume_changes
from patchgen.runtime.train.recipe import Recipe, RecipeError, to_yaml

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
        """
        has_checkpoint = broadcast_object(dist.get_rank() == 0 and self.checkpointer.latest() is not None)
        if not has_checkpoint:
            return self.loader.state_dict()
        self._require_resumable()  # before anything is loaded
        groups = self.optimizer.param_groups
        recipe_options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        saved = self.checkpointer.load(model=self.model, optimizer=self.optimizer)
        for group, options in zip(groups, recipe_options, strict=True):
            group.update(options)  # the current recipe overrides the saved options
        # The checkpoint that was loaded may be an older one than the newest, whose content may be damaged.
        self._require_resumable(saved["step"])
        if dist.get_rank() == 0 and (changes := resume_changes.description(self.recipe, saved["step"])):
            print(changes, flush=True)
        own_position = saved["rank"]["loader"] if saved["rank"] is not None else None
        position = self.loader.position_of(own_position, lambda: [rank["loader"] for rank in saved["ranks"]])
        self.saved_step = saved["step"]
        self.loader.load_state_dict(position)
        return position

    def _require_resumable(self, step: int | None = None) -> None:
        """`resume_changes.require_resumable`, read by rank 0 for all ranks.

        Raises:
            RecipeError: on all ranks, if this recipe cannot continue the checkpoint.
        """
        refusal = ""
        if dist.get_rank() == 0:
            try:
                resume_changes.require_resumable(self.recipe, step)
            except RecipeError as error:
                refusal = str(error)
        if refusal := broadcast_object(refusal):
            raise RecipeError(refusal)

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
