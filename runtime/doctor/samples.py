"""The first samples of a recipe's data, encoded as in training, without reading or caching the others."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from patchgen.runtime.data import DataConfig, DataError
from patchgen.runtime.data.build import make_preparer
from patchgen.runtime.data.config import Modality
from patchgen.runtime.data.formats import PAIR_COLUMNS
from patchgen.runtime.data.loader import documents_of
from patchgen.runtime.data.prepare import PreparedRecord, Preparer
from patchgen.runtime.data.problems import BadSample, bad_sample_error
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.transform import FIRST_ROWS, ModelInputs, Transform, check_first_rows, mappers_of
from patchgen.runtime.train.setup import DataParts

MAX_TOKENS = 2048
"""The most tokens of all samples together: enough for a meaningful loss, few enough to keep all logits."""
MAX_LENGTH = 512
"""The most tokens of one sample; longer ones are truncated."""
MAX_RECORDS = 64
ModalityPairs = Collection[tuple[str, str]]
ANY_TWO: ModalityPairs = tuple(itertools.combinations(get_args(Modality), 2))
"""All pairs of modalities: until the proof has found which ones the model distinguishes, no two share a row."""


@dataclass(frozen=True)
class Sample:
    """One document as `collate` takes it.

    Attributes:
        record: the file and line of its record.
        is_cut: whether it is truncated here.
        modalities: which of image, video and audio it contains.
        half: which half of a pair it is (`formats.PAIR_COLUMNS`); else empty.
        label: the class or score of the document; None: its tokens have labels.
        is_cut_in_run: whether a run truncates it.
    """

    record: str
    fields: dict[str, Any]
    is_cut: bool = False
    modalities: frozenset[str] = frozenset()
    half: str = ""
    label: float | None = None
    is_cut_in_run: bool = False

    @property
    def name(self) -> str:
        """Its record, and which half of a pair it is: "rows.jsonl:3, chosen"."""
        return f"{self.record}, {self.half}" if self.half else self.record

    @property
    def ids(self) -> list[int]:
        return self.fields["input_ids"].tolist()

    @property
    def labels(self) -> list[int]:
        return self.fields["labels"].tolist()


def first_samples(config: DataConfig, parts: DataParts, incompatible: ModalityPairs = ANY_TWO) -> list[Sample]:
    """The first samples of all sources in turn, at least one and at most `MAX_TOKENS` or one batch in total, from at most
    `MAX_RECORDS` records; samples longer than `MAX_LENGTH` are truncated, unless that would cut off every label or a part of an
    image, video or audio.

    Args:
        incompatible: pairs of modalities that the model does not distinguish in one row: a sample with one is left out
            after a sample with the other.

    Raises:
        DataError: a sample is bad and the recipe does not skip bad ones, or every sample is bad.
    """
    sources = [open_source(source) for source in config.sources]
    check_first_rows(config, sources)
    short_config = replace(config, max_length=min(config.length_limit, MAX_LENGTH), on_long="truncate")
    encoders = parts.tokenizer, parts.processor, parts.position_function
    prepare_short, prepare_as_in_run = make_preparer(short_config, *encoders), make_preparer(config, *encoders)
    samples, num_tokens, problems = [], 0, []
    for source_index, record in _in_turn(sources):
        prepared, in_run = _prepare_for_doctor(prepare_short, prepare_as_in_run, source_index, record)
        outcome, where, reason = prepared.problem or ("", record.where, "")
        if not prepared.samples:
            problems.append(f"{where}: {reason}")
            if outcome == "bad" and config.on_bad == "error":
                raise bad_sample_error(where, reason)
        for fields in prepared.samples:
            if samples and num_tokens + len(fields["input_ids"]) > min(MAX_TOKENS, config.tokens_per_batch):
                return samples
            documents = _samples_of(record.where, fields, prepared, in_run, config)
            if all(fits_in_row_with(document, samples, incompatible) for document in documents):
                samples += documents
                num_tokens += len(fields["input_ids"])
    if not samples:
        first = problems[0] if problems else "the sources are empty"
        raise DataError(f"None of the first records of the data gives a sample. First problem: {first}.")
    return samples


def _samples_of(
    record: str, fields: dict[str, Any], prepared: PreparedRecord, in_run: PreparedRecord | None, config: DataConfig
) -> list[Sample]:
    """The document of a record, or the two of a pair.

    Args:
        in_run: the record as the run prepares it; None: the run does not truncate it.
    """
    limit = config.length_limit if prepared is in_run else min(config.length_limit, MAX_LENGTH)
    are_cut = _are_cut(prepared, fields, limit)
    are_cut_in_run = [False] * len(are_cut)
    if in_run is not None and in_run.samples:
        are_cut_in_run = _are_cut(in_run, in_run.samples[0], config.length_limit)
    half_names, label = PAIR_COLUMNS.get(config.kind, ("",)), fields.get("label")
    return [
        Sample(record, document, is_cut, prepared.modalities, half_name, label, is_cut_in_run)
        for document, half_name, is_cut, is_cut_in_run in zip(
            documents_of(fields), half_names, are_cut, are_cut_in_run, strict=True
        )
    ]


def _are_cut(prepared: PreparedRecord, fields: dict[str, Any], limit: int) -> list[bool]:
    """Which documents of a sample were truncated; if any was, those of exactly the limit count as cut."""
    was_cut = prepared.problem is not None and prepared.problem[0] == "truncated"
    return [was_cut and document["input_ids"].shape[-1] == limit for document in documents_of(fields)]


def fits_in_row_with(sample: Sample, others: Collection[Sample], incompatible: ModalityPairs) -> bool:
    """Whether a row may contain a sample together with others, decided as by the packer of a run."""
    modalities = sample.modalities.union(*(other.modalities for other in others))
    return not others or not any(modalities.issuperset(pair) for pair in incompatible)


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
    """For the first rows: the inputs with labels of transforms that return token ids."""
    sources = [open_source(source) for source in config.sources]
    for mapper, source in zip(mappers_of(config), sources, strict=True):
        rows: Iterable[tuple[Record, Any]] = source.read() if isinstance(mapper, Transform) else ()
        for record, _ in itertools.islice(rows, FIRST_ROWS):
            with contextlib.suppress(BadSample):
                output = mapper(record.where, record.fields())
                if isinstance(output, ModelInputs):
                    yield Sample(record.where, output.fields)


def _prepare_for_doctor(
    prepare_short: Preparer, prepare_as_in_run: Preparer, source_index: int, record: Record
) -> tuple[PreparedRecord, PreparedRecord | None]:
    """The truncated sample of a record, or the sample as the run would prepare it, if truncating would cut off every label or a
    part of an image, video or audio; and the latter, unless nothing had to be truncated."""
    prepared = prepare_short(source_index, record)
    outcome = prepared.problem[0] if prepared.problem is not None else ""
    if outcome not in ("skipped", "truncated"):
        return prepared, None
    in_run = prepare_as_in_run(source_index, record)
    return in_run if outcome == "skipped" else prepared, in_run


def _in_turn(sources: list[Any]):
    """The first records of all sources, one of each in turn, with the index of the source."""
    readers = [((index, record) for record, _ in source.read()) for index, source in enumerate(sources)]
    merged = (pair for turn in itertools.zip_longest(*readers) for pair in turn if pair is not None)
    return itertools.islice(merged, MAX_RECORDS)
