"""Decodes tokens for display: complete characters, in runs of one role, each media item as one unit."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from patchgen.runtime.data.roles import TEMPLATE

REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete character is decoded to
MAX_TOKENS_OF_CHARACTER = 8
PLACEHOLDERS = {"image": "image_token", "video": "video_token", "audio": "audio_token"}
"""The attribute of a processor or tokenizer with the placeholder of each kind of media."""


@dataclass(frozen=True)
class Unit:
    """One token, several that form one character, or all of one media item.

    Attributes:
        start: offset in the document.
        learned: whether it has a loss.
        target: the text of its label, if that is another token.
        item: "image", "video" or "audio", if it is a media item.
    """

    text: str
    start: int
    ids: tuple[int, ...]
    learned: bool
    target: str = ""
    item: str = ""


@dataclass(frozen=True)
class RoleRun:
    """Consecutive tokens of one role; the role is empty if it is not known."""

    role: str
    units: list[Unit]

    @property
    def learned(self) -> bool:
        return any(unit.learned for unit in self.units)


class Decoder:
    """Tokens to text.

    Args:
        processor: its placeholders stand for media; None: there are none.
    """

    def __init__(self, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        # A token decoded alone may lose the space before it; after another token it does not.
        self._anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._anchor_length = len(self._decode(self._anchor))
        self._kind_of_placeholder = {}
        for kind, name in PLACEHOLDERS.items() if processor is not None else ():
            if token := getattr(processor, name, None) or getattr(tokenizer, name, None):
                self._kind_of_placeholder[tokenizer.convert_tokens_to_ids(str(token))] = kind

    def role_runs(
        self, ids: Sequence[int], learned: Sequence[bool], targets: Sequence[int | None], roles: Sequence[str] | None
    ) -> list[RoleRun]:
        """The tokens of a document, grouped by role."""
        runs: list[RoleRun] = []
        for unit in self._units(ids, learned, targets):
            role = roles[unit.start] if roles is not None else ""
            if role == TEMPLATE and unit.learned and runs:
                role = runs[-1].role  # the token that ends a turn belongs to it
            if not runs or runs[-1].role != role:
                runs.append(RoleRun(role, []))
            runs[-1].units.append(unit)
        return runs

    def _units(self, ids: Sequence[int], learned: Sequence[bool], targets: Sequence[int | None]) -> Iterator[Unit]:
        start = 0
        while start < len(ids):
            item = self._kind_of_placeholder.get(ids[start], "")
            count = self._item_length(ids, start) if item else self._character_length(ids, start)
            unit_ids = tuple(ids[start : start + count])
            target = targets[start]
            yield Unit(
                text=self.text(unit_ids[:1] if item else unit_ids),
                start=start,
                ids=unit_ids,
                learned=any(learned[start : start + count]),
                target="" if target is None else self.text((target,)),
                item=item,
            )
            start += count

    def _item_length(self, ids: Sequence[int], start: int) -> int:
        end = start
        while end < len(ids) and ids[end] == ids[start]:
            end += 1
        return end - start

    def _character_length(self, ids: Sequence[int], start: int) -> int:
        """How many tokens from `start` on form complete characters; 1 if none do."""
        for count in range(1, MAX_TOKENS_OF_CHARACTER + 1):
            if not self.text(tuple(ids[start : start + count])).endswith(REPLACEMENT_CHARACTER):
                return count
        return 1

    @functools.lru_cache(maxsize=2**16)  # noqa: B019 - a decoder lives as long as its command
    def text(self, ids: tuple[int, ...]) -> str:
        return self._decode([*self._anchor, *ids])[self._anchor_length :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
