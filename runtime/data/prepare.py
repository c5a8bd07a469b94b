"""Turns a record into samples that fit into a batch, in the data workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from patchgen.runtime.data.collate import text_sample
from patchgen.runtime.data.config import OnLong
from patchgen.runtime.data.loader import join_pair
from patchgen.runtime.data.problems import BadSample, DataError, Outcome, long_reason, too_long_error, too_long_reason
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.text import Encoder, Tokens


class Problem(NamedTuple):
    """A record that is bad, skipped or truncated: file and line, and why."""

    outcome: Outcome
    where: str
    reason: str


@dataclass(frozen=True)
class PreparedRecord:
    """The samples of a record for `loader.make_batch`, and a problem to count.

    `modalities`: which of image, video and audio the samples have.
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    problem: Problem | None = None
    modalities: frozenset[str] = frozenset()


class Preparer(Protocol):
    """Turns a record into samples. Picklable: runs in worker processes."""

    def __call__(self, source_index: int, record: Record) -> PreparedRecord:
        """Raises DataError for a sample that is too long if `on_long` is error."""
        ...


class PrepareText:
    """Samples of all kinds except multimodal ones.

    Args:
        encoders: of the sources, in their order.
        limit: the most tokens of a document.
        on_long: what happens to a sample with a longer document.
        skip_cut_targets: skip samples that would lose a target by truncation.
    """

    def __init__(
        self, encoders: Sequence[Encoder], *, limit: int, on_long: OnLong, skip_cut_targets: bool = False
    ) -> None:
        self.encoders = encoders
        self.limit = limit
        self.on_long = on_long
        self.skip_cut_targets = skip_cut_targets

    def __call__(self, source_index: int, record: Record) -> PreparedRecord:
        encoded = self._encode(source_index, record)
        if isinstance(encoded, BadSample):
            return PreparedRecord(problem=Problem("bad", encoded.where, encoded.reason))
        longest = max(len(document.ids) for document in _documents(encoded))
        is_pair = encoded.split is not None
        if longest <= self.limit:
            return PreparedRecord([_truncated_sample(encoded, self.limit)])
        if self.on_long == "split":
            return PreparedRecord(
                [_piece(encoded, start, start + self.limit) for start in range(0, longest, self.limit)]
            )
        if self.on_long == "error":
            is_plain_text = encoded.targets is None and encoded.label is None and not is_pair
            raise refusal_of_long_sample(record.where, longest, self.limit, can_split=is_plain_text, is_pair=is_pair)
        truncates = self.on_long == "truncate"
        keeps_a_loss = (
            truncates
            and _has_loss(encoded, self.limit)
            and not (self.skip_cut_targets and _loses_targets(encoded, self.limit))
        )
        outcome: Outcome = "truncated" if keeps_a_loss else "skipped"
        reason = reason_of_outcome(
            longest,
            self.limit,
            truncates=truncates,
            outcome=outcome,
            skip_cut_targets=self.skip_cut_targets,
            is_pair=is_pair,
        )
        problem = Problem(outcome, record.where, reason)
        return PreparedRecord([_truncated_sample(encoded, self.limit)] if outcome == "truncated" else [], problem)

    def _encode(self, source_index: int, record: Record) -> Tokens | BadSample:
        try:
            fields = record.fields()
        except BadSample as error:
            return error
        return self.encoders[source_index].encode([(record.where, fields)])[0]


def _documents(tokens: Tokens) -> list[Tokens]:
    """The documents of a sample: one, or the two of a pair."""
    if tokens.split is None:
        return [tokens]
    slices = [slice(None, tokens.split), slice(tokens.split, None)]
    return [Tokens(tokens.ids[part], None if tokens.targets is None else tokens.targets[part]) for part in slices]


def _has_loss(tokens: Tokens, limit: int) -> bool:
    """Whether each document has a loss among its first `limit` tokens, the first of which is not predicted."""
    return all(document.targets is None or bool(document.targets[1:limit].any()) for document in _documents(tokens))


def _loses_targets(tokens: Tokens, limit: int) -> bool:
    """Whether a document of a sample that is too long has a loss after its first `limit` tokens."""
    return any(document.targets is None or bool(document.targets[limit:].any()) for document in _documents(tokens))


PAIR_PREFIX = "its longer text has "


def refusal_of_long_sample(
    where: str, length: int, limit: int, *, can_split: bool, is_pair: bool = False
) -> DataError:
    """The error for a sample that is too long under `on_long: error`; only plain text can be split."""
    if can_split:
        return too_long_error(where, length, limit)
    reason = PAIR_PREFIX * is_pair + too_long_reason(length, limit)
    return DataError(f"{where}: {reason}. To fix: set data.on_long to skip or truncate, or raise the limit.")


def reason_of_outcome(
    length: int, limit: int, *, truncates: bool, outcome: Outcome, skip_cut_targets: bool, is_pair: bool
) -> str:
    """Why a sample that is too long is truncated or skipped: as `problems.long_reason`; with `skip_cut_targets` also because a
    target would be cut off."""
    if skip_cut_targets and truncates and outcome == "skipped":
        return f"{too_long_reason(length, limit)}, and not all tokens with a loss are among the first {limit}"
    return PAIR_PREFIX * is_pair + long_reason(length, limit, truncates=truncates, outcome=outcome)


def _truncated_sample(tokens: Tokens, limit: int) -> dict[str, Any]:
    """The first `limit` tokens of each document, for `loader.make_batch`."""
    documents = [_piece(document, 0, limit) for document in _documents(tokens)]
    sample = documents[0] if len(documents) == 1 else join_pair(*documents)
    return sample if tokens.label is None else {**sample, "label": tokens.label}


def _piece(tokens: Tokens, start: int, end: int) -> dict[str, Any]:
    targets = None if tokens.targets is None else torch.from_numpy(tokens.targets[start:end])
    return text_sample(torch.from_numpy(tokens.ids[start:end]), targets)
