"""The first samples of a recipe's data, made as training makes them, without reading or caching the rest."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from patchgen.runtime.data import DataConfig, DataError
from patchgen.runtime.data.encoders import make_encoder
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.prepare import Prepare, PrepareText
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.transform import FIRST_ROWS, Inputs, Transform, check_first_rows, mappers_of
from patchgen.runtime.train.setup import DataParts

TOKENS = 2048
"""Of all samples together: enough for a loss that means something, few enough for whole logits."""
LONGEST = 512
MOST_RECORDS = 64


@dataclass(frozen=True)
class Sample:
    """One sample as `collate` takes it, the place that it was read from, and whether its end was cut off."""

    where: str
    fields: dict[str, Any]
    is_cut: bool = False

    @property
    def ids(self) -> list[int]:
        return self.fields["input_ids"].tolist()

    @property
    def labels(self) -> list[int]:
        return self.fields["labels"].tolist()


def first_samples(config: DataConfig, parts: DataParts) -> list[Sample]:
    """The first samples of every source in turn, `TOKENS` in all; longer ones are cut as `on_long: truncate` does.

    Raises:
        DataError: a sample cannot be read where the recipe refuses that, or none can.
    """
    config = replace(config, max_length=min(config.longest, LONGEST), on_long="truncate")
    sources = [open_source(source) for source in config.sources]
    check_first_rows(config, sources)
    prepare = _prepare(config, parts)
    found, used, problems = [], 0, []
    for number, record in _in_turn(sources):
        prepared = prepare(number, record)
        outcome, where, reason = prepared.problem or ("", record.where, "")
        if not prepared.samples:
            problems.append(f"{where}: {reason}")
            if outcome == "bad" and config.on_bad == "error":
                raise DataError(f"{problems[-1]}. data.on_bad: skip leaves such samples out.")
        for fields in prepared.samples:
            if found and used + len(fields["input_ids"]) > min(TOKENS, config.tokens_per_batch):
                return found
            found.append(Sample(record.where, fields, is_cut=outcome == "truncated"))
            used += len(fields["input_ids"])
    if not found:
        raise DataError(f"No sample could be made of the data. The first: {problems[0] if problems else 'no record'}.")
    return found


def first_texts(config: DataConfig) -> Iterator[str]:
    """All strings in the first records of the sources, as they stand there."""
    for _, record in itertools.islice(_in_turn([open_source(source) for source in config.sources]), FIRST_ROWS):
        with contextlib.suppress(BadSample):
            yield from _strings(record.fields())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def own_samples(config: DataConfig) -> Iterator[Sample]:
    """The first rows that transforms make samples of, as they hand them over."""
    sources = [open_source(source) for source in config.sources]
    for mapper, source in zip(mappers_of(config), sources, strict=True):
        for record, _ in itertools.islice(source.read() if isinstance(mapper, Transform) else (), FIRST_ROWS):
            with contextlib.suppress(BadSample):
                made = mapper(record.where, record.fields())
                if isinstance(made, Inputs):
                    yield Sample(record.where, made.fields)


def _prepare(config: DataConfig, parts: DataParts) -> Prepare:
    if config.kind == "multimodal":
        return PrepareMultimodal(config, parts.processor, parts.position_function)
    encoders = [make_encoder(config, mapper, parts.tokenizer) for mapper in mappers_of(config)]
    return PrepareText(encoders, limit=config.longest, on_long=config.on_long)


def _in_turn(sources: list[Any]):
    """The first records of all sources, one of each in turn, with the number of their source."""
    readers = [((number, record) for record, _ in source.read()) for number, source in enumerate(sources)]
    merged = (pair for turn in itertools.zip_longest(*readers) for pair in turn if pair is not None)
    return itertools.islice(merged, MOST_RECORDS)
