"""Conversations to tokens, of which the assistant's turns are learned.

A chat template that marks its assistant turns (`{% generation %}`) says itself which tokens those are. For any other the
turns are found by rendering the conversation up to them and through them:

    messages[:i] + generation prompt   <|user|>Hi<|end|><|assistant|>
    messages[:i + 1]                   <|user|>Hi<|end|><|assistant|>Hello<|end|>
    learned                                                          ^^^^^^^^^^^^

Templates that render a turn differently once others follow (they drop its reasoning, say) are searched a second way: the
turn is exchanged for another text, and what differs is the turn. Where the template refuses the results of tools without
the calls, the calls stay and only what they hold is exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.problems import BadSample, DataError, refusals_of
from patchgen.runtime.data.text import Tokens, required, tokenizer_fingerprint

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
OTHER = "\ue000\ue001\ue000"  # private characters, which no conversation has


class ChatEncoder:
    """Conversations: a list of messages with `role` and `content` in one field, tools (JSON schemas) in another.

    Args:
        special_tokens: those that the messages may write and mean; any other in them is text.
    """

    def __init__(
        self, tokenizer: Any, *, messages_field: str, tools_field: str, special_tokens: Sequence[str] = ()
    ) -> None:
        if tokenizer.chat_template is None:
            raise DataError(
                "data.kind = chat needs a tokenizer with a chat template; this one has none (chat_template)."
            )
        self.tokenizer = tokenizer
        self.messages_field = messages_field
        self.tools_field = tools_field
        self.literals = Literals(tokenizer, kept=special_tokens)

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        return [self._encode(where, fields) for where, fields in samples]

    def _encode(self, where: str, fields: dict[str, Any]) -> Tokens | BadSample:
        messages = required(where, fields, self.messages_field, list)
        if isinstance(messages, BadSample):
            return messages
        try:
            require_messages(where, messages)
            tools = fields.get(self.tools_field) or None
            ids, targets = chat_tokens(self.tokenizer, messages, tools, literals=self.literals, where=where)
        except BadSample as error:
            return error
        if not targets.any():
            return BadSample(where, "no assistant turn to learn from")
        return Tokens(ids, targets)

    def fingerprint(self) -> list[Any]:
        fields = [self.messages_field, self.tools_field, self.literals.kept]
        return ["chat", *fields, tokenizer_fingerprint(self.tokenizer)]


def require_messages(where: str, messages: list[Any]) -> None:
    """Raises BadSample unless `messages` are dicts with a role."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadSample(where, f"message {number} is {message!r:.80}, expected a dict with a role and content")


def chat_tokens(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: Any = None,
    *,
    literals: Literals | None = None,
    where: str = "messages",
) -> tuple[np.ndarray, np.ndarray]:
    """The ids `(n,)` int64 of a conversation and which are learned `(n,)` bool."""
    literals = literals or Literals(tokenizer)
    text, spans = rendered(
        where,
        literals.marked(messages),
        literals.marked(tools),
        template=tokenizer.get_chat_template(None, tools=tools),
        tokenizer=tokenizer,
    )
    return literals.encode(where, text, spans)


def rendered(
    where: str, messages: list[dict[str, Any]], tools: Any, *, template: str, tokenizer: Any
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the characters of the assistant's turns in it.

    Raises:
        BadSample: the template refuses the messages.
    """
    options = {**tokenizer.special_tokens_map, "chat_template": template, "tools": tools}

    # As transformers does: templates would write None where a key says that there is nothing.
    messages = [{key: value for key, value in one.items() if value is not None} for one in messages]

    def render(part: list[dict[str, Any]], prompt: bool = False) -> str:
        return render_jinja_template([part], add_generation_prompt=prompt, **options)[0][0]

    with refusals_of("the chat template", where, "the messages"):
        if has_mask(template):
            texts, marks = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
            return texts[0], [tuple(span) for span in marks[0]]
        text = render(messages)
        return text, assistant_spans(render, messages, text, tuple(tokenizer.get_added_vocab()))


def has_mask(template: str) -> bool:
    """Whether a chat template marks the assistant's turns."""
    return bool(GENERATION.search(template))


def assistant_spans(
    render: Any, messages: list[dict[str, Any]], text: str, special: tuple[str, ...]
) -> list[tuple[int, int]]:
    """The characters of each assistant turn in `text`, with the token that ends the turn, without white space behind it.

    Args:
        render: `(messages, prompt=False) -> str`; with `prompt` the header of an assistant turn follows.
        text: all messages, rendered.
        special: the special tokens, with one of which a turn may end.
    """
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:number], prompt=True) if number else ""
        through = render(messages[: number + 1])
        if number and text.startswith(before) and text.startswith(through) and len(through) > len(before):
            spans.append((len(before), _without_trailing_space(text, len(before), len(through), special)))
            continue
        bare = {"role": message["role"], "content": OTHER}
        other = _rendered(render, [*messages[:number], bare, *messages[number + 1 :]])
        end_of_turn = ""
        if other is None:
            other = render([*messages[:number], _other_calls(message), *messages[number + 1 :]])
            alone = _rendered(render, [*messages[:number], bare]) or ""
            end_of_turn = through[len(through) - _common_suffix(through, alone) :].strip()
        if OTHER not in other:
            continue  # the template does not show this turn
        start = len(before) if number and text.startswith(before) else _common_prefix(text, other)
        end = max(start, len(text) - _common_suffix(text, other))
        end = max(end, text.find(end_of_turn, end))  # behind the calls' last brackets
        spans.append((start, _with_end_token(text, end, special)))
    return spans


def _rendered(render: Any, messages: list[dict[str, Any]]) -> str | None:
    """None: the template refuses the messages."""
    try:
        return render(messages)
    except (TemplateError, TypeError):
        return None


def _other_calls(message: dict[str, Any]) -> dict[str, Any]:
    """The turn with another content, and with calls of as many tools under the same ids that hold other texts."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = OTHER if isinstance(function.get("arguments"), str) else {OTHER: OTHER}
        changed = {**function, "name": OTHER, "arguments": arguments}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return {**message, "content": OTHER, **({"tool_calls": calls} if calls else {})}


def _without_trailing_space(text: str, start: int, end: int, special: tuple[str, ...]) -> int:
    bare = text[start:end].rstrip()
    return start + len(bare) if bare.endswith(special) else end


def _with_end_token(text: str, end: int, special: tuple[str, ...]) -> int:
    rest = text[end:]
    behind = rest.lstrip()
    token = max((token for token in special if behind.startswith(token)), key=len, default=None)
    return end + (len(rest) - len(behind)) + len(token) if token else end


def _common_suffix(one: str, other: str) -> int:
    return _common_prefix(one[::-1], other[::-1])


def _common_prefix(one: str, other: str) -> int:
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))
