"""A small form of a user's config: its options are kept, its sizes become those of `small_config`.

shrink(config).config        # yarn, windows, router loss, layer patterns as in `config`; hidden 64, a layer per kind
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify import small_config as small
from patchgen.runtime.verify.small_layers import per_layer_config
from patchgen.runtime.verify.small_values import NoSpecialId

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def shrink(
    config: PreTrainedConfig,
    variant: Mapping[str, object] = small.NOTHING,
    *,
    exact: Mapping[str, Any] = small.NOTHING,
) -> small.SmallConfig:
    """The small form of a config, without dropout.

    Args:
        variant: what is set at every level that has the field, as in `small_config.VARIANTS`.
        exact: fields with the values that they get, whatever the rules would give; nested for sub-configs.

    Raises:
        SmallConfigError: the class refuses the small sizes with these options, or a small vocabulary has not as many ids as the
            config has special tokens.
    """
    try:
        return _shrink(config, small.SpecialIds(min(vocabulary(config) or sizes.VOCAB, sizes.VOCAB)), variant, exact)
    except NoSpecialId as error:
        raise small.SmallConfigError(type(config), {}, error) from error


def vocabulary(config: PreTrainedConfig) -> int | None:
    """The number of tokens of a config's text model; None if it has no such field."""
    text = config.get_text_config(decoder=True)
    count = vars(text).get(type(text).attribute_map.get("vocab_size", "vocab_size"))
    return count if type(count) is int else None


def why_padding_has_no_row(config: PreTrainedConfig) -> str:
    """Why embeddings cannot be built with `pad_token_id`, in one sentence; "" if they can, or if there is none."""
    size, text = vocabulary(config), config.get_text_config(decoder=True)
    pad = vars(text).get("pad_token_id")
    if size is None or type(pad) is not int or pad < size:
        return ""
    return (
        f"pad_token_id = {pad} has no row in the embeddings: the vocabulary has {size} tokens, 0 to {size - 1}. To fix: set "
        "pad_token_id to one of them, or to null."
    )


def _shrink(
    config: PreTrainedConfig, ids: small.SpecialIds, variant: Mapping[str, object], exact: Mapping[str, Any]
) -> small.SmallConfig:
    makers = {
        name: functools.partial(_shrink, sub, variant=variant, exact=exact.get(name, {}))
        for name, sub in _sub_configs(config).items()
    }
    return small.small_form(type(config), non_default_fields(config), variant, ids, makers, exact)


def non_default_fields(config: PreTrainedConfig) -> dict[str, object]:
    """The fields of a config that differ from the defaults of its class, declared or not; without sub-configs, metadata and the
    fields that `PreTrainedConfig` declares, or that the class derives from these."""
    try:
        default_config = type(config)()
        default, default_layers = vars(default_config), per_layer_config(default_config)
    except small.REFUSALS:
        default, default_layers = {}, {}
    declared = {field.name for field in dataclasses.fields(config)}
    declared_fields = small.own_fields(type(config))
    fields = {}
    for name, value in vars(config).items():
        is_undeclared = name not in declared and not name.startswith("_") and name not in _METADATA
        if name in config.sub_configs or not (name in declared_fields or is_undeclared):
            continue
        if name not in default or value != default[name]:
            fields[name] = value
    derived = _derived(config, {name: value for name, value in fields.items() if name in declared_fields})
    fields = {name: value for name, value in fields.items() if name in declared_fields or derived.get(name) != value}
    if (
        by_layer := per_layer_config(config)
    ) != default_layers:  # not a field; a class may have its own for some layers
        fields["per_layer_config"] = by_layer
    return fields


def _derived(config: PreTrainedConfig, declared: dict[str, object]) -> dict[str, object]:
    """What the class sets on a config with these declared fields; nothing if it refuses them alone."""
    try:
        fields: dict[str, Any] = copy.deepcopy(declared | _sub_configs(config))
        return vars(type(config)(**fields))
    except small.REFUSALS:
        return {}


# Written when a config is saved; no options.
_METADATA = ("transformers_version", "architectures", "model_type", "auto_map", "torch_dtype", "dtype", "name_or_path")


def _sub_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    return {
        name: vars(config)[name] for name in config.sub_configs if dataclasses.is_dataclass(vars(config).get(name))
    }


def with_dropout(config: PreTrainedConfig, original: PreTrainedConfig) -> PreTrainedConfig:
    """A small config with the dropout of its original."""
    copied = copy.deepcopy(config)
    for name, value in vars(original).items():
        if sizes.is_dropout(name) and isinstance(value, (int, float)):
            setattr(copied, name, value)
    for name, sub in _sub_configs(original).items():
        if vars(copied).get(name) is not None:
            setattr(copied, name, with_dropout(vars(copied)[name], sub))
    return copied
