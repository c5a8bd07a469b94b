"""A small config for any model of transformers, derived from upstream's config class alone.

    small_config("qwen3_moe").overrides                 # hidden_size=64, num_experts=4, mlp_only_layers=[0], ...
    python -m patchgen.runtime.verify.coverage          # every text type, one line each: ok or the reason

The class is built once with its defaults. Each field is then read by its meaning (`field_semantics.py`), the layers
are thinned to one of each kind (`layer_selection.py`), sub-configs are treated alike, and relations that hold among
the defaults (as many key/value heads as heads, hidden = heads x head size, ...) are made to hold again. What a class
derives for itself (fields declared as None) is left for it to derive. Relations between sub-configs: `field_relations.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub.errors import StrictDataclassError

from patchgen.runtime.media_sizes import merge_size
from patchgen.runtime.verify import field_relations
from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify.layer_selection import select_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class SmallConfigError(ValueError):
    """A config class that no small config could be derived for, with the overrides that were tried.

    `reason` is upstream's own, in one line.
    """

    def __init__(self, config_class: type[PreTrainedConfig], overrides: Mapping[str, object], cause: Exception):
        self.reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        super().__init__(
            f"{config_class.__name__} refuses a small config: {self.reason}\nTried {dict(overrides)}. "
            "Give the field that is to blame a rule in runtime/verify/field_semantics.py."
        )


@dataclasses.dataclass(frozen=True)
class SmallConfig:
    """A small config, and what was given to its class to get it (nested for sub-configs)."""

    config: PreTrainedConfig
    full: PreTrainedConfig
    """The config that it is the small form of."""
    overrides: dict[str, object]
    unclassified: tuple[str, ...] = ()
    """Fields with a large number whose meaning no rule knows: they keep upstream's value."""


# What a config class raises on values that do not fit together.
REFUSALS = (
    StrictDataclassError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError,
    ZeroDivisionError,
)  # fmt: skip

MLP_KINDS = ("sparse", "dense")  # named in `mlp_layer_types`; every other kind is one of `layer_types`

# What a variant sets, at every level of a composite config that has the field.
VARIANTS: dict[str, dict[str, object]] = {
    "base": {},
    "router_logits": {"output_router_logits": True},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "window": {"use_sliding_window": True, "sliding_window": sizes.WINDOW},
    "experts": {"enable_moe_block": True, "is_moe": True},
    "no_window": {"use_sliding_window": False, "sliding_window": None},
}


def small_config(config_class: type[PreTrainedConfig] | str, *, variant: str = "base") -> SmallConfig:
    """Derives a small config.

    Args:
        config_class: upstream's config class, or a model type ("qwen3_moe").
        variant: a key of `VARIANTS`.

    Raises:
        SmallConfigError: upstream's class refuses its defaults or the small values; its reason is in the message.
        KeyError: an unknown model type or variant.
    """
    if isinstance(config_class, str):
        from transformers import CONFIG_MAPPING

        config_class = CONFIG_MAPPING[config_class]
    return shrink(config_class, {}, VARIANTS[variant], SpecialIds())


def applicable_variants(config_class: type[PreTrainedConfig] | str) -> tuple[str, ...]:
    """The variants that say something about this config: those that change a field it has."""
    base = small_config(config_class).config
    found = ["base"]
    if "output_router_logits" in _all_fields(base):
        found.append("router_logits")
    text = base.get_text_config(decoder=True)
    if "tie_word_embeddings" in _all_fields(base):
        has_own = hasattr(base, "tie_word_embeddings")
        found.append("untied" if (base if has_own else text).tie_word_embeddings else "tied")
    if any(vars(text).get(switch) is False for switch in VARIANTS["experts"]):
        found.append("experts")
    window = _field(type(text), "sliding_window")
    if window is not None:
        has_switch = _field(type(text), "use_sliding_window") is not None
        by_layer = _field(type(text), "layer_types") is not None  # then the base config has both kinds of layer
        if not vars(text).get("sliding_window"):
            found.append("window")
        elif has_switch or ("None" in str(window.type) and not by_layer):
            found.append("no_window")
    return tuple(found)


def _all_fields(config: PreTrainedConfig) -> set[str]:
    names = {field.name for field in _fields(type(config))}
    for key in type(config).sub_configs:
        sub_config = vars(config).get(key)
        if dataclasses.is_dataclass(sub_config):
            names |= _all_fields(sub_config)
    return names


