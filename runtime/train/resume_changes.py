"""How a recipe differs from the one saved in the checkpoint that a run resumes from.

Resumed with a recipe that differs from step-00000300's:
  optim.lr: 0.001 -> 0.0005
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from patchgen.runtime.checkpoint.saved_steps import SavedSteps
from patchgen.runtime.train.recipe import Recipe, RecipeError, flatten, from_dict, to_dict

RECIPE_FILE = "recipe.yaml"
FIXED_KEYS = ("optim.name.", "lora.", "objective.name.")
"""Starts of dotted keys with a dot at their end: `lora.` is the whole section, `optim.name.` this key alone. Another value
would change the trained parameters or their optimizer state. An objective's reference is the model before its run, so that
model must not have been trained with another objective."""
FREE_KEYS = ("lora.dropout", "lora.merge")
"""Exceptions from FIXED_KEYS."""


def require_resumable(recipe: Recipe, step: int | None = None) -> None:
    """Raises RecipeError, with all fixed keys that differ, if a checkpoint of the run cannot be resumed with this recipe.

    Args:
        step: of the checkpoint; None: the newest complete one, whose content may still turn out to be damaged.
    """
    checkpoint, lines = _differences(recipe, step)
    fixed = [line for key, line in lines.items() if f"{key}.".startswith(FIXED_KEYS) and key not in FREE_KEYS]
    if fixed:
        listed = "".join(f"\n  {line}" for line in fixed)
        raise RecipeError(
            f"{recipe.directory} cannot be resumed with a different objective, optimizer or adapters than {checkpoint} was "
            f"trained with:{listed}\nSet them back, name another log.directory, or start anew with --fresh."
        )


def description(recipe: Recipe, step: int | None = None) -> str:
    """How a recipe differs from that of a checkpoint: a heading, then one line per key; "" if they are equal.

    Args:
        step: as in `require_resumable`.
    """
    checkpoint, lines = _differences(recipe, step)
    return "\n  ".join([f"Resumed with a recipe that differs from {checkpoint}'s:", *lines.values()]) if lines else ""


def _differences(recipe: Recipe, step: int | None) -> tuple[str, dict[str, str]]:
    """The name of the checkpoint's folder, and a line for each key that differs; none without a readable saved recipe."""
    saved_steps = SavedSteps(recipe.directory / "checkpoints")
    if step is None:
        step = next(reversed(saved_steps.complete_steps()), None)
    if step is None:
        return "", {}
    folder = saved_steps.folder_of(step)
    before = _read(folder / RECIPE_FILE)
    if before is None:
        return folder.name, {}
    now = flatten(to_dict(recipe))
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    return folder.name, {key: f"{key}: {_show(before, key)} -> {_show(now, key)}" for key in keys}


def _read(file: Path) -> dict[str, Any] | None:
    """A checkpoint's recipe with dotted keys; None if it cannot be read: loading verifies the checkpoint, and reports that."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return flatten(_with_defaults(values)) if isinstance(values, dict) else None


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """A saved recipe with the defaults of keys that it lacks: it was saved before there were such keys, and trained as their
    defaults say. Without them a new key of `lora` would count as a change, and the run could not be resumed. A recipe that is
    not valid today is returned as it is, so that every key which it lacks counts as a change."""
    try:
        return to_dict(from_dict(values))
    except RecipeError:
        return values


def _show(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"
