"""The small form of one value of a config: ids of special tokens, sizes by their meaning, rotary sections."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.runtime.verify import field_semantics as sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class NoSpecialId(ValueError):
    """A config has more special tokens than a small vocabulary has ids for them."""


class SpecialIds(Iterator[int]):
    """The ids of the small vocabulary that are reserved for special tokens, from the top down.

    A config and its sub-configs share no id, since one token cannot mean both an image and the end of a text. Sibling
    sub-configs (the halves of an omni model) may.
    """

    def __init__(self, vocab: int = sizes.VOCAB) -> None:
        self.vocab = vocab
        self.first = sizes.first_reserved_id(vocab)
        self._next = vocab - 1

    def __next__(self) -> int:
        if self._next <= self.first:
            raise NoSpecialId(
                f"it has more than {self.vocab - self.first - 1} special tokens above {self.first}, and a small vocabulary of "
                f"{self.vocab} has no more ids for them"
            )
        self._next -= 1
        return self._next + 1

    def skip(self, sub_ids: SpecialIds) -> None:
        """Skips the ids that a sub-config took."""
        self._next = min(self._next, sub_ids._next)


NO_IDS: Iterator[int] = iter(())


def small_value(declared: object, names: tuple[str, ...], special_ids: Iterator[int] = NO_IDS) -> object:
    """The small form of a field.

    Args:
        names: its common name, if it has another one, and its own.
        special_ids: the ids that are still free.
    """
    if sizes.is_special_id(names[-1]):
        return _small_id(declared, special_ids)
    if isinstance(declared, bool):
        return declared
    if sizes.is_dropout(names[-1]) and isinstance(declared, (int, float)):
        return 0.0
    rule = sizes.rule_for(*names)
    if rule is None:
        return declared
    if isinstance(declared, int):
        return rule.small(declared)
    if isinstance(declared, (list, tuple)) and all(type(item) is int for item in declared):
        return type(declared)(rule.small(item) for item in declared)
    if isinstance(declared, dict) and declared and all(type(item) is int for item in declared.values()):
        return {key: rule.small(item) for key, item in declared.items()}
    return declared


def _small_id(declared: object, special_ids: Iterator[int]) -> object:
    if isinstance(declared, (list, tuple)):
        return type(declared)(_small_id(item, special_ids) for item in declared)
    first = special_ids.first if isinstance(special_ids, SpecialIds) else sizes.first_reserved_id(sizes.VOCAB)
    if type(declared) is int and declared >= first:
        return next(special_ids)
    return declared


# Sections read from rotary parameters, with or without a default list; `_SECTIONS` (time, height, width) if without.
_SECTIONS_READ = re.compile(r"""rope_\w+(?:\.get\(|\[)["']mrope_section["'](?:,\s*\[([\d, ]+)\])?[)\]]""")
_SECTIONS = [24, 20, 20]


def with_sections(config_class: type[PreTrainedConfig], rope: object) -> object:
    """Rotary parameters with the sections that the modeling file reads, if a config has none."""
    match = _SECTIONS_READ.search(modeling_source(config_class))
    if match is None or not isinstance(rope, dict) or "rope_type" not in rope or "mrope_section" in rope:
        return rope
    if rope["rope_type"] == "axial":  # of a tower
        return rope
    fallback = [int(number) for number in match[1].split(",")] if match[1] else _SECTIONS
    return {**rope, "mrope_section": fallback}


def small_rope(rope: object, overrides: Mapping[str, Any], values: Mapping[str, Any]) -> dict | None:
    """Rotary parameters with sections that fit the small head; None if they contain no size."""
    kinds = overrides.get("layer_types") or values.get("layer_types")
    if rope == {} and kinds:  # per kind of layer, set by checkpoints
        section = split(sizes.HEAD_DIM // 2, _SECTIONS)
        return {kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section} for kind in set(kinds)}
    if not isinstance(rope, dict) or "section" not in str(rope):
        return None
    head_dim = overrides.get("head_dim") or values.get("head_dim") or sizes.HEAD_DIM
    small = dict(rope)
    for key, value in rope.items():
        if isinstance(value, dict):
            small[key] = small_rope(value, overrides, values) or value
        elif key.endswith("section"):
            half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
            small[key] = split(half, value)
    return small


def split(total: int, shares: list[int]) -> list[int]:
    """Splits `total` in proportion to `shares`: each part is at least 1, and equal shares give equal parts if possible."""
    parts = [max(1, total * share // sum(shares)) for share in shares]
    remainder = total - sum(parts)
    first = next((share for share in shares if remainder % shares.count(share) == 0), None)
    places = [place for place, share in enumerate(shares) if share == first] or [0]
    for place in places:
        parts[place] += remainder // len(places)
    return parts


def modeling_source(config_class: type[PreTrainedConfig]) -> str:
    """The text of the modeling file next to a config class; empty if there is none."""
    config_file = Path(inspect.getfile(config_class))
    modeling_file = config_file.with_name(config_file.name.replace("configuration_", "modeling_"))
    return modeling_file.read_text() if modeling_file.is_file() else ""
