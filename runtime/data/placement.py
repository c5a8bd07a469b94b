"""Which characters of the text with one placeholder per item each token of a sample stands for.

A processor puts the tokens of an item where its placeholder stands. Most say where (`text_replacement_offsets`); of any
other the tokens of the text itself are found among those that it gives, and what is left over belongs to the items:

    text       <|user|> <image>                     What ? <|end|> <|assistant|> A cat <|end|>
    processor  <|user|> <fake> <image> <image> <fake> What ? <|end|> <|assistant|> A cat <|end|>
                        ----- items -----------------
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from patchgen.runtime.data.literals import Span, mask_of_spans
from patchgen.runtime.data.problems import BadSample


@dataclass(frozen=True)
class Placement:
    """Of each of n tokens.

    Attributes:
        offsets: `(n, 2)`, the characters that it stands for; (0, 0): none.
        expanded: turns a span of the text with one placeholder per item into one of these characters.
        is_media: `(n,)` bool, it belongs to an item.
    """

    offsets: np.ndarray
    expanded: Callable[[Span], Span]
    is_media: np.ndarray

    def within(self, spans: Sequence[Span]) -> np.ndarray:
        """`(n,)` bool: the tokens of the text, and of no item, that overlap a span of it."""
        return mask_of_spans(self.offsets, [self.expanded(span) for span in spans]) & ~self.is_media


def reported(where: str, found: dict[str, Any]) -> Placement | None:
    """The placement that a processor reports; None: it reports none.

    Raises:
        BadSample: an item has no token: a sound shorter than what one stands for, say.
    """
    if "text_replacement_offsets" not in found or "offset_mapping" not in found:
        return None
    places = (found["text_replacement_offsets"] or [[]])[0]
    for number, place in enumerate(places):
        if place["new_span"][0] == place["new_span"][1]:
            raise BadSample(where, f"item {number}, {_article(place['type'])}, is too small for a token")
    offsets = np.array(found["offset_mapping"][0]).reshape(-1, 2)

    def expanded(span: Span) -> Span:
        return _expanded(span[0], places), _expanded(span[1], places)

    return Placement(offsets, expanded, mask_of_spans(offsets, [place["new_span"] for place in places]))


def _article(kind: str) -> str:
    return {"image": "an image", "audio": "a sound"}.get(kind, f"a {kind}")


def _expanded(character: int, places: Sequence[dict[str, Any]]) -> int:
    """A character of the text with one placeholder per item, in the text where those are expanded."""
    grown = [place for place in places if place["span"][1] <= character]
    return character + sum(
        (place["new_span"][1] - place["new_span"][0]) - (place["span"][1] - place["span"][0]) for place in grown
    )


def matched(where: str, ids: Sequence[int], text: str, tokenizer: Any, needed: Sequence[Span]) -> Placement:
    """The placement by comparing `ids`, as a processor gave them, with the tokens of the text alone.

    Args:
        needed: spans of the text of which every token must be found, in one place only.

    Raises:
        BadSample: a token of `needed` is not among the ids, or could be in two places.
    """
    own = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = own["offset_mapping"]
    forward = _matches(own["input_ids"], ids)
    backward = _matches(own["input_ids"][::-1], ids[::-1])
    last_own, last = len(offsets) - 1, len(ids) - 1
    backward = {last_own - one: last - other for one, other in backward.items()}
    for number in np.flatnonzero(mask_of_spans(offsets, needed)).tolist():
        if number not in forward or forward[number] != backward.get(number):
            start, end = offsets[number]
            raise BadSample(
                where,
                f"the processor gives other tokens than the text has around {text[start:end]!r} (character {start}), so which of "
                "them have a loss is unknown",
            )
    found = np.zeros((len(ids), 2), dtype=np.int64)
    is_media = np.ones(len(ids), dtype=bool)
    for number, place in forward.items():
        found[place], is_media[place] = offsets[number], False
    return Placement(found, lambda span: span, is_media)


def _matches(text: Sequence[int], ids: Sequence[int]) -> dict[int, int]:
    """Index of a token of the text -> its index among the ids; some have none."""
    blocks = SequenceMatcher(None, text, ids, autojunk=False).get_matching_blocks()
    return {block.a + step: block.b + step for block in blocks for step in range(block.size)}
