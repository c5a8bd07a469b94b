"""What a prepared model runs on, read from the live modules, not from the configuration.

    print(report.describe(model, state, requested_seams={"fused_moe": "torch"}))

    Qwen3MoeForCausalLM on 8 ranks: dp_replicate 1 x dp_shard 4 x sp 2, ep 4
      attention      patchgen_flash_attention_4 around an exchange of heads over sp 2    48 Qwen3MoeAttention
      fused_moe      torch, tokens exchanged over ep 4                                   48 Qwen3MoeExperts
      causal_lm_loss chunked                                                             1 Qwen3MoeForCausalLM
      ...
    parameters                                            count       whole   this rank
      divided over fsdp 8, trained, bfloat16                435     3.1 GiB     0.4 GiB
      divided over ep_shard 2, ep 4, trained, bfloat16       96    56.6 GiB     7.1 GiB

A configured seam that no module uses is an error: it would silently have no effect.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from patchgen.kernels import choices
from patchgen.runtime import seams
from patchgen.runtime.experts_interface import SEAM, named_instead_of_seam
from patchgen.runtime.parallel import gathered_keys, peer_units, tables, undivided
from patchgen.runtime.parallel.media import HEADS, is_replicated
from patchgen.runtime.parallel.sharding import undivided_experts
from patchgen.runtime.parallel.state import ParallelState

HEAD_SIZES = ("head_dim", "qk_head_dim", "v_head_dim")
"""The attributes of upstream's attention classes for the sizes of their heads."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one layout, described by `label`; their bytes in total and on this rank."""

    label: str
    count: int
    total_bytes: int
    local_bytes: int


def describe(
    model: nn.Module,
    state: ParallelState | None,
    requested_seams: Mapping[str, str] | None = None,
    attention_kinds: str = "",
) -> str:
    """The report as text.

    Args:
        model: after `shard_model`.
        requested_seams: the configured implementations, by seam; "eager" requests nothing.
        attention_kinds: lines with the attention of each kind of layer and why, if it is not the same for all.

    Raises:
        ValueError: a requested seam that no module uses, or that has another implementation.
    """
    users_of_seams = seam_users(model)
    require_seams(users_of_seams, requested_seams or {})
    lines = [_title(model, state)]
    if count := getattr(model, peer_units.ATTRIBUTE, 0):
        lines.append(f"  {'shards':<16} {'gathered and summed through peer memory':<64} {count} units of FSDP")
    for name, users in {**attention_users(model, state), **users_of_seams}.items():
        modules = ", ".join(f"{count} {label}" for label, count in users.items())
        label = name.partition(":")[0]
        lines.append(f"  {label:<16} {_implementation(name, state):<64} {modules}")
    lines += [f"  {'experts':<16} {name} left alone: {reason}" for name, reason in undivided_experts(model).items()]
    if divided := tables.of_model(model):
        lines.append(
            f"  {'tables':<16} {'ids sent to the ranks of their rows, rows sent back':<64} {', '.join(divided)}"
        )
    lines += [f"  {line}" for line in attention_kinds.splitlines()]
    lines.append(f"{'parameters':<52} {'count':>6} {'whole':>11} {'this rank':>11}")
    for group in parameter_groups(model):
        lines.append(
            f"  {group.label:<50} {group.count:>6} {_size(group.total_bytes):>11} {_size(group.local_bytes):>11}"
        )
    return "\n".join(lines)


def auto_choices() -> str:
    """What the implementations "auto" chose since the process started, a line for each kind of call; "" for no call.

    Known after a step, because it depends on the shapes that reach a kernel. Compiled layers are not recorded.
    """
    seams_on_auto = [name for name, selected in seams.selected().items() if selected == seams.AUTO]
    lines = [
        f"  {name:<16} auto took {line}" for name in (*seams_on_auto, "attention") for line in choices.summary(name)
    ]
    return "\n".join(lines)


def seam_users(model: nn.Module) -> dict[str, Counter]:
    """For each seam the classes of live modules whose forward calls it, directly or through a function of their file.

    Experts whose config names one of transformers' implementations are not users of the seam.
    """
    users_by_seam: dict[str, Counter] = {name: Counter() for name in seams.names()}
    for module in model.modules():
        seam_names = called_seams(type(module).forward)
        if SEAM in seam_names and named_instead_of_seam(module) is not None:
            seam_names = seam_names - {SEAM}
        for name in seam_names:
            users_by_seam[name][_class_name(module)] += 1
    return {name: users for name, users in users_by_seam.items() if users}


def attention_users(model: nn.Module, state: ParallelState | None) -> dict[str, Counter]:
    """The users of each attention implementation, and of each way to share a sequence around it: live modules that look it up in
    their config."""
    users: dict[str, Counter] = {}
    for module in model.modules():
        if attends(module):
            config: Any = module.config
            name = f"attention:{config._attn_implementation}{_exchange(module, state)}"
            users.setdefault(name, Counter())[_class_name(module)] += 1
    return users


