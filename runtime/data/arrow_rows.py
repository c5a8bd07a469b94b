"""Rows that leave Arrow, as they were written: without the nulls that Arrow pads structs with.

A column of Arrow has one type, so each struct in it has the keys of all rows, null where its row has no such key:

    written     {"tools": [{"name": "f", "parameters": {"a": "text"}}]}
                {"tools": [{"name": "g", "parameters": {"b": "text"}}]}
    from Arrow  {"tools": [{"name": "f", "parameters": {"a": "text", "b": None}}]}
                {"tools": [{"name": "g", "parameters": {"a": None, "b": "text"}}]}

Arrow does not keep whether a key was null or missing, so null keys of structs are dropped, at any depth. What is no padding
stays: columns that are null, nulls in lists, and all of a value that is stored as JSON (`datasets.Json`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

Converter = Callable[[Any], Any]


class ArrowRows:
    """Converts rows of a schema, as dicts, to what was written; picklable.

    Args:
        schema: of pyarrow; None: not known, so every mapping in a column counts as a struct.
        parse_json: values of columns stored as JSON are texts, to be parsed here; otherwise they are parsed already.
    """

    def __init__(self, schema: Any, *, parse_json: bool) -> None:
        self._converters = None if schema is None else _converters(schema, parse_json)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row without padding. The values of the given one are not changed."""
        if self._converters is None:
            return {name: _without_nulls(value) for name, value in row.items()}
        converters = self._converters
        return {
            name: converters[name](value) if value is not None and name in converters else value
            for name, value in row.items()
        }


def _without_nulls(value: Any) -> Any:
    """A value of unknown type without the null keys of its mappings."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _converters(schema: Any, parse_json: bool) -> dict[str, Converter]:
    """The converter of each column that needs one."""
    converters = {field.name: _converter(field.type, parse_json) for field in schema}
    return {name: converter for name, converter in converters.items() if converter is not None}


def _converter(type_: Any, parse_json: bool) -> Converter | None:
    """A function for values of an Arrow type, which are not None; None: they need no conversion."""
    import pyarrow

    is_type = pyarrow.types
    if getattr(type_, "extension_name", None) == "arrow.json":
        return json.loads if parse_json else None
    if is_type.is_struct(type_):
        fields = {field.name: _converter(field.type, parse_json) for field in type_}
        return functools.partial(_convert_struct, fields)
    if isinstance(type_, pyarrow.BaseExtensionType):
        return None
    if any(is_list(type_) for is_list in (is_type.is_list, is_type.is_large_list, is_type.is_fixed_size_list)):
        convert = _converter(type_.value_type, parse_json)
        return None if convert is None else functools.partial(_convert_list, convert)
    return None


def _convert_struct(fields: Mapping[str, Converter | None], value: Any) -> Any:
    if not isinstance(value, Mapping):  # decoded by datasets
        return value
    present = {key: part for key, part in value.items() if part is not None}
    return {key: convert(part) if (convert := fields.get(key)) else part for key, part in present.items()}


def _convert_list(convert: Converter, values: Any) -> Any:
    if not isinstance(values, list | tuple):
        return values
    return [None if value is None else convert(value) for value in values]
