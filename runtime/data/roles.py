"""Finds the role of each token of a conversation by replacing the content of one message at a time.

The characters that change are the content of that message; all others belong to the template.

    messages    user: Hi                    assistant: Hello
    rendered    <|user|>Hi<|end|><|assistant|>Hello<|end|>
    replaced    <|user|>xx<|end|><|assistant|>Hello<|end|>        user: the two characters that differ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from patchgen.runtime.data.chat import (
    SENTINEL,
    common_prefix_length,
    common_suffix_length,
    make_renderer,
    render_or_none,
    with_sentinel_content,
)
from patchgen.runtime.data.literals import Literals

TEMPLATE = "template"
Spans = dict[str, list[tuple[int, int]]]


def role_spans(
    messages: list[dict[str, Any]], tools: Any, *, template: str, literals: Literals, where: str
) -> tuple[str, Spans]:
    """The text of a conversation with special tokens marked, and the spans of each role in it.

    Raises:
        BadSample: a message or a tool is in no known form.
    """
    render, messages = make_renderer(messages, tools, template=template, literals=literals, where=where)
    text = render(messages)
    spans: Spans = {}
    for index, message in enumerate(messages):
        parts = [{"type": "text", "text": SENTINEL}]
        replacements = (
            {"role": message["role"], "content": parts if isinstance(message.get("content"), list) else SENTINEL},
            with_sentinel_content(message),
        )
        texts = (
            render_or_none(render, [*messages[:index], replacement, *messages[index + 1 :]])
            for replacement in replacements
        )
        replaced = next((rendered for rendered in texts if rendered is not None and SENTINEL in rendered), None)
        if replaced is None:
            continue  # the template does not render this message, or refuses the replacement
        start = common_prefix_length(text, replaced)
        end = max(start, len(text) - common_suffix_length(text[start:], replaced[start:]))
        spans.setdefault(message["role"], []).append((start, end))
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
