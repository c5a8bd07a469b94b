"""A preview of the batches of a loader, document by document and token by token, with the tokens that have a loss.

These are determined by the shifted labels of `parallel.batch.slice_batch`, which a training step uses: the preview shows
exactly what is trained on.

    preview = make_preview(loader, config, tokenizer, rows=2)     # for `preview_text.as_text` or `preview_page.as_page`
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.decoder import Decoder, RoleRun
from patchgen.runtime.data.formats import PAIR_COLUMNS
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.loader import PADDING, Loader, SourceStatistics
from patchgen.runtime.data.problems import ALL_USED, BadSample
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.roles import tokens_with_roles
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.transform import Mapper, ModelInputs, mappers_of
from patchgen.runtime.parallel.batch import IGNORED, slice_batch

TOKEN_FIELDS = ("input_ids", "labels", "position_ids", "real_tokens", "cu_seq_lens_q", "cu_seq_lens_k")
RoleFinder = Callable[[int, Record, str], "tuple[np.ndarray, list[str]] | None"]


@dataclass(frozen=True)
class Document:
    """One document of a packed row.

    Attributes:
        source, where: its source, file and line; empty for padding.
        half: of a pair, the column of this document ("chosen", "rejected", "anchor", "positive"); otherwise empty.
        label: of its sample, if it has one.
        start: its first token in the row.
        tokens, learned: the number of tokens, and of those with a loss.
        role_runs: its tokens, grouped by role.
    """

    source: str
    where: str
    half: str
    label: float | None
    start: int
    tokens: int
    learned: int
    role_runs: list[RoleRun]

    @property
    def learned_runs(self) -> list[tuple[int, int]]:
        """`(first token, tokens)` of each run of tokens with a loss."""
        units = [unit for run in self.role_runs for unit in run.units]
        runs = [list(run) for is_learned, run in itertools.groupby(units, lambda unit: unit.learned) if is_learned]
        return [(run[0].start, sum(len(unit.ids) for unit in run)) for run in runs]


@dataclass(frozen=True)
class Row:
    """One packed row, a micro-batch: its documents, and the shapes of its other fields."""

    tokens: int
    documents: list[Document]
    fields: dict[str, tuple[int, ...]]

    @property
    def learned(self) -> int:
        return sum(document.learned for document in self.documents)

    @property
    def padding(self) -> int:
        return sum(document.tokens for document in self.documents if not document.source)


@dataclass(frozen=True)
class Figures:
    """The number of documents, tokens and tokens with a loss of one source."""

    source: str
    documents: int
    tokens: int
    learned: int


@dataclass(frozen=True)
class Preview:
    """The first packed rows of a loader, and figures.

    Attributes:
        kind: of the data.
        budget: the most tokens of a row.
        figures: by source, of `scope`: all samples, or the rows shown.
        histogram: `(first length, last length, documents)` of `scope`.
        problems: skipped and truncated samples, in one line; empty if there are none.
    """

    kind: str
    budget: int
    rows: list[Row]
    figures: list[Figures]
    scope: str
    histogram: list[tuple[int, int, int]]
    problems: str
    sources: list[str] = field(default_factory=list)


def make_preview(
    loader: Loader, config: DataConfig, tokenizer: Any, *, rows: int, processor: Any = None, preparer: Any = None
) -> Preview:
    """Reads the next `rows` packed rows of a loader.

    Args:
        config: of the loader.
        processor: its placeholders are shown as media.
        preparer: `PrepareMultimodal` of the loader, which finds the roles of its samples.
    """
    decoder = Decoder(tokenizer, processor)
    find_roles = _role_finder(config, tokenizer, preparer)
    batches = [(batch, loader.places()) for batch in itertools.islice(loader, rows)]
    records = _records(config, batches)
    preview_rows = [_row(batch, places, config, decoder, records, find_roles) for batch, places in batches]
    loader_statistics = loader.statistics()
    statistics = loader_statistics or _statistics_of_rows(preview_rows, config.source_names)
    figures = [
        Figures(name, len(of_source.lengths), int(of_source.lengths.sum()), of_source.learned)
        for name, of_source in zip(config.source_names, statistics, strict=True)
    ]
    problems = loader.counters.summary()
    return Preview(
        kind=config.kind,
        budget=config.tokens_per_batch,
        rows=preview_rows,
        figures=figures,
        scope="all samples" if loader_statistics is not None else f"the {len(preview_rows)} rows shown",
        histogram=histogram(np.concatenate([of_source.lengths for of_source in statistics])),
        problems="" if problems == ALL_USED else problems,
        sources=config.source_names,
    )


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """`(first, last, documents)` by powers of two, without empty entries at the ends."""
    if not len(lengths):
        return []
    powers = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(powers)
    return [(2**power, 2 ** (power + 1) - 1, int(counts[power])) for power in range(powers.min(), len(counts))]


# --------------------------------------------------------------------------------------------------------- one row


def _row(
    batch: Mapping[str, Any],
    places: Sequence[str],
    config: DataConfig,
    decoder: Decoder,
    records: Mapping[tuple[int, str], Record],
    find_roles: RoleFinder,
) -> Row:
    bounds, sources = batch["cu_seq_lens_q"].tolist(), batch["document_sources"].tolist()
    unsliced = slice_batch(dict(batch), sp=1, sp_rank=0)
    ids, targets = batch["input_ids"][0].tolist(), unsliced["shift_labels"][0].tolist()
    learned = [False, *(target != IGNORED for target in targets[:-1])]
    other_targets = [None, *(t if t not in (IGNORED, i) else None for t, i in zip(targets[:-1], ids[1:], strict=True))]
    labels = batch["document_labels"].tolist() if "document_labels" in batch else [None] * len(sources)
    names, halves = config.source_names, PAIR_COLUMNS.get(config.kind, ("",))
    documents = []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        window, source = slice(start, end), sources[index]
        is_padding = source == PADDING
        place, half = ("", "") if is_padding else (places[index // len(halves)], halves[index % len(halves)])
        roles = None if is_padding else _roles(ids[window], source, records.get((source, place)), half, find_roles)
        documents.append(
            Document(
                source="" if is_padding else names[source],
                where=place,
                half=half,
                label=None if is_padding else labels[index],
                start=start,
                tokens=end - start,
                learned=sum(learned[window]),
                role_runs=[]
                if is_padding
                else decoder.role_runs(ids[window], learned[window], other_targets[window], roles),
            )
        )
    shapes = {
        name: tuple(value.shape)
        for name, value in batch.items()
        if name not in TOKEN_FIELDS and not name.startswith("document_") and hasattr(value, "shape")
    }
    return Row(bounds[-1], documents, shapes)


def _statistics_of_rows(rows: Sequence[Row], names: Sequence[str]) -> list[SourceStatistics]:
    statistics = []
    for name in names:
        of_source = [document for row in rows for document in row.documents if document.source == name]
        lengths = np.array([document.tokens for document in of_source], dtype=np.int64)
        statistics.append(SourceStatistics(lengths, sum(document.learned for document in of_source)))
    return statistics


# ----------------------------------------------------------------------------------------------------------- roles


def _records(
    config: DataConfig, batches: Sequence[tuple[Mapping[str, Any], Sequence[str]]]
) -> dict[tuple[int, str], Record]:
    """The records of the samples in batches, by source and place."""
    halves = len(PAIR_COLUMNS.get(config.kind, ("",)))
    samples = {
        (int(source), place)
        for batch, places in batches
        for source, place in zip(batch["document_sources"][::halves], places, strict=False)
    }
    record_of_place = {}
    for source_index, source_config in enumerate(config.sources):
        missing = {place for source, place in samples if source == source_index}
        records = (
            (record for record, _ in open_source(source_config).read()) if missing and config.kind != "text" else ()
        )
        for record in records:
            if record.where in missing:
                missing.remove(record.where)
                record_of_place[source_index, record.where] = record
            if not missing:
                break
    return record_of_place


def _roles(
    ids: Sequence[int], source: int, record: Record | None, half: str, find_roles: RoleFinder
) -> list[str] | None:
    """The role of each token; None: not known. A truncated sample is a prefix of what `find_roles` encodes."""
    try:
        ids_and_roles = find_roles(source, record, half) if record is not None else None
    except BadSample:
        return None
    return (
        ids_and_roles[1][: len(ids)]
        if ids_and_roles is not None and ids_and_roles[0][: len(ids)].tolist() == list(ids)
        else None
    )


def _role_finder(config: DataConfig, tokenizer: Any, preparer: Any) -> RoleFinder:
    """A function that returns `(ids, roles)` of a record, or None if it has no roles."""
    mappers: list[Mapper] = mappers_of(config)
    literals = Literals(tokenizer, kept=config.special_tokens)

    def find_roles(source: int, record: Record, half: str) -> tuple[np.ndarray, list[str]] | None:
        fields = mappers[source](record.where, record.fields())
        if isinstance(fields, ModelInputs) or not isinstance(messages := fields.get(half or "messages"), list):
            return None
        if preparer is not None:
            return preparer.ids_and_roles(source, record.where, fields)
        tools = fields.get("tools") or None
        template = tokenizer.get_chat_template(None, tools=tools)
        return tokens_with_roles(messages, tools, template=template, literals=literals, where=record.where)

    return find_roles
