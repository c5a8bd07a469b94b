"""The parallel plan: the parameters of a generated model that are sharded over the expert mesh, found by the generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patchgen.runtime.parts import classes_with_plan, parts_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ParallelPlan:
    """Paths of the parameters whose first dimension is the experts' (`[E, ...]`)."""

    expert_parameters: tuple[str, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)  # class of experts that are not sharded -> why

    def __contains__(self, path: str) -> bool:
        return path in self.expert_parameters


def parallel_plan(
    model: nn.Module, experts: Mapping[str, tuple[str, ...]], left_alone: Mapping[str, str] | None = None
) -> ParallelPlan:
    """The plan of `model`, with those of its parts: models of other generated files inside it.

    Args:
        model: a generated model.
        experts: for each experts class of the generated file the names of its parameters of shape `[E, ...]`, E experts.
        left_alone: class of experts that are not sharded -> why.

    Raises:
        ValueError: a named parameter does not exist on a live module, or a live module of such a class has a parameter
            of first dimension E that the generator did not list: it would be trained wrongly.
    """
    paths = []
    for module_path, module in model.named_modules():
        # FSDP2 replaces the class of a module that it manages by its own subclass.
        names = next((experts[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in experts), None)
        if names is None:
            continue
        parameters = dict(module.named_parameters(recurse=False))
        missing = [name for name in names if name not in parameters]
        if missing:
            raise ValueError(
                f"The parallel plan names {missing} on {module_path} ({type(module).__name__}), which has "
                f"{sorted(parameters)}. Regenerate the model with `patchgen generate`."
            )
        unlisted = [
            name
            for name, value in parameters.items()
            if name not in names and _has_expert_dimension(value, parameters, names)
        ]
        if unlisted:
            raise ValueError(
                f"The parallel plan does not name {unlisted} on {module_path} ({type(module).__name__}), whose first "
                f"dimension is the number of experts, like that of {list(names)}. Regenerate the model with "
                "`patchgen generate`."
            )
        paths += [f"{module_path}.{name}" if module_path else name for name in names]
    live = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    alone = {name: reason for name, reason in (left_alone or {}).items() if name in live}
    for path, part, file in parts_of(model):
        for plan in [head.get_parallel_plan(part) for head in classes_with_plan(file)]:
            paths += [f"{path}.{name}" for name in plan.expert_parameters]
            alone |= plan.left_alone
    return ParallelPlan(expert_parameters=tuple(dict.fromkeys(paths)), left_alone=alone)


def _has_expert_dimension(value: nn.Parameter, parameters: Mapping[str, nn.Parameter], names: tuple[str, ...]) -> bool:
    """Whether a parameter has the first dimension that the parameters in `names` share: the number of experts."""
    return value.ndim > 0 and any(parameters[name].shape[0] == value.shape[0] for name in names)
