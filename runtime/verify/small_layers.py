"""The layers of a small config, one of each kind, and relations among its fields that the defaults satisfy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from patchgen.runtime.media_sizes import merge_size
from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify.layer_selection import fields_per_layer, select_layers
from patchgen.runtime.verify.small_values import modeling_source, small_value, split

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MLP_KINDS = ("sparse", "dense")  # named in `mlp_layer_types`; every other kind is one of `layer_types`


def declared_value(field: dataclasses.Field) -> object:
    """The default of a field; None if it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


_LAYER_PATTERN = re.compile(
    r".*(_interval|_period|_step|_pattern|every_n_layers|group_size|first_k_dense_replace|num_dense_layers)$"
)


def count_field(config_class: type[PreTrainedConfig]) -> str:
    """The field with the number of layers."""
    return config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def layers_of(
    config_class: type[PreTrainedConfig],
    own_fields: Mapping[str, dataclasses.Field],
    values: Mapping,
    by_layer: Mapping[int, Mapping],
    rebuild: Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any] | None],
) -> dict[str, object]:
    """The number of layers and the per-layer fields.

    Args:
        by_layer: the overrides of single layers.
        rebuild: as in `fields_per_layer`.
    """
    count_name = count_field(config_class)
    num_layers = values.get(count_name)
    if type(num_layers) is not int:
        return {}
    has_pattern = any(_LAYER_PATTERN.match(name) and type(value) is int for name, value in values.items())
    if "layer_types" in values and not values["layer_types"]:
        kinds = _kinds_in_source(config_class)
        if len(kinds) > 1:
            return {count_name: len(kinds), "layer_types": kinds}
    if values.get("mlp_layer_types", MLP_KINDS) is None:  # left to the checkpoint: one of each kind
        return {count_name: len(MLP_KINDS), "mlp_layer_types": list(reversed(MLP_KINDS))}
    if values.get("layer_types") and len(set(values["layer_types"])) == 1:
        values = {**values, "layer_types": _with_every_kind(config_class, values)}
    declared = declared_value(own_fields[count_name]) if count_name in own_fields else None
    per_layer_names = fields_per_layer(values, count_name, declared, rebuild)
    selection = select_layers(values, num_layers, sizes.LAYERS if has_pattern else 2, per_layer_names)
    fields: dict[str, object] = {count_name: len(selection.kept)}
    if by_layer:
        fields["per_layer_config"] = {
            new: {name: small_value(value, (name,)) for name, value in by_layer[old].items()}
            | _equal_heads(by_layer[old])
            for new, old in enumerate(selection.kept)
            if old in by_layer
        }
    for name, per_layer in selection.overrides.items():
        small: Any = small_value(list(per_layer), (name,))
        fields[name] = type(values[name])(small)
    return fields


def _with_every_kind(config_class: type[PreTrainedConfig], values: Mapping) -> list[str]:
    """`layer_types` of a config whose layers are all of one kind by default, its end replaced by one of each other kind in
    the modeling file. Windowed kinds are left out if the config has no window."""
    layer_types = list(values["layer_types"])
    has_window = bool(values.get("sliding_window"))
    missing_kinds = [kind for kind in _kinds_in_source(config_class) if kind not in layer_types]
    missing_kinds = [kind for kind in missing_kinds if has_window or "sliding" not in kind]
    rope = values.get("rope_parameters") or {}
    if all(isinstance(parameters, dict) for parameters in rope.values()) and rope:  # per kind: it names them all
        missing_kinds = [kind for kind in missing_kinds if kind in rope]
    missing_kinds = missing_kinds[: len(layer_types) - 1]
    return layer_types[: len(layer_types) - len(missing_kinds)] + missing_kinds


def per_layer_config(config: PreTrainedConfig) -> dict[int, dict[str, object]]:
    """The overrides of single layers in a heterogeneous config, by layer number."""
    by_layer = config.to_dict().get("per_layer_config") or {}
    return {int(layer): overrides for layer, overrides in by_layer.items()}


def _equal_heads(values: Mapping) -> dict[str, object]:
    """Multi-head attention stays multi-head: as many key/value heads as heads where the full config says so."""
    if "num_key_value_heads" not in values or values["num_key_value_heads"] != values.get("num_attention_heads"):
        return {}
    return {"num_key_value_heads": small_value(values["num_attention_heads"], ("num_attention_heads",))}


