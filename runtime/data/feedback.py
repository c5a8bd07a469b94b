"""Samples with human feedback: pairs of a chosen and a rejected conversation, and texts with a label.

pair      one sample of both conversations, the chosen one first; assistant turns after their common messages have a loss
label     a class, or a number on a scale
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from patchgen.runtime.data.chat import ChatEncoder, learned_turns
from patchgen.runtime.data.problems import BadSample, DataError
from patchgen.runtime.data.text import SampleEncoder, TextEncoder, Tokens
from patchgen.runtime.data.turn_spans import common_prefix_length


class PairEncoder(SampleEncoder):
    """Pairs of conversations `chosen` and `rejected`: one sample of two documents."""

    def __init__(self, chat: ChatEncoder) -> None:
        self.chat = chat

    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        halves = [fields["chosen"], fields["rejected"]]
        num_shared = common_prefix_length(*halves)
        encoded = []
        for name, messages in zip(("chosen", "rejected"), halves, strict=True):
            try:
                turns = learned_turns(where, messages)
                if turns is None:
                    turns = frozenset(range(len(messages)))
                later = frozenset(index for index in turns if index >= num_shared)
                ids, targets = self.chat.encode_messages(where, messages, fields, later)
            except BadSample as error:
                raise BadSample(error.where, f"{name}: {error.reason}") from error
            if not targets.any():
                raise BadSample(where, f"{name} has no assistant turn after the messages that both share")
            encoded.append((ids, targets))
        (chosen, chosen_targets), (rejected, rejected_targets) = encoded
        if np.array_equal(chosen, rejected):
            raise BadSample(where, "chosen and rejected are the same tokens")
        return Tokens(
            np.concatenate([chosen, rejected]), np.concatenate([chosen_targets, rejected_targets]), split=len(chosen)
        )

    def fingerprint(self) -> list[Any]:
        return ["pairs", self.chat.fingerprint()]


class LabelledEncoder(SampleEncoder):
    """Texts or conversations with a label; all their tokens count as targets.

    Args:
        chat: encoder of conversations; None: the tokenizer has no chat template.
    """

    def __init__(self, text: TextEncoder, chat: ChatEncoder | None) -> None:
        self.text = text
        self.chat = chat

    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        if "messages" not in fields:
            encoded = self.text.tokens(where, fields)
        elif self.chat is None:
            raise DataError(
                f"{where}: messages need a tokenizer with a chat template; this one has none (chat_template)."
            )
        else:
            encoded = Tokens(self.chat.encode_messages(where, fields["messages"], fields, frozenset())[0], None)
        return replace(encoded, label=float(fields["label"]))

    def fingerprint(self) -> list[Any]:
        return ["labelled", self.text.fingerprint(), self.chat.fingerprint() if self.chat else None]
