"""The user's function from rows to samples: `data.sources[].transform: module:function`.

    def conversation(row):                                   # my_data.py, `transform: my_data:conversation`
        content = [{"type": "image", "image": row["photo"]}, {"type": "text", "text": row["question"]}]
        return [{"role": "user", "content": content}, {"role": "assistant", "content": row["answer"]}]

It is called with the fields of a row and returns one of

    a list                     the messages of a conversation                            kinds chat, multimodal
    a string                   a text                                                    kind text
    a dict                     a row of any format that the kind reads (`formats.py`): messages, tools, images ...; text
    a dict with input_ids      the model's inputs, with `labels`: not shifted, -100 for no loss
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.runtime import registry
from patchgen.runtime.data.chat import require_messages
from patchgen.runtime.data.config import DataConfig, Kind, SourceConfig
from patchgen.runtime.data.formats import FORMATS_OF_KIND, WrongColumns
from patchgen.runtime.data.problems import BadSample, DataError, as_bad_sample
from patchgen.runtime.data.records import Source
from patchgen.runtime.data.rows import RowMapper
from patchgen.runtime.data.text import Encoder, Tokens
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.batch_fields import rule_of

FIRST_ROWS = 8
POSITION_ROWS = 4  # of multimodal positions: text, time, height, width; the row of the text may be missing


class InvalidReturn(BadSample):
    """A transform returned a value of the wrong form."""


@dataclass(frozen=True)
class ModelInputs:
    """The model's inputs for a sample: tokens `(n,)`, positions `(n,)` or `(4, n)`, media unchanged."""

    fields: dict[str, Tensor]


@dataclass(frozen=True)
class Transform:
    """The transform of one source; picklable even if the function is not."""

    spec: str
    source: SourceConfig
    kind: Kind

    def __call__(self, where: str, row: dict[str, Any]) -> dict[str, Any] | ModelInputs:
        """The fields of the sample, or the model's inputs.

        Raises:
            BadSample: the function raises.
            InvalidReturn: it returns neither.
        """
        with as_bad_sample(f"the transform {self.spec}", where, "the row"):
            returned = load_function(self.spec)(row)
        if isinstance(returned, Mapping) and "input_ids" in returned:
            return ModelInputs(_checked_inputs(where, self.spec, returned))
        shorthand, name, expected = _SHORTHANDS.get(self.kind, (dict, "", "a row"))
        if shorthand is not dict and isinstance(returned, shorthand):
            returned = {name: returned}
        if not isinstance(returned, Mapping):
            raise InvalidReturn(
                where,
                f"the transform {self.spec} returned {_describe(returned)}; expected {expected}, a dict with the columns of "
                f"{' or '.join(FORMATS_OF_KIND[self.kind])}, or a dict with input_ids and labels",
            )
        messages = returned.get("messages")
        try:
            if isinstance(messages, list):
                require_messages(where, messages)
            return RowMapper(self.source, self.kind)(where, dict(returned))
        except BadSample as error:
            description = "messages of which" if isinstance(messages, list) else f"{_describe(returned)}:"
            raise InvalidReturn(where, f"the transform {self.spec} returned {description} {error.reason}") from error

    def fingerprint(self) -> list[str]:
        """Changes when the file of the function changes."""
        content = b"".join(file.read_bytes() for file in _source_files(self.spec)) or self.spec.encode()
        return [self.spec, hashlib.sha256(content).hexdigest()]


_SHORTHANDS: dict[str, tuple[type, str, str]] = {
    "text": (str, "text", "a text"),
    "chat": (list, "messages", "a list of messages"),
    "multimodal": (list, "messages", "a list of messages"),
}
"""What a transform may return instead of a row: its type, the column that it becomes, and its name in error messages."""

Mapper = Transform | RowMapper


