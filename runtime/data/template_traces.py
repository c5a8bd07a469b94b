"""Does a chat template write all of a conversation?

A template drops what it does not know without a word: a role, a second call, the parts of a content that it expects as a text.
What it writes of the others then trains as if that had never been there. So a word is added to each part of a conversation, and
the rendering with these words must contain every one of them:

    messages    user: Hi w0                  critic: Too short w1      assistant: Hello w2
    rendered    <|user|>Hi w0<|end|><|assistant|>Hello w2<|end|>                                no w1: a bad sample

Parts of a content that are no text (an image, a refusal, a file) must change the rendering if they are left out.

What a template drops only once other messages follow (the text before a call, which some take for reasoning) is dropped on
purpose, and in generation as well: it is enough that the word is in the rendering up to its message. Reasoning that is not even
there is warned of; where a message has nothing else, it must be in the rendering, or an empty turn is learned.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.rendering import Renderer
from patchgen.runtime.data.template_forms import Message
from patchgen.runtime.data.template_inputs import REASONING

DROPS = "the chat template drops"
"""How the reason begins for which a conversation is refused here though the template takes it."""
DROPPED_TOOLS = (
    "The chat template does not write the schemas of tools: the model does not read which tools there are. To fix: describe them "
    "in a system message, or take a template with tools."
)
DROPPED_REASONING = (
    "The chat template does not write the reasoning of assistant turns, not even of the last one: it is not learned. To fix: take "
    "a template that writes it, or none of the keys reasoning_content, reasoning and thinking if that is meant."
)


@dataclass(frozen=True)
class Probe:
    """A conversation with a word in one place.

    Attributes:
        what: the place, for error messages.
        add: returns the message with the word.
        is_reasoning: beside a content or calls, a template may drop it.
    """

    index: int
    what: str
    word: str
    add: Callable[[Message], Message]
    is_reasoning: bool = False


def require_traces(where: str, render: Renderer, messages: Sequence[Message], text: str) -> None:
    """Requires that every content and every call of a conversation leaves a trace in its rendering; warns of dropped reasoning.

    Args:
        render: of the conversation, with its tools.
        messages: in the forms that the template takes (`template_inputs`).
        text: the messages, rendered.

    Raises:
        BadSample: the template drops a content, a part of one, a call or its arguments.
    """
    probes = list(_probes(messages, _words(text)))
    changed = list(messages)
    for probe in probes:
        changed[probe.index] = probe.add(changed[probe.index])
    with_words = render.or_none(changed)
    for probe in probes:
        if with_words is not None and probe.word in with_words.lower():
            continue
        message = messages[probe.index]
        is_all = probe.is_reasoning and _is_empty(message.get("content")) and not message.get("tool_calls")
        if _leaves_trace(render, messages, text, probe, in_full=is_all):
            continue
        if not probe.is_reasoning or is_all:
            raise _dropped(where, probe.what, probe.index, message["role"])
        warnings.warn(DROPPED_REASONING, stacklevel=2)
    for index, message in enumerate(messages):
        for number in _other_parts(message.get("content")):
            if not _part_leaves_trace(render, messages, text, index, number):
                kind = message["content"][number].get("type")
                raise _dropped(where, f"the {kind} in part {number} of the content", index, message["role"])


def _dropped(where: str, what: str, index: int, role: str) -> BadSample:
    remedy = "; a transform can put its text into the first user turn, or take another template" * (role == "system")
    return BadSample(
        where,
        f"{DROPS} {what} of message {index} of {role!r}: it would train as if it were not there{remedy}",
    )


def _other_parts(content: Any) -> list[int]:
    """The numbers of the parts of other types than text."""
    parts = enumerate(content) if isinstance(content, list) else ()
    return [number for number, part in parts if isinstance(part, dict) and part.get("type", "text") != "text"]


def _part_leaves_trace(render: Renderer, messages: Sequence[Message], text: str, index: int, number: int) -> bool:
    """Whether the rendering is another without a part; beside other parts, that up to its message is enough."""
    before, message, after = messages[:index], messages[index], messages[index + 1 :]
    others = [*message["content"][:number], *message["content"][number + 1 :]]
    without = {**message, "content": others}
    if render.or_none([*before, without, *after]) != text:
        return True
    return bool(others) and render.or_none([*before, without]) != render.or_none([*before, message])


def warn_of_dropped_tools(render: Renderer, messages: Sequence[Message], text: str) -> None:
    """Warns if the template writes no schemas of the tools in `render`: the model is not told which there are, here as in use."""
    without_tools = Renderer({**render.options, "tools": None})
    if render.options["tools"] and without_tools.or_none(list(messages)) == text:
        warnings.warn(DROPPED_TOOLS, stacklevel=2)


def _leaves_trace(
    render: Renderer, messages: Sequence[Message], text: str, probe: Probe, *, in_full: bool = False
) -> bool:
    """Whether a word in one place alone changes the rendering, or, unless `in_full`, is in the rendering up to its message."""
    before, message, after = messages[: probe.index], messages[probe.index], messages[probe.index + 1 :]
    changed = render.or_none([*before, probe.add(message), *after])
    if changed is None or changed != text:
        return True  # a template that refuses the word has read it
    if in_full:
        return False
    through = render.or_none([*before, probe.add(message)])
    return through is not None and probe.word in through.lower()


def _words(text: str) -> Iterator[str]:
    """Words that are not in a text."""
    return (word for word in (f"qz{number}zq" for number in itertools.count()) if word not in text)


def _probes(messages: Sequence[Message], words: Iterator[str]) -> Iterator[Probe]:
    """A probe for each content, part with a text, reasoning, call and arguments; what is empty cannot leave a trace."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(_has_text(part) for part in content):
            for number, part in enumerate(content):
                if _has_text(part):
                    word, what = next(words), "the content" if len(content) == 1 else f"part {number} of the content"
                    yield Probe(index, what, word, functools.partial(_with_word_in_part, number=number, word=word))
        elif content and not _has_parts(content):
            word = next(words)
            yield Probe(index, "the content", word, functools.partial(_with_word, word=word))
        if thoughts := [key for key in REASONING if message.get(key)]:
            word = next(words)
            add = functools.partial(_with_word_in_reasoning, keys=thoughts, word=word)
            yield Probe(index, "the reasoning", word, add, is_reasoning=True)
        for number, call in enumerate(message.get("tool_calls") or ()):
            name = call.get("function", call)["name"]
            for key in ("name", "arguments"):
                if call.get("function", call).get(key) is None:
                    continue
                word, what = next(words), f"{'call' if key == 'name' else 'the arguments of call'} {number} ({name!r})"
                yield Probe(
                    index, what, word, functools.partial(_with_word_in_call, number=number, key=key, word=word)
                )


