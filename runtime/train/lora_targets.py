"""Which modules a recipe's adapters mean: PEFT's own syntax, but that a tower is adapted only where a target names it.

    target_modules: [q_proj, v_proj]                        # names or endings: in the language model
    target_modules: [q_proj, audio_tower.proj]              # and that module of the tower
    target_modules: '.*(language_model|visual).*q_proj'     # a regular expression of whole names, which names both
    target_modules: all-linear                              # of the language model, but for the head

A module that wraps one linear layer (one that clips what goes in and comes out) stands for that layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from patchgen.runtime.train.recipe import LoraConfig, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
ADAPTED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""What PEFT has an adapter for."""


@dataclass(frozen=True)
class Targets:
    """The modules that get adapters, by path, and how many that the targets match stay as they are; both by tower."""

    modules: tuple[str, ...]
    towers: Mapping[str, int]
    left: Mapping[str, int]

    @property
    def told(self) -> str:
        """One line for the start of a run."""
        inside = len(self.modules) - sum(self.towers.values())
        parts = [f"{inside} in the language model", *(f"{count} in {name}" for name, count in self.towers.items())]
        told = f"adapters on {len(self.modules)} modules: {', '.join(parts)}"
        left = ", ".join(f"{count} in {name}" for name, count in self.left.items())
        return told + (f"; not on {left}: lora.target_modules names no tower of that name" if left else "")


def find_targets(model: PreTrainedModel, config: LoraConfig) -> Targets:
    """The modules that the targets of a recipe mean.

    Raises:
        RecipeError: a target matches nothing, or something that takes no adapter.
    """
    parameters = [name for name, _ in model.named_parameters()]
    missing = [one for one in config.target_parameters if not any(_ends_with(name, one) for name in parameters)]
    if missing:
        raise RecipeError(f"lora.target_parameters: {', '.join(missing)} match nothing in {type(model).__name__}.")
    modules = dict(model.named_modules())
    inside = _language_model(model)
    found: dict[str, str] = {}
    left: dict[str, str] = {}
    missing = []
    for target in [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules:
        matched = {name: _tower(name, inside) for name in _matched(model, modules, config, target)}
        if not matched:
            missing.append(target)
        wanted = {name: tower for name, tower in matched.items() if tower is None or _names(target, tower)}
        left |= {name: tower for name, tower in matched.items() if wanted and name not in wanted}
        found |= {_adapted(modules, name): tower for name, tower in (wanted or matched).items()}
    if missing:
        raise RecipeError(_told_of_nothing(model, config, missing))
    left = {name: tower for name, tower in left.items() if _adapted(modules, name) not in found}
    return Targets(tuple(found), Counter(filter(None, found.values())), Counter(left.values()))


def _matched(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], config: LoraConfig, target: str
) -> Iterator[str]:
    """The modules that PEFT would match with one target."""
    import peft
    from peft.tuners.tuners_utils import check_target_module_exists

    is_all = config.target_modules == ALL_LINEAR
    is_expression = isinstance(config.target_modules, str) and not is_all
    excluded = config.exclude_modules
    asked = peft.LoraConfig(
        target_modules=target if is_expression else [target],
        exclude_modules=excluded if isinstance(excluded, str | None) else list(excluded),
    )
    if config.layers_to_transform is not None:
        if is_expression:
            raise RecipeError(
                "lora.layers_to_transform goes with a list of lora.target_modules: an expression says itself which layers."
            )
        asked.layers_to_transform = list(config.layers_to_transform)
        asked.layers_pattern = list(config.layers_pattern) if config.layers_pattern is not None else None
    head = model.get_output_embeddings()
    try:
        for name, module in modules.items():
            if is_all:  # each by its own name: layers and exclusions are asked of PEFT as ever
                asked.target_modules = {name.rpartition(".")[2]}
                if not isinstance(module, nn.Linear) or module is head:
                    continue
            if name and bool(check_target_module_exists(asked, name)):
                yield name
    except re.error as error:
        raise RecipeError(f"lora.target_modules or lora.exclude_modules is no regular expression: {error}") from error


def _adapted(modules: Mapping[str, nn.Module], name: str) -> str:
    """The module that takes the adapter: the one of that name, or the one linear layer that it wraps."""
    if isinstance(modules[name], ADAPTED):
        return name
    wrapped = [inner for inner, one in modules[name].named_modules() if isinstance(one, ADAPTED)]
    if len(wrapped) == 1 and isinstance(modules[name].get_submodule(wrapped[0]), nn.Linear):
        return f"{name}.{wrapped[0]}"
    raise RecipeError(
        f"lora.target_modules: {name} is a {type(modules[name]).__name__}, which takes no adapter and wraps "
        f"{len(wrapped)} layers that do ({', '.join(wrapped[:4]) or 'none'}). Name those that are meant."
    )


def _language_model(model: PreTrainedModel) -> str | None:
    """The path of the part whose configuration is the text's; None where that is the whole model."""
    text = type(model.config.get_text_config(decoder=True))
    if text is type(model.config):
        return None
    parts = ((name, one) for name, one in model.named_modules() if name)
    return next((name for name, one in parts if type(getattr(one, "config", None)) is text), None)


def _tower(name: str, inside: str | None) -> str | None:
    """The part beside the language model that a module lies in, as the model calls it; None: in the language model."""
    if inside is None or f"{name}.".startswith(f"{inside}."):
        return None
    path, known = name.split("."), inside.split(".")
    return next((part for place, part in enumerate(path) if place >= len(known) or part != known[place]), path[-1])


def _names(target: str, tower: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(tower)}(?!\w)", target) is not None


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _told_of_nothing(model: PreTrainedModel, config: LoraConfig, missing: list[str]) -> str:
    told = f"lora.target_modules: {', '.join(missing)} match nothing in {type(model).__name__}"
    limits = [name for name in ("exclude_modules", "layers_to_transform") if getattr(config, name) is not None]
    told += f" with lora.{' and lora.'.join(limits)}." if limits else "."
    if isinstance(config.target_modules, str):
        return told + " A text is a regular expression of whole names, such as '.*language_model.*q_proj'."
    if any(re.escape(one) != one.replace(".", r"\.") for one in missing):
        return (
            told
            + " A list has names or endings; a regular expression stands alone: target_modules: '.*"
            + (f"{missing[0]}'.")
        )
    return told
