"""A small config for any model of transformers, derived from upstream's config class alone.

    small_config("qwen3_moe").overrides                 # hidden_size=64, num_experts=4, mlp_only_layers=[0], ...

The class is built once with its defaults. Each field then gets a small value by its meaning (`field_semantics.py`), one layer
of each kind is kept (`layer_selection.py`), sub-configs likewise, and relations among the defaults (as many key/value heads as
heads, hidden = heads x head size, ...) are restored. Fields declared as None are left for the class to derive. Relations
between sub-configs: `field_relations.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from patchgen.runtime.verify import field_relations
from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify.small_layers import count_field, declared_value, layers_of, per_layer_config, related
from patchgen.runtime.verify.small_values import SpecialIds, modeling_source, small_rope, small_value, with_sections

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class SmallConfigError(ValueError):
    """No small config could be derived for a config class; `reason` is upstream's own, in one line."""

    def __init__(self, config_class: type[PreTrainedConfig], overrides: Mapping[str, object], cause: Exception):
        self.reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        super().__init__(
            f"{config_class.__name__} refuses a small config: {self.reason}\nTried {dict(overrides)}. "
            "To fix: give values that it takes by `patchgen verify MODEL --set field=value`, or a whole config by `--config FILE`."
        )


@dataclasses.dataclass(frozen=True)
class SmallConfig:
    """A small config, and the arguments of its class that give it (nested for sub-configs)."""

    config: PreTrainedConfig
    full: PreTrainedConfig
    """The config that was made small."""
    overrides: dict[str, object]
    unclassified: tuple[str, ...] = ()
    """Fields with a large number that no rule covers: they keep upstream's value."""


# What a config class raises on inconsistent values.
REFUSALS = (
    StrictDataclassError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError,
    ZeroDivisionError,
)  # fmt: skip


# What upstream's classes raise on a config or an input that they do not support.
UPSTREAM_REFUSALS = (
    SmallConfigError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ImportError,
)  # fmt: skip

NOTHING: Mapping[str, Any] = MappingProxyType({})

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


def small_config(
    config_class: type[PreTrainedConfig] | str, *, variant: str = "base", exact: Mapping[str, Any] = NOTHING
) -> SmallConfig:
    """Derives a small config.

    Args:
        config_class: upstream's config class, or a model type ("qwen3_moe").
        variant: a key of `VARIANTS`.
        exact: fields with the values that they get, whatever the rules would give; nested for sub-configs.

    Raises:
        SmallConfigError: upstream's class refuses its defaults or the small values; its reason is in the message.
        KeyError: an unknown model type or variant.
    """
    if isinstance(config_class, str):
        from transformers import CONFIG_MAPPING

        config_class = CONFIG_MAPPING[config_class]
    return small_form(config_class, {}, VARIANTS[variant], SpecialIds(), exact=exact)


def set_router_loss(config: PreTrainedConfig, is_on: bool) -> None:
    """Switches the router loss of a model, if it has one."""
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = is_on


def applicable_variants(base: PreTrainedConfig) -> tuple[str, ...]:
    """The variants that change a field of this config."""
    variants = ["base"]
    if "output_router_logits" in _all_fields(base):
        variants.append("router_logits")
    text = base.get_text_config(decoder=True)
    if "tie_word_embeddings" in _all_fields(base):
        has_own = hasattr(base, "tie_word_embeddings")
        variants.append("untied" if (base if has_own else text).tie_word_embeddings else "tied")
    if any(vars(text).get(switch) is False for switch in VARIANTS["experts"]):
        variants.append("experts")
    window = _field(type(text), "sliding_window")
    if window is not None:
        has_switch = _field(type(text), "use_sliding_window") is not None
        by_layer = _field(type(text), "layer_types") is not None  # then the base config has both kinds of layer
        if not vars(text).get("sliding_window"):
            variants.append("window")
        elif has_switch or ("None" in str(window.type) and not by_layer):
            variants.append("no_window")
    return tuple(variants)


