"""Conversations to tokens, with loss only on assistant turns.

A chat template may mark its assistant turns (`{% generation %}`). With any other they are found in what it writes
(`turn_spans.py`). The text is always that of the template and the messages as they are; special tokens that come from
messages are found in it afterwards (`provenance.py`).

Assistant messages with `train: false` or `weight: 0` have no loss, those with `train: true` or `weight: 1` have one; for
the others `learn` decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from patchgen.runtime.data.literals import Literals, Span, without_marks
from patchgen.runtime.data.media_parts import MEDIA_PARTS
from patchgen.runtime.data.problems import BadSample, DataError, as_bad_sample
from patchgen.runtime.data.rendering import Renderer
from patchgen.runtime.data.template_forms import forms_of
from patchgen.runtime.data.template_inputs import adapted_messages, adapted_tools
from patchgen.runtime.data.template_traces import require_traces, warn_of_dropped_tools
from patchgen.runtime.data.text import SampleEncoder, Tokens, required_field, tokenizer_fingerprint
from patchgen.runtime.data.turn_spans import (
    marks_with_loss,
    read_conversation,
    require_own_text,
    spans_of_turns,
)

LEARN_FLAGS = ("train", "weight")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder(SampleEncoder):
    """Conversations: a list of messages with `role` and `content` in `messages`, tools (JSON schemas) in `tools`.

    Args:
        kind: of the data, for error messages.
        learn: which assistant turns have a loss: "all" or the "last".
        special_tokens: those that messages may contain as such; all others in messages are plain text.
    """

    def __init__(
        self, tokenizer: Any, *, kind: str = "chat", learn: str = "all", special_tokens: Sequence[str] = ()
    ) -> None:
        if tokenizer.chat_template is None:
            raise DataError(
                f"data.kind = {kind} needs a tokenizer with a chat template; this one has none (chat_template)."
            )
        self.tokenizer = tokenizer
        self.learn = learn
        self.literals = Literals(tokenizer, kept=special_tokens)

    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        messages = required_field(where, fields, "messages", list)
        require_messages(where, messages)
        ids, targets = self.encode_messages(where, messages, fields, learned_turns(where, messages, self.learn))
        if not targets.any():
            raise BadSample(where, "no assistant turn to learn from")
        return Tokens(ids, targets)

    def encode_messages(
        self, where: str, messages: list[Any], fields: dict[str, Any], learned: frozenset[int] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids `(n,)` int64 of messages, with the tools of `fields`, and which have a loss `(n,)` bool.

        Raises:
            BadSample: the template refuses the messages, or drops a part of them.
        """
        require_no_media(where, messages)
        tools = fields.get("tools") or None
        template = self.tokenizer.get_chat_template(None, tools=tools)
        text, spans = render_with_spans(
            where, messages, tools, template=template, literals=self.literals, learned=learned
        )
        return self.literals.encode(where, text, spans)

    def fingerprint(self) -> list[Any]:
        return ["chat", self.learn, self.literals.kept, tokenizer_fingerprint(self.tokenizer)]


def learned_turns(where: str, messages: list[dict[str, Any]], learn: str = "all") -> frozenset[int] | None:
    """The indices of the messages with a loss; None: all assistant turns.

    Raises:
        BadSample: a flag is not a boolean, 0 or 1, is set on a message of another role, or contradicts another flag.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    flags = {index: _flag(where, index, message) for index, message in enumerate(messages)}
    if learn == "all" and all(flag is None for flag in flags.values()):
        return None
    default = turns if learn == "all" else turns[-1:]
    return frozenset(index for index in turns if (index in default if flags[index] is None else flags[index]))


def _flag(where: str, index: int, message: dict[str, Any]) -> bool | None:
    """Whether a message is flagged to have a loss or none; None: it has no flag."""
    flags = {name: message[name] for name in LEARN_FLAGS if message.get(name) is not None}
    for name, value in flags.items():
        if value not in (0, 1):
            raise BadSample(where, f"message {index} has {name} = {value!r:.40}; expected false, true, 0 or 1")
    values = {bool(value) for value in flags.values()}
    if len(values) > 1:
        raise BadSample(
            where, f"message {index} has both {' and '.join(f'{name} = {value}' for name, value in flags.items())}"
        )
    flag = values.pop() if values else None
    if flag and message["role"] != "assistant":
        raise BadSample(
            where, f"message {index} of {message['role']!r} is flagged to have a loss; only assistant turns can"
        )
    return flag


def require_messages(where: str, messages: list[Any]) -> None:
    """Raises BadSample unless `messages` are dicts with a role."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadSample(where, f"message {index} is {message!r:.80}, expected a dict with a role and content")


def require_no_media(where: str, messages: list[dict[str, Any]]) -> None:
    """Raises BadSample for an image, a video or a sound: a template may write its placeholder, but nobody reads the item."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in MEDIA_PARTS:
                name = f"message {index} of {message['role']!r}"
                raise BadSample(
                    where, f"{name} has a part of the type {kind!r}, which only data.kind = multimodal reads"
                )


def render_with_spans(
    where: str,
    messages: list[dict[str, Any]],
    tools: Any,
    *,
    template: str,
    literals: Literals,
    learned: frozenset[int] | None = None,
) -> tuple[str, list[Span]]:
    """The text of a conversation, with the special tokens of its data marked, and the spans of the assistant turns `learned`;
    None: of all.

    Raises:
        BadSample: the template refuses the messages or drops a part of them (`template_traces.py`), or a turn cannot be told from
            other text (`turn_spans.py`).
    """
    render, messages = make_renderer(messages, tools, template=template, literals=literals, where=where)
    with as_bad_sample("the chat template", where, "the messages"):
        conversation = read_conversation(render, messages, literals)
        require_traces(where, render, messages, conversation.text)
        warn_of_dropped_tools(render, messages, conversation.text)
        literals.warn_of_unknown_tokens(conversation.text, conversation.sources)
        if marks_assistant_turns(template):
            spans = render.with_marks(messages)[1]
            require_own_text(where, conversation, spans)
            if learned is not None:
                spans = marks_with_loss(where, conversation, spans, learned)
        else:
            wanted = [index for index in conversation.assistants if learned is None or index in learned]
            turns = spans_of_turns(where, conversation, wanted)
            spans = [span for index in wanted for span in turns.get(index, [])]
    return literals.mark_rendered(
        where, conversation.text, conversation.sources, spans, [messages, render.options["tools"]]
    )


def make_renderer(
    messages: list[dict[str, Any]], tools: Any, *, template: str, literals: Literals, where: str
) -> tuple[Renderer, list[dict[str, Any]]]:
    """A renderer for a conversation, and its messages without flags, in the forms that the template takes.

    Raises:
        BadSample: a message or a tool is in no known form.
    """
    special_tokens = literals.tokenizer.special_tokens_map
    forms = forms_of(template, special_tokens)
    unflagged = [
        {key: value for key, value in message.items() if key not in LEARN_FLAGS} for message in without_marks(messages)
    ]
    options = {"chat_template": template, "tools": adapted_tools(where, without_marks(tools), forms)}
    return Renderer({**special_tokens, **options}), adapted_messages(where, unflagged, forms)


def marks_assistant_turns(template: str) -> bool:
    """Whether a chat template marks assistant turns."""
    return bool(GENERATION.search(template))
