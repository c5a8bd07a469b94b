"""FSDP2 over both meshes: dense parameters over `fsdp`, experts over `ep` and then `ep_shard`.

    parameter          dense mesh (fsdp)             expert mesh (ep_shard x ep)
    q_proj [out, in]   Shard(0)                      -
    gate_up [E, ..]    -                             Shard(0) over ep, then FSDP's shard over ep_shard
    large embedding    Shard(0), never gathered      -

Every gradient is the *sum* over the ranks: a rank's loss is its share of the global loss (`loss.py`), so dense and
expert gradients are gradients of the same number on either mesh, and no scaling factors are needed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from patchgen.runtime import kept_dtypes
from patchgen.runtime.compatibility import why_not_in_layout
from patchgen.runtime.parallel import (
    checkpointing,
    exchange_reduce,
    fp32_parameters,
    peer_memory,
    peer_units,
    router_selection,
    row_lengths,
    tables,
    undivided,
    unused,
)
from patchgen.runtime.parallel.buffers import compute_buffers
from patchgen.runtime.parallel.loss import why_not_additive
from patchgen.runtime.parallel.state import ParallelState

HOST_MEMORY = "_patchgen_parameters_in_host_memory"  # on a sharded model


@dataclass(frozen=True)
class ShardingOptions:
    """How parameters are stored and gathered.

    Attributes:
        param_dtype: the compute dtype of layers; None: as stored. Stored parameters keep their dtype.
        reduce_dtype: the dtype in which gradients are summed; None: as computed.
        exchange_gradients: send gradients as computed and sum them on arrival, in `reduce_dtype` (`exchange_reduce.py`):
            fewer bytes than a reduce-scatter in a wider dtype. None: on GPUs, if it saves bytes and the ranks share a machine.
        shard_exchange: how ranks gather parameters and sum gradients. "peer_memory": ranks of one machine read each other's
            memory (`peer_shards.py`); "collectives": FSDP2's own; "auto": peer memory between up to four GPUs of one machine.
        reshard_after_forward: free a layer's gathered parameters after its forward and gather again for the backward.
        prefetch: layers gathered ahead of the running one, forward and backward.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        compile_layers: torch.compile each layer.
        shard_tables_above: embeddings of more parameters are not gathered: their rows are sent for (`tables.py`); None: none.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    exchange_gradients: bool | None = None
    shard_exchange: peer_memory.ShardExchange = "auto"
    reshard_after_forward: bool = True
    prefetch: int = 1
    cpu_offload: bool = False
    compile_layers: bool = False
    shard_tables_above: int | None = tables.ABOVE


def shard_model(
    model: nn.Module,
    state: ParallelState,
    *,
    expert_parameters: Sequence[str] | None = None,
    layer_classes: Iterable[str] | None = None,
    options: ShardingOptions | None = None,
    obeys_proof: bool = True,
) -> nn.Module:
    """Shards the parameters of `model` over the ranks, in place; also on the meta device.

    Args:
        model: with full parameters, the same on every rank.
        expert_parameters: paths of parameters `[experts, ...]`; by default those of the model's own `get_parallel_plan()`.
        layer_classes: class names of the layers that are gathered one at a time; by default transformers'
            `_no_split_modules`, else the elements of the model's module lists.
        options: see `ShardingOptions`.
        obeys_proof: refuse these ranks if the proof of the model's file observed that it does not bear them. A proof on ranks
            does not: it finds out.

    Raises:
        ValueError: a path or class that matches nothing, experts that do not divide by `ep`, a parameter without a
            dimension, a loss that is not a sum of shares on several ranks, or ranks that the model does not bear.
    """
    options = options or ShardingOptions()
    if obeys_proof:
        require_layout(type(model), ranks=state.config.world, sp=state.sp)
    if scalars := [name for name, parameter in model.named_parameters() if parameter.ndim == 0]:
        raise ValueError(
            f"Parameters without a dimension cannot be sharded: {', '.join(scalars)}. To fix: give them the shape (1,) in the "
            "modeling file."
        )
    if state.config.world > 1 and (reason := why_not_additive(model)):
        raise ValueError(reason)
    paths = expert_paths(model) if expert_parameters is None else tuple(expert_parameters)
    if state.ep > 1:
        check_plan(model, paths, state.ep)
    layers = find_layers(model, layer_classes)
    experts = divide_experts(model, paths, state) if state.ep > 1 else []
    if state.peers is not None:
        from patchgen.runtime.parallel.expert_peers import install_token_prefetch  # loads Triton

        install_token_prefetch(model, experts)
    router_selection.install(model, dict.fromkeys(path.rpartition(".")[0] for path in paths))
    kept_dtypes.keep_in_fp32(model)
    names, _ = tables.choose(model, options.shard_tables_above, world=state.config.world)
    in_fp32 = fp32_parameters.names(model, options.param_dtype)
    divided = tables.divide(model, names, state, param_dtype=options.param_dtype, in_fp32=in_fp32)
    layers = [layer for layer in layers if layer not in divided]
    fp32_units, fp32_beside = fp32_parameters.find(model, options.param_dtype)
    _make_units(model, state, layers, experts, fp32_units, fp32_beside, options)
    _set_communication(model, state, experts, fp32_units, options)
    set_prefetch(layers, [*experts, *fp32_units], options.prefetch)
    setattr(model, HOST_MEMORY, options.cpu_offload)
    row_lengths.install(model)
    return model