def _all_fields(config: PreTrainedConfig) -> set[str]:
    names = {field.name for field in _fields(type(config))}
    for key in config.sub_configs:
        sub_config: Any = vars(config).get(key)
        if sub_config is not None and dataclasses.is_dataclass(type(sub_config)):
            names |= _all_fields(sub_config)
    return names


def _needs_window(config_class: type[PreTrainedConfig], fields: Mapping[str, dataclasses.Field]) -> bool:
    """Whether a config without a window may have windowed layers: by `layer_types`, without a switch."""
    if not {"sliding_window", "layer_types"} <= fields.keys() or "use_sliding_window" in fields:
        return False
    is_open = declared_value(fields["sliding_window"]) is None and declared_value(fields["layer_types"]) is None
    users = [code for code in modeling_source(config_class).split("\nclass ") if config_class.__name__ in code]
    return is_open and any("create_sliding_window_causal_mask(" in code for code in users)


def _field(config_class: type[PreTrainedConfig], name: str) -> dataclasses.Field | None:
    return {field.name: field for field in _fields(config_class)}.get(name)


# ------------------------------------------------------------------------------------------- one config class


def small_form(
    config_class: type[PreTrainedConfig],
    given: Mapping[str, object],
    variant: Mapping,
    special_ids: SpecialIds,
    sub_configs: Mapping[str, Callable[[SpecialIds], SmallConfig]] | None = None,
    exact: Mapping[str, Any] = NOTHING,
) -> SmallConfig:
    """The small form of `config_class(**given)`; its ids are taken from `special_ids`, after those of its sub-configs.

    Args:
        sub_configs: functions that make the small sub-configs; None: from the defaults of the class.
        exact: fields with the values that they get, whatever the rules would give; nested for sub-configs.
    """
    fields = own_fields(config_class)
    own_exact = {name: value for name, value in exact.items() if name not in _sub_configs(config_class)}
    _require_fields(config_class, exact)
    explicit = dict(given) | {name: value for name, value in variant.items() if name in fields}
    if type(declared_value(fields["is_decoder"]) if "is_decoder" in fields else None) is bool:
        # The causal form of a class that is an encoder by default.
        explicit.setdefault("is_decoder", sub_configs is None)
    count_name = count_field(config_class)
    has_one_layer = count_name in fields and explicit.get(count_name, declared_value(fields[count_name])) == 1
    if "mlp_only_layers" in fields and not declared_value(fields["mlp_only_layers"]) and not has_one_layer:
        explicit.setdefault("mlp_only_layers", [0])  # a dense layer beside the sparse ones
    if _needs_window(config_class, fields):
        explicit.setdefault("sliding_window", sizes.WINDOW)
    sub_configs = _default_sub_configs(config_class, variant, exact) if sub_configs is None else sub_configs
    parts = _parts(config_class, sub_configs, special_ids)
    declared = {name: explicit.get(name, declared_value(field)) for name, field in fields.items()}
    explicit |= field_relations.code_offsets(declared, parts, special_ids.first)
    nested_configs = {key: part.config for key, part in parts.items()}
    overrides: dict[str, Any] = dict(nested_configs)
    unclassified = [f"{key}.{name}" for key, part in parts.items() for name in part.unclassified]
    try:
        prototype = _construct(config_class, explicit | overrides)
    except SmallConfigError:  # a field that only checkpoints have, perhaps
        if not own_exact:
            raise
        explicit |= own_exact
        prototype = _construct(config_class, explicit | overrides)
    values = {name: vars(prototype).get(name) for name in fields}
    own_values, large = _own_values(config_class, explicit, values, set(overrides), special_ids)
    overrides |= own_values
    unclassified += large
    for name in _undeclared_ids(config_class):
        is_placeholder = name in sizes.PLACEHOLDERS  # None in checkpoints without that modality
        if not hasattr(prototype, name) or (is_placeholder and getattr(prototype, name) is None):
            overrides[name] = next(special_ids)
    overrides |= {
        name: small_value(value, (name,), special_ids) for name, value in given.items() if name not in fields
    }
    rebuild = functools.partial(_rebuilt, config_class, explicit | nested_configs)
    overrides |= layers_of(config_class, fields, values, per_layer_config(prototype), rebuild)
    overrides |= related(fields, values, explicit, overrides)
    source = modeling_source(config_class)
    overrides |= {
        name: released for name, released in sizes.RELEASED_VALUES.items() if values.get(name, released) is None
    }
    overrides |= field_relations.vocabulary_map(values, parts, source, special_ids)
    overrides |= field_relations.layer_numbers(values, parts) | field_relations.chunk_lengths(values, parts)
    rope = small_rope(with_sections(config_class, values.get("rope_parameters")), overrides, values)
    if rope is not None:
        overrides["rope_parameters"] = rope
    overrides |= own_exact
    config = _construct(config_class, overrides)
    nested: dict[str, object] = {key: part.overrides for key, part in parts.items()}
    return SmallConfig(config, prototype, overrides | nested, tuple(unclassified))


