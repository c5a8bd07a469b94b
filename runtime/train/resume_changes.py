"""How a recipe differs from the one saved in the checkpoint that a run resumes from.

Resumed with a recipe that differs from step-00000300's:
  optim.lr: 0.001 -> 0.0005
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from patchgen.runtime.checkpoint.saved_steps import SavedSteps
from patchgen.runtime.train.recipe import Recipe, RecipeError, flatten, from_dict, to_dict

RECIPE_FILE = "recipe.yaml"
FIXED_KEYS = ("optim.name.", "optim.muon_experts.", "lora.", "objective.name.", "model.resize_vocab.")
"""Starts of dotted keys with a dot at their end: `lora.` is the whole section, `optim.name.` this key alone. Another value
would change the trained parameters or their optimizer state. An objective's reference is the model before its run, so that
model must not have been trained with another objective."""
FREE_KEYS = ("lora.dropout", "lora.merge", "model.resize_vocab.new_rows")
"""Exceptions from FIXED_KEYS."""


@dataclass(frozen=True)
class Changes:
    """How a recipe differs from that of a checkpoint.

    Attributes:
        directory: of the run.
        step: of the checkpoint; None: there is none.
        checkpoint: the name of its folder.
        lines: dotted key -> its old and its new value, in one line.
    """

    directory: Path
    step: int | None = None
    checkpoint: str = ""
    lines: Mapping[str, str] = field(default_factory=dict)

    def require_resumable(self) -> None:
        """Raises RecipeError, with all fixed keys that differ, if the checkpoint cannot be resumed with the recipe."""
        fixed = [line for key, line in self.lines.items() if f"{key}.".startswith(FIXED_KEYS) and key not in FREE_KEYS]
        if fixed:
            listed = "".join(f"\n  {line}" for line in fixed)
            raise RecipeError(
                f"{self.directory} cannot be resumed with a different objective, optimizer, vocabulary or adapters than "
                f"{self.checkpoint} was trained with:{listed}\nSet them back, name another log.directory, or start anew with "
                "--fresh."
            )

    @property
    def description(self) -> str:
        """A heading, then one line per key; "" if nothing differs."""
        heading = f"Resumed with a recipe that differs from {self.checkpoint}'s:"
        return "\n  ".join([heading, *self.lines.values()]) if self.lines else ""


def since(recipe: Recipe, step: int | None = None) -> Changes:
    """How a recipe differs from that of a checkpoint of its run; not at all if that recipe cannot be read.

    Args:
        step: of the checkpoint; None: the newest complete one, whose content may still turn out to be damaged.
    """
    saved_steps = SavedSteps(recipe.directory / "checkpoints")
    if step is None:
        step = next(reversed(saved_steps.complete_steps()), None)
    if step is None:
        return Changes(recipe.directory)
    folder = saved_steps.folder_of(step)
    before, now = read_saved(folder / RECIPE_FILE), flatten(to_dict(recipe))
    if before is None:
        return Changes(recipe.directory, step, folder.name)
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    lines = {key: f"{key}: {_show(before, key)} -> {_show(now, key)}" for key in keys}
    return Changes(recipe.directory, step, folder.name, lines)


def require_resumable(recipe: Recipe) -> None:
    """Raises RecipeError if the newest checkpoint of the run, if there is one, cannot be resumed with this recipe."""
    since(recipe).require_resumable()


def read_saved(file: Path) -> dict[str, Any] | None:
    """A checkpoint's recipe with dotted keys; None if it cannot be read: loading verifies the checkpoint, and reports that."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return _with_defaults(values) if isinstance(values, dict) else None


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """A saved recipe with dotted keys, and with the defaults of keys that it lacks: it was saved before there were such keys, and
    trained as their defaults say. Without them a new key of `lora` would count as a change, and the run could not be resumed.
    Keys and values that are not valid today stay as they are. If no valid recipe is left without them, it gets no defaults, and
    every key that it lacks counts as a change."""
    valid, outdated = copy.deepcopy(values), dict[str, Any]()
    if isinstance(valid.get("optim"), dict) and valid["optim"].get("name") == "muon":
        valid["optim"].setdefault("muon_experts", False)  # AdamW stepped experts before there was this key
    while True:
        try:
            return flatten(to_dict(from_dict(valid))) | outdated
        except RecipeError as error:
            problems = error.__cause__.errors() if isinstance(error.__cause__, ValidationError) else []
        places = {_key_of(valid, problem["loc"]) for problem in problems if problem["type"] != "missing"} - {()}
        if not places:
            return flatten(values)
        for place in sorted(places, key=len, reverse=True):  # what is inside first
            section: Any = valid
            for part in place[:-1]:
                section = section[part]
            outdated |= flatten({".".join(map(str, place)): section.pop(place[-1])})


def _key_of(values: dict[str, Any], path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The place of the key that a problem is about: pydantic's place of it may go on to a branch of a union
    (`model.attention.str`). Empty if there is no such key."""
    value: Any = values
    place: tuple[int | str, ...] = ()
    for depth, part in enumerate(path):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):  # no such key or item, or a value without any
            break
        place = place if isinstance(part, int) else path[: depth + 1]
    return place


def _show(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"
