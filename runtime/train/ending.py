"""The end of a run: its export and its summary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from patchgen.runtime.data import DataError
from patchgen.runtime.train import lora, reading, setup
from patchgen.runtime.train.records import Summary

if TYPE_CHECKING:
    from patchgen.runtime.train.trainer import Trainer


def finish(trainer: Trainer, reason: str) -> Summary:
    """Exports the trained model, unless the run was stopped or `checkpoint.export` is false; returns the summary.

    Raises:
        DataError: the data ended before the first step, so there is no trained model.
    """
    if reason != "stop" and trainer.step == 0:
        raise DataError(
            "The data ended before the first step: nothing was trained, and nothing is exported. "
            f"What was read: {reading.counters_of(trainer.loader, trainer.state).summary()}."
        )
    folder, exported = None, None
    if reason != "stop" and trainer.recipe.checkpoint.export:
        exported = (
            trainer.checkpoints.step_to_export(trainer.best.step, trainer.step)
            if trainer.checkpoints
            else trainer.step
        )
        folder = setup.existing_export(trainer.recipe, exported) if trainer.step == trainer.first_step else None
        if folder is None:
            if exported != trainer.step and trainer.checkpoints is not None:
                trainer.checkpoints.load_weights(exported)
            folder = export(trainer)
        elif dist.get_rank() == 0:
            print(f"Nothing to export: {folder} has the model of step {exported}.", flush=True)
    summary = Summary(
        steps=trainer.step,
        reason=reason,
        directory=str(trainer.recipe.directory),
        export=str(folder) if folder else None,
        data=reading.counters_of(trainer.loader, trainer.state).summary(),
        skipped=trainer.num_skipped,
        best_step=trainer.best.step,
        exported_step=exported,
        best_loss=trainer.best.loss if trainer.best.step is not None else None,
        graph=trainer.captured.summary if trainer.captured is not None else None,
    )
    for listener in trainer.listeners:
        listener.on_end(summary)
    return summary


def export(trainer: Trainer) -> Path:
    """Writes the model, or its adapters (collective)."""
    if trainer.adapted is None or trainer.recipe.lora is None:  # both are None or neither
        return setup.export(trainer.recipe, trainer.model, trainer.parts)
    lora.save(trainer.adapted, folder := trainer.recipe.directory / lora.FOLDER, trainer.parts.tokenizer)
    if not trainer.recipe.lora.merge:
        return folder
    lora.merge(trainer.adapted)
    return setup.export(trainer.recipe, trainer.model, trainer.parts)
