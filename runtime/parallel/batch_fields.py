"""How each field of a batch is packed, padded and sliced: one rule per field, one table.

    field                packed along   sliced   padded with    to a multiple of
    input_ids            -1 (tokens)    yes      pad_token_id   sp
    labels               -1             yes      IGNORED        sp
    position_ids         -1             yes      0, 1, 2 ...    sp
    mm_token_type_ids    -1             no       0              sp
    pixel_values          0 (patches)   no       0              -
    image_grid_thw        0 (images)    no       -              -

A model's class may declare rules for its own inputs (`input_rules`), a recipe for the outputs of its processor (`inputs`).
Inputs that a model computes image, video or audio features from are per item, whatever their name (`infer_item_fields`).

Samples are concatenated along `pack_dim`; where their other dimensions differ (sounds of different lengths), the shorter
ones are padded. Media are not sliced between the ranks of a sequence-parallel group: the towers divide them (`media.py`).
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
"""Padding with 0, 1, 2 ..., the positions of a document."""


@dataclass(frozen=True)
class FieldRule:
    """The rule of one field.

    Attributes:
        pack_dim: the dimension along which samples are concatenated: 0 for images and sounds, -1 for tokens.
        sliced: each rank of a sequence-parallel group gets its part of that dimension; else all ranks get all of it.
        pad_value: the padding; "counting": 0, 1, 2 ...
        pad_scale: padded to a multiple of this times the size of the group, 1 for tokens; 0: never padded.
        listed: a list with an entry for each item, which the model takes as a list instead of a tensor.
    """

    __pydantic_config__ = {"extra": "forbid"}  # recipes have rules; with an annotation it would be a field

    pack_dim: int
    sliced: bool = False
    pad_value: int | str = 0
    pad_scale: int = 0
    listed: bool = False

    def __post_init__(self) -> None:
        if self.sliced and not self.pad_scale:
            raise ValueError(
                "sliced: true needs a pad_scale of at least 1: a length that does not divide evenly is padded first."
            )
        if isinstance(self.pad_value, str) and self.pad_value != COUNTING:
            raise ValueError(f"pad_value must be a number or '{COUNTING}'; found '{self.pad_value}'.")

    @property
    def is_per_token(self) -> bool:
        """Whether each token has its entry along `pack_dim`."""
        return self.pack_dim == -1 or self.pad_scale == 1

    def padding(self, like: Tensor, length: int, *, fill: int | str | None = None) -> Tensor:
        """`length` entries along `pack_dim`, of the other dimensions' sizes as in `like`; `fill`: default `pad_value`."""
        dim = self.pack_dim % like.ndim
        shape = [*like.shape[:dim], length, *like.shape[dim + 1 :]]
        fill = self.pad_value if fill is None else fill
        if not isinstance(fill, str):
            return like.new_full(shape, fill)
        counts = torch.arange(length, dtype=like.dtype, device=like.device)  # COUNTING
        return counts.view(-1, *(1 for _ in shape[dim + 1 :])).expand(shape)

    @property
    def constant_fill(self) -> int:
        """The padding, where it is one number."""
        if isinstance(self.pad_value, str):
            raise ValueError(f"pad_value is '{self.pad_value}', not one number to pad with.")
        return self.pad_value

    def local_part(self, value: Tensor, *, sp: int, sp_rank: int, fill: int | str) -> Tensor:
        """The part of a full value for rank `sp_rank` of `sp`, padded with `fill`."""
        if not self.pad_scale:
            return value
        dim = self.pack_dim % value.ndim
        if length := -value.shape[dim] % (self.pad_scale * sp):
            value = torch.cat([value, self.padding(value, length, fill=fill)], dim=dim)
        if not self.sliced:
            return value
        length = value.shape[dim] // sp
        return value.narrow(dim, sp_rank * length, length).contiguous()


TOKENS = FieldRule(-1, sliced=True, pad_scale=1)
TARGETS = FieldRule(-1, sliced=True, pad_value=IGNORED, pad_scale=1)
UNSLICED_TOKENS = FieldRule(-1, pad_scale=1)
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
    "mm_token_type_ids": UNSLICED_TOKENS,
    "token_type_ids": UNSLICED_TOKENS,
    "image_embeds_position_mask": UNSLICED_TOKENS,
    "moe_mm_token_type_ids": TOKENS,  # read by each layer together with the hidden states
    "pixel_values": ITEMS,
    "pixel_values_videos": ITEMS,
    "flattened_patches": ITEMS,
    "image_pixel_values": ITEMS,
    "image_attention_mask": FieldRule(1, pad_scale=1),  # per token and image of its row
    "audio_input_features": ITEMS,
    "audio_embed_sizes": ITEMS,
    "audio_attention_mask": ITEMS,
    "aspect_ratio_ids": ITEMS,
    "aspect_ratio_mask": ITEMS,
    "cross_attention_mask": FieldRule(1, pad_scale=1),  # per token and image tile of its row
    "pixel_attention_mask": ITEMS,
    "image_grid_thw": ITEMS,
    "video_grid_thw": ITEMS,
    "image_patches": ITEMS,  # an earlier name of patches in pixel_values
    "image_sizes": ITEMS,
    "spatial_shapes": ITEMS,
    "pixel_mask": ITEMS,
    "num_frames_per_video": ITEMS,
    "image_position_ids": FieldRule(0, pad_value=-1),
    "video_position_ids": FieldRule(0, pad_value=-1),
    "num_local_patches": LISTED_ITEMS,  # per image, with its columns and rows
    "patches_grid": LISTED_ITEMS,
    "video_compression_mask": ITEMS,  # which video features are kept
    "second_per_grid_ts": ITEMS,
    "video_second_per_grid": ITEMS,
    "input_features": ITEMS,
    "input_features_mask": ITEMS,
    "feature_attention_mask": ITEMS,
    "input_values": ITEMS,
    "input_values_mask": ITEMS,
    "padding_mask": ITEMS,  # of raw audio
    "audio_feature_lengths": ITEMS,
    "chunk_sample_lengths": ITEMS,
}