def require_layout(model_class: type[nn.Module], *, ranks: int, sp: int) -> None:
    """Refuses ranks, of which `sp` share a sequence, that a model does not bear by what the proof of its file observed.

    For trainers that shard parameters themselves; `shard_model` calls it. Nothing is sent.

    Raises:
        ValueError: with the line of the generated file.
    """
    if reason := why_not_in_layout(model_class, ranks=ranks, sp=sp):
        raise ValueError(f"{model_class.__name__}: {reason}")


def _make_units(
    model: nn.Module,
    state: ParallelState,
    layers: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    fp32_units: Sequence[nn.Module],
    fp32_beside: Sequence[nn.Parameter],
    options: ShardingOptions,
) -> None:
    """The modules that FSDP2 gathers and shards one at a time, innermost first."""
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.cpu_offload else OffloadPolicy()
    unit = functools.partial(
        fully_shard,
        mesh=state.fsdp_mesh,
        reshard_after_forward=options.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype),
        offload_policy=offload,
        # torch cannot gather a parameter without elements.
        ignored_params={
            *fp32_beside,
            *(table.weight for table in tables.of_model(model).values()),
            *(parameter for parameter in model.parameters() if not parameter.numel()),
        },
    )
    # Units inside a layer do not cast their inputs: the layer did, and upstream's code decides what it widens, routing
    # weights for example.
    without_input_cast = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype, cast_forward_inputs=False)
    for module in shared_by_experts(experts):
        unit(module, reshard_after_forward=False, mp_policy=without_input_cast)
        checkpointing.hide_hooks(module)
    placement = functools.partial(expert_placement, state=state)
    for module in experts:
        unit(module, mesh=state.expert_fsdp_mesh, mp_policy=without_input_cast, shard_placement_fn=placement)
        checkpointing.hide_hooks(module)
    fp32_policy = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    for module in fp32_units:
        unit(module, mp_policy=fp32_policy)
        checkpointing.hide_hooks(module)
    for layer in layers:
        if options.compile_layers:
            layer.compile()
        unit(layer)
    # The root has embeddings, final norm and head. Its forward spans the model, so resharding after it saves nothing, and a
    # fused loss may read the head's weight at any time.
    unit(model, reshard_after_forward=False)
    fp32_parameters.add_groups(model, fp32_beside, fp32_policy)