class MappedEncoder:
    """An encoder of rows: a mapper, followed by the encoder of fields."""

    def __init__(self, mapper: Mapper, encoder: Encoder) -> None:
        self.mapper = mapper
        self.encoder = encoder

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        returned = [(where, self._mapped(where, row)) for where, row in samples]
        encoded = iter(
            self.encoder.encode([(where, fields) for where, fields in returned if isinstance(fields, dict)])
        )
        return [next(encoded) if isinstance(fields, dict) else fields for _, fields in returned]

    def _mapped(self, where: str, row: dict[str, Any]) -> dict[str, Any] | Tokens | BadSample:
        try:
            returned = self.mapper(where, row)
            return self._tokens(where, returned.fields) if isinstance(returned, ModelInputs) else returned
        except BadSample as error:
            return error

    def _tokens(self, where: str, fields: dict[str, Tensor]) -> Tokens:
        assert isinstance(self.mapper, Transform), "only transforms return model inputs"
        ids, labels = fields["input_ids"], fields["labels"]
        learned = labels != IGNORED
        if (
            self.mapper.kind not in ("text", "chat")
            or fields.keys() - {"input_ids", "labels"}
            or not torch.equal(labels[learned], ids[learned])
        ):
            raise InvalidReturn(
                where,
                f"the transform {self.mapper.spec} returned {', '.join(sorted(fields))}: data.kind = {self.mapper.kind} "
                "supports only input_ids, and labels that are the same ids or -100; data.kind = multimodal supports others",
            )
        return Tokens(ids.numpy(), learned.numpy())

    def fingerprint(self) -> list[Any]:
        return [*self.mapper.fingerprint(), self.encoder.fingerprint()]


def mappers_of(config: DataConfig) -> list[Mapper]:
    """What maps the rows of each source to fields: its transform, or their format."""
    return [
        Transform(source.transform, source, config.kind) if source.transform else RowMapper(source, config.kind)
        for source in config.sources
    ]


def check_first_rows(config: DataConfig, sources: Sequence[Source]) -> None:
    """Maps the first rows of each source to fields.

    Raises:
        DataError: there is no such transform, it returns a value of the wrong form, or raises on all of these rows; the
            columns of all of these rows match no format of the kind, or several.
    """
    for mapper, source in zip(mappers_of(config), sources, strict=True):
        if isinstance(mapper, Transform):
            load_function(mapper.spec)
        failures, rows = [], 0
        for record, _ in itertools.islice(source.read(), FIRST_ROWS):
            try:
                fields = record.fields()
            except BadSample:
                continue  # counted or raised when samples are prepared
            rows += 1
            try:
                mapper(record.where, fields)
            except InvalidReturn as error:
                raise DataError(
                    f"{error}. data.sources[].transform is checked on the first rows of a source."
                ) from error
            except BadSample as error:
                if isinstance(mapper, Transform) or isinstance(error, WrongColumns):
                    failures.append(error)
        if failures and len(failures) == rows:
            raise DataError(f"{failures[0]}. All of the first {rows} rows of {source.name} fail.") from failures[0]


