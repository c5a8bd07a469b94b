"""The first samples of a recipe's data, encoded as in training, without reading or caching the others."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from patchgen.runtime.data import DataConfig, DataError
from patchgen.runtime.data.config import Modality
from patchgen.runtime.data.encoders import make_encoder
from patchgen.runtime.data.formats import PAIR_COLUMNS
from patchgen.runtime.data.loader import documents_of
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.prepare import Prepare, Prepared, PrepareText
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.transform import FIRST_ROWS, ModelInputs, Transform, check_first_rows, mappers_of
from patchgen.runtime.train.setup import DataParts

TOKENS = 2048
"""Of all samples: enough for a meaningful loss, few enough to keep all logits."""
MAX_LENGTH = 512
MAX_RECORDS = 64
Pairs = Collection[tuple[str, str]]
ANY_TWO: Pairs = tuple(itertools.combinations(get_args(Modality), 2))
"""Pairs of modalities that share no row as long as the proof has not found which ones the model distinguishes."""


@dataclass(frozen=True)
class Sample:
    """One document as `collate` takes it.

    Attributes:
        where: the file and line that it was read from.
        is_cut: whether it was truncated here.
        modalities: which of image, video and audio it contains.
        half: the half of a pair that it is (`formats.PAIR_COLUMNS`); else empty.
        label: of the document; None: it has none.
        is_cut_in_run: whether a run truncates it as well.
    """

    where: str
    fields: dict[str, Any]
    is_cut: bool = False
    modalities: frozenset[str] = frozenset()
    half: str = ""
    label: float | None = None
    is_cut_in_run: bool = False

    @property
    def place(self) -> str:
        """Where it was read, and which half of a pair it is."""
        return f"{self.where}, {self.half}" if self.half else self.where

    @property
    def ids(self) -> list[int]:
        return self.fields["input_ids"].tolist()

    @property
    def labels(self) -> list[int]:
        return self.fields["labels"].tolist()


def first_samples(config: DataConfig, parts: DataParts, separate: Pairs = ANY_TWO) -> list[Sample]:
    """The first samples of all sources in turn, up to `TOKENS`; longer ones are cut as by `on_long: truncate`, unless that
    would cut off every label or a part of an image, video or sound.

    Args:
        separate: pairs of modalities that the model does not distinguish in one row: a sample with one is left out after
            a sample with the other.

    Raises:
        DataError: a sample is bad and the recipe does not skip bad ones, or all are.
    """
    sources = [open_source(source) for source in config.sources]
    check_first_rows(config, sources)
    truncated = _prepare(replace(config, max_length=min(config.longest, MAX_LENGTH), on_long="truncate"), parts)
    full = _prepare(config, parts)
    found, used, problems = [], 0, []
    for number, record in _in_turn(sources):
        prepared, is_cut_in_run = _truncated_or_full(truncated, full, number, record)
        outcome, where, reason = prepared.problem or ("", record.where, "")
        if not prepared.samples:
            problems.append(f"{where}: {reason}")
            if outcome == "bad" and config.on_bad == "error":
                raise DataError(f"{problems[-1]}. data.on_bad: skip leaves such samples out.")
        for fields in prepared.samples:
            if found and used + len(fields["input_ids"]) > min(TOKENS, config.tokens_per_batch):
                return found
            samples = _samples(record.where, fields, prepared, config, is_cut_in_run=is_cut_in_run)
            if all(fits_in_row_with(sample, found, separate) for sample in samples):
                found += samples
                used += len(fields["input_ids"])
    if not found:
        first = problems[0] if problems else "no record"
        raise DataError(f"No record of the data gives a sample: expected at least one, found {first}.")
    return found


def _samples(
    where: str, fields: dict[str, Any], prepared: Prepared, config: DataConfig, *, is_cut_in_run: bool
) -> list[Sample]:
    """The document of a sample, or the two of a pair; if it was cut, those of maximal length were."""
    halves = documents_of(fields)
    was_cut = prepared.problem is not None and prepared.problem[0] == "truncated"
    samples = []
    for half, name in zip(halves, PAIR_COLUMNS.get(config.kind, ("",)), strict=True):
        is_cut = was_cut and half["input_ids"].shape[-1] == min(config.longest, MAX_LENGTH)
        options = {"half": name, "label": fields.get("label"), "is_cut_in_run": is_cut and is_cut_in_run}
        samples.append(Sample(where, half, is_cut, prepared.modalities, **options))
    return samples


def fits_in_row_with(sample: Sample, others: Collection[Sample], separate: Pairs) -> bool:
    """Whether a row may contain a sample together with others, as the packer of a run decides it."""
    modalities = sample.modalities.union(*(other.modalities for other in others))
    return not others or not any(modalities.issuperset(pair) for pair in separate)


def first_texts(config: DataConfig) -> Iterator[str]:
    """All strings in the first records of the sources."""
    for _, record in itertools.islice(_in_turn([open_source(source) for source in config.sources]), FIRST_ROWS):
        with contextlib.suppress(BadSample):
            yield from _strings(record.fields())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def transform_outputs(config: DataConfig) -> Iterator[Sample]:
    """The samples that transforms return for the first rows."""
    sources = [open_source(source) for source in config.sources]
    for mapper, source in zip(mappers_of(config), sources, strict=True):
        rows: Iterable[tuple[Record, Any]] = source.read() if isinstance(mapper, Transform) else ()
        for record, _ in itertools.islice(rows, FIRST_ROWS):
            with contextlib.suppress(BadSample):
                made = mapper(record.where, record.fields())
                if isinstance(made, ModelInputs):
                    yield Sample(record.where, made.fields)


def _prepare(config: DataConfig, parts: DataParts) -> Prepare:
    if config.kind == "multimodal":
        return PrepareMultimodal(config, parts.processor, parts.position_function)
    encoders = [make_encoder(config, mapper, parts.tokenizer) for mapper in mappers_of(config)]
    return PrepareText(encoders, limit=config.longest, on_long=config.on_long)


def _truncated_or_full(truncated: Prepare, full: Prepare, number: int, record: Record) -> tuple[Prepared, bool]:
    """The truncated sample of a record, or the sample of a run if truncating spoils it; and whether a run truncates it too."""
    prepared = truncated(number, record)
    outcome = prepared.problem[0] if prepared.problem is not None else ""
    if outcome not in ("skipped", "truncated"):
        return prepared, False
    in_run = full(number, record)
    is_cut = in_run.problem is not None and in_run.problem[0] == "truncated"
    return in_run if outcome == "skipped" else prepared, is_cut


def _in_turn(sources: list[Any]):
    """The first records of all sources, one of each in turn, with the index of the source."""
    readers = [((number, record) for record, _ in source.read()) for number, source in enumerate(sources)]
    merged = (pair for turn in itertools.zip_longest(*readers) for pair in turn if pair is not None)
    return itertools.islice(merged, MAX_RECORDS)
