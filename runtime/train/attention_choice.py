"""The attention of a run: what the recipe names, or the fastest for each kind of layer that the model has."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from patchgen.runtime import attention, attention_kinds
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.attention_calls import FLOAT32, of_dtype
from patchgen.runtime.attention_kinds import Kind, Names
from patchgen.runtime.parallel import report
from patchgen.runtime.train.recipe import RecipeError
from patchgen.runtime.verify.training_path import asked_of_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def require_known(wanted: Names | None) -> None:
    """Refuses a name of no attention, and one that cannot run on this machine."""
    for name in attention_kinds.all_names(wanted) if wanted is not None else ():
        if name not in attention.names():
            near = difflib.get_close_matches(name, attention.names(), n=1, cutoff=0.3)
            raise RecipeError(
                f"model.attention = '{name}' is none of {', '.join(attention.names())}."
                + (f" Near: {near[0]}." if near else "")
            )
        reason = None if name == attention.BY_LAYER else BACKENDS[name].unavailable()
        if reason is not None:
            raise RecipeError(f"model.attention = '{name}' cannot run here: {reason}.")


def choose(
    wanted: Names | None,
    head: type[PreTrainedModel],
    config: PreTrainedConfig,
    asked: Iterable[Kind] | None = None,
    dtype: torch.dtype | None = None,
) -> Names:
    """The wanted attention, or the fastest that has here what each kind of layer asks for and takes its heads.

    Args:
        asked: what a small form of the model asks for; None: it is run to find out.
        dtype: what layers compute in (`model.compute_dtype`).

    Raises:
        RecipeError: the wanted one cannot run here, or not with heads of this size, or not in this dtype.
    """
    require_known(wanted)
    if wanted is None:
        return attention_kinds.choose(kinds_of(head, config, asked, dtype), config)
    if any(name != attention.BY_LAYER and BACKENDS[name].max_head for name in attention_kinds.all_names(wanted)):
        alone = [replace(kind, asked=of_dtype(dtype)) for kind in kinds_of(head, config, asked or ())]
        if lacking := attention_kinds.lacking(wanted, alone):
            able = [other for other in BACKENDS if not attention_kinds.lacking(other, alone)]
            whose = "parallel.param_dtype asks for" if lacking[0] == FLOAT32 else f"{head.__name__} has"
            raise RecipeError(
                f"model.attention = '{wanted}' cannot do {lacking[0]}, which {whose}. Those that can: {', '.join(able)}."
            )
    return wanted


def explain(
    head: type[PreTrainedModel], config: PreTrainedConfig, names: Names, dtype: torch.dtype | None = None
) -> str:
    """What each kind of layer gets, and why nothing faster."""
    return attention_kinds.explain(kinds_of(head, config, dtype=dtype), names)


def kinds_of(
    head: type[PreTrainedModel],
    config: PreTrainedConfig,
    asked: Iterable[Kind] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Kind, ...]:
    """The kinds of attention layers of a model: what their like in a small form asks for and what a dtype does, with their
    own heads and number.

    A layer that the small form did not run is taken to ask for whatever any other does.
    """
    asked = tuple(asked_of_attention(head, config) if asked is None else asked)
    places = _places(head, config.to_json_string(use_diff=False))
    known = {kind.layers for kind in asked}
    anything = tuple(feature for feature in attention.FEATURES if any(feature in kind.asked for kind in asked))
    found = [
        replace(kind, head_size=place.head_size, count=place.count)
        for kind in asked
        if (place := places.get(kind.layers)) is not None
    ]
    unseen = [(layers, place) for layers, place in places.items() if layers not in known and place.attends]
    found += [Kind(layers, place.config, anything, place.head_size, place.count) for layers, place in unseen]
    found = [replace(kind, asked=(*kind.asked, *of_dtype(dtype))) for kind in found]
    return tuple(sorted(found, key=lambda kind: (kind.config, kind.layers, kind.asked)))


@dataclass
class _Place:
    """The modules of a model that lie alike (`Kind.layers`)."""

    config: str
    attends: bool
    head_size: int = 0
    count: int = 0


@functools.lru_cache(maxsize=8)
def _places(head: type[PreTrainedModel], config_text: str) -> dict[str, _Place]:
    assert head.config_class is not None, "a generated head names its configuration"
    config = head.config_class.from_dict(json.loads(config_text))
    with torch.device("meta"):
        model = head._from_config(config, attn_implementation="eager")
    found: dict[str, _Place] = {}
    for path, module in model.named_modules():
        place = found.setdefault(
            attention_kinds.layers_of(path, module),
            _Place(attention_kinds.config_read_by(module, model.config), report.attends(module)),
        )
        place.head_size, place.count = max(place.head_size, report.head_size(module)), place.count + 1
    return found
