"""Which characters of a rendered conversation come from which message.

The conversation is rendered a second time with its texts written in other letters, a set of them for each message. Where
the result has such a letter, the character of the first rendering is the message's; all others are the template's:

    rendered                         <|user|>Hi<|end|><|assistant|>Hi there<|end|>
    rendered in other letters        <|user|>𠀀𠀁<|end|><|assistant|>𠀂𠀁 𠀃𠀄𠀅𠀆𠀅<|end|>
    message                                  00                     11 11111

White space and quotes stay, and what the template looks for (`'</think>' in content`) if it writes something else without it:
the second rendering in the first's letters has to be the first, else nothing is known.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from patchgen.runtime.data.literals import TEMPLATE, strings_of
from patchgen.runtime.data.rendering import Renderer, compared_texts

OTHER_LETTERS = (range(0x20000, 0x2A6E0), range(0x2A700, 0x2B739), range(0x30000, 0x3134B), range(0x100000, 0x10FFFE))
"""Ideographs that are printable and have no case, and at last private characters."""
KEPT_CHARACTERS = frozenset(" \"'\\")
"""What templates strip, split at or escape; characters that cannot be printed, as other white space, are kept as well."""
NAMES = frozenset(
    ("role", "name", "id", "tool_call_id", "type", "image", "image_url", "video", "audio", "path", "url")
)
"""Fields of messages that are not texts: templates compare them, and write names outside of the message as well."""
CHANGED = "it changes their letters, or compares their texts with each other"
EXHAUSTED = (
    "they have more different characters, counted in each message, than there are letters to write them in (about 115,000); use "
    "shorter conversations"
)
TOOLS = -2
"""The source of a character of the tools' schemas."""


def sources_of_characters(
    render: Renderer, messages: Sequence[dict[str, Any]], text: str, marked_tools: re.Pattern[str]
) -> tuple[np.ndarray | None, str]:
    """`(len(text),)` int64: the message that each character comes from, `TEMPLATE` or `TOOLS`; None: unknown, with the reason.

    A kept character between two of one message is taken for the template's.

    Args:
        text: the messages, rendered.
        marked_tools: texts in the tools' schemas of which the source is asked; others count as the template's.
    """
    compared = compared_texts(render.options["chat_template"])
    for kept_of_answers, kept_of_others in ((), ()), (compared, ()), (compared, compared):
        letters = _Letters(text, messages)
        kept, kept_elsewhere = _kept(kept_of_answers), _kept(kept_of_others)
        written = [
            letters.write(message, index, kept if message["role"] == "assistant" else kept_elsewhere)
            for index, message in enumerate(messages)
        ]
        tools = render.options.get("tools")
        other_tools = letters.write_matches(tools, marked_tools) if tools else tools
        if letters.exhausted:
            return None, EXHAUSTED
        rendered = Renderer({**render.options, "tools": other_tools}).or_none(written)
        sources = None if rendered is None else letters.sources(rendered, text)
        if sources is not None:
            return sources, ""
    return None, CHANGED


def _kept(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


class _Letters:
    """Other letters for the characters of messages: one for each character of each message."""

    def __init__(self, text: str, messages: Sequence[dict[str, Any]]) -> None:
        used = set(text)
        for string in strings_of(messages):
            used.update(string)
        self._unused: Iterator[str] = (
            letter for letter in map(chr, itertools.chain(*OTHER_LETTERS)) if letter not in used
        )
        self._letters: dict[tuple[int, str], str] = {}
        self.exhausted = False

    def write(self, value: Any, source: int, kept: re.Pattern[str]) -> Any:
        """A message, or a part of one, with its texts in the letters of `source`, except for what `kept` matches."""
        return _mapped(value, lambda text: self._write_text(text, source, kept))

    def write_matches(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """The tools, with what `pattern` matches in other letters."""
        return _mapped(
            value,
            lambda text: pattern.sub(lambda match: self._in_letters(match.group(), TOOLS), text),
            frozenset(),
        )

    def _write_text(self, text: str, source: int, kept: re.Pattern[str]) -> str:
        pieces, last = [], 0
        for match in kept.finditer(text):
            pieces += [self._in_letters(text[last : match.start()], source), match.group()]
            last = match.end()
        return "".join([*pieces, self._in_letters(text[last:], source)])

    def _in_letters(self, text: str, source: int) -> str:
        table = {}
        for character in sorted(set(text) - KEPT_CHARACTERS):
            if not character.isprintable():
                continue
            letter = self._letters.get((source, character)) or next(self._unused, None)
            self.exhausted |= letter is None
            self._letters[source, character] = table[ord(character)] = letter or character
        return text.translate(table)

    def sources(self, rendered: str, text: str) -> np.ndarray | None:
        """`(len(text),)` int64: the source of each character; None: `rendered` is not `text` in these letters."""
        if len(rendered) != len(text):
            return None
        letters, expected = _code_points(rendered), _code_points(text)
        sources = np.full(len(text), TEMPLATE, dtype=np.int64)
        if self._letters:
            known = np.array([ord(letter) for letter in self._letters.values()])
            order = np.argsort(known)
            found = order[np.searchsorted(known, letters, sorter=order).clip(max=len(known) - 1)]
            is_letter = known[found] == letters
            originals = np.array([ord(character) for _, character in self._letters])
            owners = np.array([source for source, _ in self._letters])
            letters = np.where(is_letter, originals[found], letters)
            sources[is_letter] = owners[found][is_letter]
        return sources if np.array_equal(letters, expected) else None


def _mapped(value: Any, write: Callable[[str], str], names: frozenset[str] = NAMES) -> Any:
    """A value with all its texts changed, except those in fields of `names`."""
    if isinstance(value, str):
        return write(value)
    if isinstance(value, dict):
        return {key: part if key in names else _mapped(part, write, names) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(part, write, names) for part in value]
    return value


def _code_points(text: str) -> np.ndarray:
    """`(len(text),)` int64"""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
