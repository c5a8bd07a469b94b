"""Relations between the sub-configs of a composite config, restored among the small ones.

| relation | found by |
| --- | --- |
| `vision_feature_layer` names layers of `vision_config` | the field's name |
| `x.reshape(-1, self.config.audio_config.intermediate_size)` groups frames: it is a whole number of widths | the modeling file |
| `self.config.audio_config.projection_bias`, which its class does not have, is set: no bias, or a small size | the modeling file |
| a vocabulary has an id for each code of an image tokenizer | names in the modeling file |
| `image_token_offset`, `audio_token_offset`: the codes of each tokenizer follow one another in the vocabulary | the fields' names |
| the text model has the layers that `spatial_target_layers` names | the field's name |
| a chunk of samples is a multiple of the hop | the last part whose full `hop_length` divides the full length |
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from patchgen.runtime.verify import field_semantics as sizes

if TYPE_CHECKING:
    from patchgen.runtime.verify.small_config import SmallConfig

TOWER_LAYER_FIELD = re.compile(r"(\w+)_feature_layers?$")
CODE_OFFSET_FIELD = re.compile(r"(image|audio)_token_offset$")
CODE_TOKENIZERS = {"image": "vision_config", "audio": "audio_config"}
TEXT_LAYER_FIELD = re.compile(r"\w+_target_layers$")
SUB_CONFIG_READ = re.compile(r"\bconfig\.(\w+_config)\.(\w+)\b(?!\()")
NAMED_IDS = re.compile(r"""vocab_map\.get\(["'](.+?)["']\)""")
GROUPING_RESHAPE = re.compile(r"\.(?:reshape|view)\([^()]*\bconfig\.(\w+)\.(\w+)\s*,?\s*\)")


def relate_parts(parts: Mapping[str, SmallConfig], source: str) -> None:
    """Sets the fields of small sub-configs that depend on other sub-configs, or that the modeling file reads of them.

    Args:
        parts: by the name of the sub-config.
        source: the modeling file of the composite.
    """
    for part in parts.values():
        for name, value in layer_numbers(vars(part.config), parts).items():
            setattr(part.config, name, value)
    for key, name in SUB_CONFIG_READ.findall(source):
        rule = sizes.rule_for(name)
        if key in parts and not hasattr(parts[key].config, name) and (rule is not None or name.endswith("_bias")):
            # Of the largest declared value the small one is the rule's limit.
            setattr(parts[key].config, name, False if rule is None else rule.small(sys.maxsize))
    for key, name in GROUPING_RESHAPE.findall(source):
        if key not in parts:
            continue
        width, grouped = (getattr(parts[key].full, field, None) for field in ("hidden_size", name))
        if type(width) is int and type(grouped) is int and grouped % width == 0:
            setattr(parts[key].config, name, grouped // width * parts[key].config.hidden_size)


def distinct_placeholders(parts: Mapping[str, SmallConfig], special_ids: Iterator[int]) -> None:
    """Gives the placeholders of each modality a different id."""
    name_of_token: dict[int, str] = {}
    for part in parts.values():
        for name in sizes.PLACEHOLDERS:
            if type(token := vars(part.config).get(name)) is int and name_of_token.setdefault(token, name) != name:
                setattr(part.config, name, next(special_ids))


def vocabulary_map(
    values: Mapping[str, object], parts: Mapping[str, SmallConfig], source: str, special_ids: Iterator[int]
) -> dict[str, object]:
    """The `vocabulary_map` that a modeling file reads, if it is None: named ids, and codes of an image tokenizer.

    Also sets the numbers of codes in the config of that tokenizer, which is one of `parts`.
    """
    prefix = next((prefix for prefix in sizes.IMAGE_CODES if f'startswith("{prefix}")' in source), None)
    if prefix is None or values.get("vocabulary_map", {}) is not None:
        return {}
    for part in parts.values():
        for name in ("num_embeddings", "codebook_size"):
            if hasattr(part.config, name):
                setattr(part.config, name, sizes.NUM_IMAGE_CODES)
    codes = (sizes.IMAGE_CODES[prefix](number) for number in range(sizes.NUM_IMAGE_CODES))
    return {
        "vocabulary_map": {name: next(special_ids) for name in (*dict.fromkeys(NAMED_IDS.findall(source)), *codes)}
    }


def code_offsets(values: Mapping[str, object], parts: Mapping[str, SmallConfig], first_special: int) -> dict[str, int]:
    """The ids of the first code of each tokenizer, in the order of the full config and without gaps, below the special ids."""
    offsets = {
        name: value
        for name, value in values.items()
        if type(value) is int and (match := CODE_OFFSET_FIELD.match(name)) and CODE_TOKENIZERS[match[1]] in parts
    }
    small: dict[str, int] = {}
    end = first_special
    for name in sorted(offsets, key=offsets.__getitem__, reverse=True):
        end -= parts[CODE_TOKENIZERS[name.partition("_")[0]]].config.codebook_size
        small[name] = end
    return small


def layer_numbers(values: Mapping[str, object], parts: Mapping[str, SmallConfig]) -> dict[str, object]:
    """The fields among `values` with numbers of layers that a small tower lacks, mapped to its layers in the same order.

    `*_target_layers` become 1, 2, ..., and the text config gets one layer more than these.
    """
    small_numbers: dict[str, object] = {}
    for name, value in values.items():
        if TEXT_LAYER_FIELD.match(name) and isinstance(value, (list, tuple)) and "text_config" in parts:
            small_numbers[name] = list(range(1, len(value) + 1))
            parts["text_config"].config.num_hidden_layers = len(value) + 1
        match = TOWER_LAYER_FIELD.match(name)
        tower = parts.get(f"{match[1]}_config") if match else None
        count = getattr(tower.config, "num_hidden_layers", None) if tower else None
        numbers: Any = value if isinstance(value, (list, tuple)) else [value]
        if type(count) is not int or any(type(number) is not int for number in numbers):
            continue
        small = [_small_layer_number(number, numbers, count) for number in numbers]
        if small != list(numbers):
            small_numbers[name] = type(value)(small) if isinstance(value, (list, tuple)) else small[0]
    return small_numbers


def _small_layer_number(number: int, numbers: list[int] | tuple[int, ...], count: int) -> int:
    if number < 0:
        return max(number, -count)
    if all(other < count for other in numbers):
        return number
    later = len({other for other in numbers if other > number})
    return max(count - 1 - later, 0)


def chunk_lengths(values: Mapping[str, object], parts: Mapping[str, SmallConfig]) -> dict[str, int]:
    """Lengths of chunks in samples: `WINDOW` small hops of the sub-config whose full hop divides the full length, the last of
    several."""
    hops = {
        full: part.config.hop_length
        for part in parts.values()
        if type(full := getattr(part.full, "hop_length", None)) is int and full > 1
    }
    return {
        name: sizes.WINDOW * small
        for name, value in values.items()
        if type(value) is int and (rule := sizes.rule_for(name)) is not None and rule.meaning == "chunk of a scan"
        for full, small in hops.items()
        if value >= full and value % full == 0
    }
