"""Whose words each token of a conversation is: by exchanging the content of one message after the other.

What differs when a message says something else is what it said; everything between is the template's.

    messages    user: Hi                    assistant: Hello
    rendered    <|user|>Hi<|end|><|assistant|>Hello<|end|>
    with OTHER  <|user|>xx<|end|><|assistant|>Hello<|end|>        user: the two characters that differ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from patchgen.runtime.data.chat import OTHER, common_prefix, common_suffix, or_none, other_calls, rendering
from patchgen.runtime.data.literals import Literals

TEMPLATE = "template"
Spans = dict[str, list[tuple[int, int]]]


def role_spans(messages: list[dict[str, Any]], tools: Any, *, template: str, tokenizer: Any) -> tuple[str, Spans]:
    """The text of a conversation, and the characters that each role says in it."""
    render, messages = rendering(messages, tools, template=template, tokenizer=tokenizer)
    text = render(messages)
    spans: Spans = {}
    for number, message in enumerate(messages):
        parts = [{"type": "text", "text": OTHER}]
        changed = (
            {"role": message["role"], "content": parts if isinstance(message.get("content"), list) else OTHER},
            other_calls(message),
        )
        tries = (or_none(render, [*messages[:number], one, *messages[number + 1 :]]) for one in changed)
        other = next((found for found in tries if found is not None and OTHER in found), None)
        if other is None:
            continue  # the template does not show this message, or not alone
        start = common_prefix(text, other)
        end = max(start, len(text) - common_suffix(text[start:], other[start:]))
        spans.setdefault(message["role"], []).append((start, end))
    return text, spans


def roles_of(
    messages: list[dict[str, Any]], tools: Any, *, template: str, literals: Literals, where: str
) -> tuple[np.ndarray, list[str]]:
    """The ids `(n,)` int64 of a conversation as `chat.chat_tokens` makes them, and the role of each.

    Raises:
        BadSample: the tokenizer cannot take the text.
    """
    text, spans = role_spans(
        literals.marked(messages), literals.marked(tools), template=template, tokenizer=literals.tokenizer
    )
    ids, _ = literals.encode(where, text)
    return ids, named(len(ids), spans, lambda own: literals.encode(where, text, own)[1])


def named(count: int, spans: Mapping[str, Any], within: Callable[[Any], np.ndarray]) -> list[str]:
    """The role of each of `count` tokens.

    Args:
        within: which tokens `(count,)` bool lie in some spans.
    """
    roles = [TEMPLATE] * count
    for role, own in spans.items():
        for number in np.flatnonzero(within(own)):
            roles[number] = role
    return roles
