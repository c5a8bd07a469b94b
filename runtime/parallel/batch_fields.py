"""How each field of a batch is packed, padded and sliced: one rule per field, one table.

    field                packed along   sliced   padded with    to a multiple of
    input_ids            -1 (tokens)    yes      pad_token_id   sp
    labels               -1             yes      IGNORED        sp
    position_ids         -1             yes      0, 1, 2 ...    sp
    mm_token_type_ids    -1             no       0              sp
    pixel_values          0 (patches)   no       0              -
    image_grid_thw        0 (images)    no       -              -

A model's class has rules for inputs of its own (`input_rules`), a recipe for whatever its processor makes (`inputs`). What a
model computes features of images, videos or sounds from is of these items, whatever it is called (`of_items`).

Samples are put together along `pack_dim`; where their other dimensions differ (sounds of different lengths), the shorter
ones are filled up. Media stay whole on every rank of a sequence-parallel group: the towers divide them (`media.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
COUNTING = "counting"
"""Padding that counts from 0, as the positions of a document do."""


@dataclass(frozen=True)
class FieldRule:
    """The rule of one field.

    Attributes:
        pack_dim: samples are put together along this dimension: 0 for images and sounds, -1 for tokens.
        sliced: a rank of a sequence-parallel group holds its part of that dimension; else all of it.
        pad_value: fills up; "counting": 0, 1, 2 ...
        pad_scale: padded to a multiple of this times the size of the group, 1 for tokens; 0: as it is.
        listed: a list with an entry for each item, which the model takes as a list, in the place of a tensor.
    """

    __pydantic_config__ = {"extra": "forbid"}  # recipes have rules; with an annotation it would be a key

    pack_dim: int
    sliced: bool = False
    pad_value: int | str = 0
    pad_scale: int = 0
    listed: bool = False

    def __post_init__(self) -> None:
        if self.sliced and not self.pad_scale:
            raise ValueError(
                "sliced: true needs a pad_scale, 1 or more: what cannot be divided evenly is filled up first."
            )
        if isinstance(self.pad_value, str) and self.pad_value != COUNTING:
            raise ValueError(f"pad_value is a number or '{COUNTING}', not '{self.pad_value}'.")

    @property
    def number(self) -> int:
        """What fills up, where it does not count."""
        if isinstance(self.pad_value, str):
            raise ValueError(f"pad_value is '{self.pad_value}': there is no one number that fills up.")
        return self.pad_value

    def part(self, value: Tensor, *, sp: int, sp_rank: int, fill: int | str) -> Tensor:
        """What rank `sp_rank` of `sp` holds of a whole value; `fill` in the place of `pad_value`."""
        if not self.pad_scale:
            return value
        dim = self.pack_dim % value.ndim
        padding = -value.shape[dim] % (self.pad_scale * sp)
        if padding:
            shape = [*value.shape[:dim], padding, *value.shape[dim + 1 :]]
            if isinstance(fill, str):  # which counts
                counts = torch.arange(padding, dtype=value.dtype, device=value.device)
                tail = counts.view(-1, *(1 for _ in shape[dim + 1 :])).expand(shape)
            else:
                tail = value.new_full(shape, fill)
            value = torch.cat([value, tail], dim=dim)
        if not self.sliced:
            return value
        length = value.shape[dim] // sp
        return value.narrow(dim, sp_rank * length, length).contiguous()


TOKENS = FieldRule(-1, sliced=True, pad_scale=1)
TARGETS = FieldRule(-1, sliced=True, pad_value=IGNORED, pad_scale=1)
WHOLE_TOKENS = FieldRule(-1, pad_scale=1)
ITEMS = FieldRule(0)
LISTED_ITEMS = FieldRule(0, listed=True)

RULES: dict[str, FieldRule] = {
    "input_ids": TOKENS,
    "labels": TARGETS,
    "shift_labels": TARGETS,
    "attention_mask": TOKENS,
    "real_tokens": TOKENS,
    "position_ids": FieldRule(-1, sliced=True, pad_value=COUNTING, pad_scale=1),
    "inputs_embeds": FieldRule(1, sliced=True, pad_scale=1),
    "mm_token_type_ids": WHOLE_TOKENS,
    "token_type_ids": WHOLE_TOKENS,
    "image_embeds_position_mask": WHOLE_TOKENS,
    "moe_mm_token_type_ids": TOKENS,  # read layer by layer, beside the hidden states
    "pixel_values": ITEMS,
    "pixel_values_videos": ITEMS,
    "flattened_patches": ITEMS,
    "image_pixel_values": ITEMS,
    "image_attention_mask": FieldRule(1, pad_scale=1),  # of each token, and each image beside its row
    "audio_input_features": ITEMS,
    "audio_embed_sizes": ITEMS,
    "audio_attention_mask": ITEMS,
    "aspect_ratio_ids": ITEMS,
    "aspect_ratio_mask": ITEMS,
    "cross_attention_mask": FieldRule(1, pad_scale=1),  # of each token, and each tile of the images beside its row
    "pixel_attention_mask": ITEMS,
    "image_grid_thw": ITEMS,
    "video_grid_thw": ITEMS,
    "image_patches": ITEMS,  # what pixel_values of patches were called before
    "image_sizes": ITEMS,
    "spatial_shapes": ITEMS,
    "pixel_mask": ITEMS,
    "num_frames_per_video": ITEMS,
    "image_position_ids": FieldRule(0, pad_value=-1),
    "video_position_ids": FieldRule(0, pad_value=-1),
    "num_local_patches": LISTED_ITEMS,  # of each image, with its columns and rows
    "patches_grid": LISTED_ITEMS,
    "video_compression_mask": ITEMS,  # which features of videos are kept
    "second_per_grid_ts": ITEMS,
    "video_second_per_grid": ITEMS,
    "input_features": ITEMS,
    "input_features_mask": ITEMS,
    "feature_attention_mask": ITEMS,
    "input_values": ITEMS,
    "input_values_mask": ITEMS,
    "padding_mask": ITEMS,  # of sounds as they were recorded
    "audio_feature_lengths": ITEMS,
    "chunk_sample_lengths": ITEMS,
}


SIDE_BY_SIDE = {"pixel_values": "target_sizes", "pixel_values_videos": "target_sizes_videos"}
"""Patches that stand side by side in one image `[1, C, p, P * p]`, where their sizes are handed over under this name."""

OF_CROPS = {"image_attention_mask": "image_pixel_values"}
"""A mask of the patches of each crop, thus of items, where these are handed over; of tokens where they are not."""

BUILT_IN = frozenset(RULES)
FEATURES = tuple(f"get_{kind}_features" for kind in ("image", "video", "audio"))
"""The methods of upstream's models that compute features of items."""
_FOUND: set[str] = set()  # rules that were read from a model: whoever declares another knows better
ATTRIBUTES = tuple(field.name for field in dataclasses.fields(FieldRule))


