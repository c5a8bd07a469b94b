"""Aligns the tokens of a multimodal sample with its text, in which each media item has one placeholder.

A processor replaces the placeholder of an item by the tokens of the item. Most report where (`text_replacement_offsets`);
for others the tokens of the text are matched with the processor's, and the remaining ones belong to items:

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
class TokenAlignment:
    """For each of n tokens:

    Attributes:
        offsets: `(n, 2)`, its characters; (0, 0): none.
        expanded: maps a span of the text with one placeholder per item to the characters that `offsets` counts.
        is_media: `(n,)` bool, whether it belongs to an item.
    """

    offsets: np.ndarray
    expanded: Callable[[Span], Span]
    is_media: np.ndarray

    def overlapping(self, spans: Sequence[Span]) -> np.ndarray:
        """`(n,)` bool: whether each token overlaps a span of the text, and belongs to no item."""
        return mask_of_spans(self.offsets, [self.expanded(span) for span in spans]) & ~self.is_media


def alignment_of_processor(where: str, outputs: dict[str, Any]) -> TokenAlignment | None:
    """The alignment that a processor reports; None: it reports none.

    Raises:
        BadSample: an item has no token, for example a very short sound.
    """
    if "text_replacement_offsets" not in outputs or "offset_mapping" not in outputs:
        return None
    places = (outputs["text_replacement_offsets"] or [[]])[0]
    for index, place in enumerate(places):
        if place["new_span"][0] == place["new_span"][1]:
            raise BadSample(where, f"item {index}, {_article(place['type'])}, is too small for a token")
    offsets = np.array(outputs["offset_mapping"][0]).reshape(-1, 2)

    def expanded(span: Span) -> Span:
        return _expanded(span[0], places), _expanded(span[1], places)

    return TokenAlignment(offsets, expanded, mask_of_spans(offsets, [place["new_span"] for place in places]))


def _article(kind: str) -> str:
    return {"image": "an image", "audio": "a sound"}.get(kind, f"a {kind}")


def _expanded(character: int, places: Sequence[dict[str, Any]]) -> int:
    """The index of a character in the text after placeholders are expanded."""
    before = [place for place in places if place["span"][1] <= character]
    return character + sum(
        (place["new_span"][1] - place["new_span"][0]) - (place["span"][1] - place["span"][0]) for place in before
    )


def alignment_by_matching(
    where: str, ids: Sequence[int], text: str, tokenizer: Any, needed: Sequence[Span]
) -> TokenAlignment:
    """The alignment found by comparing `ids` of a processor with the tokens of the text.

    Args:
        needed: spans of the text whose tokens must all have a unique match.

    Raises:
        BadSample: a token of `needed` has no match, or several.
    """
    text_tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = text_tokens["offset_mapping"]
    forward = _matches(text_tokens["input_ids"], ids)
    backward = _matches(text_tokens["input_ids"][::-1], ids[::-1])
    last_text_index, last_index = len(offsets) - 1, len(ids) - 1
    backward = {last_text_index - text_index: last_index - index for text_index, index in backward.items()}
    for text_index in np.flatnonzero(mask_of_spans(offsets, needed)).tolist():
        if text_index not in forward or forward[text_index] != backward.get(text_index):
            start, end = offsets[text_index]
            raise BadSample(
                where,
                f"the processor returns other tokens than the text has around {text[start:end]!r} (character {start}), so it is "
                "unknown which of them have a loss",
            )
    token_offsets = np.zeros((len(ids), 2), dtype=np.int64)
    is_media = np.ones(len(ids), dtype=bool)
    for text_index, index in forward.items():
        token_offsets[index], is_media[index] = offsets[text_index], False
    return TokenAlignment(token_offsets, lambda span: span, is_media)


def _matches(text: Sequence[int], ids: Sequence[int]) -> dict[int, int]:
    """Index of a token of the text -> its index in the ids, where it has one."""
    blocks = SequenceMatcher(None, text, ids, autojunk=False).get_matching_blocks()
    return {block.a + step: block.b + step for block in blocks for step in range(block.size)}