@functools.cache
def load_function(spec: str) -> Callable[[dict[str, Any]], Any]:
    """The function of `module:function` or `path/to/file.py:function`.

    Raises:
        DataError: it does not exist.
    """
    place, _, name = spec.rpartition(":")
    file = Path(place).expanduser() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise DataError(f"data.sources[].transform = {spec!r}: there is no file {place} (from {Path.cwd()}).")
    try:
        module = registry.import_file(file) if file is not None else _imported(place)
    except Exception as error:  # the user's code may raise anything
        raise DataError(
            f"data.sources[].transform = {spec!r}: {place} cannot be imported: {type(error).__name__}: {error}. Modules are "
            f"searched on Python's path and in {Path.cwd()}; path/to/file.py:function names a file."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        function_names = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise DataError(
            f"data.sources[].transform = {spec!r}: {place} has no function {name!r}; its functions: "
            f"{', '.join(function_names) or 'none'}."
        )
    return function


def _source_files(spec: str) -> list[Path]:
    """The files that a transform depends on: the one that `spec` names, and that of the function.

    The first may make the function with arguments (`functools.partial`, a closure, a bound method, an object with `__call__`).
    Built-in functions have no file; of a compiled module, what was compiled is the file.
    """
    definition: Any = load_function(spec)
    while isinstance(definition, functools.partial):
        definition = definition.func
    definition = inspect.unwrap(definition)
    if not (inspect.isroutine(definition) or inspect.isclass(definition)):
        definition = type(definition)
    try:
        defined = inspect.getsourcefile(definition)
    except TypeError:  # built in, such as an operator.itemgetter
        defined = None
    place = spec.rpartition(":")[0]
    named = place if place.endswith(".py") else getattr(_imported(place), "__file__", None)
    return list(dict.fromkeys(Path(file).expanduser().resolve() for file in (named, defined) if file))


def _imported(name: str) -> ModuleType:
    """Imports a module, also from the current folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def _checked_inputs(where: str, spec: str, returned: Mapping[str, Any]) -> dict[str, Tensor]:
    """The checked model inputs: tokens `(n,)`, positions `(n,)` or `(4, n)`, media unchanged."""

    def wrong(reason: str) -> InvalidReturn:
        return InvalidReturn(where, f"the transform {spec} returned {reason}")

    if "labels" not in returned:
        raise wrong(
            f"input_ids without labels, only {', '.join(sorted(returned))}: labels are the ids, or -100 for no loss"
        )
    fields: dict[str, Tensor] = {}
    for name, raw in returned.items():
        value = _tensor(raw)
        if value is None:
            raise wrong(f"{name} as {_describe(raw)}, expected a tensor of numbers")
        fields[name] = value
    ids = fields["input_ids"]
    if ids.ndim > 1 and ids.shape[:-1].numel() == 1:
        ids = fields["input_ids"] = ids.reshape(-1)
    if ids.ndim != 1 or not len(ids):
        raise wrong(f"input_ids of shape {tuple(ids.shape)}, expected (n,) or (1, n)")
    out = {}
    for name, value in fields.items():
        try:
            rule = rule_of(name)
        except KeyError as error:
            raise wrong(f"the field {name!r}. {error.args[0]}") from error
        if rule.pack_dim == -1:
            if not value.ndim or value.shape[-1] != len(ids):
                raise wrong(f"{name} of shape {tuple(value.shape)} for {len(ids)} input_ids")
            rows = value.reshape(-1, len(ids))
            value = rows[0] if len(rows) == 1 else rows
            if name in ("input_ids", "labels") and (value.ndim > 1 or value.is_floating_point()):
                raise wrong(f"{name} of shape {tuple(value.shape)}, {value.dtype}, expected (n,) of integers")
        out[name] = value
    mask = out.pop("attention_mask", None)
    if mask is not None and not bool(mask.bool().all()):
        raise wrong("an attention_mask with zeros, expected samples without padding")
    positions = out.get("position_ids")
    if positions is not None and positions.ndim == 2:
        if len(positions) not in (POSITION_ROWS - 1, POSITION_ROWS):
            raise wrong(f"position_ids of shape {tuple(positions.shape)}, expected (n,), (3, n) or (4, n)")
        if len(positions) < POSITION_ROWS:
            out["position_ids"] = torch.cat([torch.arange(len(ids))[None].to(positions.dtype), positions])
    out["input_ids"], out["labels"] = out["input_ids"].long(), out["labels"].long()
    if not bool((out["labels"][1:] != IGNORED).any()):
        raise BadSample(where, f"the transform {spec} returned labels without any loss (all after the first are -100)")
    return out


def _tensor(value: Any) -> Tensor | None:
    """The value as a tensor of numbers; None if it is not one."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return torch.from_numpy(array.copy()) if array.dtype.kind in "biuf" and array.size else None


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(sorted(map(str, value))) or 'nothing'}"
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "None"