def rule_of(field: str) -> FieldRule:
    """The rule of a field; KeyError with what to do for a field that has none."""
    if field not in RULES:
        raise KeyError(
            f"No rule says how the field {field!r} is packed and sliced. Give it one, in the recipe's inputs: "
            f"{{{field}: {{pack_dim: 0}}}}, or as input_rules = {{{field!r}: {{'pack_dim': 0}}}} of the model's class. Attributes: "
            "pack_dim (samples are put together along it: 0 for items, -1 for tokens), sliced (a rank of a sequence-parallel "
            "group holds its part; default: all of it), pad_value (fills up; default 0), pad_scale (1 for tokens; default 0: "
            "never padded to a multiple). Or keep the processor from making it."
        )
    return RULES[field]


def declare(rules: Mapping[str, FieldRule | Mapping[str, Any]], where: str) -> None:
    """Gives fields their rules in this process.

    Args:
        rules: name -> a rule, or its attributes.
        where: who says so, for the message.

    Raises:
        ValueError: an attribute that a rule does not have, or another rule for a field that has one.
    """
    for name, given in rules.items():
        try:
            rule = given if isinstance(given, FieldRule) else FieldRule(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {name}: {error} Attributes: {', '.join(ATTRIBUTES)}.") from error
        if name in _FOUND:
            _FOUND.remove(name)
            RULES[name] = rule
        if RULES.setdefault(name, rule) != rule:
            raise ValueError(f"{where}: {name} has the rule {RULES[name]}, and is given {rule}.")


def of_items(head: type) -> None:
    """Gives tensors that a head computes features of items from the rule of items, where nothing else says one.

    Args:
        head: its own method, or that of the model inside it, which is a class of the same file, says what it is given.
    """
    taken = inspect.signature(head.forward).parameters
    classes = [one for one in vars(sys.modules[head.__module__]).values() if isinstance(one, type)]
    methods = [getattr(one, name) for one in classes for name in FEATURES if hasattr(one, name)]
    for name, parameter in (item for method in methods for item in inspect.signature(method).parameters.items()):
        if name in taken and name not in RULES and "Tensor" in str(parameter.annotation):
            RULES[name] = ITEMS
            _FOUND.add(name)


def declared() -> dict[str, FieldRule]:
    """The rules that were given in this process, beside those of the table."""
    return {name: rule for name, rule in RULES.items() if name not in BUILT_IN}


def pack(field: str, values: Sequence[Any], beside: Collection[str] = ()) -> Any:
    """The values of several samples put together by the field's rule: tensors, or lists where the rule says so.

    Args:
        beside: the fields of the batch.

    Raises:
        ValueError: they differ in another dimension, and padding of this field only counts along the tokens.
    """
    rule = ITEMS if OF_CROPS.get(field) in beside else rule_of(field)
    if rule.listed:
        return [entry for value in values for entry in value]
    if SIDE_BY_SIDE.get(field) in beside:
        return torch.cat(list(values), dim=-1)
    dims = values[0].ndim
    along = rule.pack_dim % dims
    sizes = [max(value.shape[dim] for value in values) for dim in range(dims)]
    filled = []
    for value in values:
        missing = [0 if dim == along else sizes[dim] - value.shape[dim] for dim in range(dims)]
        if any(missing):
            if isinstance(rule.pad_value, str):
                raise ValueError(
                    f"Samples differ in {field} beside dimension {along}, where nothing can fill up the shorter ones: "
                    f"{[tuple(v.shape) for v in values]}."
                )
            value = F.pad(value, [amount for size in reversed(missing) for amount in (0, size)], value=rule.pad_value)
        filled.append(value)
    return torch.cat(filled, dim=along)
