"""Renders conversations by a chat template, and tells which message each part of the text is written for.

A template writes a conversation in a loop over its messages. The template runs with calls put in (`_Follower`) that do
not write anything, and report whose turn it is:

    {% for message in messages %}     message 0: from character 0
      <|{{ message.role }}|>...       message 1: from character 12
    {% endfor %}                      no message: from character 40
    {{ eos_token }}
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from transformers.utils import chat_template_utils

FOLLOW, LEAVE = "patchgen_follow", "patchgen_leave"
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError)
"""What a template raises on messages that it does not support."""
OWN_OUTPUT = (nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock)
"""What these contain is written elsewhere, later or never."""


@dataclass(frozen=True)
class Segment:
    """The characters `start` to `end` of a text, written for the message `index`; None: for no message."""

    start: int
    end: int
    index: int | None


class Renderer:
    """Renders messages by a chat template.

    Args:
        options: keyword arguments of `render_jinja_template`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """The text; with `prompt`, followed by the header of an assistant turn."""
        return chat_template_utils.render_jinja_template([messages], add_generation_prompt=prompt, **self.options)[0][
            0
        ]

    def or_none(self, messages: list[dict[str, Any]], prompt: bool = False) -> str | None:
        """The text, or None if the template refuses the messages."""
        try:
            return self(messages, prompt)
        except REFUSALS:
            return None

    def with_marks(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters that the template marks as assistant turns."""
        texts, marks = chat_template_utils.render_jinja_template(
            [messages], return_assistant_tokens_mask=True, **self.options
        )
        return texts[0], [(int(start), int(end)) for start, end in marks[0] if end > start]

    def with_segments(self, messages: list[dict[str, Any]], prompt: bool = False) -> tuple[str, list[Segment]]:
        """The text, and its parts by the message that each is written for, in the order of the text."""
        options = {key: value for key, value in self.options.items() if key != "chat_template"}
        # Each message is an object of its own, by which it is recognised.
        copies = [dict(message) for message in chat_template_utils._alias_reasoning_fields(messages)]
        follower = _Follower(copies)
        values = {
            **options,
            "messages": copies,
            "documents": None,
            "add_generation_prompt": prompt,
            FOLLOW: follower.follow,
            LEAVE: follower.leave,
        }
        template = _followed(self.options["chat_template"])
        for part in template.root_render_func(template.new_context(values)):
            follower.write(part)
        return follower.text_and_segments()


class _Follower:
    """Collects the text of a template, and whose message is written: by the depth of loops."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._index = {id(message): index for index, message in enumerate(messages)}
        self._live: dict[int, int | None] = {0: None}
        self._is_message_loop: dict[int, bool] = {}
        self._parts: list[str] = []
        self._length = 0
        self._changes: list[tuple[int, int | None]] = [(0, None)]

    def write(self, part: str) -> None:
        self._parts.append(part)
        self._length += len(part)

    def follow(self, depth: int, is_item: bool, *values: Any) -> None:
        """A loop at `depth` begins an item, or a variable in it gets a value: a message is written from here on.

        A variable counts only in loops over anything else (`for i in range(n)`), and its first message only: in a loop
        over messages it is another message to compare with.
        """
        index = next((self._index[id(value)] for value in values if id(value) in self._index), None)
        if is_item:
            self._live[depth] = self._live[depth - 1] if index is None else index
            self._is_message_loop[depth] = index is not None
        elif index is None or self._is_message_loop[depth]:
            return
        else:
            self._live[depth] = index
            self._is_message_loop[depth] = True
        self._changes.append((self._length, self._live[depth]))

    def leave(self, depth: int) -> None:
        """A loop at `depth` has ended."""
        self._changes.append((self._length, self._live[depth - 1]))

    def text_and_segments(self) -> tuple[str, list[Segment]]:
        segments: list[Segment] = []
        ends = [start for start, _ in self._changes[1:]] + [self._length]
        for (start, index), end in zip(self._changes, ends, strict=True):
            if end == start:
                continue
            if segments and segments[-1].index == index:
                start = segments.pop().start
            segments.append(Segment(start, end, index))
        return "".join(self._parts), segments


@functools.lru_cache(maxsize=32)
def _followed(chat_template: str) -> jinja2.Template:
    """A chat template that reports the messages of its loops."""
    environment = chat_template_utils._compile_jinja_template(chat_template).environment
    tree = environment.parse(chat_template)
    tree.body = list(_with_calls(tree.body, depth=0))
    tree.set_environment(environment)
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.globals)


def _with_calls(body: Sequence[nodes.Node], depth: int) -> Iterator[nodes.Node]:
    """The statements with those that report messages; `depth` is the number of loops around them."""
    for node in body:
        if isinstance(node, OWN_OUTPUT):
            yield node
        elif isinstance(node, nodes.For):
            items = [name.name for name in node.target.find_all(nodes.Name)]
            items += [node.target.name] if isinstance(node.target, nodes.Name) else []
            node.body = [_call(FOLLOW, depth + 1, True, names=items), *_with_calls(node.body, depth + 1)]
            yield node
            yield _call(LEAVE, depth + 1)
        elif isinstance(node, nodes.If):
            for branch in (node, *node.elif_):
                branch.body = list(_with_calls(branch.body, depth))
            node.else_ = list(_with_calls(node.else_, depth))
            yield node
        elif isinstance(node, nodes.Assign) and depth and isinstance(node.target, nodes.Name):
            yield node
            yield _call(FOLLOW, depth, False, names=[node.target.name])
        else:
            yield node


def _call(function: str, *constants: Any, names: Sequence[str] = ()) -> nodes.ExprStmt:
    arguments = [*map(nodes.Const, constants), *(nodes.Name(name, "load") for name in names)]
    return nodes.ExprStmt(nodes.Call(nodes.Name(function, "load"), arguments, [], None, None), lineno=1)


@functools.lru_cache(maxsize=32)
def compared_texts(chat_template: str) -> tuple[str, ...]:
    """The texts that a template looks for in its input (`'</think>' in content`, `content.split('</think>')`), longest first."""
    environment = chat_template_utils._compile_jinja_template(chat_template).environment
    tree = environment.parse(chat_template)
    found = set()
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        operands: list[nodes.Node] = []
        if isinstance(node, nodes.Compare):
            operands = [node.expr, *(operand.expr for operand in node.ops)]
        else:
            operands = [*node.args, *(pair.value for pair in node.kwargs)]
        for operand in operands:
            constants = [operand] if isinstance(operand, nodes.Const) else operand.find_all(nodes.Const)
            found |= {constant.value for constant in constants if isinstance(constant.value, str)}
    return tuple(sorted((text for text in found if text.strip()), key=lambda text: (-len(text), text)))