def _needs_window(config_class: type[PreTrainedConfig], fields: Mapping[str, dataclasses.Field]) -> bool:
    """Whether a config that gives no window has windowed layers all the same: by `layer_types`, without a switch."""
    if not {"sliding_window", "layer_types"} <= fields.keys() or "use_sliding_window" in fields:
        return False
    is_open = _declared(fields["sliding_window"]) is None and _declared(fields["layer_types"]) is None
    written_for = [code for code in _modeling_source(config_class).split("\nclass ") if config_class.__name__ in code]
    return is_open and any("create_sliding_window_causal_mask(" in code for code in written_for)


def _field(config_class: type[PreTrainedConfig], name: str) -> dataclasses.Field | None:
    return {field.name: field for field in _fields(config_class)}.get(name)


# ------------------------------------------------------------------------------------------- one config class


def shrink(
    config_class: type[PreTrainedConfig],
    given: Mapping[str, object],
    variant: Mapping,
    special_ids: SpecialIds,
    sub_configs: Mapping[str, Callable[[SpecialIds], SmallConfig]] | None = None,
) -> SmallConfig:
    """The small form of `config_class(**given)`; its ids are taken from `special_ids`, after those of its sub-configs.

    Args:
        sub_configs: make the small forms of the sub-configs; None: they are those of what the class gives by default.
    """
    fields = own_fields(config_class)
    explicit = dict(given) | {name: value for name, value in variant.items() if name in fields}
    if type(_declared(fields["is_decoder"]) if "is_decoder" in fields else None) is bool:
        explicit.setdefault(
            "is_decoder", sub_configs is None
        )  # the causal form of a class that is an encoder by default
    if "mlp_only_layers" in fields and not _declared(fields["mlp_only_layers"]):
        explicit.setdefault("mlp_only_layers", [0])  # a dense layer beside the sparse ones
    if _needs_window(config_class, fields):
        explicit.setdefault("sliding_window", sizes.WINDOW)
    overrides, sub_overrides, unclassified = {}, {}, []
    parts: dict[str, SmallConfig] = {}
    for key, make in (sub_configs if sub_configs is not None else _default_sub_configs(config_class, variant)).items():
        own_ids = SpecialIds()
        parts[key] = sub = make(own_ids)
        special_ids.skip(own_ids)
        overrides[key] = sub.config
        sub_overrides[key] = sub.overrides
        unclassified += [f"{key}.{name}" for name in sub.unclassified]
    field_relations.relate_parts(parts, _modeling_source(config_class))
    field_relations.distinct_placeholders(parts, special_ids)
    prototype = _construct(config_class, explicit | overrides)
    values = {name: vars(prototype).get(name) for name in fields}
    common_names = {own: common for common, own in config_class.attribute_map.items()}

    for name, field in fields.items():
        if name in overrides:
            continue
        declared = explicit.get(name, _declared(field))
        names = common_names.get(name, name), name
        if declared is None and (
            sizes.is_special_id(name) or isinstance(values[name], dict) or sizes.is_input_width(name)
        ):
            declared = values[name]  # derived by the class, but not from other fields
        small = _small_value(declared, names, special_ids)
        if small == 1 and name not in explicit and sizes.counts_experts(*names):
            small = sizes.EXPERTS  # the class leaves it to the checkpoint; one has nothing to route
        if small is declared and type(declared) is int and declared > 2 * sizes.VOCAB:
            unclassified.append(name)
        if small != declared or name in explicit:
            overrides[name] = small
        elif declared is None and values[name] is None:
            rule = sizes.rule_for(*names)
            if rule is not None and rule.meaning in sizes.REQUIRED:
                overrides[name] = rule.small(sys.maxsize)
    for name in _undeclared_ids(config_class):
        is_placeholder = name in sizes.PLACEHOLDERS  # None: of a checkpoint that takes no such input
        if not hasattr(prototype, name) or (is_placeholder and getattr(prototype, name) is None):
            overrides[name] = next(special_ids)
    overrides |= {
        name: _small_value(value, (name,), special_ids) for name, value in given.items() if name not in fields
    }
    overrides |= _layers(config_class, values, _per_layer_config(prototype))
    overrides |= _related(fields, values, explicit, overrides)
    source = _modeling_source(config_class)
    overrides |= {name: one for name, one in sizes.UNSAID.items() if values.get(name, one) is None}
    overrides |= field_relations.vocabulary(values, parts, source, special_ids)
    overrides |= field_relations.layer_numbers(values, parts) | field_relations.chunks_of_hops(values, parts)
    rope = _small_rope(_with_sections(config_class, values.get("rope_parameters")), overrides, values)
    if rope is not None:
        overrides["rope_parameters"] = rope
    config = _construct(config_class, overrides)
    return SmallConfig(config, prototype, overrides | sub_overrides, tuple(unclassified))