def _require_fields(config_class: type[PreTrainedConfig], exact: Mapping[str, Any]) -> None:
    """Refuses values for fields that the class does not have and its modeling file does not read: it would keep any attribute."""
    known = {field.name for field in _fields(config_class)} | set(config_class.attribute_map)
    for name, value in exact.items():
        if name in _sub_configs(config_class):
            if not isinstance(value, Mapping):
                raise SmallConfigError(
                    config_class, exact, ValueError(f"{name} is a config of its own: set {name}.FIELD")
                )
        elif name not in known and (part := _part_with(config_class, name)):
            raise SmallConfigError(config_class, exact, ValueError(f"{name} is a field of {part}: set {part}.{name}"))
        elif name not in known and not re.search(rf"config\.{name}\b|\"{name}\"", modeling_source(config_class)):
            near = difflib.get_close_matches(name, sorted(known), n=3)
            raise SmallConfigError(
                config_class, exact, ValueError(f"there is no field {name}; near it: {', '.join(near)}")
            )


def _part_with(config_class: type[PreTrainedConfig], name: str) -> str:
    """The sub-config that has a field; "" if there is none."""
    parts = _sub_configs(config_class)
    return next((key for key, (part, _) in parts.items() if name in {field.name for field in _fields(part)}), "")


def _own_values(
    config_class: type[PreTrainedConfig],
    explicit: Mapping[str, Any],
    values: Mapping[str, Any],
    known: set[str],
    special_ids: SpecialIds,
) -> tuple[dict[str, Any], list[str]]:
    """The small values of fields that are not in `known`, and the names of large numbers that no rule covers."""
    small_values: dict[str, Any] = {}
    large = []
    common_names = {own: common for common, own in config_class.attribute_map.items()}
    for name, field in own_fields(config_class).items():
        if name in known:
            continue
        declared = explicit.get(name, declared_value(field))
        names = common_names.get(name, name), name
        if declared is None and (
            sizes.is_special_id(name) or isinstance(values[name], dict) or sizes.is_input_width(name)
        ):
            declared = values[name]  # derived by the class, but not from other fields
        small = small_value(declared, names, special_ids)
        if small == 1 and name not in explicit and sizes.counts_experts(*names):
            small = sizes.EXPERTS  # set by checkpoints; with one expert there is no routing
        if small is declared and type(declared) is int and declared > 2 * sizes.VOCAB:
            large.append(name)
        if small != declared or name in explicit:
            small_values[name] = small
        elif declared is None and values[name] is None:
            rule = sizes.rule_for(*names)
            if rule is not None and rule.meaning in sizes.REQUIRED:
                small_values[name] = rule.small(sys.maxsize)
    return small_values, large


