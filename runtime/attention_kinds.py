"""Which attention each kind of layer gets: layers of one model may need different features.

    sliding layers with sinks, full ones without       heads of 256 in some layers, of 512 in others
    a language model with overlaid masks, and a vision tower with full attention

Layers that need the same features are a kind. Each config, of the model or a sub-config, names one attention for all modules
that read it: the fastest for all of its kinds if they agree, else `BY_LAYER`, which chooses the fastest for every call. All
of our names take the same masks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from patchgen.runtime import attention
from patchgen.runtime.attention import BY_LAYER

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Names = str | Mapping[str, "Names"]
"""One name for the full model, or one for each config, in the form of transformers' `attn_implementation`: sub-config field ->
name, with "" for the config itself."""


@dataclass(frozen=True)
class Kind:
    """Attention layers that need the same features.

    Attributes:
        layers: their path (`model.layers.*.self_attn`) and, if the config has layer types, their type.
        config: dotted path of the config that names their attention; "" for the model's own.
        features: names from `attention_calls.FEATURES`.
        head_size: of the largest heads, of keys or values; 0 if unknown.
        count: number of layers; 0 if unknown.
    """

    layers: str
    config: str = ""
    features: tuple[str, ...] = ()
    head_size: int = 0
    count: int = 0


def layers_of(path: str, module: nn.Module) -> str:
    """`Kind.layers` of a module: the same in a small form of the model."""
    pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
    kind, index = getattr(module, "layer_type", None), getattr(module, "layer_idx", None)
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if not isinstance(kind, str) and isinstance(types, list | tuple) and isinstance(index, int) and index < len(types):
        kind = types[index]
    return f"{pattern}, {kind}" if isinstance(kind, str) else pattern


def configs_of(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """(dotted path, config) of a config and its sub-configs."""
    yield prefix.removesuffix("."), config
    for field in config.sub_configs:
        if (inner := getattr(config, field, None)) is not None:
            yield from configs_of(inner, f"{prefix}{field}.")


def config_read_by(module: nn.Module, config: PreTrainedConfig) -> str:
    """The path of the config that names the attention of a module; "" if the module has another config."""
    module_config, configs = getattr(module, "config", None), list(configs_of(config))
    by_type = [path for path, candidate in configs if type(candidate) is type(module_config)]
    return next(
        (path for path, candidate in configs if candidate is module_config), by_type[0] if len(by_type) == 1 else ""
    )


def recorded_kinds(model: nn.Module, recorded: Mapping[nn.Module, Iterable[tuple[str, ...]]]) -> tuple[Kind, ...]:
    """The kinds of the modules whose calls were recorded (`attention.recording`)."""
    config: Any = model.config
    kinds = {
        Kind(layers_of(path, module), config_read_by(module, config), features)
        for path, module in model.named_modules()
        for features in recorded.get(module, ())
    }
    return tuple(sorted(kinds, key=lambda kind: (kind.config, kind.layers, kind.features)))


# ---------------------------------------------------------------------------------------------------- choosing


def choose(kinds: Iterable[Kind], config: PreTrainedConfig, *, device_type: str | None = None) -> Names:
    """The fastest attention that can train here for each kind, by config; one name if all are the same."""
    fastest: dict[str, set[str]] = {}
    for kind in kinds:
        name = attention.choose(kind.features, device_type=device_type, head_size=kind.head_size)
        fastest.setdefault(kind.config, set()).add(name)
    name_by_path = {path: names.pop() if len(names) == 1 else BY_LAYER for path, names in fastest.items()}
    text = config.get_text_config(decoder=True)
    paths = dict(configs_of(config))
    text_name = next(
        (name_by_path[path] for path, inner in paths.items() if inner is text and path in name_by_path), None
    )
    default = text_name or next(iter(name_by_path.values()), None) or attention.choose(device_type=device_type)
    return _joined({path: name_by_path.get(path, default) for path in paths})


def named_in(config: PreTrainedConfig) -> Names:
    """The attention that a model's configs name now."""
    return _joined({path: str(inner._attn_implementation) for path, inner in configs_of(config)})


def _joined(by_path: Mapping[str, str]) -> Names:
    return next(iter(by_path.values())) if len(set(by_path.values())) == 1 else _nested(by_path)


def _nested(by_path: Mapping[str, str]) -> Names:
    """`{"": a, "text_config": b, "text_config.inner": c}` as `{"": a, "text_config": {"": b, "inner": c}}`."""
    inner: dict[str, dict[str, str]] = {}
    for path, name in by_path.items():
        field, _, inner_path = path.partition(".")
        inner.setdefault(field, {})[inner_path] = name
    return {field: names[""] if len(names) == 1 else _nested(names) for field, names in inner.items()}


def name_for(names: Names, config: str) -> str:
    """The name that serves the modules of one config."""
    return key_and_name(names, config)[1]


def key_and_name(names: Names, config: str, key: str = "") -> tuple[str, str]:
    """The name that serves the modules of one config, and where it is in `names`: `key` with the keys that lead to it."""
    if isinstance(names, str):
        return key, names
    field, _, inner_path = config.partition(".")
    inner_key = f"{key}.{field}" if field and field in names else f'{key}[""]'
    return key_and_name(names.get(field, names[""]), inner_path, inner_key)


def all_names(names: Names) -> tuple[str, ...]:
    """Each name once."""
    if isinstance(names, str):
        return (names,)
    return tuple(dict.fromkeys(name for inner in names.values() for name in all_names(inner)))


def missing_features(names: Names, kinds: Iterable[Kind]) -> tuple[str, ...]:
    """Features that kinds need and their attention lacks; `BY_LAYER` lacks none."""
    name_and_kind = [(name_for(names, kind.config), kind) for kind in kinds]
    missing = [
        attention.missing_features(name, kind.features, head_size=kind.head_size)
        for name, kind in name_and_kind
        if name != BY_LAYER
    ]
    return tuple(dict.fromkeys(feature for features in missing for feature in features))


# -------------------------------------------------------------------------------------------------------- reporting


def explain(kinds: Iterable[Kind], names: Names) -> str:
    """The attention of each kind of layer, and why nothing faster was chosen."""
    counts: dict[Kind, int] = {}
    for kind in kinds:
        uncounted = replace(kind, count=0)
        counts[uncounted] = counts.get(uncounted, 0) + kind.count
    return "\n".join(line for kind, count in counts.items() for line in _lines(replace(kind, count=count), names))


def _lines(kind: Kind, names: Names) -> Iterator[str]:
    name = name_for(names, kind.config)
    implementation = attention.choose(kind.features, head_size=kind.head_size) if name == BY_LAYER else name
    needs = [*kind.features, *([f"heads of {kind.head_size}"] if kind.head_size else [])]
    number = f"{kind.count} layer{'s' if kind.count > 1 else ''}: " if kind.count else ""
    yield f"attention    {implementation}    {number}{kind.layers}" + (f" ({', '.join(needs)})" if needs else "")
    reasons = attention.passed_over(implementation, kind.features, head_size=kind.head_size)
    for reason in dict.fromkeys(reasons.values()):
        yield f"             not {', '.join(candidate for candidate, obstacle in reasons.items() if obstacle == reason)}: {reason}"
