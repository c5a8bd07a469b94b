"""Parameters that are computed in fp32 while the others of a sharded model are narrower, as upstream decides (`kept_dtypes.py`).

    layer             one unit of FSDP2, gathered in bf16
      norm            a unit of its own, gathered in fp32 when it is called
      attention
        q_proj
        sinks         beside others, or read without calling its module: a second group of the layer's unit, in fp32

A group of FSDP2 has one dtype, in which its parameters are stored, and one in which they are gathered.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from patchgen.runtime import kept_dtypes
from patchgen.runtime.parallel import tables, undivided
from patchgen.runtime.parallel.peer_units import IS_REBUILT


def names(model: nn.Module, param_dtype: torch.dtype | None) -> set[str]:
    """The parameters that are computed in fp32; `param_dtype` as of `find`."""
    stored = kept_dtypes.most_common_dtype(model)
    is_kept = kept_dtypes.keeps_in_fp32(model, param_dtype or stored)
    return {
        path
        for path, parameter in model.named_parameters()
        if is_kept(path) or (parameter.dtype == torch.float32 != stored)
    }


def find(model: nn.Module, param_dtype: torch.dtype | None) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """The modules that become units in fp32, and the parameters beside others, which become further groups.

    Args:
        param_dtype: in which layers compute; None: as stored.
    """
    in_fp32 = names(model, param_dtype) - tables.of_model(model).keys()  # FSDP2 does not gather these
    stored = kept_dtypes.most_common_dtype(model)
    owners = dict.fromkeys(path.rpartition(".")[0] for path in sorted(in_fp32))
    parameters_of = {
        path: {f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters()} for path in owners
    }
    separable = {
        path for path in owners if path and parameters_of[path] <= in_fp32 and not _is_read_from_outside(model, path)
    }
    beside = [model.get_parameter(path) for path in sorted(in_fp32) if path.rpartition(".")[0] not in separable]
    inner = {path for path in separable if any(path.startswith(f"{outer}.") for outer in separable)}
    return [model.get_submodule(path) for path in sorted(separable - inner)], _with_group(model, beside, stored)


def _with_group(model: nn.Module, beside: list[nn.Parameter], stored: torch.dtype | None) -> list[nn.Parameter]:
    """The parameters, if this torch can give a unit a second group; else none, and they are stored as those around them."""
    if not beside or (not IS_REBUILT and _has_several_groups()):
        return beside
    names = [name for name, parameter in model.named_parameters() if any(parameter is one for one in beside)]
    warnings.warn(
        f"{type(model).__name__} keeps {names[:6]} in fp32, in modules with other parameters, and torch {torch.__version__} has "
        f"one dtype per unit of FSDP2: they are stored and used as the others ({stored}).",
        stacklevel=4,
    )
    for parameter in beside:
        parameter.data = parameter.data.to(stored)
    return []


def _has_several_groups() -> bool:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return hasattr(FSDPState(), "_fsdp_param_groups")


def add_groups(model: nn.Module, parameters: Sequence[nn.Parameter], policy: MixedPrecisionPolicy) -> None:
    """Adds these parameters, which `fully_shard` left out, to the innermost units around them, as groups of their own."""
    ids = {id(parameter) for parameter in parameters}
    by_unit: dict[str, list[nn.Parameter]] = {}
    units = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
    for name, parameter in model.named_parameters():
        if id(parameter) in ids:
            around = (path for path in units if not path or name.startswith(f"{path}."))
            by_unit.setdefault(max(around, key=len), []).append(parameter)
    for path, members in by_unit.items():
        unit: Any = model.get_submodule(path)
        first = undivided.param_groups(unit)[0]
        for parameter in members:
            if not parameter.is_meta:
                parameter.data = parameter.data.to(first.device)
        group = FSDPParamGroup(
            members,
            (unit,),
            first.mesh_info,
            first.post_forward_mesh_info,
            first.device,
            None,
            policy,
            first.offload_policy,
        )
        unit._get_fsdp_state()._fsdp_param_groups.append(group)


def _is_read_from_outside(model: nn.Module, path: str) -> bool:
    """Whether the parent of the module at `path` reads its parameters directly: `self.conv1d.weight`."""
    owner, _, name = path.rpartition(".")
    names = "|".join(re.escape(parameter) for parameter, _ in model.get_submodule(path).named_parameters())
    try:
        source = inspect.getsource(type(model.get_submodule(owner)))
    except (OSError, TypeError):  # a class without a source file: assume it does
        return True
    return re.search(rf"\bself\.{re.escape(name)}\.({names})\b", source) is not None
