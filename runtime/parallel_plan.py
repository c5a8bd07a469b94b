"""The parallel plan: the parameters of a generated model that no rank gathers.

experts     sharded over the expert mesh; which they are, the generator found
tables      embeddings whose rows can be sharded over all ranks (`parallel/tables.py`); found by their role in the live model,
            and sharded so if they are large
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patchgen.runtime.parts import classes_with_plan, parts_of

if TYPE_CHECKING:
    from torch import nn

_LOOK_UPS = ("torch.nn.modules.sparse", "patchgen.runtime.parallel.tables")  # files of classes that look rows up


@dataclass(frozen=True)
class ParallelPlan:
    """Paths of the parameters whose first dimension is the experts' (`[E, ...]`), and of tables `[rows, width]` of any size."""

    expert_parameters: tuple[str, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)  # class of experts that are not sharded -> why
    tables: tuple[str, ...] = ()
    tables_left_alone: Mapping[str, str] = field(
        default_factory=dict
    )  # path of an embedding that FSDP has to gather -> why

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
    tables, gathered = find_tables(model)
    return ParallelPlan(tuple(dict.fromkeys(paths)), alone, tables, gathered)


def find_tables(model: nn.Module) -> tuple[tuple[str, ...], dict[str, str]]:
    """The weights of embeddings that are only looked up by `nn.Embedding.forward`, and the others, each with the reason.

    That nothing else reads a weight is not shown here: it would fail with torch's error on mixed tensors and DTensors.
    """
    from torch import nn

    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tables, gathered = [], {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            name = f"{path}.weight" if path else "weight"
            reason = _why_gathered(module, is_shared=uses[id(module.weight)] > 1)
            if reason is None:
                tables.append(name)
            else:
                gathered[name] = reason
    return tuple(tables), gathered


def _why_gathered(module: nn.Embedding, *, is_shared: bool) -> str | None:
    """Why rows of an embedding cannot be sent for; None: they can."""
    reasons = {
        "another module has the same weight, a head tied to it for example": is_shared,
        "max_norm changes rows when they are looked up": module.max_norm is not None,
        "scale_grad_by_freq counts the ids of a whole batch": module.scale_grad_by_freq,
        "its gradient is a sparse tensor": module.sparse,
        f"{type(module).__name__} looks rows up itself, not by nn.Embedding.forward": not _looks_up_by_torch(module),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _looks_up_by_torch(module: nn.Module) -> bool:
    """Whether a module's forward is that of `nn.Embedding`, or all that override it call `super().forward`."""
    for cls in type(module).__mro__:
        if cls.__module__ in _LOOK_UPS:
            return True
        code = getattr(vars(cls).get("forward"), "__code__", None)
        if code is not None and not ("__class__" in code.co_freevars and "forward" in code.co_names):
            return False
    return True


def _has_expert_dimension(value: nn.Parameter, parameters: Mapping[str, nn.Parameter], names: tuple[str, ...]) -> bool:
    """Whether a parameter has the first dimension that the parameters in `names` share: the number of experts."""
    return value.ndim > 0 and any(parameters[name].shape[0] == value.shape[0] for name in names)