def _is_empty(content: Any) -> bool:
    """Whether a content is none, or has only parts without a text."""
    return not content or (
        isinstance(content, list) and not any(map(_has_text, content)) and not _other_parts(content)
    )


def _has_parts(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(part, dict) and "type" in part for part in content)


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and bool(part.get("text"))


def _with_word(message: Message, word: str) -> Message:
    return {**message, "content": _lengthened(message["content"], word)}


def _with_word_in_part(message: Message, number: int, word: str) -> Message:
    parts = list(message["content"])
    parts[number] = {**parts[number], "text": _lengthened(parts[number]["text"], word)}
    return {**message, "content": parts}


def _with_word_in_reasoning(message: Message, keys: Sequence[str], word: str) -> Message:
    return {**message, **{key: _lengthened(message[key], word) for key in keys}}


def _with_word_in_call(message: Message, number: int, key: str, word: str) -> Message:
    calls = list(message["tool_calls"])
    call = calls[number]
    function = call.get("function", call)
    changed = {**function, key: _lengthened(function[key], word)}
    if key == "name" and isinstance(
        call.get("id"), str
    ):  # Kimi's templates write an id that contains the name, in its place
        call = {**call, "id": call["id"].replace(function[key], changed[key])}
    calls[number] = {**call, "function": changed} if "function" in call else changed
    return {**message, "tool_calls": calls}


def _lengthened(value: Any, word: str) -> Any:
    """A value with a word: a text ends with it, a mapping has it as a further key, a list as a further entry."""
    if isinstance(value, str):
        return value + word
    if isinstance(value, dict):
        return {**value, word: word}
    return [*value, {word: word} if value and isinstance(value[0], dict) else word]
