"""What a model that was just made ready runs on: read from the live modules, not from the configuration.

    print(report.describe(model, state, wanted_seams={"fused_moe": "torch"}))

    Qwen3MoeForCausalLM on 8 ranks: dp_replicate 1 x dp_shard 4 x sp 2, ep 4
      attention      patchgen_flash_attention_4 around an exchange of heads over sp 2    48 Qwen3MoeAttention
      fused_moe      torch, tokens exchanged over ep 4                                   48 Qwen3MoeExperts
      causal_lm_loss chunked                                                             1 Qwen3MoeForCausalLM
      ...
    parameters                                  whole      this rank
      dense    fsdp 8                           3.1 GiB    0.4 GiB
      experts  ep 4, ep_shard 2                 56.6 GiB   7.1 GiB

A seam that the configuration asks for and that no module uses is an error: it would be inactive in silence.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from patchgen.kernels import choices
from patchgen.runtime import seams
from patchgen.runtime.experts_interface import SEAM, named_instead_of_seam
from patchgen.runtime.parallel import peer_units
from patchgen.runtime.parallel.sharding import left_alone
from patchgen.runtime.parallel.state import ParallelState

HEAD_SIZES = ("head_dim", "qk_head_dim", "v_head_dim")
"""What upstream's attention classes call the sizes of their heads."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are laid out alike: `label` says how; bytes whole and on this rank."""

    label: str
    count: int
    whole: int
    local: int


def describe(
    model: nn.Module,
    state: ParallelState | None,
    wanted_seams: Mapping[str, str] | None = None,
    kinds: str = "",
) -> str:
    """The report as text.

    Args:
        model: after `shard_model`.
        wanted_seams: what the configuration asked for, by seam; those set to "eager" ask for nothing.
        kinds: lines that say which kinds of layers get which attention and why, where it is not one for all.

    Raises:
        ValueError: a wanted seam that no module uses, or that another implementation serves.
    """
    used = seam_users(model)
    check_seams(used, wanted_seams or {})
    lines = [_title(model, state)]
    if count := getattr(model, peer_units.ATTRIBUTE, 0):
        lines.append(f"  {'shards':<16} {'gathered and summed through peer memory':<64} {count} units of FSDP")
    for name, users in {**attention_users(model), **used}.items():
        modules = ", ".join(f"{count} {label}" for label, count in users.items())
        label = name.partition(":")[0]
        lines.append(f"  {label:<16} {_served_by(name, state):<64} {modules}")
    lines += [f"  {'experts':<16} {name} left alone: {why}" for name, why in left_alone(model).items()]
    lines += [f"  {line}" for line in kinds.splitlines()]
    lines.append(f"{'parameters':<52} {'count':>6} {'whole':>11} {'this rank':>11}")
    for group in parameter_groups(model):
        lines.append(f"  {group.label:<50} {group.count:>6} {_size(group.whole):>11} {_size(group.local):>11}")
    return "\n".join(lines)


def chosen() -> str:
    """What the implementations that choose took since the process started, a line for each kind of call; "" if none did.

    Known after a step: it depends on the shapes that reach a kernel. Layers that are compiled are not in it.
    """
    lines = [
        (name, line)
        for name, served in seams.selected().items()
        if served == seams.AUTO
        for line in choices.taken(name)
    ] + [("attention", line) for line in choices.taken("attention")]
    return "\n".join(f"  {name:<16} auto took {line}" for name, line in lines)


def seam_users(model: nn.Module) -> dict[str, Counter]:
    """For each seam the classes of live modules whose forward calls it, directly or by a function of their file.

    Experts whose config names an implementation of transformers' are not users: that one serves them.
    """
    found: dict[str, Counter] = {name: Counter() for name in seams.names()}
    for module in model.modules():
        called = called_seams(type(module).forward)
        if SEAM in called and named_instead_of_seam(module) is not None:
            called = called - {SEAM}
        for name in called:
            found[name][_own_name(module)] += 1
    return {name: users for name, users in found.items() if users}


def attention_users(model: nn.Module) -> dict[str, Counter]:
    """The attention implementations of live attention modules, by name: a module that looks one up in its config."""
    found: dict[str, Counter] = {}
    for module in model.modules():
        if attends(module):
            config: Any = module.config
            name = f"attention:{config._attn_implementation}"
            found.setdefault(name, Counter())[_own_name(module)] += 1
    return found


