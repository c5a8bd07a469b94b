"""Finds the role of each token of a conversation by replacing the content of one message at a time.

The characters that change are the content of that message; all others belong to the template.

    messages    user: Hi                    assistant: Hello
    rendered    <|user|>Hi<|end|><|assistant|>Hello<|end|>
    with other  <|user|>xx<|end|><|assistant|>Hello<|end|>        user: the two characters that differ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from patchgen.runtime.data.chat import (
    SENTINEL,
    common_prefix,
    common_suffix,
    make_renderer,
    render_or_none,
    with_other_content,
)
from patchgen.runtime.data.literals import Literals

TEMPLATE = "template"
Spans = dict[str, list[tuple[int, int]]]


def role_spans(messages: list[dict[str, Any]], tools: Any, *, template: str, literals: Literals) -> tuple[str, Spans]:
    """The text of a conversation with special tokens marked, and the characters of each role in it."""
    render, messages = make_renderer(messages, tools, template=template, literals=literals)
    text = render(messages)
    spans: Spans = {}
    for number, message in enumerate(messages):
        parts = [{"type": "text", "text": SENTINEL}]
        changed = (
            {"role": message["role"], "content": parts if isinstance(message.get("content"), list) else SENTINEL},
            with_other_content(message),
        )
        tries = (
            render_or_none(render, [*messages[:number], changed_message, *messages[number + 1 :]])
            for changed_message in changed
        )
        other = next((rendered for rendered in tries if rendered is not None and SENTINEL in rendered), None)
        if other is None:
            continue  # the template does not render this message, or refuses the changed one
        start = common_prefix(text, other)
        end = max(start, len(text) - common_suffix(text[start:], other[start:]))
        spans.setdefault(message["role"], []).append((start, end))
    return text, spans


def tokens_with_roles(
    messages: list[dict[str, Any]], tools: Any, *, template: str, literals: Literals, where: str
) -> tuple[np.ndarray, list[str]]:
    """The ids `(n,)` int64 of a conversation, as of `chat.ChatEncoder`, and the role of each.

    Raises:
        BadSample: the text cannot be encoded.
    """
    text, spans = role_spans(messages, tools, template=template, literals=literals)
    ids, _ = literals.encode(where, text)
    return ids, roles_of_tokens(len(ids), spans, lambda role: literals.encode(where, text, role)[1])


def roles_of_tokens(count: int, spans: Mapping[str, Any], within: Callable[[Any], np.ndarray]) -> list[str]:
    """The role of each of `count` tokens.

    Args:
        within: returns `(count,)` bool, the tokens that overlap the spans of a role.
    """
    roles = [TEMPLATE] * count
    for role, of_role in spans.items():
        for number in np.flatnonzero(within(of_role)):
            roles[number] = role
    return roles
