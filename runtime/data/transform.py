"""A function of the user's own between a source and the samples: `data.sources[].transform: module:function`.

    def conversation(row):                                   # my_data.py, `transform: my_data:conversation`
        content = [{"type": "image", "image": row["photo"]}, {"type": "text", "text": row["question"]}]
        return [{"role": "user", "content": content}, {"role": "assistant", "content": row["answer"]}]

It gets the fields of a row and gives one of

    a list                     the messages of a conversation                            kinds chat, multimodal
    a string                   a text                                                    kind text
    a dict                     a row of any format that the kind reads (`formats.py`): messages, tools, images ...; text
    a dict with input_ids      a sample as the model takes it, with `labels`, not shifted, -100 where nothing is learned
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
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

from patchgen.runtime.data.chat import require_messages
from patchgen.runtime.data.config import DataConfig, Kind, SourceConfig
from patchgen.runtime.data.formats import OF_KIND, WrongColumns
from patchgen.runtime.data.problems import BadSample, DataError, refusals_of
from patchgen.runtime.data.records import Source
from patchgen.runtime.data.rows import Rows
from patchgen.runtime.data.text import Encoder, Tokens, digest
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.batch_fields import rule_of

FIRST_ROWS = 8
TEXT_ROWS = 4  # of multimodal positions with the text's in front


class WrongReturn(BadSample):
    """A transform returned what no row may become."""


@dataclass(frozen=True)
class Inputs:
    """A sample as the model takes it: tokens `(n,)`, positions `(n,)` or `(4, n)`, media as they are."""

    fields: dict[str, Tensor]


@dataclass(frozen=True)
class Transform:
    """The transform of one source; picklable, whatever file the function is in."""

    spec: str
    source: SourceConfig
    kind: Kind

    def __call__(self, where: str, row: dict[str, Any]) -> dict[str, Any] | Inputs:
        """The fields of the sample, or the sample itself.

        Raises:
            BadSample: the function raises.
            WrongReturn: it returns what is none of these.
        """
        with refusals_of(f"the transform {self.spec}", where, "the row"):
            made = load(self.spec)(row)
        if isinstance(made, Mapping) and "input_ids" in made:
            return Inputs(_inputs(where, self.spec, made))
        bare, name, wanted = _BARE.get(self.kind, (dict, "", "a row"))
        if bare is not dict and isinstance(made, bare):
            made = {name: made}
        if not isinstance(made, Mapping):
            raise WrongReturn(
                where,
                f"the transform {self.spec} returned {_shown(made)}; expected {wanted}, a dict with the columns of "
                f"{' or '.join(OF_KIND[self.kind])}, or a dict with input_ids and labels",
            )
        messages = made.get("messages")
        try:
            if isinstance(messages, list):
                require_messages(where, messages)
            return Rows(self.source, self.kind)(where, dict(made))
        except BadSample as error:
            told = "messages of which" if isinstance(messages, list) else f"{_shown(made)}:"
            raise WrongReturn(where, f"the transform {self.spec} returned {told} {error.reason}") from error

    def fingerprint(self) -> list[str]:
        """Changes with the file of the function."""
        file = inspect.getsourcefile(load(self.spec))
        content = Path(file).read_bytes() if file else self.spec.encode()
        return [self.spec, hashlib.sha256(content).hexdigest()]


_BARE: dict[str, tuple[type, str, str]] = {
    "text": (str, "text", "a text"),
    "chat": (list, "messages", "a list of messages"),
    "multimodal": (list, "messages", "a list of messages"),
}
"""What a transform may return in the place of a row: its type, the column that it is, and what it is called."""

Mapper = Transform | Rows


class MappedEncoder:
    """An encoder behind what makes its fields of rows."""

    def __init__(self, mapper: Mapper, encoder: Encoder) -> None:
        self.mapper = mapper
        self.encoder = encoder

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        made = [(where, self._mapped(where, row)) for where, row in samples]
        found = iter(self.encoder.encode([(where, fields) for where, fields in made if isinstance(fields, dict)]))
        return [next(found) if isinstance(fields, dict) else fields for _, fields in made]

    def _mapped(self, where: str, row: dict[str, Any]) -> dict[str, Any] | Tokens | BadSample:
        try:
            made = self.mapper(where, row)
            return self._tokens(where, made.fields) if isinstance(made, Inputs) else made
        except BadSample as error:
            return error

    def _tokens(self, where: str, fields: dict[str, Tensor]) -> Tokens:
        assert isinstance(self.mapper, Transform), "rows of a format make no sample as the model takes it"
        ids, labels = fields["input_ids"], fields["labels"]
        learned = labels != IGNORED
        if (
            self.mapper.kind not in ("text", "chat")
            or fields.keys() - {"input_ids", "labels"}
            or not torch.equal(labels[learned], ids[learned])
        ):
            raise WrongReturn(
                where,
                f"the transform {self.mapper.spec} returned {', '.join(sorted(fields))}: data.kind = {self.mapper.kind} "
                "keeps input_ids, and labels that are the same ids or -100; data.kind = multimodal takes other fields and labels",
            )
        return Tokens(ids.numpy(), learned.numpy())

    def fingerprint(self) -> list[Any]:
        return [*self.mapper.fingerprint(), self.encoder.fingerprint()]


def mappers_of(config: DataConfig) -> list[Mapper]:
    """What makes fields of the rows of each source: its transform, else what their format says."""
    return [
        Transform(one.transform, one, config.kind) if one.transform else Rows(one, config.kind)
        for one in config.sources
    ]


def check_first_rows(config: DataConfig, sources: Sequence[Source]) -> None:
    """Makes fields of the first rows of each source.

    Raises:
        DataError: there is no such transform, it returns what no row may become, or raises on every one of these rows;
            the columns of the first row, or of all of these, are of no format of the kind, or of several.
    """
    for mapper, source in zip(mappers_of(config), sources, strict=True):
        if isinstance(mapper, Transform):
            load(mapper.spec)
        failures, rows = [], 0
        for record, _ in itertools.islice(source.read(), FIRST_ROWS):
            try:
                fields = record.fields()
            except BadSample:
                continue  # counted or refused when the samples are made
            rows += 1
            try:
                mapper(record.where, fields)
            except WrongReturn as error:
                raise DataError(
                    f"{error}. data.sources[].transform is checked on the first rows of a source."
                ) from error
            except BadSample as error:
                if isinstance(mapper, Transform) or isinstance(error, WrongColumns):
                    failures.append(error)
        if failures and len(failures) == rows:
            raise DataError(f"{failures[0]}. So it is with the first {rows} rows of {source.name}.") from failures[0]


@functools.cache
def load(spec: str) -> Callable[[dict[str, Any]], Any]:
    """The function that `module:function` or `path/to/file.py:function` names.

    Raises:
        DataError: there is none.
    """
    place, _, name = spec.rpartition(":")
    try:
        module = _from_file(Path(place).expanduser()) if place.endswith(".py") else _imported(place)
    except FileNotFoundError as error:
        raise DataError(
            f"data.sources[].transform = {spec!r}: there is no file {place} (from {Path.cwd()})."
        ) from error
    except Exception as error:  # code of the user's own runs here
        raise DataError(
            f"data.sources[].transform = {spec!r}: {place} cannot be imported: {type(error).__name__}: {error}. A module is "
            f"looked for where Python looks and in {Path.cwd()}; path/to/file.py:function names a file."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(key for key, one in vars(module).items() if inspect.isfunction(one))
        raise DataError(
            f"data.sources[].transform = {spec!r}: {place} has no function {name!r}, only {', '.join(there) or 'none'}."
        )
    return function


def _imported(name: str) -> ModuleType:
    """A module, also of the folder that the run was started in."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def _from_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise FileNotFoundError(file)
    name = f"patchgen_transform_{digest(str(file.resolve()))[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "the name of the file ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _inputs(where: str, spec: str, made: Mapping[str, Any]) -> dict[str, Tensor]:
    """A sample of tensors, checked: tokens `(n,)`, positions `(n,)` or `(4, n)`, media as they are."""

    def wrong(reason: str) -> WrongReturn:
        return WrongReturn(where, f"the transform {spec} returned {reason}")

    if "labels" not in made:
        raise wrong(
            f"input_ids without labels, only {', '.join(sorted(made))}: labels are the ids, -100 where not learned"
        )
    fields: dict[str, Tensor] = {}
    for name, given in made.items():
        value = _tensor(given)
        if value is None:
            raise wrong(f"{name} as {_shown(given)}, expected numbers of one shape")
        fields[name] = value
    ids = fields["input_ids"] = (
        fields["input_ids"].reshape(-1) if 1 in fields["input_ids"].shape[:-1] else fields["input_ids"]
    )
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
                raise wrong(f"{name} of shape {tuple(value.shape)}, {value.dtype}, expected (n,) of whole numbers")
        out[name] = value
    mask = out.pop("attention_mask", None)
    if mask is not None and not bool(mask.bool().all()):
        raise wrong("an attention_mask with zeros: leave padding out")
    positions = out.get("position_ids")
    if positions is not None and positions.ndim == 2:
        if len(positions) not in (TEXT_ROWS - 1, TEXT_ROWS):
            raise wrong(f"position_ids of shape {tuple(positions.shape)}, expected (n,), (3, n) or (4, n)")
        if len(positions) < TEXT_ROWS:
            out["position_ids"] = torch.cat([torch.arange(len(ids))[None].to(positions.dtype), positions])
    out["input_ids"], out["labels"] = out["input_ids"].long(), out["labels"].long()
    if not bool((out["labels"][1:] != IGNORED).any()):
        raise BadSample(where, f"the transform {spec} returned labels of which none is learned")
    return out


def _tensor(value: Any) -> Tensor | None:
    """A tensor of numbers; None: it is no such thing."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return torch.from_numpy(array.copy()) if array.dtype.kind in "biuf" and array.size else None


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(sorted(map(str, value))) or 'nothing'}"
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "None"
