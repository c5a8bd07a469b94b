"""Tokens as text to be looked at: whole characters, in runs of one role, items as one piece each."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from patchgen.runtime.data.roles import TEMPLATE

BROKEN = "\ufffd"  # part of a character
MOST_OF_A_CHARACTER = 8  # tokens
NAMES = {"image": ("image_token",), "video": ("video_token",), "audio": ("audio_token",)}


@dataclass(frozen=True)
class Unit:
    """One token, or as many as make one character, or all that stand for one item.

    Attributes:
        start: place in the document.
        ids: of its tokens.
        learned: whether the loss reads it.
        target: what is learned in its place, where that is another token.
        item: "image", "video" or "audio": it stands for one.
    """

    text: str
    start: int
    ids: tuple[int, ...]
    learned: bool
    target: str = ""
    item: str = ""


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one role; empty: whose words they are is not known."""

    role: str
    units: list[Unit]

    @property
    def learned(self) -> bool:
        return any(unit.learned for unit in self.units)


class Decoder:
    """Tokens to text.

    Args:
        processor: whose placeholders stand for items; None: there are none.
    """

    def __init__(self, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        # A token alone may lose the space before it, and behind another it does not.
        self._anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._before = len(self._decode(self._anchor))
        self._items = {}
        for kind, names in NAMES.items() if processor is not None else ():
            tokens = [getattr(processor, name, None) or getattr(tokenizer, name, None) for name in names]
            self._items |= {tokenizer.convert_tokens_to_ids(str(token)): kind for token in tokens if token}

    def pieces(
        self, ids: Sequence[int], learned: Sequence[bool], targets: Sequence[int | None], roles: Sequence[str] | None
    ) -> list[Piece]:
        """The tokens of a document in runs of one role."""
        found: list[Piece] = []
        for unit in self._units(ids, learned, targets):
            role = roles[unit.start] if roles is not None else ""
            if role == TEMPLATE and unit.learned and found:
                role = found[-1].role  # what ends a turn is learned with it
            if not found or found[-1].role != role:
                found.append(Piece(role, []))
            found[-1].units.append(unit)
        return found

    def _units(self, ids: Sequence[int], learned: Sequence[bool], targets: Sequence[int | None]) -> Iterator[Unit]:
        place = 0
        while place < len(ids):
            item = self._items.get(ids[place], "")
            count = self._of_item(ids, place) if item else self._of_character(ids, place)
            own = tuple(ids[place : place + count])
            other = targets[place]
            yield Unit(
                text=self.text((own[0],) if item else own),
                start=place,
                ids=own,
                learned=any(learned[place : place + count]),
                target="" if other is None else self.text((other,)),
                item=item,
            )
            place += count

    def _of_item(self, ids: Sequence[int], place: int) -> int:
        end = place
        while end < len(ids) and ids[end] == ids[place]:
            end += 1
        return end - place

    def _of_character(self, ids: Sequence[int], place: int) -> int:
        """How many tokens from `place` on make whole characters; 1 where none do."""
        for count in range(1, MOST_OF_A_CHARACTER):
            if not self.text(tuple(ids[place : place + count])).endswith(BROKEN):
                return count
        return 1

    @functools.lru_cache(maxsize=2**16)  # noqa: B019 - a decoder lives as long as its command
    def text(self, ids: tuple[int, ...]) -> str:
        return self._decode([*self._anchor, *ids])[self._before :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
