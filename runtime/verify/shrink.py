"""A small form of a user's config: its options are kept, its sizes become those of `small_config`.

shrink(config).config        # yarn, windows, router loss, layer patterns as in `config`; hidden 64, a layer per kind
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import TYPE_CHECKING

from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify import small_config as small

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def shrink(config: PreTrainedConfig) -> small.SmallConfig:
    """The small form of a config, without dropout.

    Raises:
        SmallConfigError: the class refuses the small sizes with these options.
    """
    return _shrink(config, small.SpecialIds())


def _shrink(config: PreTrainedConfig, ids: small.SpecialIds) -> small.SmallConfig:
    makers = {name: functools.partial(_shrink, sub) for name, sub in _sub_configs(config).items()}
    return small.small_form(type(config), non_default_fields(config), {}, ids, makers)


def non_default_fields(config: PreTrainedConfig) -> dict[str, object]:
    """The fields of a config that differ from the defaults of its class, declared or not; without sub-configs, metadata and the
    fields that `PreTrainedConfig` declares."""
    try:
        default = vars(type(config)())
    except small.REFUSALS:
        default = {}
    declared = {field.name for field in dataclasses.fields(config)}
    declared_fields = small.own_fields(type(config))
    fields = {}
    for name, value in vars(config).items():
        is_undeclared = name not in declared and not name.startswith("_") and name not in _METADATA
        if name in config.sub_configs or not (name in declared_fields or is_undeclared):
            continue
        if name not in default or value != default[name]:
            fields[name] = value
    return fields


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