CONCATENATED_PATCHES = {"pixel_values": "target_sizes", "pixel_values_videos": "target_sizes_videos"}
"""Fields of patches concatenated into one image `[1, C, p, P * p]` if the batch has their sizes, under this name."""

MASKS_OF_CROPS = {"image_attention_mask": "image_pixel_values"}
"""Masks that are per crop, thus per item, if the batch has this field of crops; per token otherwise."""

_TABLE = frozenset(RULES)
FEATURES = tuple(f"get_{kind}_features" for kind in ("image", "video", "audio"))
"""Methods of upstream's models that compute item features."""
_INFERRED: set[str] = set()  # fields whose rule was inferred from a model: a declared rule replaces it
ATTRIBUTES = tuple(field.name for field in dataclasses.fields(FieldRule))


def rule_of(field: str, batch_fields: Collection[str] = ()) -> FieldRule:
    """The rule of a field in a batch of these fields.

    Raises:
        KeyError: a field without a rule; its message says how to declare one.
    """
    if MASKS_OF_CROPS.get(field) in batch_fields:
        return ITEMS
    if field not in RULES:
        raise KeyError(
            f"No rule says how the field {field!r} is packed and sliced. To fix: add one to the recipe's inputs, "
            f"{{{field}: {{pack_dim: 0}}}}, or to the model's class, input_rules = {{{field!r}: {{'pack_dim': 0}}}}; or let the "
            "processor not return it. Attributes: pack_dim (samples are concatenated along it: 0 for items, -1 for tokens), "
            "sliced (each rank of a sequence-parallel group gets its part; default: all ranks get all of it), pad_value "
            "(default 0), pad_scale (1 for tokens: padded to a multiple of the group's size; default 0: never padded), listed (a "
            "list with an entry for each item, not a tensor)."
        )
    return RULES[field]


def declare(rules: Mapping[str, FieldRule | Mapping[str, Any]], where: str) -> None:
    """Adds rules of fields in this process.

    Args:
        rules: name -> a rule, or its attributes.
        where: who declares them, for errors.

    Raises:
        ValueError: an unknown attribute or value, or a second, different rule for a field.
    """
    for name, declared in rules.items():
        try:
            rule = declared if isinstance(declared, FieldRule) else FieldRule(**declared)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {name}: {error} Attributes: {', '.join(ATTRIBUTES)}.") from error
        if name in _INFERRED:
            _INFERRED.remove(name)
            RULES[name] = rule
        if RULES.setdefault(name, rule) != rule:
            raise ValueError(f"{where}: {name} already has the rule {RULES[name]}; found another, {rule}.")


def infer_item_fields(head: type) -> None:
    """Adds the rule of items for inputs that a head computes item features from and that have no other rule.

    The parameters of feature methods are read from the head and from the other classes of its file, the model inside it.
    """
    inputs = inspect.signature(head.forward).parameters
    classes = [cls for cls in vars(sys.modules[head.__module__]).values() if isinstance(cls, type)]
    methods = [getattr(cls, name) for cls in classes for name in FEATURES if hasattr(cls, name)]
    for name, parameter in (item for method in methods for item in inspect.signature(method).parameters.items()):
        if name in inputs and name not in RULES and "Tensor" in str(parameter.annotation):
            RULES[name] = ITEMS
            _INFERRED.add(name)


def declared_rules() -> dict[str, FieldRule]:
    """The rules added in this process to those of the table."""
    return {name: rule for name, rule in RULES.items() if name not in _TABLE}


def pack(field: str, values: Sequence[Any], batch_fields: Collection[str] = ()) -> Any:
    """The values of several samples, concatenated by the field's rule: tensors, or lists if the rule says so.

    Args:
        batch_fields: the fields of the batch.

    Raises:
        KeyError: a field without a rule.
        ValueError: they differ in another dimension, and this field is padded with counting positions.
    """
    rule = rule_of(field, batch_fields)
    if rule.listed:
        return [entry for value in values for entry in value]
    if CONCATENATED_PATCHES.get(field) in batch_fields:
        return torch.cat(list(values), dim=-1)
    dims = values[0].ndim
    pack_dim = rule.pack_dim % dims
    sizes = [max(value.shape[dim] for value in values) for dim in range(dims)]
    padded = []
    for value in values:
        missing = [0 if dim == pack_dim else sizes[dim] - value.shape[dim] for dim in range(dims)]
        if any(missing):
            if isinstance(rule.pad_value, str):
                raise ValueError(
                    f"Samples differ in {field} in other dimensions than {pack_dim}, where counting positions cannot pad the "
                    f"shorter ones: {[tuple(v.shape) for v in values]}."
                )
            value = F.pad(value, [amount for size in reversed(missing) for amount in (0, size)], value=rule.pad_value)
        padded.append(value)
    return torch.cat(padded, dim=pack_dim)
