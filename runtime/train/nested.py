"""Nested values and nested types of recipes."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any] | Mapping[int, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested dicts and lists, as `--set` takes them."""
    found = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        found |= flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) and inner else {f"{prefix}{key}": value}
    return found


def section_type(kind: Any) -> type | None:
    """The dataclass that an annotation names, alone, optional, in a tuple or by name."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType, tuple, list, dict):
        return next(filter(None, map(section_type, typing.get_args(kind))), None)
    return None


def set_at(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets `values["a"]["b"] = value` for the key `a.b`; numbers are places in lists, made as they are needed.

    Raises:
        LookupError: there is no such place; the message says what stands there.
    """
    *parents, last = key.split(".")
    inner: Any = values
    for part, following in zip(parents, [*parents[1:], last], strict=False):
        empty: Any = [] if following.isdigit() else {}
        if isinstance(inner, list):
            _require_place(inner, part)
            if int(part) == len(inner):
                inner.append(empty)
            inner = inner[int(part)]
        elif isinstance(inner, dict):
            if inner.get(part) is None:
                inner[part] = empty
            inner = inner[part]
        else:
            raise LookupError(f"the value above '{part}' is {inner!r}, which has no keys.")
    if isinstance(inner, list):
        _require_place(inner, last)
        inner[int(last) : int(last) + 1] = [value]
    elif isinstance(inner, dict):
        inner[last] = value
    else:
        raise LookupError(f"the value above '{last}' is {inner!r}, which has no keys.")


def _require_place(values: list, part: str) -> None:
    if not part.isdigit() or int(part) > len(values):
        raise LookupError(f"'{part}' is not a place in a list of {len(values)}; {len(values)} appends to it.")
