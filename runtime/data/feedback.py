"""Samples with what people say of them: pairs of a chosen and a rejected conversation, and texts with a number.

pair      both conversations are one sample, the chosen one first; learned is what the assistant says after the messages
          that they share
number    of a class, or of a scale: `label`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from patchgen.runtime.data.chat import ChatEncoder, learned_turns
from patchgen.runtime.data.problems import BadSample, DataError
from patchgen.runtime.data.text import TextEncoder, Tokens


class PairEncoder:
    """Pairs of conversations `chosen` and `rejected`: one sample, of two documents."""

    def __init__(self, chat: ChatEncoder) -> None:
        self.chat = chat

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        return [self._encode(where, fields) for where, fields in samples]

    def _encode(self, where: str, fields: dict[str, Any]) -> Tokens | BadSample:
        halves = [fields["chosen"], fields["rejected"]]
        shared = next(
            (number for number, (one, other) in enumerate(zip(*halves, strict=False)) if one != other),
            min(map(len, halves)),
        )
        found = []
        for name, messages in zip(("chosen", "rejected"), halves, strict=True):
            try:
                turns = learned_turns(where, messages)
                if turns is None:
                    turns = frozenset(range(len(messages)))
                later = frozenset(number for number in turns if number >= shared)
                ids, targets = self.chat.tokens(where, messages, fields, later)
            except BadSample as error:
                return BadSample(error.where, f"{name}: {error.reason}")
            if not targets.any():
                return BadSample(where, f"{name} has no assistant turn after the prefix that it shares with the other")
            found.append((ids, targets))
        (chosen, learned), (rejected, learned_too) = found
        if np.array_equal(chosen, rejected):
            return BadSample(where, "chosen and rejected are the same tokens")
        return Tokens(np.concatenate([chosen, rejected]), np.concatenate([learned, learned_too]), split=len(chosen))

    def fingerprint(self) -> list[Any]:
        return ["pairs", self.chat.fingerprint()]


class LabelledEncoder:
    """Texts or conversations with a number; all their tokens count as learned.

    Args:
        chat: of conversations; None: the tokenizer has no chat template.
    """

    def __init__(self, text: TextEncoder, chat: ChatEncoder | None) -> None:
        self.text = text
        self.chat = chat

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        return [self._encode(where, fields) for where, fields in samples]

    def _encode(self, where: str, fields: dict[str, Any]) -> Tokens | BadSample:
        if "messages" not in fields:
            (found,) = self.text.encode([(where, fields)])
        elif self.chat is None:
            raise DataError(
                f"{where}: messages need a tokenizer with a chat template; this one has none (chat_template)."
            )
        else:
            try:
                found = Tokens(self.chat.tokens(where, fields["messages"], fields, None)[0], None)
            except BadSample as error:
                return error
        return found if isinstance(found, BadSample) else replace(found, label=float(fields["label"]))

    def fingerprint(self) -> list[Any]:
        return ["labelled", self.text.fingerprint(), self.chat.fingerprint() if self.chat else None]
