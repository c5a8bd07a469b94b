"""Conversations to tokens, with loss only on assistant turns.

A chat template that marks its assistant turns (`{% generation %}`) says itself which tokens those are. For any other the
turns are found by rendering the conversation up to them and through them:

    messages[:i] + generation prompt   <|user|>Hi<|end|><|assistant|>
    messages[:i + 1]                   <|user|>Hi<|end|><|assistant|>Hello<|end|>
    learned                                                          ^^^^^^^^^^^^

Templates that render a turn differently once others follow (they drop its reasoning, say) are searched a second way: the
turn is exchanged for another text, and what differs is the turn. Where the template refuses the results of tools without
the calls, the calls stay and only what they hold is exchanged.

A message of the assistant with `train: false` or `weight: 0` is not learned, one with `train: true` or `weight: 1` is; for
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
from patchgen.runtime.data.problems import BadSample, DataError, refusals_of
from patchgen.runtime.data.text import Tokens, required, tokenizer_fingerprint

FLAGS = ("train", "weight")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
OTHER = "\ue000\ue001\ue000"  # private characters, which no conversation has


class ChatEncoder:
    """Conversations: a list of messages with `role` and `content` in `messages`, tools (JSON schemas) in `tools`.

    Args:
        kind: of the data, for messages.
        learn: which turns of the assistant: "all", or the "last".
        special_tokens: those that the messages may write and mean; any other in them is text.
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

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        return [self._encode(where, fields) for where, fields in samples]

    def _encode(self, where: str, fields: dict[str, Any]) -> Tokens | BadSample:
        messages = required(where, fields, "messages", list)
        if isinstance(messages, BadSample):
            return messages
        try:
            require_messages(where, messages)
            ids, targets = self.tokens(where, messages, fields, learned_turns(where, messages, self.learn))
        except BadSample as error:
            return error
        if not targets.any():
            return BadSample(where, "no assistant turn to learn from")
        return Tokens(ids, targets)

    def tokens(
        self, where: str, messages: list[Any], fields: dict[str, Any], learned: frozenset[int] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids `(n,)` int64 of messages, with the tools of `fields`, and which are learned `(n,)` bool.

        Raises:
            BadSample: the template refuses them.
        """
        tools = fields.get("tools") or None
        return chat_tokens(self.tokenizer, messages, tools, literals=self.literals, where=where, learned=learned)

    def fingerprint(self) -> list[Any]:
        return ["chat", self.learn, self.literals.kept, tokenizer_fingerprint(self.tokenizer)]


def learned_turns(where: str, messages: list[dict[str, Any]], learn: str = "all") -> frozenset[int] | None:
    """The numbers of the messages that are learned; None: all of the assistant.

    Raises:
        BadSample: a message says what cannot be: of another than the assistant, a share, two things at once.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    said = {number: _flag(where, number, message) for number, message in enumerate(messages)}
    if learn == "all" and all(flag is None for flag in said.values()):
        return None
    default = turns if learn == "all" else turns[-1:]
    return frozenset(number for number in turns if (number in default if said[number] is None else said[number]))


def _flag(where: str, number: int, message: dict[str, Any]) -> bool | None:
    """Whether a message says that it is learned; None: it says nothing."""
    said = {name: message[name] for name in FLAGS if message.get(name) is not None}
    for name, value in said.items():
        if value not in (0, 1):
            raise BadSample(where, f"message {number} has {name} = {value!r:.40}; possible are false, true, 0 and 1")
    values = {bool(value) for value in said.values()}
    if len(values) > 1:
        raise BadSample(
            where, f"message {number} has {' and '.join(f'{name} = {value}' for name, value in said.items())}"
        )
    flag = values.pop() if values else None
    if flag and message["role"] != "assistant":
        raise BadSample(
            where, f"message {number} of {message['role']!r} asks for a loss; only turns of the assistant can have one"
        )
    return flag


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
    learned: frozenset[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The ids `(n,)` int64 of a conversation and which are learned `(n,)` bool: the turns of these numbers; None: all."""
    literals = literals or Literals(tokenizer)
    text, spans = rendered(
        where,
        literals.marked(messages),
        literals.marked(tools),
        template=tokenizer.get_chat_template(None, tools=tools),
        tokenizer=tokenizer,
        learned=learned,
    )
    return literals.encode(where, text, spans)


def rendered(
    where: str,
    messages: list[dict[str, Any]],
    tools: Any,
    *,
    template: str,
    tokenizer: Any,
    learned: frozenset[int] | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the characters of the assistant's turns in it: those of these numbers; None: all.

    Raises:
        BadSample: the template refuses the messages.
    """
    render, messages = rendering(messages, tools, template=template, tokenizer=tokenizer)
    with refusals_of("the chat template", where, "the messages"):
        marks = None
        if has_mask(template):
            text, marks = render.marked(messages)
            if learned is None:
                return text, marks
        else:
            text = render(messages)
        spans = assistant_spans(render, messages, text, tuple(tokenizer.get_added_vocab()))
    if marks is not None and learned is not None:
        return text, _marks_of(where, marks, spans, learned)
    return text, [span for number, span in spans.items() if learned is None or number in learned]


class Render:
    """Renders messages by a chat template.

    Args:
        options: of `render_jinja_template`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """The text; with `prompt` the header of an assistant turn follows."""
        return render_jinja_template([messages], add_generation_prompt=prompt, **self.options)[0][0]

    def marked(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters that the template marks as the assistant's."""
        texts, marks = render_jinja_template([messages], return_assistant_tokens_mask=True, **self.options)
        return texts[0], [(int(start), int(end)) for start, end in marks[0]]


def rendering(
    messages: list[dict[str, Any]], tools: Any, *, template: str, tokenizer: Any
) -> tuple[Render, list[dict[str, Any]]]:
    """What renders a conversation, and its messages as a template takes them."""
    # As transformers does: templates would write None where a key says that there is nothing.
    plain = [{key: value for key, value in one.items() if value is not None and key not in FLAGS} for one in messages]
    return Render({**tokenizer.special_tokens_map, "chat_template": template, "tools": tools}), plain


def _marks_of(
    where: str, marks: list[tuple[int, int]], turns: dict[int, tuple[int, int]], learned: frozenset[int]
) -> list[tuple[int, int]]:
    """The marks of a template that are of the learned turns."""
    kept = []
    for mark in marks:
        own = {number in learned for number, (start, end) in turns.items() if start < mark[1] and mark[0] < end}
        if len(own) > 1:
            raise BadSample(where, "the chat template marks turns that are learned and others in one piece")
        if True in own:
            kept.append(mark)
    return kept


def has_mask(template: str) -> bool:
    """Whether a chat template marks the assistant's turns."""
    return bool(GENERATION.search(template))


def assistant_spans(
    render: Any, messages: list[dict[str, Any]], text: str, special: tuple[str, ...]
) -> dict[int, tuple[int, int]]:
    """The characters of each assistant turn in `text`, by the number of its message: with the token that ends the turn,
    without white space behind it.

    Args:
        render: `(messages, prompt=False) -> str`; with `prompt` the header of an assistant turn follows.
        text: all messages, rendered.
        special: the special tokens, with one of which a turn may end.
    """
    spans = {}
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:number], prompt=True) if number else ""
        through = render(messages[: number + 1])
        if number and text.startswith(before) and text.startswith(through) and len(through) > len(before):
            spans[number] = (len(before), _without_trailing_space(text, len(before), len(through), special))
            continue
        bare = {"role": message["role"], "content": OTHER}
        other = or_none(render, [*messages[:number], bare, *messages[number + 1 :]])
        end_of_turn = ""
        if other is None:
            other = render([*messages[:number], other_calls(message), *messages[number + 1 :]])
            alone = or_none(render, [*messages[:number], bare]) or ""
            end_of_turn = through[len(through) - common_suffix(through, alone) :].strip()
        if OTHER not in other:
            continue  # the template does not show this turn
        start = len(before) if number and text.startswith(before) else common_prefix(text, other)
        end = max(start, len(text) - common_suffix(text, other))
        end = max(end, text.find(end_of_turn, end))  # behind the calls' last brackets
        spans[number] = (start, _with_end_token(text, end, special))
    return spans


def or_none(render: Any, messages: list[dict[str, Any]]) -> str | None:
    """None: the template refuses the messages."""
    try:
        return render(messages)
    except (TemplateError, TypeError):
        return None


def other_calls(message: dict[str, Any]) -> dict[str, Any]:
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


def common_suffix(one: str, other: str) -> int:
    return common_prefix(one[::-1], other[::-1])


def common_prefix(one: str, other: str) -> int:
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))
