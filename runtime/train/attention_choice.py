"""The attention of a run: the recipe's, or the fastest for each kind of layer."""

from __future__ import annotations

import difflib
import functools
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from patchgen.runtime import attention, attention_kinds
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.attention_calls import FLOAT32, dtype_features
from patchgen.runtime.attention_kinds import Kind, Names
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import report
from patchgen.runtime.train.recipe import RecipeError
from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS
from patchgen.runtime.verify.training_path import find_attention_kinds
from patchgen.runtime.verify.verdict import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def require_available(requested: Names | None) -> None:
    """Refuses unknown names, those that cannot run on this machine, and a mapping that names none for its own config.

    Raises:
        RecipeError: with the key.
    """
    if requested is not None:
        _require_available(requested, "model.attention")


def _require_available(names: object, key: str) -> None:
    """`require_available` for the value of one key, which YAML may have given any type."""
    if isinstance(names, Mapping):
        if "" not in names:
            raise RecipeError(
                f'{key} names the attention of {", ".join(map(str, names)) or "no config"} only. To fix: add an entry "" for '
                "the config itself and its other sub-configs."
            )
        for field, inner in names.items():
            _require_available(inner, f"{key}.{field}" if field else f'{key}[""]')
        return
    if not isinstance(names, str) or names not in attention.names():
        near = difflib.get_close_matches(str(names), attention.names(), n=1, cutoff=0.3)
        raise RecipeError(
            f"{key} = {names!r} is unknown. There are: {', '.join(attention.names())}."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    reason = None if names == attention.BY_LAYER else BACKENDS[names].unavailable()
    if reason is not None:
        raise RecipeError(f"{key} = '{names}' cannot run here: {reason}.")


def choose(
    requested: Names | None,
    head: type[PreTrainedModel],
    config: PreTrainedConfig,
    small_kinds: Iterable[Kind] | None = None,
    dtype: torch.dtype | None = None,
) -> Names:
    """The requested attention, or if none is, the fastest here that supports the features and head size of each kind of layer.

    A requested one must take the head sizes and the dtype; other features that it lacks it refuses itself, when it is called.

    Args:
        small_kinds: the kinds of layers in a small form of the model; None: that form is run to find them.
        dtype: the dtype that layers compute in (`model.compute_dtype`).

    Raises:
        RecipeError: a requested one is unknown, cannot run here, or does not support the head size or dtype of its layers.
    """
    require_available(requested)
    if requested is None:
        return attention_kinds.choose(kinds_of(head, config, small_kinds, dtype), config)
    # Only flash kernels have a `max_head`, and they alone lack float32: for others the model need not be built.
    if any(name != attention.BY_LAYER and BACKENDS[name].max_head for name in attention_kinds.all_names(requested)):
        kinds = [replace(kind, features=dtype_features(dtype)) for kind in kinds_of(head, config, small_kinds or ())]
        _require_supported(requested, kinds, head.__name__)
    return requested


def _require_supported(requested: Names, kinds: Iterable[Kind], head: str) -> None:
    """Raises RecipeError for the first key of the recipe whose attention lacks a feature, with the layers that need it."""
    served_by: dict[tuple[str, str], list[Kind]] = {}
    for kind in kinds:
        served_by.setdefault(attention_kinds.key_and_name(requested, kind.config, "model.attention"), []).append(kind)
    for (key, name), served in served_by.items():
        layers: dict[str, list[str]] = {}  # of each missing feature
        for kind in served:
            for feature in attention_kinds.missing_features(name, (kind,)):
                layers.setdefault(feature, []).append(kind.layers)
        if not layers:
            continue
        needs = [
            f"{feature}, which parallel.param_dtype needs"
            if feature == FLOAT32
            else f"{feature}, which {head} has in {', '.join(dict.fromkeys(places))}"
            for feature, places in layers.items()
        ]
        able = [other for other in BACKENDS if not attention_kinds.missing_features(other, served)]
        raise RecipeError(f"{key} = '{name}' cannot do {' and '.join(needs)}. Those that can: {', '.join(able)}.")


def explain(
    head: type[PreTrainedModel], config: PreTrainedConfig, names: Names, dtype: torch.dtype | None = None
) -> str:
    """The attention of each kind of layer, and why nothing faster was chosen."""
    return attention_kinds.explain(kinds_of(head, config, dtype=dtype), names)


def kinds_of(
    head: type[PreTrainedModel],
    config: PreTrainedConfig,
    small_kinds: Iterable[Kind] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Kind, ...]:
    """The kinds of attention layers of a model: features from its small form and the dtype, head sizes and counts
    from the model itself.

    A layer that the small form did not run is assumed to need every feature that any other needs. Without a small form that
    runs all are assumed to need every feature there is, which a warning says.
    """
    any_features: tuple[str, ...] | None = None
    try:
        small_kinds = tuple(find_attention_kinds(head, config) if small_kinds is None else small_kinds)
    except UPSTREAM_REFUSALS as refusal:
        reraise_machine_failure(refusal)
        small_kinds, any_features = (), attention.FEATURES
        warnings.warn(
            f"No small form of this config runs ({one_line(f'{type(refusal).__name__}: {refusal}')}): the attention is chosen as "
            f"if each layer of {head.__name__} needed {', '.join(any_features)}.",
            stacklevel=2,
        )
    groups = _layer_groups(head, json.dumps(config.to_dict()))
    known = {kind.layers for kind in small_kinds}
    if any_features is None:
        any_features = tuple(name for name in attention.FEATURES if any(name in kind.features for kind in small_kinds))
    kinds = [
        replace(kind, head_size=group.head_size, count=group.count)
        for kind in small_kinds
        if (group := groups.get(kind.layers)) is not None
    ]
    not_run = [(layers, group) for layers, group in groups.items() if layers not in known and group.attends]
    kinds += [Kind(layers, group.config, any_features, group.head_size, group.count) for layers, group in not_run]
    kinds = [replace(kind, features=(*kind.features, *dtype_features(dtype))) for kind in kinds]
    return tuple(sorted(kinds, key=lambda kind: (kind.config, kind.layers, kind.features)))


@dataclass
class _LayerGroup:
    """The modules of a model with the same `Kind.layers`, attention or not.

    Attributes:
        config: dotted path of the config that names their attention, as in `Kind`.
        attends: whether they are attention modules.
        head_size: of their largest heads; 0 if unknown.
        count: how many there are.
    """

    config: str
    attends: bool
    head_size: int = 0
    count: int = 0


@functools.lru_cache(maxsize=8)
def _layer_groups(head: type[PreTrainedModel], config_text: str) -> dict[str, _LayerGroup]:
    """`Kind.layers` -> the modules with it, of the model built on the meta device.

    Args:
        config_text: the config as JSON with all its fields, which the cache can hash; infinite numbers as Python writes them.
    """
    assert head.config_class is not None, "a generated head names its configuration"
    config = head.config_class.from_dict(json.loads(config_text))
    with torch.device("meta"):
        model = head._from_config(config, attn_implementation="eager")
    groups: dict[str, _LayerGroup] = {}
    for path, module in model.named_modules():
        group = groups.setdefault(
            attention_kinds.layers_of(path, module),
            _LayerGroup(attention_kinds.config_read_by(module, model.config), report.attends(module)),
        )
        group.head_size, group.count = max(group.head_size, report.head_size(module)), group.count + 1
    return groups
