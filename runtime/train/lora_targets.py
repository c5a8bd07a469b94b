"""Which modules get adapters: PEFT's syntax for targets, except that a target adapts a tower only if it names it or matches
nothing else.

    target_modules: [q_proj, v_proj]                        # names or endings: in the language model
    target_modules: [q_proj, audio_tower.proj]              # and that module of the tower
    target_modules: '.*(language_model|visual).*q_proj'     # a regular expression of whole names, which names both
    target_modules: all-linear                              # of the language model, except the head
    target_parameters: [mlp.experts.gate_up_proj]           # names or endings of stacked experts' parameters

A module that wraps exactly one linear layer (to clip its input and output, say) stands for that layer.
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
ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The modules that PEFT has adapters for."""


@dataclass(frozen=True)
class Targets:
    """What gets adapters, by path.

    Attributes:
        modules: linear layers and other adaptable modules.
        towers: tower -> the number of those modules in it.
        skipped: tower -> the number of its modules that targets match without naming the tower; they get no adapter.
        experts: stacked parameters served by the experts' seam, trained in any layout of ranks.
        others: further parameters, which PEFT replaces while their module runs; on one rank only.
    """

    modules: tuple[str, ...]
    towers: Mapping[str, int]
    skipped: Mapping[str, int]
    experts: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line for the start of a run."""
        in_language_model = len(self.modules) - sum(self.towers.values())
        parts = [f"{in_language_model} in the language model"]
        parts += [f"{count} in {name}" for name, count in self.towers.items()]
        text = f"adapters on {len(self.modules)} modules: {', '.join(parts)}"
        text += f"; on {len(self.experts)} stacked parameters of experts" if self.experts else ""
        text += f"; on {len(self.others)} other parameters" if self.others else ""
        skipped = ", ".join(f"{count} in {name}" for name, count in self.skipped.items())
        return text + (f"; not on {skipped}: lora.target_modules does not name the tower" if skipped else "")


def find_targets(model: PreTrainedModel, config: LoraConfig) -> Targets:
    """Resolves a recipe's targets to modules and parameters.

    Raises:
        RecipeError: a target matches nothing, or something that takes no adapter.
    """
    modules = dict(model.named_modules())
    experts, others = _find_parameters(model, config)
    language_model = _language_model(model)
    targets: dict[str, str | None] = {}
    skipped: dict[str, str] = {}
    missing: list[str] = []
    for target in [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules:
        matched = {name: _tower(name, language_model) for name in _matching_modules(model, modules, config, target)}
        if not matched:
            missing.append(target)
        selected = {name: tower for name, tower in matched.items() if tower is None or _names_tower(target, tower)}
        skipped |= {name: tower for name, tower in matched.items() if tower and selected and name not in selected}
        targets |= {_adaptable(modules, name): tower for name, tower in (selected or matched).items()}
    if missing:
        raise RecipeError(_unmatched_modules(model, config, missing))
    skipped = {name: tower for name, tower in skipped.items() if _adaptable(modules, name) not in targets}
    return Targets(tuple(targets), Counter(filter(None, targets.values())), Counter(skipped.values()), experts, others)


def num_adapter_parameters(model: PreTrainedModel, config: LoraConfig) -> tuple[int, int]:
    """The number of adapter parameters that are replicated, and of those that are sharded over the ranks."""
    targets = find_targets(model, config)
    names = (*(f"{path}.weight" for path in targets.modules), *targets.others)
    replicated = [model.get_parameter(name) for name in names]
    sharded = [model.get_parameter(name) for name in targets.experts]
    widths = sum(weight.shape[0] + weight[0].numel() for weight in replicated)
    stacked_widths = sum(weight.shape[0] * sum(weight.shape[1:]) for weight in sharded)
    return config.rank * widths, config.rank * stacked_widths


def _find_parameters(model: PreTrainedModel, config: LoraConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stacked expert parameters, and the other parameters, that `target_parameters` match.

    Raises:
        RecipeError: a target matches nothing, or an expert parameter that is not a stack of matrices.
    """
    expert_paths = set(sharding.expert_paths(model))
    owners = {path.rpartition(".")[0] for path in expert_paths}
    experts, others = [], []
    for target in config.target_parameters:
        names = [
            name for name, _ in model.named_parameters() if _ends_with(name, target) and _is_included(name, config)
        ]
        if not names:
            raise RecipeError(_unmatched_parameter(model, config, target))
        for name in names:
            if name.rpartition(".")[0] not in owners:
                others.append(name)
            elif name in expert_paths and model.get_parameter(name).ndim == 3:
                experts.append(name)
            else:
                shape = tuple(model.get_parameter(name).shape)
                raise RecipeError(
                    f"lora.target_parameters: {name} {shape} is not a stack of matrices, one per expert, as an adapter of "
                    "experts needs. Name those that are: "
                    f"{', '.join(sorted({p.rpartition('.')[2] for p in expert_paths if model.get_parameter(p).ndim == 3}))}."
                )
    return tuple(dict.fromkeys(experts)), tuple(dict.fromkeys(others))


