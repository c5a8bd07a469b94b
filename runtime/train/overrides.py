"""The overrides of a recipe in a config: fields that it has, the defaults that depend on them, and what its class made of them."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from patchgen.runtime.train.recipe import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def require_fields(config: PreTrainedConfig, overrides: Mapping[str, Any], key: str, modeling_source: str) -> None:
    """Refuses overrides of fields that the config does not have and the modeling file does not read: config classes keep any
    attribute, so they would silently do nothing.

    Args:
        key: of the recipe, for the message.
        modeling_source: the modeling file, which may read fields that the config class does not declare (`head_dim`, often).

    Raises:
        RecipeError: with the field and the nearest ones.
    """
    for name, value in overrides.items():
        if not hasattr(config, name) and not re.search(rf"config\.{name}\b|config, \"{name}\"", modeling_source):
            near = difflib.get_close_matches(name, list(config.to_dict()), n=3)
            raise RecipeError(
                f"{key}.{name}: {type(config).__name__} has no such field."
                + (f" Did you mean {', '.join(near)}?" if near else "")
            )
        inner = getattr(config, name, None)
        if isinstance(value, Mapping) and inner is not None and hasattr(inner, "to_dict"):
            require_fields(inner, value, f"{key}.{name}", modeling_source)


def with_overrides(
    config: PreTrainedConfig, overrides: Mapping[str, Any], file_fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a config with some replaced, by the class's own names (`attribute_map`).

    Args:
        file_fields: the fields that the config was built from; the class filled in the others.
    """
    replacements = {}
    for name, value in overrides.items():
        inner, own_name = getattr(config, name, None), config.attribute_map.get(name, name)
        if isinstance(value, Mapping) and inner is not None and hasattr(inner, "to_dict"):
            # Old files have the sub-config's fields at the top level.
            top_level_fields = {
                field: file_fields[field] for field in inner.to_dict().keys() & file_fields.keys() - {"model_type"}
            }
            value = with_overrides(inner, value, file_fields.get(own_name) or top_level_fields)
        replacements[own_name] = value
    return config.to_dict() | _refilled_fields(config, replacements, file_fields) | replacements


def _refilled_fields(
    config: PreTrainedConfig, replacements: Mapping[str, Any], file_fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that the class now fills in differently: `layer_types`, say, if `num_hidden_layers` is replaced."""
    config_class, values = type(config), config.to_dict()
    before, after = (
        config_class(**copy.deepcopy(fields)).to_dict()
        for fields in (dict(file_fields), {**file_fields, **replacements})
    )
    return {
        name: value
        for name, value in after.items()
        # Fields that the file gives stay, as do values that a config which contains this one filled in otherwise.
        if file_fields.get(name) is None and value != before.get(name) and before.get(name) == values.get(name)
    }


def require_applied(config: PreTrainedConfig, overrides: Mapping[str, Any], key: str) -> None:
    """Raises RecipeError for an override that the config class changed to another value."""
    for name, value in overrides.items():
        inner = getattr(config, name)
        if isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            require_applied(inner, value, f"{key}.{name}")
        elif not isinstance(value, Mapping | list) and inner != value:
            raise RecipeError(f"{key}.{name} = {value!r}, but {type(config).__name__} changed it to {inner!r}.")
