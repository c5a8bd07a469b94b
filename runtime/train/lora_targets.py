"""Which modules a recipe's adapters mean: PEFT's own syntax, but that a tower is adapted only where a target names it.

    target_modules: [q_proj, v_proj]                        # names or endings: in the language model
    target_modules: [q_proj, audio_tower.proj]              # and that module of the tower
    target_modules: '.*(language_model|visual).*q_proj'     # a regular expression of whole names, which names both
    target_modules: all-linear                              # of the language model, but for the head
    target_parameters: [mlp.experts.gate_up_proj]           # names or endings of stacked experts' parameters

A module that wraps one linear layer (one that clips what goes in and comes out) stands for that layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from patchgen.runtime.parallel import sharding
from patchgen.runtime.train.recipe import LoraConfig, RecipeError

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
ADAPTED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""What PEFT has an adapter for."""


@dataclass(frozen=True)
class Targets:
    """What gets adapters, by path, and how many modules that the targets match stay as they are.

    Attributes:
        modules: linear layers and the like.
        towers, left: how many of them, and of those that stay as they are, by tower.
        experts: stacked parameters that the seam of the experts takes: in any layout.
        others: further parameters, which PEFT replaces while their module runs: on one rank.
    """

    modules: tuple[str, ...]
    towers: Mapping[str, int]
    left: Mapping[str, int]
    experts: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """One line for the start of a run."""
        inside = len(self.modules) - sum(self.towers.values())
        parts = [f"{inside} in the language model", *(f"{count} in {name}" for name, count in self.towers.items())]
        told = f"adapters on {len(self.modules)} modules: {', '.join(parts)}"
        for count, what in (
            (len(self.experts), "stacked parameters of experts"),
            (len(self.others), "other parameters"),
        ):
            told += f"; on {count} {what}" if count else ""
        left = ", ".join(f"{count} in {name}" for name, count in self.left.items())
        return told + (f"; not on {left}: lora.target_modules names no tower of that name" if left else "")


def find_targets(model: PreTrainedModel, config: LoraConfig) -> Targets:
    """The modules that the targets of a recipe mean.

    Raises:
        RecipeError: a target matches nothing, or something that takes no adapter.
    """
    modules = dict(model.named_modules())
    experts, others = _find_parameters(model, config)
    inside = _language_model(model)
    found: dict[str, str | None] = {}
    left: dict[str, str] = {}
    missing: list[str] = []
    for target in [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules:
        matched = {name: _tower(name, inside) for name in _matched(model, modules, config, target)}
        if not matched:
            missing.append(target)
        towers = {name: tower for name, tower in matched.items() if tower is not None}
        wanted = {name: tower for name, tower in matched.items() if tower is None or _names(target, tower)}
        left |= {name: tower for name, tower in towers.items() if wanted and name not in wanted}
        found |= {_adapted(modules, name): tower for name, tower in (wanted or matched).items()}
    if missing:
        raise RecipeError(_told_of_nothing(model, config, missing))
    left = {name: tower for name, tower in left.items() if _adapted(modules, name) not in found}
    return Targets(tuple(found), Counter(filter(None, found.values())), Counter(left.values()), experts, others)


def num_parameters(model: PreTrainedModel, config: LoraConfig) -> tuple[int, int]:
    """How many numbers the adapters have: those that every rank holds whole, and those that are divided over the ranks."""
    targets = find_targets(model, config)
    whole = [model.get_parameter(name) for name in (*(f"{path}.weight" for path in targets.modules), *targets.others)]
    divided = [model.get_parameter(name) for name in targets.experts]
    widths = sum(weight.shape[0] + weight[0].numel() for weight in whole)
    stacked = sum(weight.shape[0] * sum(weight.shape[1:]) for weight in divided)
    return config.rank * widths, config.rank * stacked


def _find_parameters(model: PreTrainedModel, config: LoraConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stacked parameters of experts, and the other ones, that a recipe's `target_parameters` mean.

    Raises:
        RecipeError: a target matches nothing, or what is not a stack of matrices.
    """
    plan = set(sharding.expert_paths(model))
    owners = {path.rpartition(".")[0] for path in plan}
    experts, others = [], []
    for target in config.target_parameters:
        found = [name for name, _ in model.named_parameters() if _ends_with(name, target) and _is_wanted(name, config)]
        if not found:
            raise RecipeError(_told_of_no_parameter(model, config, target))
        for name in found:
            if name.rpartition(".")[0] not in owners:
                others.append(name)
            elif name in plan and model.get_parameter(name).ndim == 3:
                experts.append(name)
            else:
                shape = tuple(model.get_parameter(name).shape)
                raise RecipeError(
                    f"lora.target_parameters: {name} {shape} is not a stack of matrices, one per expert, which an adapter of "
                    "experts takes. Name those that are: "
                    f"{', '.join(sorted({path.rpartition('.')[2] for path in plan if model.get_parameter(path).ndim == 3}))}."
                )
    return tuple(dict.fromkeys(experts)), tuple(dict.fromkeys(others))


def _is_wanted(name: str, config: LoraConfig) -> bool:
    """Whether `layers_to_transform` and `exclude_modules` leave a parameter in, of which PEFT asks modules alone."""
    if config.exclude_modules is None and config.layers_to_transform is None:
        return True
    from peft.tuners.tuners_utils import check_target_module_exists

    owner = name.rpartition(".")[0]
    return bool(check_target_module_exists(_asked(config, [owner.rpartition(".")[2]]), owner))


def _matched(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], config: LoraConfig, target: str
) -> Iterator[str]:
    """The modules that PEFT would match with one target."""
    from peft.tuners.tuners_utils import check_target_module_exists

    is_all = config.target_modules == ALL_LINEAR
    is_expression = isinstance(config.target_modules, str) and not is_all
    if is_expression and config.layers_to_transform is not None:
        raise RecipeError(
            "lora.layers_to_transform goes with a list of lora.target_modules: an expression says itself which layers."
        )
    asked = _asked(config, target if is_expression else [target])
    head = model.get_output_embeddings()
    try:
        for name, module in modules.items():
            if is_all:  # each by its own name: layers and exclusions are asked of PEFT as ever
                asked.target_modules = [name.rpartition(".")[2]]
                if not isinstance(module, nn.Linear) or module is head:
                    continue
            if name and bool(check_target_module_exists(asked, name)):
                yield name
    except re.error as error:
        raise RecipeError(
            f"lora.target_modules or lora.exclude_modules is not a regular expression: {error}"
        ) from error


def _asked(config: LoraConfig, targets: str | list[str]) -> peft.LoraConfig:
    """What PEFT is asked about one target at a time."""
    import peft

    excluded = config.exclude_modules
    asked = peft.LoraConfig(
        target_modules=targets, exclude_modules=excluded if isinstance(excluded, str | None) else list(excluded)
    )
    if config.layers_to_transform is not None:
        asked.layers_to_transform = list(config.layers_to_transform)
        asked.layers_pattern = list(config.layers_pattern) if config.layers_pattern is not None else None
    return asked


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


def _told_of_no_parameter(model: PreTrainedModel, config: LoraConfig, target: str) -> str:
    told = f"lora.target_parameters: {target} matches nothing in {type(model).__name__}"
    limits = [name for name in ("exclude_modules", "layers_to_transform") if getattr(config, name) is not None]
    told += f" with lora.{' and lora.'.join(limits)}." if limits else "."
    stacked = sorted({".".join(path.rsplit(".", 3)[1:]) for path in sharding.expert_paths(model)})
    return told + (f" Its experts have {', '.join(stacked)}." if stacked else " It has no stacked experts.")


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
