"""Encoders for heads that are not language models: words with classes, answers in a text, and pairs of similar texts.

tags      the first token of a word has its class, the others have none
question  question, newline, context; the tokens of the first answer are the targets
similar   one sample of both texts, the anchor first
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from patchgen.runtime.data.formats import type_of
from patchgen.runtime.data.media_parts import as_list
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.text import SampleEncoder, TextEncoder, Tokens


class TaskEncoder(SampleEncoder):
    """Samples with the tokens of plain text. Names of subclasses are part of cache keys."""

    def __init__(self, text: TextEncoder) -> None:
        self.text = text

    def fingerprint(self) -> list[Any]:
        return [type(self).__name__, self.text.fingerprint()]


class TaggedEncoder(TaskEncoder):
    """Words `tokens` with the class `tags` of each."""

    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        words, tags = fields["tokens"], fields["tags"]
        if len(words) != len(tags):
            raise BadSample(where, f"{len(words)} tokens and {len(tags)} tags, expected equal numbers")
        if min(tags) < 0:
            raise BadSample(where, f"tag {min(tags)}, expected classes from 0")
        marked = [self.text.literals.mark(word) for word in words]
        starts = [0, *itertools.accumulate(len(word) + 1 for word in marked)]
        spans = [(start, start + len(word)) for start, word in zip(starts, marked, strict=False)]
        ids, word_numbers = self.text.literals.encode_with_span_numbers(
            where, " ".join(marked), spans, add_special_tokens=True
        )
        self._require_all_words(where, words, word_numbers)
        is_first = (word_numbers > 0) & (np.diff(word_numbers, prepend=0) != 0)
        classes = np.array([0, *(tag + 1 for tag in tags)], dtype=np.int32)[np.where(is_first, word_numbers, 0)]
        ids, classes = self.text.with_end_token(ids, classes, 0)
        if classes[-1]:
            raise BadSample(
                where,
                "a tag on the last token, which needs an end-of-sequence token after it: set data.append_eos: true, with a "
                "tokenizer that has one",
            )
        return Tokens(ids, np.roll(classes, 1))

    def _require_all_words(self, where: str, words: list[str], word_numbers: np.ndarray) -> None:
        """Raises BadSample if a word has no token of its own (it is empty, or the tokenizer drops it): its tag would be lost.

        Args:
            word_numbers: by token, the number of its word, from 1; 0: none.
        """
        missing = sorted({*range(1, len(words) + 1)} - set(word_numbers.tolist()))
        if missing:
            raise BadSample(
                where,
                f"token {missing[0] - 1} is {words[missing[0] - 1]!r:.60}, of which the tokenizer makes no token, so its tag "
                "would be lost; expected words with text",
            )


class AnswerEncoder(TaskEncoder):
    """A `question`, and a `context` with `answers` in it: `text` and `answer_start`, of which the first is used."""

    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        context = fields["context"]
        text, start = self._first_answer(where, fields["answers"])
        end = start + len(text)
        if not text or start < 0 or context[start:end] != text:
            raise BadSample(where, f"the answer {text!r:.60} is not in the context at {start}")
        pieces = (f"{fields['question']}\n{context[:start]}", text, context[end:])
        before, answer, after = map(self.text.literals.mark, pieces)
        span = (len(before), len(before) + len(answer))
        ids, learned = self.text.literals.encode(where, before + answer + after, [span], add_special_tokens=True)
        return Tokens(*self.text.with_end_token(ids, learned, False))

    def _first_answer(self, where: str, answers: Mapping[str, Any]) -> tuple[str, int]:
        """The text of the first answer, and where it starts in the context.

        Raises:
            BadSample: there is none, or of another type.
        """
        first: dict[str, Any] = {}
        for name, expected in (("text", "list of text"), ("answer_start", "list of int")):
            values = answers.get(name, [])
            if not as_list(values):
                raise BadSample(
                    where, "answers without a text or an answer_start: questions without an answer have no targets"
                )
            values = values[:1] if isinstance(values, list | tuple) else values  # the others are not read
            if type_of(values) != expected:
                raise BadSample(where, f"answers holds {name} as {type_of(values)}, expected {expected}")
            first[name] = values[0]
        return first["text"], int(first["answer_start"])


class SimilarEncoder(TaskEncoder):
    """Texts `anchor` and `positive`: one sample of two documents."""

    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        halves = [self.text.tokens(where, {"text": fields[name]}).ids for name in ("anchor", "positive")]
        return Tokens(np.concatenate(halves), None, split=len(halves[0]))


TASK_ENCODERS = {"token_classes": TaggedEncoder, "answers": AnswerEncoder, "similar": SimilarEncoder}
"""The encoder of each kind of data for these heads."""