def attends(module: nn.Module) -> bool:
    """Whether this module itself calls the attention implementation that its config names."""
    names = {name for code in _codes(type(module).forward) for name in code.co_names}
    return getattr(module, "config", None) is not None and {"get_interface", "_attn_implementation"} <= names


def head_size(module: nn.Module) -> int:
    """The larger of the head sizes, of keys and values, that a module says it has; 0 if it says none."""
    sizes = [getattr(module, name, 0) for name in HEAD_SIZES]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def check_seams(used: Mapping[str, Counter], wanted: Mapping[str, str]) -> None:
    """Raises unless every seam that is wanted has users and is served by what was wanted, which can run here."""
    selected = seams.selected()
    for name, implementation in wanted.items():
        if implementation == seams.EAGER:
            continue
        if name not in used:
            raise ValueError(
                f"The configuration asks for {name}='{implementation}', but no module of this model calls that seam: "
                f"it would do nothing. Seams in use: {', '.join(used) or 'none'}. Remove it, or generate the model "
                "with the pass that bakes it in. (Experts do not where the model's experts_implementation names "
                "another than 'eager' or 'grouped_mm'.)"
            )
        if selected[name] != implementation:
            raise ValueError(
                f"The configuration asks for {name}='{implementation}', but '{selected[name]}' serves it: call "
                f"seams.configure({name}='{implementation}') before the first step."
            )
        reason = seams.unavailable(name, implementation)
        if reason is not None:
            raise ValueError(f"The configuration asks for {name}='{implementation}', which cannot run here: {reason}.")


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """Parameters by layout, with their bytes."""
    found: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        found.setdefault(_layout(parameter), []).append(parameter)
    return [
        ParameterGroup(
            label,
            len(members),
            sum(p.numel() * p.element_size() for p in members),
            sum(_local(p).numel() * p.element_size() for p in members),
        )
        for label, members in found.items()
    ]


def _title(model: nn.Module, state: ParallelState | None) -> str:
    if state is None:
        return f"{_own_name(model)} in one process"
    config = state.config
    return (
        f"{_own_name(model)} on {config.world} ranks: dp_replicate {config.dp_replicate} x dp_shard {config.dp_shard} "
        f"x sp {config.sp}, ep {config.ep}"
    )


def _served_by(name: str, state: ParallelState | None) -> str:
    if name.startswith("attention:"):
        exchange = f" around an exchange of heads over sp {state.sp}" if state is not None and state.sp > 1 else ""
        return name.removeprefix("attention:") + exchange
    served = seams.selected()[name]
    if name == "fused_moe" and state is not None and state.ep > 1:
        kernel = "torch" if served == seams.EAGER else served
        through = "" if state.peers is None else " through peer memory"
        served = f"{kernel}, tokens exchanged over ep {state.ep}{through}"
    return "; ".join([served, *(f"without {other}: {reason}" for other, reason in seams.passed_over(name).items())])


def _layout(parameter: nn.Parameter) -> str:
    kind = "trained" if parameter.requires_grad else "frozen"
    if not isinstance(parameter, DTensor):
        return f"whole on every rank, {kind}, {parameter.dtype}"
    names = parameter.device_mesh.mesh_dim_names or ()
    cuts = [
        f"{name} {parameter.device_mesh.size(dim)}"
        for dim, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard"
    ]
    return f"divided over {', '.join(cuts) or 'nothing'}, {kind}, {str(parameter.dtype).removeprefix('torch.')}"


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _own_name(module: nn.Module) -> str:
    """The class name without what FSDP2 puts before it."""
    return type(module).__name__.removeprefix("FSDP")


def _codes(function: Callable) -> Iterator:
    """The code of a forward and of the functions that it wraps or defines inside."""
    function = inspect.unwrap(function)
    if isinstance(function, FunctionType):
        waiting = [function.__code__]
        while waiting:
            code = waiting.pop()
            yield code
            waiting += [constant for constant in code.co_consts if hasattr(constant, "co_names")]


def called_seams(function: Callable) -> set[str]:
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return set()
    names = {name for code in _codes(function) for name in code.co_names}
    for name in list(names):
        known = function.__globals__.get(name)
        other = inspect.unwrap(known) if callable(known) else None
        if isinstance(other, FunctionType) and other.__module__ == function.__module__:
            names |= {inner for code in _codes(other) for inner in code.co_names}
    return set(seams.names()) & names if "ops" in names else set()


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
