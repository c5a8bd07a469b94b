"""Adapters through PEFT on a sharded model.

    base weights                DTensors of FSDP2 and EP, frozen, gathered layer by layer as usual
    adapters of linear layers   replicated parameters; one all-reduce of their gradients after the backward
    adapters of experts         DTensors, sharded like the experts (`expert_lora.py`)

Generated models keep upstream's module and parameter names, so PEFT loads a saved adapter onto upstream's model unchanged.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from patchgen.kernels.fused_moe import WITHOUT_ADAPTERS
from patchgen.runtime.checkpoint.load import tied_groups
from patchgen.runtime.checkpoint.placement import local_tensor
from patchgen.runtime.parallel import sharding, undivided, unused
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train.lora_targets import Targets, find_targets
from patchgen.runtime.train.recipe import LoraConfig, RecipeError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

FOLDER = "adapter"
"""The folder of a run's adapters, in PEFT's format."""
PREFIX = "base_model.model."
"""What PEFT puts before the names of the base model."""


def add_adapters(
    model: PreTrainedModel,
    config: LoraConfig,
    state: ParallelState,
    *,
    source: str,
    seed: int,
    options: sharding.ShardingOptions | None = None,
) -> PeftModel:
    """Freezes `model` and adds adapters in place, the same on every rank.

    Args:
        model: sharded, with its weights, not yet run.
        source: the base model that the adapter's config names.
        options: those that the model was sharded with.

    Returns:
        PEFT's wrapper of the model, for saving; `model` itself is what is trained.

    Raises:
        RecipeError: PEFT is not installed, a target matches nothing, or `config` cannot be trained on these ranks.
    """
    require_trainable(config, replicas=state.config.dp_replicate)
    import peft

    from patchgen.runtime.train import expert_lora

    targets = find_targets(model, config)
    require_trainable_on(targets, dist.get_world_size())
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # annotated as int, but any number works
        use_rslora=config.rslora,
        lora_dropout=config.dropout,
        target_modules=list(targets.modules),
        target_parameters=[*targets.experts, *targets.others] or None,
        task_type="CAUSAL_LM",
    )
    # PEFT annotates the values as classes, but any callable works.
    custom = expert_lora.custom_modules(model, targets.experts, state)
    peft_config._register_custom_module(custom)  # pyright: ignore[reportArgumentType]
    if dist.get_rank() == 0:
        print(targets.summary, flush=True)
    # This rank's device only: by default the generators of all devices are saved, which initialises each of them.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, peft_config)
    expert_lora.shard(model, state, options or sharding.ShardingOptions())
    adapted.peft_config["default"].base_model_name_or_path = source
    return adapted


def require_trainable(config: LoraConfig, kernel: str | None = None, replicas: int = 1) -> None:
    """Refuses adapters that cannot be trained, whatever the model.

    Args:
        kernel: the recipe's `kernels.fused_moe`.
        replicas: `parallel.dp_replicate`.

    Raises:
        RecipeError: PEFT is not installed; the kernel or an option does not support adapters of experts; linear layers are
            adapted with replicas.
    """
    if importlib.util.find_spec("peft") is None:
        raise RecipeError("A recipe with a section lora needs `pip install peft`.")
    if config.target_modules and replicas > 1:
        # PEFT takes every mesh other than a one-dimensional "fsdp" for tensor parallelism, and sizes adapters by the shard.
        raise RecipeError(
            f"parallel.dp_replicate = {replicas} with lora.target_modules: PEFT would size adapters of linear layers by a "
            "rank's shard of the weight. Set parallel.dp_replicate: 1, or adapt experts alone (target_modules: [])."
        )
    if config.target_parameters and config.dropout:
        raise RecipeError(
            f"lora.dropout = {config.dropout} with lora.target_parameters: PEFT refuses dropout in adapters of parameters. "
            "Remove one of them."
        )
    if config.target_parameters and kernel in WITHOUT_ADAPTERS:
        raise RecipeError(
            f"kernels.fused_moe = {kernel} does not support adapters of experts (lora.target_parameters): use auto, triton "
            "or torch."
        )


def require_trainable_on(targets: Targets, world: int) -> None:
    """Refuses targets that `world` ranks cannot train.

    Raises:
        RecipeError: parameters that are not stacked experts, on several ranks.
    """
    if targets.others and world > 1:
        raise RecipeError(
            f"lora.target_parameters: {', '.join(targets.others[:4])}: PEFT and FSDP2 both replace a parameter while its "
            f"module runs, so on {world} ranks only stacked experts can have such adapters. Train these on one rank, or "
            "target linear layers (lora.target_modules)."
        )


def reduce_gradients(model: nn.Module) -> None:
    """All-reduces the gradients of replicated parameters: each rank has those of its own tokens."""
    replicated = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if not replicated or dist.get_world_size() == 1:
        return
    gradients = [unused.gradient_or_zeros(parameter) for parameter in replicated]
    total = all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), operation="add up adapter gradients")
    for gradient, part in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def save(adapted: PeftModel, folder: Path, tokenizer: Any = None) -> None:
    """Writes the adapter as PEFT does (collective; rank 0 writes).

    Embeddings and head are written with it if they have rows that the base model lacks (`model.resize_vocab`), and so is the
    tokenizer with the new tokens: as for any adapter of PEFT, the base model is resized before it is loaded.
    """
    from patchgen.runtime.train import expert_lora

    tensors = adapted.state_dict() | expert_lora.in_peft_layout(adapted)
    base: Any = adapted.get_base_model()
    grown = getattr(base, "grown_vocabulary", {})
    names = {name for group in tied_groups(base) if grown.keys() & set(group) for name in group} | grown.keys()
    for name in sorted(names):
        tensors[f"{PREFIX}{name}"] = expert_lora.full_tensor(base.get_parameter(name).detach()).cpu()
    if dist.get_rank() == 0:
        # Not "auto", which asks the Hub for the base model's vocabulary.
        adapted.save_pretrained(str(folder), state_dict=tensors, save_embedding_layers=bool(grown))
        if grown and tokenizer is not None:
            tokenizer.save_pretrained(folder)
    dist.barrier()


@torch.no_grad()
def merge(adapted: PeftModel) -> None:
    """Merges the adapters into this rank's weights and removes them, for export (collective, once)."""
    from peft.tuners.lora.layer import LoraLayer

    from patchgen.runtime.train import expert_lora

    for module in list(adapted.modules()):
        if isinstance(module, LoraLayer):
            weight, delta = expert_lora.local_delta(module)
            local = local_tensor(weight)
            local.copy_(local + delta)
    model = adapted.unload()
    undivided.forget_copies(model)
