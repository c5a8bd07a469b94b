"""Conversations to tokens, with loss only on assistant turns.

A chat template may mark its assistant turns (`{% generation %}`). With any other, a turn is found by rendering the
conversation without it and with it:

    messages[:i] + generation prompt   <|user|>Hi<|end|><|assistant|>
    messages[:i + 1]                   <|user|>Hi<|end|><|assistant|>Hello<|end|>
    loss                                                             ^^^^^^^^^^^^

If a template renders a turn differently once others follow (it drops its reasoning, for example), the content of the turn
is replaced by a sentinel, and the characters that differ are the turn. If the template refuses tool results without
calls, the calls stay and only their content is replaced.

Assistant messages with `train: false` or `weight: 0` have no loss, those with `train: true` or `weight: 1` have one; for
the others `learn` decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.media_parts import MEDIA_PARTS
from patchgen.runtime.data.problems import BadSample, DataError, as_bad_sample
from patchgen.runtime.data.template_forms import forms_of
from patchgen.runtime.data.template_inputs import adapted_messages, adapted_tools
from patchgen.runtime.data.template_traces import require_traces
from patchgen.runtime.data.text import SampleEncoder, Tokens, required_field, tokenizer_fingerprint

LEARN_FLAGS = ("train", "weight")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "\ue000\ue001\ue000"  # private-use characters, which do not occur in conversations


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
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation with special tokens marked, and the spans of the assistant turns `learned`; None: of all.

    Raises:
        BadSample: the template refuses the messages, or drops a part of them.
    """
    render, messages = make_renderer(messages, tools, template=template, literals=literals, where=where)
    with as_bad_sample("the chat template", where, "the messages"):
        marks = None
        if marks_assistant_turns(template):
            text, marks = render.with_marks(messages)
            require_traces(where, render, messages, text)
            if learned is None:
                return text, marks
        else:
            text = render(messages)
            require_traces(where, render, messages, text)
        spans = assistant_spans(render, messages, text, tuple(literals.tokenizer.get_added_vocab()))
    if marks is not None and learned is not None:
        return text, _marks_with_loss(where, marks, spans, learned)
    return text, [span for index, span in spans.items() if learned is None or index in learned]


class Renderer:
    """Renders messages by a chat template.

    Args:
        options: keyword arguments of `render_jinja_template`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """The text; with `prompt`, followed by the header of an assistant turn."""
        return render_jinja_template([messages], add_generation_prompt=prompt, **self.options)[0][0]

    def with_marks(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters that the template marks as assistant turns."""
        texts, marks = render_jinja_template([messages], return_assistant_tokens_mask=True, **self.options)
        return texts[0], [(int(start), int(end)) for start, end in marks[0]]


def make_renderer(
    messages: list[dict[str, Any]], tools: Any, *, template: str, literals: Literals, where: str
) -> tuple[Renderer, list[dict[str, Any]]]:
    """A renderer for a conversation, and its messages without flags, in the forms that the template takes; special tokens in
    messages and tools are marked.

    Raises:
        BadSample: a message or a tool is in no known form.
    """
    special_tokens = literals.tokenizer.special_tokens_map
    forms = forms_of(template, special_tokens)
    unflagged = [{key: value for key, value in message.items() if key not in LEARN_FLAGS} for message in messages]
    adapted = adapted_messages(where, unflagged, forms)
    options = {"chat_template": template, "tools": literals.mark(adapted_tools(where, tools, forms))}
    return Renderer({**special_tokens, **options}), literals.mark(adapted)


def _marks_with_loss(
    where: str, marks: list[tuple[int, int]], turns: dict[int, tuple[int, int]], learned: frozenset[int]
) -> list[tuple[int, int]]:
    """The template's marks that belong to turns with a loss."""
    marks_with_loss = []
    for mark in marks:
        have_loss = {index in learned for index, (start, end) in turns.items() if start < mark[1] and mark[0] < end}
        if len(have_loss) > 1:
            raise BadSample(where, "the chat template marks turns with and without a loss as one span")
        if True in have_loss:
            marks_with_loss.append(mark)
    return marks_with_loss


def marks_assistant_turns(template: str) -> bool:
    """Whether a chat template marks assistant turns."""
    return bool(GENERATION.search(template))


def assistant_spans(
    render: Any, messages: list[dict[str, Any]], text: str, added_tokens: tuple[str, ...]
) -> dict[int, tuple[int, int]]:
    """The span of each assistant turn in `text`, by the index of its message: with the token that ends the turn,
    without white space after it.

    Args:
        render: `(messages, prompt=False) -> str`; with `prompt`, followed by the header of an assistant turn.
        text: all messages, rendered.
        added_tokens: of the tokenizer; one of these may end a turn.
    """
    spans = {}
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], prompt=True) if index else ""
        through = render(messages[: index + 1])
        if index and text.startswith(before) and text.startswith(through) and len(through) > len(before):
            spans[index] = (len(before), _end_without_space(text, len(before), len(through), added_tokens))
            continue
        sentinel_message = {"role": message["role"], "content": SENTINEL}
        replaced = render_or_none(render, [*messages[:index], sentinel_message, *messages[index + 1 :]])
        end_of_turn = ""
        if replaced is None:
            replaced = render([*messages[:index], with_sentinel_content(message), *messages[index + 1 :]])
            through_replaced = render_or_none(render, [*messages[:index], sentinel_message]) or ""
            end_of_turn = through[len(through) - common_suffix_length(through, through_replaced) :].strip()
        if SENTINEL not in replaced:
            continue  # the template does not render this turn
        start = len(before) if index and text.startswith(before) else common_prefix_length(text, replaced)
        end = max(start, len(text) - common_suffix_length(text, replaced))
        end = max(end, text.find(end_of_turn, end))  # after the closing brackets of the calls
        spans[index] = (start, _end_after_end_token(text, end, added_tokens))
    return spans


def render_or_none(render: Any, messages: list[dict[str, Any]]) -> str | None:
    """The text, or None if the template refuses the messages."""
    try:
        return render(messages)
    except (TemplateError, TypeError):
        return None


def with_sentinel_content(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content, and the names and arguments of its tool calls, replaced by the sentinel."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = SENTINEL if isinstance(function.get("arguments"), str) else {SENTINEL: SENTINEL}
        changed = {**function, "name": SENTINEL, "arguments": arguments}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return {**message, "content": SENTINEL, **({"tool_calls": calls} if calls else {})}


def _end_without_space(text: str, start: int, end: int, added_tokens: tuple[str, ...]) -> int:
    stripped = text[start:end].rstrip()
    return start + len(stripped) if stripped.endswith(added_tokens) else end


def _end_after_end_token(text: str, end: int, added_tokens: tuple[str, ...]) -> int:
    remaining_text = text[end:]
    following = remaining_text.lstrip()
    token = max((token for token in added_tokens if following.startswith(token)), key=len, default=None)
    return end + (len(remaining_text) - len(following)) + len(token) if token else end


def common_suffix_length(first: str, second: str) -> int:
    return common_prefix_length(first[::-1], second[::-1])


def common_prefix_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many characters, tokens or messages at the beginning are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
