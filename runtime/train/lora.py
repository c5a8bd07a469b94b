"""Adapters through PEFT on a sharded model.

    base weights     DTensors of FSDP2 and EP, frozen, gathered layer by layer as ever
    of linear layers plain parameters, the same on every rank; after the backward one all-reduce of their gradients
    of experts       DTensors, divided as the experts are (`expert_lora.py`)

The names of modules and parameters in a generated model are upstream's, so PEFT loads a saved adapter onto upstream's
model with no conversion.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from patchgen.kernels.fused_moe import WITHOUT_ADAPTERS
from patchgen.runtime.checkpoint.placement import local_tensor
from patchgen.runtime.parallel import sharding, undivided, unused
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train.lora_targets import Targets, find_targets
from patchgen.runtime.train.recipe import LoraConfig, RecipeError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ADAPTER = "adapter"
"""The folder of a run's adapters, in PEFT's format."""


def add_adapters(
    model: PreTrainedModel,
    config: LoraConfig,
    state: ParallelState,
    *,
    source: str,
    seed: int,
    options: sharding.ShardingOptions | None = None,
) -> PeftModel:
    """Freezes `model` and puts adapters into it, in place; every rank makes the same ones.

    Args:
        model: sharded, with its weights, not yet run.
        source: what the adapter says it belongs to.
        options: those that the model was sharded with.

    Returns:
        PEFT's view of the model, for saving; `model` itself is what is trained.

    Raises:
        RecipeError: PEFT is not installed, a target matches nothing, or only one rank could train it.
    """
    require_possible(config, replicas=state.config.dp_replicate)
    import peft

    from patchgen.runtime.train import expert_lora

    targets = find_targets(model, config)
    require_any_layout(targets, dist.get_world_size())
    wanted = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # PEFT says int, and divides it
        use_rslora=config.rslora,
        lora_dropout=config.dropout,
        target_modules=list(targets.modules),
        target_parameters=[*targets.experts, *targets.others] or None,
        task_type="CAUSAL_LM",
    )
    # PEFT calls what it is told, and says that it must be a class.
    custom = expert_lora.custom_modules(model, targets.experts, state)
    wanted._register_custom_module(custom)  # pyright: ignore[reportArgumentType]
    if dist.get_rank() == 0:
        print(targets.told, flush=True)
    # Of this rank's device only: by default the generators of all devices are kept, which opens each of them.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, wanted)
    expert_lora.shard(model, state, options or sharding.ShardingOptions())
    adapted.peft_config["default"].base_model_name_or_path = source
    return adapted


def require_possible(config: LoraConfig, kernel: str | None = None, replicas: int = 1) -> None:
    """Refuses adapters that cannot be trained, whatever the model.

    Args:
        kernel: what serves the experts, where the recipe names it.
        replicas: `parallel.dp_replicate`.

    Raises:
        RecipeError: PEFT is not installed; a kernel or an option that has no adapters of experts; linear layers with
            replicas.
    """
    if importlib.util.find_spec("peft") is None:
        raise RecipeError("A recipe with a section lora needs `pip install peft`.")
    if config.target_modules and replicas > 1:
        # PEFT takes any mesh but one named "fsdp" alone for tensor parallelism, and sizes adapters by a rank's part.
        raise RecipeError(
            f"parallel.dp_replicate = {replicas} with lora.target_modules: PEFT would make adapters of linear layers for the "
            "part of a weight that a rank holds. Set parallel.dp_replicate: 1, or adapt experts alone (target_modules: [])."
        )
    if config.target_parameters and config.dropout:
        raise RecipeError(
            f"lora.dropout = {config.dropout} with lora.target_parameters: PEFT's adapters of parameters have no dropout, and "
            "would not load. Set one of them to nothing."
        )
    if config.target_parameters and kernel in WITHOUT_ADAPTERS:
        raise RecipeError(
            f"kernels.fused_moe = {kernel} has no adapters of experts (lora.target_parameters): use auto, triton or torch."
        )


def require_any_layout(targets: Targets, world: int) -> None:
    """Refuses targets that `world` ranks cannot train.

    Raises:
        RecipeError: parameters that are not stacked experts, on several ranks.
    """
    if targets.others and world > 1:
        raise RecipeError(
            f"lora.target_parameters: {', '.join(targets.others[:4])}: PEFT replaces a parameter while its module runs, which "
            f"FSDP2 does as well, so {world} ranks train such adapters of stacked experts only. Train these on one rank, or "
            "target linear layers (lora.target_modules)."
        )


def reduce_gradients(model: nn.Module) -> None:
    """Adds up the gradients of whole parameters over all ranks: a rank has those of its own tokens."""
    whole = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if not whole or dist.get_world_size() == 1:
        return
    found = [unused.gradient_or_zeros(parameter) for parameter in whole]
    total = all_reduce(torch.cat([gradient.flatten() for gradient in found]), operation="add up adapter gradients")
    for gradient, part in zip(found, total.split([gradient.numel() for gradient in found]), strict=True):
        gradient.copy_(part.view_as(gradient))


def save(adapted: PeftModel, folder: Path) -> None:
    """Writes the adapter as PEFT does; every rank calls it, rank 0 writes."""
    from patchgen.runtime.train import expert_lora

    experts = expert_lora.in_peft_layout(adapted)
    if dist.get_rank() == 0:
        adapted.save_pretrained(str(folder), state_dict=adapted.state_dict() | experts)
    dist.barrier()


@torch.no_grad()
def merge(adapted: PeftModel) -> None:
    """Adds the adapters to the weights of this rank and takes them out: the model is a plain one again, to be exported.

    Every rank calls it, once.
    """
    from peft.tuners.lora.layer import LoraLayer

    from patchgen.runtime.train import expert_lora

    for module in list(adapted.modules()):
        if isinstance(module, LoraLayer):
            weight, added = expert_lora.part_of_delta(module)
            own = local_tensor(weight)
            own.copy_(own + added)
    model = adapted.unload()
    undivided.forget_copies(model)
