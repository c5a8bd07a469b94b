"""Nested values and nested types of recipes."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested dicts and lists, as `--set` takes them."""
    found = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        found |= flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) and inner else {f"{prefix}{key}": value}
    return found


def section_type(kind: Any) -> type | None:
    """The dataclass that an annotation names, alone, optional or in a tuple."""
    if dataclasses.is_dataclass(kind):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType, tuple, list):
        return next(filter(None, map(section_type, typing.get_args(kind))), None)
    return None
