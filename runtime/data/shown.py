"""What is learned, to be looked at: the batches of a loader, document by document and token by token.

A token counts as learned where the loss reads it: by the shifted labels of `parallel.batch.slice_batch`, which is what a
step takes. So what is shown here is what is trained, whatever went before.

    shown = show(loader, config, tokenizer, rows=2)     # `show_text.as_text`, `show_page.as_page` make it readable
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.formats import HALVES
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.loader import PADDING, Loader
from patchgen.runtime.data.pieces import Decoder, Piece
from patchgen.runtime.data.problems import ALL_USED, BadSample
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.roles import roles_of
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.transform import Inputs, Mapper, mappers_of
from patchgen.runtime.parallel.batch import IGNORED, slice_batch

NOT_OF_TOKENS = ("input_ids", "labels", "position_ids", "real_tokens", "cu_seq_lens_q", "cu_seq_lens_k")
RoleFinder = Callable[[int, Record, str], "tuple[np.ndarray, list[str]] | None"]


@dataclass(frozen=True)
class Document:
    """One document of a packed row.

    Attributes:
        source, where: what it is of, file and line; empty for padding.
        half: "chosen" or "rejected" of a pair.
        label: its number, where it has one.
        start: its first token in the row.
        tokens, learned: counts.
        pieces: its text in runs of one role.
    """

    source: str
    where: str
    half: str
    label: float | None
    start: int
    tokens: int
    learned: int
    pieces: list[Piece]

    @property
    def learned_runs(self) -> list[tuple[int, int]]:
        """`(first token, tokens)` of each run of what is learned."""
        units = [unit for piece in self.pieces for unit in piece.units]
        runs = [list(own) for is_learned, own in itertools.groupby(units, lambda unit: unit.learned) if is_learned]
        return [(run[0].start, sum(len(unit.ids) for unit in run)) for run in runs]


@dataclass(frozen=True)
class Row:
    """One packed row, the micro-batch of one step of one batch group: its documents, and its other fields with their shapes."""

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
    """Of one source: documents, their tokens, those that are learned."""

    source: str
    documents: int
    tokens: int
    learned: int


@dataclass(frozen=True)
class Shown:
    """What `show` found.

    Attributes:
        kind: of the data.
        budget: most tokens of a row.
        rows: the first packed rows.
        figures: by source, and `scope` says of what: all samples, or the rows shown.
        histogram: `(first length, last length, documents)` of the same.
        problems: what was left out, in one line; empty if nothing was.
    """

    kind: str
    budget: int
    rows: list[Row]
    figures: list[Figures]
    scope: str
    histogram: list[tuple[int, int, int]]
    problems: str
    sources: list[str] = field(default_factory=list)


def show(
    loader: Loader, config: DataConfig, tokenizer: Any, *, rows: int, processor: Any = None, prepare: Any = None
) -> Shown:
    """Reads the next `rows` packed rows of a loader.

    Args:
        config: that the loader was built from.
        processor: whose placeholders of items are told apart from text.
        prepare: `PrepareMultimodal` of the loader, which finds the roles of its samples.
    """
    decoder = Decoder(tokenizer, processor)
    find = _role_finder(config, tokenizer, prepare)
    batches = [(batch, loader.places()) for batch in itertools.islice(loader, rows)]
    wanted = _records(config, batches)
    found = [_row(batch, places, config, decoder, wanted, find) for batch, places in batches]
    census = loader.census()
    if census is None:
        figures, lengths = _figures_of_rows(found, config.source_names)
    else:
        pairs = zip(config.source_names, census, strict=True)
        figures = [Figures(name, len(one.lengths), int(one.lengths.sum()), one.learned) for name, one in pairs]
        lengths = np.concatenate([one.lengths for one in census])
    problems = loader.counters.summary()
    return Shown(
        kind=config.kind,
        budget=config.tokens_per_batch,
        rows=found,
        figures=figures,
        scope="all samples" if census is not None else f"the {len(found)} rows shown",
        histogram=histogram(lengths),
        problems="" if problems == ALL_USED else problems,
        sources=config.source_names,
    )


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """`(first, last, documents)` of lengths that double from one entry to the next; none empty at either end."""
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
    find: RoleFinder,
) -> Row:
    bounds, sources = batch["cu_seq_lens_q"].tolist(), batch["document_sources"].tolist()
    rows = slice_batch(dict(batch), sp=1, sp_rank=0)
    ids, targets = batch["input_ids"][0].tolist(), rows["shift_labels"][0].tolist()
    learned = [False, *(target != IGNORED for target in targets[:-1])]
    others = [None, *(t if t not in (IGNORED, i) else None for t, i in zip(targets[:-1], ids[1:], strict=True))]
    labels = batch["document_labels"].tolist() if "document_labels" in batch else [None] * len(sources)
    names, halves = config.source_names, HALVES.get(config.kind, ("",))
    documents = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        own, source = slice(start, end), sources[number]
        padding = source == PADDING
        place, half = ("", "") if padding else (places[number // len(halves)], halves[number % len(halves)])
        roles = None if padding else _roles(ids[own], source, records.get((source, place)), half, find)
        documents.append(
            Document(
                source="" if padding else names[source],
                where=place,
                half=half,
                label=None if padding else labels[number],
                start=start,
                tokens=end - start,
                learned=sum(learned[own]),
                pieces=[] if padding else decoder.pieces(ids[own], learned[own], others[own], roles),
            )
        )
    shapes = {
        name: tuple(value.shape)
        for name, value in batch.items()
        if name not in NOT_OF_TOKENS and not name.startswith("document_") and hasattr(value, "shape")
    }
    return Row(bounds[-1], documents, shapes)


def _figures_of_rows(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[Figures], np.ndarray]:
    documents = [document for row in rows for document in row.documents if document.source]
    figures = []
    for name in names:
        own = [one for one in documents if one.source == name]
        figures.append(Figures(name, len(own), sum(one.tokens for one in own), sum(one.learned for one in own)))
    return figures, np.array([one.tokens for one in documents], dtype=np.int64)


# ----------------------------------------------------------------------------------------------------------- roles


def _records(
    config: DataConfig, batches: Sequence[tuple[Mapping[str, Any], Sequence[str]]]
) -> dict[tuple[int, str], Record]:
    """The records of the samples of some batches, by the number of their source and their place."""
    halves = len(HALVES.get(config.kind, ("",)))
    wanted = {
        (int(source), place)
        for batch, places in batches
        for source, place in zip(batch["document_sources"][::halves], places, strict=False)
    }
    found = {}
    for number, described in enumerate(config.sources):
        missing = {place for source, place in wanted if source == number}
        records = (record for record, _ in open_source(described).read()) if missing and config.kind != "text" else ()
        for record in records:
            if record.where in missing:
                missing.remove(record.where)
                found[number, record.where] = record
            if not missing:
                break
    return found


def _roles(ids: Sequence[int], source: int, record: Record | None, half: str, find: RoleFinder) -> list[str] | None:
    """The role of each token; None: they are not known. A sample that was cut is the beginning of what is found."""
    try:
        found = find(source, record, half) if record is not None else None
    except BadSample:
        return None
    return found[1][: len(ids)] if found is not None and found[0][: len(ids)].tolist() == list(ids) else None


def _role_finder(config: DataConfig, tokenizer: Any, prepare: Any) -> RoleFinder:
    """What finds the roles of a record's tokens: `(ids, roles)`, or None where it has none."""
    mappers: list[Mapper] = mappers_of(config)
    literals = Literals(tokenizer, kept=config.special_tokens)

    def find(source: int, record: Record, half: str) -> tuple[np.ndarray, list[str]] | None:
        fields = mappers[source](record.where, record.fields())
        if isinstance(fields, Inputs) or not isinstance(messages := fields.get(half or "messages"), list):
            return None
        if prepare is not None:
            return prepare.roles(source, record.where, fields)
        tools = fields.get("tools") or None
        template = tokenizer.get_chat_template(None, tools=tools)
        return roles_of(messages, tools, template=template, literals=literals, where=record.where)

    return find
