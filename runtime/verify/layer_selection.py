"""Selects the layers of a small model: one of each kind of the full model.

A config describes its layers in two ways:

    one entry per layer     layer_types = ["linear_attention", "linear_attention", "full_attention", ...]
    a list of layer numbers mlp_only_layers = [0, 1]

Side by side these lists give each layer one column, its kind. The first layer of each kind is kept, in order:

    layer            0       1       2       3       4  ...       kept     0       1       3
    layer_types      linear  linear  linear  full    linear       ->       linear  linear  full
    mlp_layer_types  dense   sparse  sparse  sparse  sparse                dense   sparse  sparse
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from patchgen.runtime.verify.field_semantics import is_special_id

INDEX_LIST_NAME = re.compile(r".*(layers|_idxs|_ids|_indices|_indexes)$")


@dataclass(frozen=True)
class LayerSelection:
    """The numbers of the kept layers in the full model, and the new values of the per-layer fields."""

    kept: tuple[int, ...]
    overrides: dict[str, list] = field(default_factory=dict)


def select_layers(
    values: Mapping[str, Any], num_layers: int, min_layers: int, per_layer_names: Collection[str] | None = None
) -> LayerSelection:
    """Keeps one layer of each kind.

    Args:
        values: the fields of the full config.
        num_layers: of the full config.
        min_layers: with fewer kinds than this, the last kind is repeated.
        per_layer_names: the fields with an entry per layer; None: all lists of that length.
    """
    names = lists_of_length(values, num_layers) if per_layer_names is None else per_layer_names
    per_layer = {name: value for name, value in values.items() if name in names}
    indices = {name: value for name, value in values.items() if _is_index_list(name, value, num_layers)}
    kinds: dict[tuple, int] = {}
    for layer in range(num_layers):
        kind = tuple(repr(value[layer]) for value in per_layer.values())
        kind += tuple(layer in value for value in indices.values())
        kinds.setdefault(kind, layer)
    layers = sorted(kinds.values())
    for name, value in indices.items():
        if name.endswith("_indexes") and len(value) > 1:  # outputs of tower layers: one alone has no order to test
            layers = sorted({*layers, *value[:2]})
    if values.get("num_kv_shared_layers"):
        layers.append(layers[-1])  # the last layers reuse the keys of an earlier layer of their own kind
    while len(layers) < min_layers:
        layers.append(layers[-1])
    overrides: dict[str, list] = {name: [value[layer] for layer in layers] for name, value in per_layer.items()}
    for name, value in indices.items():
        overrides[name] = [new for new, old in enumerate(layers) if old in value]
    return LayerSelection(tuple(layers), overrides)


def fields_per_layer(
    values: Mapping[str, Any],
    count_name: str,
    declared_layers: object,
    rebuild: Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any] | None],
) -> tuple[str, ...]:
    """The fields of a config that have an entry per layer, as its class shows with one layer more.

    A list that the class then makes longer has one, and so has a list that the class refuses to be longer with as many layers.
    A list that stays as long has none, unless that is the length of the class's own default. What shows neither (a list that
    only a config sets) is taken by its length; of one layer, if it names its kind.

    Args:
        values: the fields of the full config.
        count_name: the field with the number of layers.
        declared_layers: its default.
        rebuild: the fields of this config with other values, and without others; None if its class refuses that.
    """
    num_layers = values[count_name]
    candidates = lists_of_length(values, num_layers)
    longer = rebuild({count_name: num_layers + 1}, candidates) if candidates else None
    per_layer = []
    for name in candidates:
        derived = longer.get(name) if longer is not None else None
        length = len(derived) if isinstance(derived, (list, tuple)) else None
        if length == num_layers and num_layers != declared_layers:
            continue
        value = values[name]
        is_kind = num_layers > 1 or isinstance(value[0], str)
        if length == num_layers + 1 or is_kind or rebuild({name: [*value, value[-1]]}, ()) is None:
            per_layer.append(name)
    return tuple(per_layer)


def lists_of_length(values: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The fields that may have an entry per layer: lists of this length, of something else than layer numbers or token ids."""
    return tuple(
        name
        for name, value in values.items()
        if isinstance(value, (list, tuple))
        and len(value) == num_layers
        and not is_special_id(name)
        and not _is_index_list(name, value, num_layers)
    )


def _is_index_list(name: str, value: object, num_layers: int) -> bool:
    if not isinstance(value, (list, tuple)) or not value or not INDEX_LIST_NAME.match(name) or is_special_id(name):
        return False
    numbers = all(type(number) is int and 0 <= number < num_layers for number in value)
    return numbers and all(a < b for a, b in itertools.pairwise(value))