def _construct(config_class: type[PreTrainedConfig], overrides: Mapping[str, object]) -> PreTrainedConfig:
    try:
        return config_class(**overrides)
    except REFUSALS as error:
        raise SmallConfigError(config_class, overrides, error) from error


def own_fields(config_class: type[PreTrainedConfig]) -> dict[str, dataclasses.Field]:
    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name: field for field in _fields(config_class) if field.name not in common}


def _fields(config_class: type[PreTrainedConfig]) -> list[dataclasses.Field]:
    """The fields of a config class; of one with an `__init__` of its own the parameters that have a default, too."""
    found = {field.name: field for field in dataclasses.fields(config_class)}
    for name, parameter in inspect.signature(config_class.__init__).parameters.items():
        if name not in found and parameter.default is not inspect.Parameter.empty:
            found[name] = dataclasses.field(default=parameter.default)
            found[name].name, found[name].type = name, parameter.annotation
    return list(found.values())


def _declared(field: dataclasses.Field) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def _default_sub_configs(
    config_class: type[PreTrainedConfig], variant: Mapping
) -> dict[str, Callable[[SpecialIds], SmallConfig]]:
    return {
        key: lambda ids, of=sub_class, given=given: shrink(of, given, variant, ids)
        for key, (sub_class, given) in _sub_configs(config_class).items()
    }