def _is_included(name: str, config: LoraConfig) -> bool:
    """Whether `layers_to_transform` and `exclude_modules`, which PEFT applies to modules only, include a parameter."""
    if config.exclude_modules is None and config.layers_to_transform is None:
        return True
    from peft.tuners.tuners_utils import check_target_module_exists

    owner = name.rpartition(".")[0]
    return bool(check_target_module_exists(_peft_config(config, [owner.rpartition(".")[2]]), owner))


def _matching_modules(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], config: LoraConfig, target: str
) -> Iterator[str]:
    """The modules that PEFT matches with one target."""
    from peft.tuners.tuners_utils import check_target_module_exists

    is_all = config.target_modules == ALL_LINEAR
    is_regex = isinstance(config.target_modules, str) and not is_all
    if is_regex and config.layers_to_transform is not None:
        raise RecipeError(
            "lora.layers_to_transform needs lora.target_modules as a list: a regular expression selects layers itself."
        )
    peft_config = _peft_config(config, target if is_regex else [target])
    head = model.get_output_embeddings()
    try:
        for name, module in modules.items():
            if is_all:  # each by its own name, so that PEFT still applies layers and exclusions
                peft_config.target_modules = [name.rpartition(".")[2]]
                if not isinstance(module, nn.Linear) or module is head:
                    continue
            if name and bool(check_target_module_exists(peft_config, name)):
                yield name
    except re.error as error:
        raise RecipeError(
            f"lora.target_modules or lora.exclude_modules is not a valid regular expression: {error}"
        ) from error


def _peft_config(config: LoraConfig, targets: str | list[str]) -> peft.LoraConfig:
    """A recipe's filters with these targets, for PEFT's matching function."""
    import peft

    excluded = config.exclude_modules
    lora_config = peft.LoraConfig(
        target_modules=targets, exclude_modules=excluded if isinstance(excluded, str | None) else list(excluded)
    )
    if config.layers_to_transform is not None:
        lora_config.layers_to_transform = list(config.layers_to_transform)
        lora_config.layers_pattern = list(config.layers_pattern) if config.layers_pattern is not None else None
    return lora_config


def _adaptable(modules: Mapping[str, nn.Module], name: str) -> str:
    """The module that takes the adapter: the named one, or the only linear layer that it wraps."""
    if isinstance(modules[name], ADAPTABLE):
        return name
    wrapped = [path for path, module in modules[name].named_modules() if isinstance(module, ADAPTABLE)]
    if len(wrapped) == 1 and isinstance(modules[name].get_submodule(wrapped[0]), nn.Linear):
        return f"{name}.{wrapped[0]}"
    raise RecipeError(
        f"lora.target_modules: {name} is a {type(modules[name]).__name__}, which takes no adapter and wraps "
        f"{len(wrapped)} layers that do ({', '.join(wrapped[:4]) or 'none'}). Name the layers to adapt."
    )


def _language_model(model: PreTrainedModel) -> str | None:
    """The path of the submodule with the text configuration; None if that is the full model."""
    text = type(model.config.get_text_config(decoder=True))
    if text is type(model.config):
        return None
    submodules = ((path, module) for path, module in model.named_modules() if path)
    return next((path for path, module in submodules if type(getattr(module, "config", None)) is text), None)


def _tower(name: str, language_model: str | None) -> str | None:
    """The name of the tower, outside the language model, that contains a module; None: the language model contains it."""
    if language_model is None or f"{name}.".startswith(f"{language_model}."):
        return None
    path, prefix = name.split("."), language_model.split(".")
    return next((part for index, part in enumerate(path) if index >= len(prefix) or part != prefix[index]), path[-1])


def _names_tower(target: str, tower: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(tower)}(?!\w)", target) is not None


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _describe_filters(config: LoraConfig) -> str:
    """The end of a sentence: the options that narrow down what targets match."""
    filters = [name for name in ("exclude_modules", "layers_to_transform") if getattr(config, name) is not None]
    return f" with lora.{' and lora.'.join(filters)}." if filters else "."


def _unmatched_parameter(model: PreTrainedModel, config: LoraConfig, target: str) -> str:
    message = f"lora.target_parameters: {target} matches nothing in {type(model).__name__}{_describe_filters(config)}"
    stacked = sorted({".".join(path.rsplit(".", 3)[1:]) for path in sharding.expert_paths(model)})
    return message + (f" Its experts have {', '.join(stacked)}." if stacked else " It has no stacked experts.")


def _unmatched_modules(model: PreTrainedModel, config: LoraConfig, missing: list[str]) -> str:
    message = f"lora.target_modules: nothing in {type(model).__name__} matches {', '.join(missing)}{_describe_filters(config)}"
    if isinstance(config.target_modules, str):
        return message + " A string is a regular expression of full names, such as '.*language_model.*q_proj'."
    if any(re.escape(target) != target.replace(".", r"\.") for target in missing):
        message += " A list has names or endings; give a regular expression as a string: "
        message += f"target_modules: '.*{missing[0]}'."
    return message
