"""The checkpoints of a run: resuming, saving, and handling failed saves as the recipe says."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from patchgen.runtime.checkpoint import CheckpointError
from patchgen.runtime.data import Loader
from patchgen.runtime.parallel import watch
from patchgen.runtime.parallel.collectives import broadcast_object
from patchgen.runtime.train import continuing, setup
from patchgen.runtime.train.recipe import Recipe, RecipeError, to_yaml

FAILED_SAVE_SECONDS = 10.0
"""How long a failing run waits for an unfinished save, whose ranks may be waiting for a dead one."""


class RunCheckpoints:
    """Loads and saves the checkpoints of a run; every method is collective.

    Attributes:
        saved_step: the step of the newest save; 0: there is none.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer, loader: Loader) -> None:
        self.recipe, self.model, self.optimizer, self.loader = recipe, model, optimizer, loader
        self.checkpointer = setup.checkpointer(recipe)
        self.saved_step = 0

    def resume(self) -> dict[str, Any]:
        """Resumes from the newest intact checkpoint of the run, if there is one; returns the loader's position.

        Raises:
            RecipeError: on all ranks, if this recipe cannot continue the checkpoint.
        """
        found: tuple[int | None, str, str] = (None, "", "")
        if dist.get_rank() == 0:  # decides for all ranks
            try:
                found = self.checkpointer.latest(), continuing.changes(self.recipe), ""
            except RecipeError as error:
                found = None, "", str(error)
        latest, changed, refusal = broadcast_object(found)
        if refusal:
            raise RecipeError(refusal)
        if latest is None:
            return self.loader.state_dict()
        if changed and dist.get_rank() == 0:
            print(changed, flush=True)
        groups = self.optimizer.param_groups
        from_recipe = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        saved = self.checkpointer.load(model=self.model, optimizer=self.optimizer)
        for group, options in zip(groups, from_recipe, strict=True):
            group.update(options)  # the current recipe overrides the saved options
        this_rank = saved["rank"]["loader"] if saved["rank"] is not None else None
        position = self.loader.position_of(this_rank, lambda: [rank["loader"] for rank in saved["ranks"]])
        self.saved_step = saved["step"]
        self.loader.load_state_dict(position)
        return position

    def save(self, step: int, position: dict[str, Any], *, asynchronous: bool) -> None:
        """Saves a checkpoint; `position` is the loader's after the steps taken so far."""
        with watch.paused():
            self.settle()
            try:
                self.checkpointer.save(
                    step,
                    model=self.model,
                    optimizer=self.optimizer,
                    extra_state={"rank": {"loader": position}},
                    files={continuing.RECIPE: to_yaml(self.recipe)},
                    asynchronous=asynchronous,
                )
            except CheckpointError as error:
                self._handle_failure(error)
                return
        self.saved_step = step

    def settle(self) -> None:
        """Waits for an unfinished save; a failed one ends the run, or not, as the recipe says."""
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            self._handle_failure(error)

    def _handle_failure(self, error: CheckpointError) -> None:
        """Reports a failed save; all ranks have the same error.

        Raises:
            CheckpointError: `checkpoint.on_failed` is to stop.
        """
        if self.recipe.checkpoint.on_failed == "stop":
            raise error
        self.saved_step = max(self.checkpointer.complete()[-1:], default=0)
        if dist.get_rank() == 0:
            print(f"{error}\nThe run continues without it (checkpoint.on_failed: continue).", flush=True)

    def print_failed_save(self, kind: type | None, error: BaseException | None, _trace: object) -> None:
        """An exit callback: if an error ends the run, prints the failure of a save in the background."""
        failed = self.checkpointer.failure(FAILED_SAVE_SECONDS) if kind is not None else None
        if failed is not None and failed is not error and dist.get_rank() == 0:
            print(failed, file=sys.stderr, flush=True)
