"""Finds the role of each token of a conversation: that of the message which has brought it; all others are the template's.

messages    user: Hi                    assistant: Hello
rendered    <|user|>Hi<|end|><|assistant|>Hello<|end|>
role                uu                    aaaaa
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from patchgen.runtime.data.chat import make_renderer
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.problems import as_bad_sample
from patchgen.runtime.data.turn_spans import read_conversation, text_by_message

TEMPLATE = "template"
Spans = dict[str, list[tuple[int, int]]]


def role_spans(
    messages: list[dict[str, Any]], tools: Any, *, template: str, literals: Literals, where: str
) -> tuple[str, Spans]:
    """The text of a conversation with special tokens of its data marked, and the spans of each role in it.

    Raises:
        BadSample: the template refuses the messages, or one is in no known form.
    """
    render, messages = make_renderer(messages, tools, template=template, literals=literals, where=where)
    with as_bad_sample("the chat template", where, "the messages"):
        conversation = read_conversation(render, messages, literals)
    found = list(text_by_message(conversation))
    text, shifted = literals.mark_rendered(
        where,
        conversation.text,
        conversation.sources,
        [span for _, span in found],
        [messages, render.options["tools"]],
    )
    spans: Spans = {}
    for (index, _), span in zip(found, shifted, strict=True):
        spans.setdefault(messages[index]["role"], []).append(span)
    return text, spans


def tokens_with_roles(
    messages: list[dict[str, Any]], tools: Any, *, template: str, literals: Literals, where: str
) -> tuple[np.ndarray, list[str]]:
    """The ids `(n,)` int64 of a conversation, as of `chat.ChatEncoder`, and the role of each.

    Raises:
        BadSample: the text cannot be encoded.
    """
    text, spans = role_spans(messages, tools, template=template, literals=literals, where=where)
    ids, _ = literals.encode(where, text)
    return ids, roles_of_tokens(len(ids), spans, lambda role: literals.encode(where, text, role)[1])


def roles_of_tokens(count: int, spans: Mapping[str, Any], within: Callable[[Any], np.ndarray]) -> list[str]:
    """The role of each of `count` tokens.

    Args:
        within: returns `(count,)` bool, the tokens that overlap the spans of a role.
    """
    roles = [TEMPLATE] * count
    for role, spans_of_role in spans.items():
        for index in np.flatnonzero(within(spans_of_role)):
            roles[index] = role
    return roles
