"""Texts in which something is marked, for heads that are not language models: words with a class each, answers in a text, and
pairs of texts whose meaning is near.

    tags      the first token of a word has its class, the others none
    question  question, a line's end, context; the tokens of the first answer are learned
    similar   both texts are one sample, the anchor first
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.text import TextEncoder, Tokens


class MarkedEncoder(ABC):
    """What the three have in common: samples one by one, by the tokens of plain texts."""

    def __init__(self, text: TextEncoder) -> None:
        self.text = text

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        found: list[Tokens | BadSample] = []
        for where, fields in samples:
            try:
                found.append(self.tokens(where, fields))
            except BadSample as error:
                found.append(error)
        return found

    @abstractmethod
    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        """Those of a sample. Raises BadSample."""

    def fingerprint(self) -> list[Any]:
        return [type(self).__name__, self.text.fingerprint()]


class TaggedEncoder(MarkedEncoder):
    """Words `tokens` with the class `tags` of each."""

    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        words, tags = fields["tokens"], fields["tags"]
        if len(words) != len(tags):
            raise BadSample(where, f"{len(words)} tokens and {len(tags)} tags, expected as many of each")
        if min(tags) < 0:
            raise BadSample(where, f"tag {min(tags)}, expected classes from 0")
        marked = [self.text.literals.marked(word) for word in words]
        starts = [0, *itertools.accumulate(len(word) + 1 for word in marked)]
        spans = [(start, start + len(word)) for start, word in zip(starts, marked, strict=False)]
        ids, number = self.text.literals.encode_numbered(where, " ".join(marked), spans, add_special_tokens=True)
        is_first = (number > 0) & (np.diff(number, prepend=0) != 0)
        classes = np.array([0, *(tag + 1 for tag in tags)], dtype=np.int32)[np.where(is_first, number, 0)]
        ids, classes = self.text.ended(ids, classes, 0)
        if classes[-1]:
            raise BadSample(where, "a tag of the last token, and the tokenizer has no token that ends a text")
        return Tokens(ids, np.roll(classes, 1))


class AnswerEncoder(MarkedEncoder):
    """A `question`, and a `context` in which `answers` stand: `text` and `answer_start`, of which the first is taken."""

    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        context, answers = fields["context"], fields["answers"]
        texts, starts = (list(answers.get(name) or ()) for name in ("text", "answer_start"))
        if not texts or not starts:
            raise BadSample(
                where, "answers without a text and an answer_start: nothing is learned of what has no answer"
            )
        end = starts[0] + len(texts[0])
        if not texts[0] or context[starts[0] : end] != texts[0]:
            raise BadSample(where, f"the answer {texts[0]!r:.60} does not stand in the context at {starts[0]}")
        pieces = (f"{fields['question']}\n{context[: starts[0]]}", texts[0], context[end:])
        before, answer, after = map(self.text.literals.marked, pieces)
        span = (len(before), len(before) + len(answer))
        ids, learned = self.text.literals.encode(where, before + answer + after, [span], add_special_tokens=True)
        return Tokens(*self.text.ended(ids, learned, False))


class SimilarEncoder(MarkedEncoder):
    """Texts `anchor` and `positive`: one sample, of two documents."""

    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        halves = []
        for found in self.text.encode([(where, {"text": fields[name]}) for name in ("anchor", "positive")]):
            if isinstance(found, BadSample):
                raise found
            halves.append(found.ids)
        return Tokens(np.concatenate(halves), None, split=len(halves[0]))


OF_TEXTS = {"token_classes": TaggedEncoder, "answers": AnswerEncoder, "similar": SimilarEncoder}
"""The encoder of each kind of data whose samples are plain texts with something marked."""