def _kinds_in_source(config_class: type[PreTrainedConfig]) -> list[str]:
    """The kinds of layer in the modeling file of a config class."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    source = modeling_source(config_class)
    return [kind for kind in ALLOWED_LAYER_TYPES if kind not in MLP_KINDS and f'"{kind}"' in source]


def related(own_fields: Mapping, values: Mapping, explicit: Mapping, overrides: Mapping) -> dict[str, object]:
    """The fields that restore relations among the defaults."""
    fields: dict[str, object] = {}
    small = dict(values) | dict(overrides)
    heads, key_value = "num_attention_heads", "num_key_value_heads"
    if heads in own_fields and key_value in own_fields:
        if values[heads] == values[key_value] and declared_value(own_fields[key_value]) is not None:
            fields[key_value] = small[heads]
        elif declared_value(own_fields[key_value]) is None and "kv_lora_rank" not in own_fields:
            fields[key_value] = sizes.KEY_VALUE_HEADS
    if {"head_dim", "qk_rope_head_dim"} <= own_fields.keys() and values["head_dim"] == values["qk_rope_head_dim"]:
        fields["head_dim"] = small["qk_rope_head_dim"]
    parts = {"head_dim", "qk_nope_head_dim", "qk_rope_head_dim"}
    if parts <= own_fields.keys() and values["head_dim"] != values["qk_rope_head_dim"]:
        fields["head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    inner = [values.get(name) for name in ("expand", "hidden_size", "num_heads", "head_dim")]
    factors = [number for number in inner if type(number) is int]
    if len(factors) == 4 and factors[0] * factors[1] == factors[2] * factors[3]:
        fields["num_heads"] = small["expand"] * small["hidden_size"] // small["head_dim"]
    inner, width = (explicit.get(name) for name in ("intermediate_size", "hidden_size"))
    if type(inner) is int and type(width) is int and inner < width and width % inner == 0:  # given as a fraction
        fields["intermediate_size"] = small["hidden_size"] // (width // inner)
    if {"window_size", "patch_size", "spatial_merge_size"} <= own_fields.keys():  # in pixels: two merged patches wide
        fields["window_size"] = 2 * small["patch_size"] * small["spatial_merge_size"]
    crops = values.get("image_grid_pinpoints")
    if crops:  # sizes of crops, multiples of the image's
        unit = min(side for crop in crops for side in crop)
        fields["image_grid_pinpoints"] = [[side * sizes.IMAGE // unit for side in crop] for crop in crops]
    if {"out_hidden_size", "vision_config"} <= own_fields.keys():  # of the tower's merged patches
        tower = small["vision_config"]
        fields["out_hidden_size"] = tower.hidden_size * merge_size(tower) ** 2
    if {"window_size", "downsample_rate"} <= own_fields.keys():  # a window becomes whole tokens
        fields["window_size"] = small["downsample_rate"] * max(1, values["window_size"] // values["downsample_rate"])
    if {"pixel_shuffle_ratio", "projector_input_dim"} <= own_fields.keys():  # its MLP reads the shuffled patches
        merged = round(small["hidden_size"] / small["pixel_shuffle_ratio"] ** 2)
        fields |= {"intermediate_size": merged, "projector_input_dim": small["projector_output_dim"]}
    queries = values.get("projector_patch_to_query_dict")
    if queries:  # by the number of patches of an image
        fields["projector_patch_to_query_dict"] = {
            sizes.IMAGE_TOKENS * 4 ** (n + 1): min(count, sizes.IMAGE_TOKENS + n)
            for n, count in enumerate(queries.values())
        }
    if "axial_pos_shape" in own_fields:  # training wants the product to be the length of the sequence
        fields |= {"axial_pos_shape": [4, sizes.SEQUENCE // 4], "axial_pos_embds_dim": split(sizes.HIDDEN, [1, 3])}
    stages = values.get("base_channels"), values.get("channel_multiplier"), values.get("hidden_size")
    if stages[0] and stages[1] and stages[0] * stages[1][-1] == stages[2]:  # of the last stage
        fields["hidden_size"] = small["base_channels"] * small["channel_multiplier"][-1]
    if (
        values.get("codebook_dim") == values.get("hidden_size") is not None
    ):  # nothing projects between encoder and codebook
        fields["codebook_dim"] = small["hidden_size"]
    middle, out = values.get("intermediate_layers_indices"), values.get("vision_output_dim")
    if middle and out == (len(middle) + 1) * values["hidden_size"]:  # of these layers, and of the last
        fields |= {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * small["hidden_size"]}
    if "hash_seed" in own_fields:
        fields["hash_seed"] = 0
    if "languages" in own_fields and "default_language" in own_fields:
        fields["default_language"] = values["languages"][0]
    if "attention_types" in own_fields:  # [[[kinds], repetitions]]
        kinds = list(dict.fromkeys(kind for group, _ in values["attention_types"] for kind in group))
        fields |= {"attention_types": [[kinds, 1]], "num_layers": len(kinds)}
    return fields
