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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INDEX_LIST_NAME = re.compile(r".*(layers|_idxs|_ids|_indices|_indexes)$")


@dataclass(frozen=True)
class LayerSelection:
    """The numbers of the kept layers in the full model, and the new values of the per-layer fields."""

    kept: tuple[int, ...]
    overrides: dict[str, list] = field(default_factory=dict)


def select_layers(values: Mapping[str, Any], num_layers: int, min_layers: int) -> LayerSelection:
    """Keeps one layer of each kind.

    Args:
        values: the fields of the full config.
        num_layers: of the full config.
        min_layers: with fewer kinds than this, the last kind is repeated.
    """
    per_layer = {name: value for name, value in values.items() if _is_per_layer(name, value, num_layers)}
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


def _is_index_list(name: str, value: object, num_layers: int) -> bool:
    if not isinstance(value, (list, tuple)) or not value or not INDEX_LIST_NAME.match(name):
        return False
    numbers = all(type(number) is int and 0 <= number < num_layers for number in value)
    return numbers and all(a < b for a, b in itertools.pairwise(value))


def _is_per_layer(name: str, value: Any, num_layers: int) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) == num_layers
    # With a single layer, a list of one number need not be per layer; a list of one name is its kind.
    is_by_layer = num_layers > 1 or (is_list and isinstance(value[0], str))
    return is_list and is_by_layer and not _is_index_list(name, value, num_layers)