def _set_communication(
    model: nn.Module,
    state: ParallelState,
    experts: Sequence[nn.Module],
    fp32_units: Sequence[nn.Module],
    options: ShardingOptions,
) -> None:
    """Sets how the units of a sharded model sum gradients and gather parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    exchanges = exchange_reduce.install(
        model,
        state,
        experts,
        fp32_units,
        compute_dtype=options.param_dtype,
        sum_dtype=options.reduce_dtype,
        enabled=options.exchange_gradients,
    )
    setattr(model, exchange_reduce.ATTRIBUTE, exchanges)
    undivided.install(model)
    setattr(model, peer_units.ATTRIBUTE, peer_units.install(model, options.shard_exchange))
    unused.install(model)


# --------------------------------------------------------------------------------------------- the plan


def expert_paths(model: nn.Module) -> tuple[str, ...]:
    """The paths of the expert parameters that a generated class reports; none for other classes."""
    plan = getattr(model, "get_parallel_plan", None)
    return plan().expert_parameters if plan is not None else ()


def undivided_experts(model: nn.Module) -> Mapping[str, str]:
    """The classes whose experts are not divided over ranks, with the reason, as a generated class reports them."""
    plan = getattr(model, "get_parallel_plan", None)
    return plan().left_alone if plan is not None else {}


def check_plan(model: nn.Module, paths: Sequence[str], ep: int) -> None:
    """Raises ValueError unless there are paths, each a parameter of `model` whose first dimension divides by `ep`, and their
    modules have no other parameters of their own.
    """
    parameters = dict(model.named_parameters())
    missing = [path for path in paths if path not in parameters]
    if missing:
        stacked = [name for name, parameter in parameters.items() if parameter.ndim == 3][:6]
        raise ValueError(
            f"The parallel plan names {missing[:6]}, which {type(model).__name__} does not have. Its stacked parameters: "
            f"{stacked or 'none'}. To fix: name those that are experts."
        )
    if not paths:
        undivided_note = "".join(
            f" {name} is left alone: {reason}." for name, reason in undivided_experts(model).items()
        )
        raise ValueError(
            f"ep={ep}, but {type(model).__name__} reports no expert parameters. To fix: train it with ep=1, or generate it "
            f"with the pass `parallel_plan`.{undivided_note}"
        )
    for path in paths:
        count = parameters[path].shape[0]
        if count % ep:
            raise ValueError(
                f"{path} has {count} experts, which ep={ep} does not divide evenly. To fix: choose another ep."
            )
    for owner in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        module = model.get_submodule(owner)
        remaining = [name for name, _ in module.named_parameters(recurse=False) if f"{owner}.{name}" not in paths]
        if remaining:
            raise ValueError(
                f"{owner} ({type(module).__name__}) has {remaining} in addition to its experts' parameters. Every rank would train "
                "its own copy of them on the tokens of its experts. To fix: train this model with ep=1."
            )


def find_layers(model: nn.Module, layer_classes: Iterable[str] | None) -> list[nn.Module]:
    """The outermost modules of these classes that share no parameters with other modules; see `shard_model`.

    Modules in lists are preferred. Raises ValueError if no module has one of the classes.
    """
    names = set(layer_classes if layer_classes is not None else getattr(model, "_no_split_modules", None) or ())
    if layer_classes is None and not any(type(module).__name__ in names for module in model.modules()):
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        names = {type(layer).__name__ for layers in lists for layer in layers}
    paths: list[str] = []
    for path, module in model.named_modules():
        is_inner = any(path.startswith(f"{outer}.") for outer in paths)
        if type(module).__name__ in names and path and not is_inner:
            paths.append(path)
    if not paths:
        raise ValueError(
            f"{type(model).__name__} has no modules of the classes {sorted(names) or '(none named)'}. To fix: name its "
            "repeated layers in layer_classes."
        )
    # `_no_split_modules` includes embeddings of some models, which may be tied to the head in the root.
    repeated = [path for path in paths if path.rpartition(".")[2].isdigit()]
    return [module for path in repeated or paths if _shares_nothing(module := model.get_submodule(path), model)]


def _shares_nothing(layer: nn.Module, model: nn.Module) -> bool:
    """Whether a layer shares no parameter with another module; FSDP2 would untie shared ones."""
    uses = Counter(id(parameter) for _, parameter in layer.named_parameters(remove_duplicate=False))
    everywhere = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return all(everywhere[parameter] == count for parameter, count in uses.items())


# -------------------------------------------------------------------------------------------- the experts


def divide_experts(model: nn.Module, paths: Sequence[str], state: ParallelState) -> list[nn.Module]:
    """Shards expert parameters over `ep`, as DTensors; returns the experts modules."""
    modules: dict[str, nn.Module] = {}
    for path in paths:
        owner, _, name = path.rpartition(".")
        module = modules.setdefault(owner, model.get_submodule(owner))
        full = module.get_parameter(name)
        sharded = distribute_tensor(full.data, state.ep_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=full.requires_grad))
    return list(modules.values())


def shared_by_experts(experts: Sequence[nn.Module]) -> list[nn.Module]:
    """The submodules that all experts share, e.g. a norm of their output: every rank has a gradient for them, and the sum
    over all ranks is theirs, as for any dense parameter."""
    children = [child for module in experts for child in module.children() if child not in experts]
    return [child for child in children if any(not isinstance(parameter, DTensor) for parameter in child.parameters())]


def expert_placement(parameter: nn.Parameter, state: ParallelState) -> Shard:
    """The dimension along which FSDP shards an expert parameter: experts, or with fewer experts than shards another one."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    shards = state.config.ep_shard
    if local.shape[0] >= shards:
        return Shard(0)
    divisible = [dim for dim in range(1, local.ndim) if local.shape[dim] % shards == 0]
    return Shard(divisible[0]) if divisible else Shard(0)


