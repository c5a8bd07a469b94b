"""Writes the reference page of recipes from their types: `python -m patchgen.runtime.train.reference > docs/recipes.md`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from typing import Any

from pydantic.fields import FieldInfo

from patchgen.runtime.train.recipe import Recipe, section_type

INTRODUCTION = """\
# Recipes

Every key of a recipe, generated from its types (`Recipe` in `runtime/train/recipe.py` and the types of its fields) by
`python -m patchgen.runtime.train.reference > docs/recipes.md`. A recipe is YAML with a `name` and these sections;
`--set section.key=value` changes one value, `--set data.sources.0.path=my.jsonl` one in a list; `--print-config` shows
the whole recipe with all defaults. An unknown key is refused, and the nearest known one is suggested.
"""


def text() -> str:
    """The page in Markdown."""
    parts = [INTRODUCTION]
    hints = typing.get_type_hints(Recipe, include_extras=True)
    about = descriptions(Recipe)
    for name, kind in hints.items():
        section = section_type(kind)
        if section is None:
            continue
        parts += [f"## {name}\n", about[name][0].upper() + about[name][1:] + "\n", *tables(section)]
    return "\n".join(parts)


def tables(kind: type) -> list[str]:
    """The table of a section, then those of its nested types."""
    hints, about = typing.get_type_hints(kind, include_extras=True), descriptions(kind)
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    inner = []
    for field in dataclasses.fields(kind):
        cells = f"`{field.name}`", type_text(hints[field.name]), f"`{default_text(field)}`", about[field.name]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        section = section_type(hints[field.name])
        if section is not None:
            is_list = typing.get_origin(hints[field.name]) in (tuple, list, dict)
            inner += [f"{'Each of' if is_list else 'Keys of'} `{field.name}`:\n", *tables(section)]
    return ["\n".join(lines) + "\n", *inner]


def descriptions(kind: type) -> dict[str, str]:
    """Field -> its entry under Attributes in the class's docstring."""
    documented = inspect.getdoc(kind) or ""
    entries = re.split(r"\n {4}(?=\w+: )", "\n" + documented.partition("Attributes:")[2].strip("\n"))
    meanings = {}
    for entry in entries:
        name, _, meaning = entry.strip().partition(": ")
        meanings[name] = " ".join(meaning.split())
    for field in dataclasses.fields(kind):
        if not meanings.get(field.name):
            raise ValueError(f"{kind.__name__}.{field.name} has no description.")
    return {field.name: meanings[field.name] for field in dataclasses.fields(kind)}


def type_text(kind: Any) -> str:
    """A type in words, with its range."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        limits = [limit for info in arguments[1:] for limit in getattr(info, "metadata", [])]
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        ranges = [
            f"{signs[name]} {value}"
            for limit in limits
            for name, value in dataclasses.asdict(limit).items()
            if name in signs
        ]
        return f"{type_text(arguments[0])} {', '.join(ranges)}".strip()
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else type_text(part) for part in arguments)
    if origin in (tuple, list):
        any_length = arguments[-1] is Ellipsis or len(arguments) == 1
        return f"list of {type_text(arguments[0])}" if any_length else f"{len(arguments)} x {type_text(arguments[0])}"
    if origin is dict:
        return "mapping"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return names.get(kind, "the keys below" if dataclasses.is_dataclass(kind) else str(kind))


def default_text(field: dataclasses.Field) -> str:
    """The default of a field as YAML; of a list of sections, the path of each."""
    value = field.default
    if isinstance(value, FieldInfo):
        value = value.get_default(call_default_factory=True)
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING or repr(value) == "PydanticUndefined":
        return "required"
    if value is None:
        return "null"
    if dataclasses.is_dataclass(value):
        return "{}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        shown = [getattr(entry, "path", entry) for entry in value]
        return "[" + ", ".join(map(str, shown)) + "]"
    return str(value)


if __name__ == "__main__":
    sys.stdout.write(text())
