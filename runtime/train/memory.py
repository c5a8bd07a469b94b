"""Estimate of a rank's memory, before anything is allocated.

parameters, gradients, optimizer    exact, from shapes and layout (an even share; the last rank's may be smaller)
gathered                            layers that are gathered at the same time, embeddings and head; experts' weights kept in FP8
reduction                           full gradients before ranks sum them, and the buffers of the sum, where they are largest
activations                         what each layer saves for the backward, from the widths of its linear layers
logits                              if the loss is not fused: logits and their gradient in fp32

Not counted: the CUDA context (about 0.5 GiB), NCCL buffers, workspaces, and fragmentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from patchgen.runtime import seams
from patchgen.runtime.parallel import ParallelConfig, sharding
from patchgen.runtime.train import lora_targets, optimizers
from patchgen.runtime.train.flops import experts_per_token, model_cost
from patchgen.runtime.train.precision import kept_fp8_forms
from patchgen.runtime.train.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


INPUTS_ON_DEVICE = 2
"""Of layers whose inputs are in host memory: the running layer's, and one on its way."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reduction: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__dataclass_fields__)

    def text(self) -> str:
        """A table, in GiB, or in MiB for a toy."""
        rows = [(name, getattr(self, name)) for name in self.__dataclass_fields__] + [("total", self.total)]
        unit, suffix = (2**30, "GiB") if self.total >= 2**30 else (2**20, "MiB")
        lines = [f"  {name:<12} {size / unit:>9.2f} {suffix}" for name, size in rows]
        return "\n".join(["memory of one rank (estimate)", *lines])


def estimate(
    model: PreTrainedModel, recipe: Recipe, layout: ParallelConfig, compute_dtype: torch.dtype | None, fused_loss: bool
) -> Estimate:
    """The estimate for a model on the meta device, not sharded.

    Args:
        compute_dtype: the dtype that layers compute in; None: as stored.
        fused_loss: whether the loss is computed without storing all logits.
    """
    itemsize = (compute_dtype or getattr(torch, recipe.model.dtype)).itemsize
    experts = set(sharding.expert_paths(model))
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    of_muon = optimizers.muon_matrices(model, trainable, recipe.optim) if recipe.optim.name == "muon" else {}
    stored, trained, states = 0, 0, 0
    for name, parameter in model.named_parameters():
        share = -(-parameter.numel() // layout.num_shards) * parameter.element_size()
        stored += share
        if parameter.requires_grad and recipe.lora is None:
            trained += share
            states += share * (1 if name in of_muon else 2)
    if recipe.lora is not None:  # in fp32, with AdamW's two states, or Muon's one for matrices
        replicated, sharded = lora_targets.num_adapter_parameters(model, recipe.lora)
        adapters = 4 * (replicated + -(-sharded // layout.num_shards))
        stored, trained = stored + adapters, adapters
        states = 2 * adapters - (4 * replicated if recipe.optim.name == "muon" else 0)
    layers = sharding.find_layers(model, None)
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    root = sum(p.numel() for p in model.parameters() if id(p) not in in_layers)

    def gathered_size(layer: nn.Module) -> int:
        prefix = next(path for path, module in model.named_modules() if module is layer)
        return sum(
            p.numel() // (layout.ep if f"{prefix}.{name}" in experts else 1) for name, p in layer.named_parameters()
        )

    sizes = sorted(gathered_size(layer) for layer in layers)
    gathered = sizes
    if recipe.parallel.reshard_after_forward:
        gathered = gathered[-(1 + recipe.parallel.prefetch) :]
    tokens = recipe.data.tokens_per_batch // layout.sp
    text_config = model.config.get_text_config()
    saved = [_saved_per_token(layer, text_config) for layer in layers]
    mode, offloads = recipe.parallel.activation_checkpointing, recipe.parallel.offload_inputs
    if mode in ("full", "offload"):
        num_inputs = min(len(layers), INPUTS_ON_DEVICE) if offloads or mode == "offload" else len(layers)
        per_token = text_config.hidden_size * num_inputs + max(saved)
    else:
        per_token = sum(saved) // (2 if mode == "selective" else 1)
        if offloads:
            per_token -= text_config.hidden_size * max(0, len(layers) - INPUTS_ON_DEVICE)
    is_sharded = layout.num_shards > 1 or compute_dtype is not None
    in_experts = sum(p.numel() for name, p in model.named_parameters() if name in experts and p.dim() == 3)
    kept = kept_fp8_forms(recipe, layout) * -(-in_experts // layout.ep)
    activation_bytes = tokens * per_token * itemsize
    return Estimate(
        parameters=stored,
        gradients=trained,
        optimizer=states,
        gathered=(root + sum(gathered)) * itemsize + kept if is_sharded else 0,
        reduction=_reduction(model, recipe, root, sizes[-1], itemsize, activation_bytes) if is_sharded else 0,
        activations=activation_bytes,
        logits=0 if fused_loss else tokens * text_config.vocab_size * 8,
    )


def host_bytes(model: PreTrainedModel, recipe: Recipe, layout: ParallelConfig, itemsize: int) -> int:
    """Bytes of host memory of one rank that `parallel.offload_inputs` and `offload_attention` take; 0 without.

    Args:
        itemsize: of the dtype that layers compute in.
    """
    if not recipe.parallel.offload_inputs:
        return 0
    per_token = model.config.get_text_config().hidden_size * len(sharding.find_layers(model, None))
    if recipe.parallel.offload_attention:  # results have the heads and the size of values: half of `N (D_qk + D_v)`
        per_token += sum(width // 2 for width, _ in model_cost(model).attention)
    return recipe.data.tokens_per_batch // layout.sp * per_token * itemsize


def _reduction(model: PreTrainedModel, recipe: Recipe, root: int, layer: int, itemsize: int, activations: int) -> int:
    """Bytes of full gradients and of what they are summed in, beyond the shards: the larger of two moments of a backward.

        in the layers   the head's gradient, which waits for that of the embeddings; a layer's, and the buffer of its sum
        at the end      the gradients of embeddings and head, and the buffer of their sum; activations are gone

    With adapters only those are summed, which is little.

    Args:
        root, layer: parameters outside of layers, and of the largest layer, as gathered.
    """
    if recipe.lora is not None:
        return 0
    wide = itemsize if recipe.parallel.exchange_gradients else getattr(torch, recipe.parallel.reduce_dtype).itemsize
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    early = sum(p.numel() for p in head.parameters()) if head is not None and not is_tied else 0
    in_layers = early * itemsize + layer * (itemsize + wide)
    at_end = root * (itemsize + wide) - activations
    return max(in_layers, at_end)


def has_fused_loss(chosen: Mapping[str, str]) -> bool:
    """Whether a run with these kernels, by seam, computes its loss without storing all logits."""
    return chosen.get("causal_lm_loss", seams.EAGER) != seams.EAGER


def _saved_per_token(layer: nn.Module, text_config) -> int:
    """Number of values that a layer saves per token: inputs and outputs of its linear layers, and four of hidden size for norms
    and residuals; for each expert of a token its input, gate, up, product and output."""
    saved = 4 * text_config.hidden_size
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            saved += module.in_features + module.out_features
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 3 and not isinstance(module, nn.Linear):
                saved += experts_per_token(text_config) * (parameter.shape[1] + parameter.shape[2])
    return saved
