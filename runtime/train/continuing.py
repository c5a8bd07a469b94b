"""What changed since the checkpoint that a run continues from: each keeps the recipe that it was made with.

Continued with another recipe than that of step-00000300:
  optim.lr: 0.001 -> 0.0005
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from patchgen.runtime.checkpoint.saved_steps import SavedSteps
from patchgen.runtime.train.nested import flat
from patchgen.runtime.train.recipe import ObjectiveConfig, Recipe, RecipeError, to_dict

RECIPE = "recipe.yaml"
# With another value the trained parameters are others, or the state that is kept of them. A dropout is neither.
# The reference of an objective is the model before its run, which is none that another objective trained.
FIXED = ("optim.name.", "lora.", "objective.name.")
FREE = ("lora.dropout", "lora.merge")
BEFORE_OBJECTIVES = {"objective.name": ObjectiveConfig().name}


def changes(recipe: Recipe) -> str:
    """How a recipe differs from that of the newest whole checkpoint of its run, a line a key; "" if it does not.

    Raises:
        RecipeError: in a way that cannot be meant.
    """
    checkpointer = SavedSteps(recipe.directory / "checkpoints")
    steps = checkpointer.complete()
    if not steps:
        return ""
    folder = checkpointer.folder_of(steps[-1])
    before = _read(folder / RECIPE)
    if before is None:
        return ""
    before, now = BEFORE_OBJECTIVES | before, flat(to_dict(recipe))
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    told = {key: f"{key}: {_show(before, key)} -> {_show(now, key)}" for key in keys}
    fixed = [line for key, line in told.items() if f"{key}.".startswith(FIXED) and key not in FREE]
    if fixed:
        listed = "".join(f"\n  {line}" for line in fixed)
        raise RecipeError(
            f"{recipe.directory} cannot be continued with another objective, optimizer or other adapters than {folder.name} "
            f"was trained with:{listed}\nSet them back, name another log.directory, or start anew with --fresh."
        )
    return "\n  ".join([f"Continued with another recipe than that of {folder.name}:", *told.values()]) if told else ""


def _read(file: Path) -> dict[str, Any] | None:
    """The recipe of a checkpoint, flat; None if it kept none that can be read: its content is checked when it loads."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return flat(values) if isinstance(values, dict) else None


def _show(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not there"