def _sub_configs(config_class: type[PreTrainedConfig]) -> dict[str, tuple[type[PreTrainedConfig], dict]]:
    """The classes of the sub-configs, with what upstream gives them by default."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    found = {}
    specs = getattr(config_class, "sub_configs_defaults", {})  # not in older releases
    for key, sub_class in config_class.sub_configs.items():
        given = dict(specs[key].init_kwargs) if key in specs else {}
        if not issubclass(sub_class, PreTrainedConfig):  # AutoConfig: the spec names the default model type
            model_type = specs[key].model_type if key in specs else given.pop("model_type", None)
            if not model_type:
                continue
            sub_class = CONFIG_MAPPING[model_type]
        given |= sizes.UNDECLARED.get(key, {})
        found[key] = (sub_class, given)
    return found


# ------------------------------------------------------------------------------------------------ one value


class SpecialIds(Iterator[int]):
    """The ids of the small vocabulary that are kept for special tokens, from the top down.

    A config and the sub-configs in it share no id: one that meant the end of a text and an image would be both. Two
    sub-configs beside each other (the halves of an omni model) may.
    """

    def __init__(self) -> None:
        self._next = sizes.VOCAB - 1

    def __next__(self) -> int:
        if self._next <= sizes.VOCAB - sizes.NUM_RESERVED_IDS:
            raise ValueError(f"more than {sizes.NUM_RESERVED_IDS - 1} special tokens: raise NUM_RESERVED_IDS")
        self._next -= 1
        return self._next + 1

    def skip(self, used: SpecialIds) -> None:
        """Leaves out the ids that a sub-config took."""
        self._next = min(self._next, used._next)


NO_IDS: Iterator[int] = iter(())


def _small_value(declared: object, names: tuple[str, ...], special_ids: Iterator[int] = NO_IDS) -> object:
    """The small form of a field; `names` are its common name and its own, `special_ids` the ids not yet given away."""
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
    if type(declared) is int and declared >= sizes.VOCAB - sizes.NUM_RESERVED_IDS:
        return next(special_ids)
    return declared


# Read off rotary parameters with nothing or a list to fall back to; of time, height and width where nothing is said.
_SECTIONS_READ = re.compile(r"""rope_\w+(?:\.get\(|\[)["']mrope_section["'](?:,\s*\[([\d, ]+)\])?[)\]]""")
_SECTIONS = [24, 20, 20]


def _with_sections(config_class: type[PreTrainedConfig], rope: object) -> object:
    """Rotary parameters with the sections that the modeling file reads, or falls back to, where a config names none."""
    read = _SECTIONS_READ.search(_modeling_source(config_class))
    if read is None or not isinstance(rope, dict) or "rope_type" not in rope or "mrope_section" in rope:
        return rope
    if rope["rope_type"] == "axial":  # of a tower
        return rope
    fallback = [int(number) for number in read[1].split(",")] if read[1] else _SECTIONS
    return {**rope, "mrope_section": fallback}


def _small_rope(rope: object, overrides: Mapping[str, object], values: Mapping[str, object]) -> dict | None:
    """Rotary parameters with sections that fit the small head, None where nothing in them is a size."""
    kinds = overrides.get("layer_types") or values.get("layer_types")
    if rope == {} and kinds:  # per kind of layer, left to the checkpoint
        section = _split(sizes.HEAD_DIM // 2, _SECTIONS)
        return {kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section} for kind in set(kinds)}
    if not isinstance(rope, dict) or "section" not in str(rope):
        return None
    head_dim = overrides.get("head_dim") or values.get("head_dim") or sizes.HEAD_DIM
    small = dict(rope)
    for key, value in rope.items():
        if isinstance(value, dict):
            small[key] = _small_rope(value, overrides, values) or value
        elif key.endswith("section"):
            half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
            small[key] = _split(half, value)
    return small


def _split(total: int, shares: list[int]) -> list[int]:
    """Splits `total` in proportion to `shares`, each part at least 1 and equal shares into equal parts while that is possible."""
    parts = [max(1, total * share // sum(shares)) for share in shares]
    rest = total - sum(parts)
    first = next((share for share in shares if rest % shares.count(share) == 0), None)
    for place in [place for place, share in enumerate(shares) if share == first] or [0]:
        parts[place] += rest // max(shares.count(first), 1)
    return parts


# ----------------------------------------------------------------------------------------- layers, relations

_LAYER_PATTERN = re.compile(
    r".*(_interval|_period|_step|_pattern|every_n_layers|group_size|first_k_dense_replace|num_dense_layers)$"
)


def _layers(
    config_class: type[PreTrainedConfig], values: Mapping, by_layer: Mapping[int, Mapping]
) -> dict[str, object]:
    """The number of layers, and the fields that say what each layer is; `by_layer` is what single layers override."""
    count_name = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if type(values.get(count_name)) is not int:
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
    selection = select_layers(values, values[count_name], min_layers=sizes.LAYERS if has_pattern else 2)
    found: dict[str, object] = {count_name: len(selection.kept)}
    if by_layer:
        found["per_layer_config"] = {
            new: {name: _small_value(value, (name,)) for name, value in by_layer[old].items()}
            | _equal_heads(by_layer[old])
            for new, old in enumerate(selection.kept)
            if old in by_layer
        }
    for name, per_layer in selection.overrides.items():
        found[name] = type(values[name])(_small_value(list(per_layer), (name,)))
    return found


def _with_every_kind(config_class: type[PreTrainedConfig], values: Mapping) -> list[str]:
    """The layers of a config that are all of one kind by default, ending in one of each other kind there is code for.

    Windowed kinds need a window: without one (None, or 0 where a switch is off) they are left out.
    """
    layer_types = list(values["layer_types"])
    has_window = bool(values.get("sliding_window"))
    others = [kind for kind in _kinds_in_source(config_class) if kind not in layer_types]
    others = [kind for kind in others if has_window or "sliding" not in kind]
    rope = values.get("rope_parameters") or {}
    if all(isinstance(parameters, dict) for parameters in rope.values()) and rope:  # per kind: it names them all
        others = [kind for kind in others if kind in rope]
    return layer_types[: len(layer_types) - len(others)] + others


def _per_layer_config(config: PreTrainedConfig) -> dict[int, dict[str, object]]:
    """What a heterogeneous config overrides for single layers, by layer number."""
    by_layer = config.to_dict().get("per_layer_config") or {}
    return {int(layer): overrides for layer, overrides in by_layer.items()}


def _equal_heads(values: Mapping) -> dict[str, object]:
    """Multi-head attention stays multi-head: as many key/value heads as heads where the full config says so."""
    if "num_key_value_heads" not in values or values["num_key_value_heads"] != values.get("num_attention_heads"):
        return {}
    return {"num_key_value_heads": _small_value(values["num_attention_heads"], ("num_attention_heads",))}


def _kinds_in_source(config_class: type[PreTrainedConfig]) -> list[str]:
    """The kinds of layer that the modeling file beside a config class knows, for a class that leaves them unsaid."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    source = _modeling_source(config_class)
    return [kind for kind in ALLOWED_LAYER_TYPES if kind not in MLP_KINDS and f'"{kind}"' in source]


def _undeclared_ids(config_class: type[PreTrainedConfig]) -> list[str]:
    """The token ids that the modeling file reads off a composite config and released checkpoints bring along."""
    if not config_class.sub_configs:
        return []
    source = _modeling_source(config_class)
    with_default = re.findall(r"""getattr\((?:self\.)?config, ["'](\w+_token_(?:id|index))["'], [\d_]+\)""", source)
    placeholders = {name for name in sizes.PLACEHOLDERS if re.search(rf"\bconfig\.{name}\b", source)}
    return sorted({*re.findall(r"self\.config\.(\w+_token_id)\b", source), *with_default, *placeholders})


def _modeling_source(config_class: type[PreTrainedConfig]) -> str:
    config_file = Path(inspect.getfile(config_class))
    modeling_file = config_file.with_name(config_file.name.replace("configuration_", "modeling_"))
    return modeling_file.read_text() if modeling_file.is_file() else ""


def _related(own_fields: Mapping, values: Mapping, explicit: Mapping, overrides: Mapping) -> dict[str, object]:
    """What keeps the relations that hold among the defaults."""
    found: dict[str, object] = {}
    small = dict(values) | dict(overrides)
    heads, key_value = "num_attention_heads", "num_key_value_heads"
    if heads in own_fields and key_value in own_fields:
        if values[heads] == values[key_value] and _declared(own_fields[key_value]) is not None:
            found[key_value] = small[heads]
        elif _declared(own_fields[key_value]) is None and "kv_lora_rank" not in own_fields:
            found[key_value] = sizes.KEY_VALUE_HEADS
    if {"head_dim", "qk_rope_head_dim"} <= own_fields.keys() and values["head_dim"] == values["qk_rope_head_dim"]:
        found["head_dim"] = small["qk_rope_head_dim"]
    parts = {"head_dim", "qk_nope_head_dim", "qk_rope_head_dim"}
    if parts <= own_fields.keys() and values["head_dim"] != values["qk_rope_head_dim"]:
        found["head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    inner = values.get("expand"), values.get("hidden_size"), values.get("num_heads"), values.get("head_dim")
    if all(type(number) is int for number in inner) and inner[0] * inner[1] == inner[2] * inner[3]:
        found["num_heads"] = small["expand"] * small["hidden_size"] // small["head_dim"]
    inner, width = (explicit.get(name) for name in ("intermediate_size", "hidden_size"))
    if (
        type(inner) is int and type(width) is int and inner < width and width % inner == 0
    ):  # who asks for both means a part
        found["intermediate_size"] = small["hidden_size"] // (width // inner)
    if {"window_size", "patch_size", "spatial_merge_size"} <= own_fields.keys():  # in pixels: two merged patches wide
        found["window_size"] = 2 * small["patch_size"] * small["spatial_merge_size"]
    crops = values.get("image_grid_pinpoints")
    if crops:  # sizes of crops, multiples of the image's
        unit = min(side for crop in crops for side in crop)
        found["image_grid_pinpoints"] = [[side * sizes.IMAGE // unit for side in crop] for crop in crops]
    if {"out_hidden_size", "vision_config"} <= own_fields.keys():  # of the tower's merged patches
        tower = small["vision_config"]
        found["out_hidden_size"] = tower.hidden_size * merge_size(tower) ** 2
    if {"window_size", "downsample_rate"} <= own_fields.keys():  # a window becomes whole tokens
        found["window_size"] = small["downsample_rate"] * max(1, values["window_size"] // values["downsample_rate"])
    if {"pixel_shuffle_ratio", "projector_input_dim"} <= own_fields.keys():  # its MLP reads the shuffled patches
        merged = round(small["hidden_size"] / small["pixel_shuffle_ratio"] ** 2)
        found |= {"intermediate_size": merged, "projector_input_dim": small["projector_output_dim"]}
    queries = values.get("projector_patch_to_query_dict")
    if queries:  # by the number of patches of an image
        found["projector_patch_to_query_dict"] = {
            sizes.IMAGE_TOKENS * 4 ** (n + 1): min(count, sizes.IMAGE_TOKENS + n)
            for n, count in enumerate(queries.values())
        }
    if "axial_pos_shape" in own_fields:  # training wants the product to be the length of the sequence
        found |= {"axial_pos_shape": [4, sizes.SEQUENCE // 4], "axial_pos_embds_dim": _split(sizes.HIDDEN, [1, 3])}
    stages = values.get("base_channels"), values.get("channel_multiplier"), values.get("hidden_size")
    if stages[0] and stages[1] and stages[0] * stages[1][-1] == stages[2]:  # of the last stage
        found["hidden_size"] = small["base_channels"] * small["channel_multiplier"][-1]
    middle, out = values.get("intermediate_layers_indices"), values.get("vision_output_dim")
    if middle and out == (len(middle) + 1) * values["hidden_size"]:  # of these layers, and of the last
        found |= {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * small["hidden_size"]}
    if "hash_seed" in own_fields:
        found["hash_seed"] = 0
    if "languages" in own_fields and "default_language" in own_fields:
        found["default_language"] = values["languages"][0]
    if "attention_types" in own_fields:  # [[[kinds], repetitions]]
        kinds = values["attention_types"][0][0]
        found |= {"attention_types": [[kinds, 1]], "num_layers": len(kinds)}
    return found
