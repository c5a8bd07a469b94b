"""The state of an optimizer by parameter name, independent of parameter groups and meshes.

Groups follow the mesh (`sharding.optimizer_groups`), which may change between runs. So options are saved with the
names of their parameters, and state tensors have the placements of their parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from patchgen.runtime.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.optim import Optimizer

SEPARATOR = "/"
IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose an implementation of the same update: this run's are kept."""


def named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's parameters, by name in the model.

    Raises:
        CheckpointError: the optimizer has a tensor that is not a parameter of the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"Group {index} of {type(optimizer).__name__} trains a tensor {list(parameter.shape)} that is "
                    "not a parameter of the model. Create the optimizer after sharding the model."
                )
            parameters[names[id(parameter)]] = parameter
    return parameters


def state_tensors(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """The tensors of the state, as `parameter/field`, and its other values, by parameter."""
    tensors, others = {}, {}
    for name, parameter in named_parameters(model, optimizer).items():
        for field, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}{SEPARATOR}{field}"] = value
            else:
                others.setdefault(name, {})[field] = value
    return tensors, others


def group_options(model: nn.Module, optimizer: Optimizer) -> list[dict]:
    """Options and parameter names of each parameter group."""
    names = {id(parameter): name for name, parameter in named_parameters(model, optimizer).items()}
    return [
        {
            "names": [names[id(parameter)] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]


def empty_state(
    model: nn.Module,
    optimizer: Optimizer,
    saved: Mapping[str, TensorStorageMetadata],
    others: Mapping[str, Mapping[str, object]],
) -> dict[str, Tensor]:
    """Tensors to read a saved state into, `parameter/field`, sharded for this run.

    Args:
        others: the other saved values, by parameter.

    Raises:
        CheckpointError: the state is of parameters that this optimizer does not train, or is sharded in a way that only
            the optimizer itself knows.
    """
    parameters = named_parameters(model, optimizer)
    fields = [(name, field) for name, values in others.items() for field in values]
    fields += [(name, field) for name, _, field in (key.rpartition(SEPARATOR) for key in saved)]
    problems = [
        f"{name} has a saved {field}, but this optimizer does not train it."
        for name, field in fields
        if name not in parameters
    ]
    advice = "To fix: train the parameters of the saved run, or load without the optimizer." if problems else ""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    empty_tensors = {}
    for key, stored in saved.items():
        name, _, field = key.rpartition(SEPARATOR)
        if name not in parameters:
            continue
        parameter = parameters[name]
        existing = optimizer.state.get(parameter, {}).get(field)
        dtype = stored.properties.dtype
        if isinstance(existing, Tensor) and existing.shape == stored.size:
            empty_tensors[key] = torch.zeros_like(existing, dtype=dtype)
        elif stored.size == parameter.shape and parameter.ndim:
            empty_tensors[key] = torch.zeros_like(parameter.detach(), dtype=dtype)
        elif len(stored.chunks) == 1:
            group = group_of[id(parameter)]
            # torch's optimizers keep the step count on the host, unless a fused or captured kernel reads it.
            on_host = field == "step" and not (group.get("fused") or group.get("capturable"))
            empty_tensors[key] = torch.zeros(stored.size, dtype=dtype, device="cpu" if on_host else parameter.device)
        else:
            problems.append(
                f"{field} of {name} is {list(stored.size)} in {len(stored.chunks)} parts; the parameter is "
                f"{list(parameter.shape)}. Take one step with the optimizer, which creates its state, before loading."
            )
    if problems:
        raise CheckpointError(f"The saved state does not fit {type(optimizer).__name__}:", problems, advice=advice)
    return empty_tensors


def restore(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    others: Mapping[str, dict],
    groups: list[dict],
) -> list[str]:
    """Sets the optimizer's state and the options of its groups to loaded ones.

    Returns:
        The parameters of this optimizer that the saved one did not train, sorted. Others may have no saved state either: those
        that had no gradient until the save.

    Raises:
        CheckpointError: parameters of one group had different options.
    """
    parameters = named_parameters(model, optimizer)
    options_of = {
        id(parameters[name]): group["options"] for group in groups for name in group["names"] if name in parameters
    }
    problems = []
    for index, group in enumerate(optimizer.param_groups):
        saved = [options_of[id(parameter)] for parameter in group["params"] if id(parameter) in options_of]
        if not saved:
            continue
        restored = {key: value for key, value in saved[0].items() if key not in IMPLEMENTATION_OPTIONS}
        differing = [
            key for key, value in restored.items() if any(not _equal(options.get(key), value) for options in saved)
        ]
        if differing:
            names = ", ".join(sorted(differing))
            problems.append(f"group {index} holds parameters that were saved with different {names}.")
        group.update(restored)
    if problems:
        raise CheckpointError(
            "A parameter group of the optimizer has parameters that the saved run had in groups with different options:",
            problems,
            advice="To fix: use the parameter groups of the saved run.",
        )
    optimizer.state.clear()
    for key, value in tensors.items():
        name, _, field = key.rpartition(SEPARATOR)
        optimizer.state[parameters[name]][field] = value
    for name, fields in others.items():
        optimizer.state[parameters[name]].update(fields)
    return sorted(name for name, parameter in parameters.items() if id(parameter) not in options_of)


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    return a == b


def scheduler_state(state: Mapping[str, object], optimizer: Optimizer) -> dict[str, object]:
    """The state of a learning-rate scheduler for this run's groups, whose options are already restored.

    Raises:
        CheckpointError: the number of groups has changed, and the groups had different values.
    """
    groups = optimizer.param_groups
    fitted = dict(state)
    rates = fitted.get("base_lrs")
    count = len(rates) if isinstance(rates, list | tuple) else 0
    if not count or count == len(groups):
        return fitted
    fitted["base_lrs"] = [group.get("initial_lr", group["lr"]) for group in groups]
    fitted["_last_lr"] = [group["lr"] for group in groups]
    for key, value in state.items():
        if key in ("base_lrs", "_last_lr") or not isinstance(value, list) or len(value) != count:
            continue
        if any(element != value[0] for element in value):
            raise CheckpointError(
                f"The scheduler has {count} values of {key}, one per group, which differ; the optimizer now has "
                f"{len(groups)} groups. To fix: resume with the parameter groups of the saved run."
            )
        fitted[key] = [value[0]] * len(groups)
    return fitted
