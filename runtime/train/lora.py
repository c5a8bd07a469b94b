"""Adapters through PEFT on a sharded model: small, whole on every rank, their gradients added up over all of them.

    base weights     DTensors of FSDP2 and EP, frozen, gathered layer by layer as ever
    lora_A, lora_B   plain parameters, the same on every rank; after the backward one all-reduce of their gradients

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

from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train.lora_targets import find_targets
from patchgen.runtime.train.recipe import LoraConfig, RecipeError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def add_adapters(
    model: PreTrainedModel, config: LoraConfig, state: ParallelState, *, source: str, seed: int
) -> PeftModel:
    """Freezes `model` and puts adapters into it, in place; every rank makes the same ones.

    Args:
        model: sharded, with its weights, not yet run.
        source: what the adapter says it belongs to.

    Returns:
        PEFT's view of the model, for saving; `model` itself is what is trained.

    Raises:
        RecipeError: PEFT is not installed, a target matches nothing, or experts are divided over ranks.
    """
    require_possible(config, dist.get_world_size())
    import peft

    targets = find_targets(model, config)
    if dist.get_rank() == 0:
        print(targets.told, flush=True)
    # Of this rank's device only: by default the generators of all devices are kept, which opens each of them.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=config.rank,
                lora_alpha=config.alpha,
                lora_dropout=config.dropout,
                target_modules=list(targets.modules),
                target_parameters=list(config.target_parameters) or None,
                task_type="CAUSAL_LM",
            ),
        )
    adapted.peft_config["default"].base_model_name_or_path = source
    return adapted


def require_possible(config: LoraConfig, world: int) -> None:
    """Refuses adapters that `world` ranks cannot train.

    Raises:
        RecipeError: PEFT is not installed, or experts are divided over ranks.
    """
    if importlib.util.find_spec("peft") is None:
        raise RecipeError("A recipe with a section lora needs `pip install peft`.")
    if config.target_parameters and world > 1:
        raise RecipeError(
            f"lora.target_parameters = {list(config.target_parameters)}: PEFT replaces a stacked parameter while its "
            "module runs, which FSDP2 does as well; both at once is not supported. Train adapters of experts on one "
            "rank, or target linear layers (lora.target_modules)."
        )


def reduce_gradients(model: nn.Module) -> None:
    """Adds up the gradients of whole parameters over all ranks: a rank has those of its own tokens."""
    found = [p.grad for p in model.parameters() if p.grad is not None and not isinstance(p.grad, DTensor)]
    if not found:
        return
    total = all_reduce(torch.cat([gradient.flatten() for gradient in found]), operation="add up adapter gradients")
    for gradient, part in zip(found, total.split([gradient.numel() for gradient in found]), strict=True):
        gradient.copy_(part.view_as(gradient))


def save(adapted: PeftModel, folder: Path) -> None:
    """Writes the adapter as PEFT does; every rank calls it, rank 0 writes."""
    if dist.get_rank() == 0:
        adapted.save_pretrained(folder)
    dist.barrier()