def _parts(
    config_class: type[PreTrainedConfig],
    sub_configs: Mapping[str, Callable[[SpecialIds], SmallConfig]],
    special_ids: SpecialIds,
) -> dict[str, SmallConfig]:
    """The small sub-configs with their relations; their ids are removed from `special_ids`."""
    parts: dict[str, SmallConfig] = {}
    for key, make in sub_configs.items():
        own_ids = SpecialIds(special_ids.vocab)
        parts[key] = make(own_ids)
        special_ids.skip(own_ids)
    field_relations.relate_parts(parts, modeling_source(config_class))
    field_relations.distinct_placeholders(parts, special_ids)
    return parts


def _construct(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    try:
        return config_class(**overrides)
    except REFUSALS as error:
        raise SmallConfigError(config_class, overrides, error) from error


def _rebuilt(
    config_class: type[PreTrainedConfig], arguments: Mapping[str, Any], changes: Mapping, without: Collection[str]
) -> dict[str, Any] | None:
    """The fields of a config with changes to its arguments; None if the class refuses them."""
    kept = {name: copy.deepcopy(value) for name, value in arguments.items() if name not in without}
    try:
        return vars(config_class(**kept | dict(changes)))
    except REFUSALS:
        return None


def own_fields(config_class: type[PreTrainedConfig]) -> dict[str, dataclasses.Field]:
    """The fields of a config class without those of `PreTrainedConfig`."""
    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name: field for field in _fields(config_class) if field.name not in common}


def _fields(config_class: type[PreTrainedConfig]) -> list[dataclasses.Field]:
    """The fields of a config class, and the parameters with a default of its own `__init__`."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for name, parameter in inspect.signature(config_class.__init__).parameters.items():
        if name not in fields and parameter.default is not inspect.Parameter.empty:
            fields[name] = dataclasses.field(default=parameter.default)
            fields[name].name, fields[name].type = name, parameter.annotation
    return list(fields.values())


def _default_sub_configs(
    config_class: type[PreTrainedConfig], variant: Mapping, exact: Mapping[str, Any]
) -> dict[str, Callable[[SpecialIds], SmallConfig]]:
    return {
        key: functools.partial(small_form, sub_class, arguments, variant, exact=exact.get(key, NOTHING))
        for key, (sub_class, arguments) in _sub_configs(config_class).items()
    }


def _sub_configs(config_class: type[PreTrainedConfig]) -> dict[str, tuple[type[PreTrainedConfig], dict]]:
    """The classes of the sub-configs, with upstream's default arguments."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    sub_configs = {}
    specs = getattr(config_class, "sub_configs_defaults", {})  # not in older releases
    declared: Any = config_class.sub_configs  # a class property in transformers
    for key, sub_class in declared.items():
        arguments = dict(specs[key].init_kwargs) if key in specs else {}
        if not issubclass(sub_class, PreTrainedConfig):  # AutoConfig: the spec names the default model type
            model_type = specs[key].model_type if key in specs else arguments.pop("model_type", None)
            if not model_type:
                continue
            sub_class = CONFIG_MAPPING[model_type]
        arguments |= sizes.UNDECLARED_FIELDS.get(key, {})
        sub_configs[key] = (sub_class, arguments)
    return sub_configs


def _undeclared_ids(config_class: type[PreTrainedConfig]) -> list[str]:
    """The token ids that the modeling file reads from a composite config and that only released checkpoints set."""
    if not config_class.sub_configs:
        return []
    source = modeling_source(config_class)
    with_default = re.findall(r"""getattr\((?:self\.)?config, ["'](\w+_token_(?:id|index))["'], [\d_]+\)""", source)
    placeholders = {name for name in sizes.PLACEHOLDERS if re.search(rf"\bconfig\.{name}\b", source)}
    return sorted({*re.findall(r"self\.config\.(\w+_token_id)\b", source), *with_default, *placeholders})