def set_prefetch(layers: Sequence[nn.Module], inner: Sequence[nn.Module], ahead: int) -> None:
    """Gathers the parameters of the next layers while one runs: the host cannot launch a gather during an exchange's sync.

    Args:
        inner: modules inside layers that are units themselves: experts, and what stays in fp32.
    """
    unit_ids = {id(module) for module in inner}

    def units(layer: nn.Module) -> list[FSDPModule]:
        modules = (module for module in layer.modules() if module is layer or id(module) in unit_ids)
        return [module for module in modules if isinstance(module, FSDPModule)]

    for place, layer in enumerate(layers):
        following = layers[place + 1 : place + 1 + ahead]
        preceding = layers[max(0, place - ahead) : place][::-1]
        assert isinstance(layer, FSDPModule), "layers are units"
        layer.set_modules_to_forward_prefetch([unit for neighbour in following for unit in units(neighbour)])
        layer.set_modules_to_backward_prefetch([unit for neighbour in preceding for unit in units(neighbour)])


def reduce_gradients(model: nn.Module, *, is_last: bool, accumulate_unsharded: bool = False) -> None:
    """Sets, before a backward, whether it is that of the last micro-batch of the step.

    Call it instead of FSDP2's `set_requires_gradient_sync`, which does not configure gradient exchanges
    (`exchange_reduce.py`).

    Args:
        is_last: replicas (HSDP) sum their gradients in this backward only.
        accumulate_unsharded: shards, too, are reduced in the last backward only: less communication, but full gradients in
            memory.
    """
    root: Any = model  # a unit of FSDP2, or a wrapper that forwards its methods
    root.set_requires_all_reduce(is_last)
    root.set_requires_gradient_sync(is_last or not accumulate_unsharded)
    for exchange in getattr(model, exchange_reduce.ATTRIBUTE, ()):
        exchange.sends_compute_dtype = not accumulate_unsharded  # unsharded gradients accumulate in the sum's dtype


def optimizer_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """The trained parameters for an optimizer, one group per mesh.

    torch's foreach and fused optimizers update a group in one call, and DTensors of one call must share their mesh.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return [{"params": members} for members in groups.values()]


# -------------------------------------------------------------------------------------------- full tensors


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device | str) -> None:
    """Allocates the memory of a model that was built and sharded on the meta device, uninitialised: load it next.

    Non-persistent buffers (rotary frequencies) are computed by upstream's initialisation of modules.

    Args:
        device: the device of computation. With `cpu_offload` parameters stay in host memory.

    Raises:
        ValueError: a non-persistent buffer that upstream does not initialise.
    """
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared.setdefault(id(parameter), []).append((module, name))
    in_host_memory = getattr(model, HOST_MEMORY, False)
    model.to_empty(device="cpu" if in_host_memory else device)
    if in_host_memory:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
    for (first, first_name), *aliases in shared.values():
        for module, name in aliases:
            module._parameters[name] = first._parameters[first_name]
    compute_buffers(model)


@torch.no_grad()
def load_full_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Loads a sharded model from full tensors that every rank has.

    Raises:
        ValueError: names that do not match the parameters and persistent buffers of the model.
    """
    from patchgen.runtime.checkpoint.placement import shard_like

    targets = model.state_dict()
    mismatches = sorted(set(targets) ^ set(tensors))
    if mismatches:
        raise ValueError(
            f"The tensors do not match {type(model).__name__}: {mismatches[:8]} are only in the model, or only among the tensors."
        )
    for name, target in targets.items():
        if isinstance(target, DTensor):
            target.to_local().copy_(shard_like(tensors[name], target))
        else:
            target.copy_(tensors[name])
