"""Which attention each kind of layer gets: the layers of one model need not ask for the same.

    sliding layers with sinks, full ones without       heads of 256 in some layers, of 512 in others
    a language model whose masks are drawn by hand, beside a tower that looks at whole pictures

Layers that ask for the same are a kind. A config, of the model or of a part of it, names one attention for all modules that
read it: the fastest that has what they all ask for, if that is the fastest of each kind alone; else `BY_LAYER`, under which
every call gets the fastest for what it asks. All of our names take the same masks, so kinds need none of their own.
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
"""One name for the whole model; or a name for each config in it, as transformers' `attn_implementation` takes them: by the
field of the config that holds it, "" for the config itself."""


@dataclass(frozen=True)
class Kind:
    """Attention layers that ask for the same.

    Attributes:
        layers: where they are (`model.layers.*.self_attn`) and, where the config tells types of layers apart, of which type.
        config: the fields that lead to the config that names their attention, with dots; "" for the model's own.
        asked: names out of `attention_backends.FEATURES`.
        head_size: of the largest heads, of keys or values; 0 if it is not known.
        count: how many there are; 0 if they were not counted.
    """

    layers: str
    config: str = ""
    asked: tuple[str, ...] = ()
    head_size: int = 0
    count: int = 0


def layers_of(path: str, module: nn.Module) -> str:
    """What `Kind.layers` says of a module: the same in a small form of the model as in the model."""
    place = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
    kind, number = getattr(module, "layer_type", None), getattr(module, "layer_idx", None)
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if (
        not isinstance(kind, str)
        and isinstance(types, list | tuple)
        and isinstance(number, int)
        and number < len(types)
    ):
        kind = types[number]
    return f"{place}, {kind}" if isinstance(kind, str) else place


def configs_of(config: PreTrainedConfig, before: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """A config and those in it, by the fields that lead to them."""
    yield before.removesuffix("."), config
    for field in config.sub_configs:
        if (inner := getattr(config, field, None)) is not None:
            yield from configs_of(inner, f"{before}{field}.")


def config_read_by(module: nn.Module, config: PreTrainedConfig) -> str:
    """Which config of a model names the attention of a module; the model's own for one that is not in it."""
    own, known = getattr(module, "config", None), list(configs_of(config))
    by_type = [path for path, one in known if type(one) is type(own)]
    return next((path for path, one in known if one is own), by_type[0] if len(by_type) == 1 else "")


def asked_by(model: nn.Module, recorded: Mapping[nn.Module, Iterable[tuple[str, ...]]]) -> tuple[Kind, ...]:
    """The kinds among the modules whose calls were recorded (`attention.recording`)."""
    config: Any = model.config
    found = {
        Kind(layers_of(path, module), config_read_by(module, config), asked)
        for path, module in model.named_modules()
        for asked in recorded.get(module, ())
    }
    return tuple(sorted(found, key=lambda kind: (kind.config, kind.layers, kind.asked)))


# ---------------------------------------------------------------------------------------------------- choosing


def choose(kinds: Iterable[Kind], config: PreTrainedConfig, *, device_type: str | None = None) -> Names:
    """The fastest attention for each kind that can train here, by config; one name where all are the same."""
    fastest: dict[str, set[str]] = {}
    for kind in kinds:
        name = attention.choose(kind.asked, device_type=device_type, head_size=kind.head_size)
        fastest.setdefault(kind.config, set()).add(name)
    named = {path: names.pop() if len(names) == 1 else BY_LAYER for path, names in fastest.items()}
    text = config.get_text_config(decoder=True)
    paths = dict(configs_of(config))
    of_text = next((named[path] for path, one in paths.items() if one is text and path in named), None)
    other = of_text or next(iter(named.values()), None) or attention.choose(device_type=device_type)
    return _joined({path: named.get(path, other) for path in paths})


def named_in(config: PreTrainedConfig) -> Names:
    """What the configs of a model name as it stands."""
    return _joined({path: str(one._attn_implementation) for path, one in configs_of(config)})


def _joined(each: Mapping[str, str]) -> Names:
    return next(iter(each.values())) if len(set(each.values())) == 1 else _nested(each)


def _nested(each: Mapping[str, str]) -> Names:
    """`{"": a, "text_config": b, "text_config.inner": c}` as `{"": a, "text_config": {"": b, "inner": c}}`."""
    inner: dict[str, dict[str, str]] = {}
    for path, name in each.items():
        field, _, rest = path.partition(".")
        inner.setdefault(field, {})[rest] = name
    return {field: names[""] if len(names) == 1 else _nested(names) for field, names in inner.items()}


def name_for(names: Names, config: str) -> str:
    """The name that serves the modules of one config."""
    if isinstance(names, str):
        return names
    field, _, rest = config.partition(".")
    return name_for(names.get(field, names[""]), rest)


def all_names(names: Names) -> tuple[str, ...]:
    """Each name once."""
    if isinstance(names, str):
        return (names,)
    return tuple(dict.fromkeys(name for inner in names.values() for name in all_names(inner)))


def lacking(names: Names, kinds: Iterable[Kind]) -> tuple[str, ...]:
    """What kinds ask for and the attention that serves them does not have; `BY_LAYER` has everything."""
    served = [(name_for(names, kind.config), kind) for kind in kinds]
    lacks = [attention.lacks(name, kind.asked, head_size=kind.head_size) for name, kind in served if name != BY_LAYER]
    return tuple(dict.fromkeys(feature for features in lacks for feature in features))


# -------------------------------------------------------------------------------------------------------- telling


def explain(kinds: Iterable[Kind], names: Names) -> str:
    """What each kind of layer gets and why it gets nothing faster, a few lines for each."""
    counts: dict[Kind, int] = {}
    for kind in kinds:
        alone = replace(kind, count=0)
        counts[alone] = counts.get(alone, 0) + kind.count
    return "\n".join(line for kind, count in counts.items() for line in _told(replace(kind, count=count), names))


def _told(kind: Kind, names: Names) -> Iterator[str]:
    name = name_for(names, kind.config)
    served = attention.choose(kind.asked, head_size=kind.head_size) if name == BY_LAYER else name
    needs = [*kind.asked, *([f"heads of {kind.head_size}"] if kind.head_size else [])]
    number = f"{kind.count} layer{'s' if kind.count > 1 else ''}: " if kind.count else ""
    yield f"attention    {served}    {number}{kind.layers}" + (f" ({', '.join(needs)})" if needs else "")
    against = attention.passed_over(served, kind.asked, head_size=kind.head_size)
    for reason in dict.fromkeys(against.values()):
        yield f"             not {', '.join(other for other, why in against.items() if why == reason)}: {reason}"
