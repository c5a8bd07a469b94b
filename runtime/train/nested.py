"""Nested values and nested types of recipes."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


def flatten(values: Mapping[str, Any] | Mapping[int, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested dicts and lists, with keys as `--set` takes them."""
    flattened = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        is_nested = isinstance(inner, dict) and inner
        flattened |= flatten(inner, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return flattened


def section_type(kind: Any) -> type | None:
    """The dataclass in an annotation: alone, optional, or in a tuple, list or dict."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType, tuple, list, dict):
        return next(filter(None, map(section_type, typing.get_args(kind))), None)
    return None


def set_at(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets `values["a"]["b"] = value` for the key `a.b`; numbers are list indices; missing containers are created.

    Raises:
        LookupError: there is no such key or index; the message says what is there.
    """
    *parents, last = key.split(".")
    inner: Any = values
    for part, following in zip(parents, [*parents[1:], last], strict=False):
        empty: Any = [] if following.isdigit() else {}
        if isinstance(inner, list):
            _require_index(inner, part)
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
        _require_index(inner, last)
        inner[int(last) : int(last) + 1] = [value]
    elif isinstance(inner, dict):
        inner[last] = value
    else:
        raise LookupError(f"the value above '{last}' is {inner!r}, which has no keys.")


def _require_index(values: list, part: str) -> None:
    if not part.isdigit() or int(part) > len(values):
        raise LookupError(f"'{part}' is not an index of a list of {len(values)}; {len(values)} appends to it.")
