"""Turns a record into samples that fit into a batch, in the data workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from patchgen.runtime.data.collate import text_sample
from patchgen.runtime.data.config import OnLong
from patchgen.runtime.data.loader import join_pair
from patchgen.runtime.data.problems import BadSample, Outcome, long_reason, too_long_error, too_long_reason
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.text import Encoder, Tokens


@dataclass(frozen=True)
class Prepared:
    """The samples of a record for `loader.make_batch`, and a problem to count: `(outcome, where, reason)`.

    `modalities`: which of image, video and audio the samples have.
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    problem: tuple[Outcome, str, str] | None = None
    modalities: frozenset[str] = frozenset()


class Prepare(Protocol):
    """Turns a record into samples. Picklable: runs in worker processes."""

    def __call__(self, source: int, record: Record) -> Prepared:
        """Raises DataError for a sample that is too long if `on_long` is error."""
        ...


class PrepareText:
    """Samples of all kinds except multimodal ones.

    Args:
        encoders: by source.
        limit: the most tokens of a document.
        keeps_targets: skip samples that would lose a target by truncation.
    """

    def __init__(
        self, encoders: Sequence[Encoder], *, limit: int, on_long: OnLong, keeps_targets: bool = False
    ) -> None:
        self.encoders = encoders
        self.limit = limit
        self.on_long = on_long
        self.keeps_targets = keeps_targets

    def __call__(self, source: int, record: Record) -> Prepared:
        encoded = self._encode(source, record)
        if isinstance(encoded, BadSample):
            return Prepared(problem=("bad", encoded.where, encoded.reason))
        length = max(len(half.ids) for half in _halves(encoded))
        if length <= self.limit:
            return Prepared([_sample(encoded, self.limit)])
        if self.on_long == "split":
            return Prepared([_piece(encoded, start, start + self.limit) for start in range(0, length, self.limit)])
        if self.on_long == "error":
            raise too_long_error(record.where, length, self.limit)
        truncates = self.on_long == "truncate"
        is_usable = (
            truncates
            and _has_loss(encoded, self.limit)
            and not (self.keeps_targets and _loses_targets(encoded, self.limit))
        )
        outcome: Outcome = "truncated" if is_usable else "skipped"
        reason = long_sample_reason(
            length, self.limit, truncates=truncates, outcome=outcome, keeps_targets=self.keeps_targets
        )
        problem = (outcome, record.where, reason)
        return Prepared([_sample(encoded, self.limit)] if outcome == "truncated" else [], problem)

    def _encode(self, source: int, record: Record) -> Tokens | BadSample:
        try:
            fields = record.fields()
        except BadSample as error:
            return error
        return self.encoders[source].encode([(record.where, fields)])[0]


def _halves(tokens: Tokens) -> list[Tokens]:
    """The documents of a sample: one, or the two of a pair."""
    if tokens.split is None:
        return [tokens]
    slices = [slice(None, tokens.split), slice(tokens.split, None)]
    return [Tokens(tokens.ids[half], None if tokens.targets is None else tokens.targets[half]) for half in slices]


def _has_loss(tokens: Tokens, limit: int) -> bool:
    """Whether each document has a loss among its first `limit` tokens, the first of which is not predicted."""
    return all(half.targets is None or bool(half.targets[1:limit].any()) for half in _halves(tokens))


def _loses_targets(tokens: Tokens, limit: int) -> bool:
    """Whether a document has a loss after its first `limit` tokens."""
    return any(half.targets is None or bool(half.targets[limit:].any()) for half in _halves(tokens))


def long_sample_reason(length: int, limit: int, *, truncates: bool, outcome: Outcome, keeps_targets: bool) -> str:
    """As `long_reason`; with `keeps_targets`, samples are also skipped because a target would be cut off."""
    if keeps_targets and truncates and outcome == "skipped":
        return f"{too_long_reason(length, limit)}, and not all tokens with a loss are among the first {limit}"
    return long_reason(length, limit, truncates=truncates, outcome=outcome)


def _sample(tokens: Tokens, limit: int) -> dict[str, Any]:
    """The first `limit` tokens of each document, for `loader.make_batch`."""
    documents = [_piece(half, 0, limit) for half in _halves(tokens)]
    sample = documents[0] if len(documents) == 1 else join_pair(*documents)
    return sample if tokens.label is None else {**sample, "label": tokens.label}


def _piece(tokens: Tokens, start: int, end: int) -> dict[str, Any]:
    targets = None if tokens.targets is None else torch.from_numpy(tokens.targets[start:end])
    return text_sample(torch.from_numpy(tokens.ids[start:end]), targets)