def _exchange(module: Any, state: ParallelState | None) -> str:
    """What the ranks that share a sequence exchange around an attention module, whose number of heads may not be known."""
    if state is None or state.sp == 1:
        return ""
    if is_replicated(module):
        return " on whole inputs on every rank"
    heads = next((count for owner in (module, module.config) if (count := _num_heads(owner))), state.sp)
    blocks = gathered_keys.head_blocks(heads, state.sp)
    if blocks == state.sp:
        return f" around an exchange of heads over sp {state.sp}"
    return f" around an exchange of heads over {blocks} of sp {state.sp}, keys gathered over {state.sp // blocks}"


def _num_heads(owner: object) -> int:
    counts = (getattr(owner, name, None) for name in HEADS)
    return next((count for count in counts if isinstance(count, int)), 0)


def attends(module: nn.Module) -> bool:
    """Whether this module itself calls the attention implementation named by its config."""
    names = {name for code in _code_objects(type(module).forward) for name in code.co_names}
    return getattr(module, "config", None) is not None and {"get_interface", "_attn_implementation"} <= names


def head_size(module: nn.Module) -> int:
    """The larger of a module's head sizes of keys and values; 0 if it has none of the attributes."""
    sizes = [getattr(module, name, 0) for name in HEAD_SIZES]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def require_seams(users: Mapping[str, Counter], requested: Mapping[str, str]) -> None:
    """Raises ValueError unless every requested seam has users and the requested implementation, which can run here."""
    selected = seams.selected()
    for name, implementation in requested.items():
        if implementation == seams.EAGER:
            continue
        if name not in users:
            raise ValueError(
                f"The configuration asks for {name}='{implementation}', but no module of this model calls that seam: "
                f"it would have no effect. Seams in use: {', '.join(users) or 'none'}. To fix: remove it, or generate the model "
                "with the pass that adds it. (Experts do not call their seam if the model's experts_implementation is neither "
                "'eager' nor 'grouped_mm'.)"
            )
        if selected[name] != implementation:
            raise ValueError(
                f"The configuration asks for {name}='{implementation}', but '{selected[name]}' is selected. To fix: call "
                f"seams.configure({name}='{implementation}') before the first step."
            )
        reason = seams.unavailable(name, implementation)
        if reason is not None:
            raise ValueError(f"The configuration asks for {name}='{implementation}', which cannot run here: {reason}.")


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """The parameters by layout."""
    by_layout: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_layout.setdefault(_layout(parameter), []).append(parameter)
    return [
        ParameterGroup(
            label,
            len(members),
            sum(p.numel() * p.element_size() for p in members),
            sum(undivided.local(p).numel() * p.element_size() for p in members),
        )
        for label, members in by_layout.items()
    ]


def _title(model: nn.Module, state: ParallelState | None) -> str:
    if state is None:
        return f"{_class_name(model)} in one process"
    config = state.config
    return (
        f"{_class_name(model)} on {config.world} ranks: dp_replicate {config.dp_replicate} x dp_shard {config.dp_shard} "
        f"x sp {config.sp}, ep {config.ep}"
    )


def _implementation(name: str, state: ParallelState | None) -> str:
    if name.startswith("attention:"):
        return name.removeprefix("attention:")
    selected = seams.selected()[name]
    if name == "fused_moe" and state is not None and state.ep > 1:
        kernel = "torch" if selected == seams.EAGER else selected
        through = "" if state.peers is None else " through peer memory"
        selected = f"{kernel}, tokens exchanged over ep {state.ep}{through}"
    return "; ".join(
        [selected, *(f"without {alternative}: {reason}" for alternative, reason in seams.passed_over(name).items())]
    )


def _layout(parameter: nn.Parameter) -> str:
    kind = "trained" if parameter.requires_grad else "frozen"
    if not isinstance(parameter, DTensor):
        return f"whole on every rank, {kind}, {parameter.dtype}"
    names = parameter.device_mesh.mesh_dim_names or ()
    sharded = [
        f"{name} {parameter.device_mesh.size(dim)}"
        for dim, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard"
    ]
    return f"divided over {', '.join(sharded) or 'nothing'}, {kind}, {str(parameter.dtype).removeprefix('torch.')}"


def _class_name(module: nn.Module) -> str:
    """The class name without FSDP2's prefix."""
    return type(module).__name__.removeprefix("FSDP")


def _code_objects(function: Callable) -> Iterator:
    """The code objects of a forward and of the functions that it wraps or defines."""
    function = inspect.unwrap(function)
    if isinstance(function, FunctionType):
        waiting = [function.__code__]
        while waiting:
            code = waiting.pop()
            yield code
            waiting += [constant for constant in code.co_consts if hasattr(constant, "co_names")]


def called_seams(function: Callable) -> set[str]:
    """The seams that a function calls, directly or through a function of its file."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return set()
    names = {name for code in _code_objects(function) for name in code.co_names}
    for name in list(names):
        value = function.__globals__.get(name)
        callee = inspect.unwrap(value) if callable(value) else None
        if isinstance(callee, FunctionType) and callee.__module__ == function.__module__:
            names |= {inner for code in _code_objects(callee) for inner in code.co_names}
    return set(seams.names()) & names if "ops" in names else set()


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
