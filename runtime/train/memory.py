"""Estimate of a rank's memory, before anything is allocated.

parameters, gradients, optimizer    exact, from shapes and layout (an even share; the last rank's may be smaller)
copies                              of undivided parameters in the dtype that layers compute in; experts' weights kept in FP8
shared                              what other ranks read and write: shards, places for gradients, experts' tokens
gathered                            layers that are gathered at the same time, embeddings and head; not row-sharded tables
activations                         what layers save for the backward, from the widths of their linear layers (`saved.py`)
loss                                the gradient of a fused head, the logits of a chunk; all logits if the loss is not fused

They are never all there at once: gradients of layers grow while their activations go. The total is the largest sum of

    loss        all activations, the loss, no gradient yet
    layer k     activations of layers up to k, gradients of those after k, layer k and the next ones gathered, its whole gradients
    root        gradients of all layers, the whole gradients of embeddings and head

Not counted: the CUDA context (about 0.5 GiB), NCCL buffers, workspaces, and fragmentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from patchgen.kernels.loss.linear_cross_entropy import tokens_per_chunk
from patchgen.runtime import seams
from patchgen.runtime.parallel import ParallelConfig, peer_memory, peer_shards, peer_units, sharding, tables
from patchgen.runtime.train import lora_targets, optimizers, saved
from patchgen.runtime.train.flops import model_cost
from patchgen.runtime.train.precision import kept_fp8_forms
from patchgen.runtime.train.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INPUTS_ON_DEVICE = 2
"""Of layers whose inputs are in host memory: the running layer's, and one on its way."""
HOST_RANKS = 8
"""Up to so many ranks are taken for those of one host, whose gradients travel as computed."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank: of each part at its largest, and of all at once.

    Attributes:
        total: the largest sum.
        reached: when; see the module's docstring.
    """

    parameters: int
    gradients: int
    optimizer: int
    copies: int
    shared: int
    gathered: int
    activations: int
    loss: int
    total: int
    reached: str

    def text(self) -> str:
        """A table, in GiB, or in MiB for a toy."""
        unit, suffix = (2**30, "GiB") if self.total >= 2**30 else (2**20, "MiB")
        names = [name for name in self.__dataclass_fields__ if name != "reached"]
        sizes = [(name, getattr(self, name)) for name in names]
        lines = [f"  {name:<12} {size / unit:>9.2f} {suffix}" for name, size in sizes if size or name in names[:3]]
        lines[-1] += f" at once, {self.reached}"
        return "\n".join(["memory of one rank (estimate), each part at its largest", *lines])


@dataclass
class _Unit:
    """The parameters that are gathered together: a layer, or all outside of layers.

    Attributes:
        gathered: bytes in the dtype of computing, of parameters that are divided over ranks.
        whole_gradients: those of the trained ones among them, before they are summed.
        gradients: of this rank, as the optimizer gets them.
        undivided_gradients: those of them that no other rank sums: of parameters which this rank holds whole, of rows of tables.
        copies: of parameters that this rank holds whole.
        shards: of trained, divided parameters in the dtype of computing, one size for each.
    """

    gathered: int = 0
    whole_gradients: int = 0
    gradients: int = 0
    undivided_gradients: int = 0
    copies: int = 0
    shards: tuple[int, ...] = ()


def estimate(
    model: PreTrainedModel,
    recipe: Recipe,
    layout: ParallelConfig,
    compute_dtype: torch.dtype | None,
    chosen: Mapping[str, str],
    *,
    device_type: str = "cpu",
) -> Estimate:
    """The estimate for a model on the meta device, not sharded.

    Args:
        compute_dtype: the dtype that layers compute in; None: as stored.
        chosen: what implements each seam.
        device_type: of the ranks' devices.
    """
    itemsize = (compute_dtype or getattr(torch, recipe.model.dtype)).itemsize
    experts = set(sharding.expert_paths(model))
    in_rows = set(tables.choose(model, recipe.parallel.shard_tables_above, world=layout.world)[0])
    stored, trained, states = _state(model, recipe, layout)
    layers = sharding.find_layers(model, None)
    owners = {id(parameter): index for index, layer in enumerate(layers) for parameter in layer.parameters()}
    units, root = [_Unit() for _ in layers], _Unit()
    for name, parameter in model.named_parameters():
        unit = units[owners[id(parameter)]] if id(parameter) in owners else root
        if name in in_rows:  # a dense gradient of this rank's rows
            is_trained = parameter.requires_grad and recipe.lora is None
            size = is_trained * -(-parameter.numel() // layout.world) * parameter.element_size()
            unit.gradients += size
            unit.undivided_gradients += size
            continue
        _add(unit, parameter, name in experts, recipe, layout, itemsize, device_type, compute_dtype)
    uses_peers = _uses_peers(recipe, layout, compute_dtype, device_type)
    gradients = sum(unit.gradients for unit in (*units, root)) if recipe.lora is None else trained
    tokens = recipe.data.tokens_per_batch // layout.sp
    widths = saved.Widths(model, recipe, layout, chosen, itemsize, device_type)
    per_layer = [
        tokens * widths.of_layer(layer, path) for layer, path in zip(layers, _paths(model, layers), strict=True)
    ]
    mode, hidden = recipe.parallel.activation_checkpointing, tokens * widths.hidden * itemsize
    kept = {"none": per_layer, "selective": [size // 2 for size in per_layer], "full": [hidden] * len(layers)}.get(
        mode, [hidden] * INPUTS_ON_DEVICE
    )
    if recipe.parallel.offload_inputs:
        kept = [size if index < INPUTS_ON_DEVICE else size - hidden for index, size in enumerate(kept)]
    in_experts = sum(p.numel() for name, p in model.named_parameters() if name in experts and p.dim() == 3)
    copies = sum(unit.copies for unit in (*units, root))
    copies += kept_fp8_forms(recipe, layout) * -(-in_experts // layout.ep)
    shared = _shared([*units, root], layout) if uses_peers else 0
    if uses_peers and layout.ep > 1:
        shared += _token_buffers(recipe, layout, hidden)
    fixed = stored + states + copies + shared
    loss = (
        _loss(model, recipe, tokens, chosen, itemsize) + 3 * hidden
    )  # the last hidden states, normed, and their gradient
    reshards = recipe.parallel.reshard_after_forward
    window = 1 + recipe.parallel.prefetch if reshards else len(units)
    # Beside whole gradients, buffers in which they are sent; through peer memory they are in `shared`.
    sending = 1.0 if uses_peers else 1.0 + _wide(recipe, layout, itemsize, device_type) / itemsize
    # With several micro-batches all gradients of the ones before are there from the second forward on.
    earlier = gradients if recipe.train.batches_per_step > layout.num_batches else 0
    moments = {
        "in the loss": earlier + sum(kept) + loss + root.gathered + (0 if reshards else sum(u.gathered for u in units))
    }
    done = int(
        _share_of_head(model, layers, in_rows)
        * (root.gradients if uses_peers or root.copies else root.whole_gradients)
    )
    if not has_fused_loss(chosen):
        done = max(done, loss)
    for index in reversed(range(len(units))):
        unit = units[index]
        gathered = sum(one.gathered for one in (units[max(0, index + 1 - window) : index + 1] if reshards else units))
        working = tokens * widths.working[index] + (per_layer[index] if mode != "none" else 0)
        own_gradients = unit.undivided_gradients + int(unit.whole_gradients * sending)
        moments[f"in the backward of layer {index}"] = (
            sum(kept[: index + 1]) + max(done, earlier) + root.gathered + gathered + working + own_gradients
        )
        done += unit.gradients
    whole = int(root.whole_gradients * (sending if not uses_peers else 1 - _share_of_head(model, layers, in_rows)))
    moments["in the backward of embeddings and head"] = gradients + root.gathered + whole
    reached = max(moments, key=lambda name: moments[name])
    return Estimate(
        parameters=stored,
        gradients=gradients,
        optimizer=states,
        copies=copies,
        shared=shared,
        gathered=root.gathered + sum(sorted((unit.gathered for unit in units), reverse=True)[:window]),
        activations=sum(kept) + (max(per_layer) if mode != "none" else 0),
        loss=loss,
        total=fixed + moments[reached],
        reached=reached,
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


def _paths(model: nn.Module, layers: list[nn.Module]) -> list[str]:
    by_id = {id(module): path for path, module in model.named_modules()}
    return [by_id[id(layer)] for layer in layers]


def _state(model: PreTrainedModel, recipe: Recipe, layout: ParallelConfig) -> tuple[int, int, int]:
    """Bytes of parameters, of gradients in their dtypes, and of the optimizer."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    of_muon = optimizers.muon_matrices(model, trainable, recipe.optim) if recipe.optim.name == "muon" else {}
    in_rows = set(tables.choose(model, recipe.parallel.shard_tables_above, world=layout.world)[0])
    stored, trained, states = 0, 0, 0
    for name, parameter in model.named_parameters():
        shards = layout.world if name in in_rows else layout.num_shards
        share = -(-parameter.numel() // shards) * parameter.element_size()
        stored += share
        if parameter.requires_grad and recipe.lora is None:
            trained += share
            states += share * (1 if name in of_muon else 2)
    if recipe.lora is not None:  # in fp32, with AdamW's two states, or Muon's one for matrices
        replicated, sharded = lora_targets.num_adapter_parameters(model, recipe.lora)
        adapters = 4 * (replicated + -(-sharded // layout.num_shards))
        stored, trained = stored + adapters, adapters
        states = 2 * adapters - (4 * replicated if recipe.optim.name == "muon" else 0)
    return stored, trained, states


def _add(
    unit: _Unit,
    parameter: nn.Parameter,
    is_expert: bool,
    recipe: Recipe,
    layout: ParallelConfig,
    itemsize: int,
    device_type: str,
    compute_dtype: torch.dtype | None,
) -> None:
    """Adds a parameter to its unit."""
    is_trained = parameter.requires_grad and recipe.lora is None
    local = parameter.numel() // (layout.ep if is_expert else 1)
    shard = -(-parameter.numel() // layout.num_shards)
    num_shards = layout.ep_shard if is_expert and layout.ep > 1 else layout.num_shards
    is_undivided = num_shards == 1 and layout.dp_replicate == 1
    is_cast = compute_dtype is not None and itemsize < parameter.element_size()
    if is_undivided:
        if is_cast and is_trained:
            unit.copies += local * itemsize
        elif is_cast:
            unit.gathered += local * itemsize
    else:
        unit.gathered += local * itemsize
        if is_trained:
            unit.whole_gradients += local * itemsize
            unit.shards += (shard * itemsize,)
    if is_trained:
        accumulates = recipe.train.batches_per_step > layout.num_batches
        stays_narrow = (
            is_undivided and is_cast and not accumulates and device_type == "cuda" and recipe.optim.name == "adamw"
        )
        size = shard * (itemsize if stays_narrow else parameter.element_size())
        unit.gradients += size
        unit.undivided_gradients += size if is_undivided else 0


def _uses_peers(recipe: Recipe, layout: ParallelConfig, compute_dtype: torch.dtype | None, device_type: str) -> bool:
    """Whether trained shards are read from other ranks' memory (`parallel/peer_units.py`), as far as it is known here."""
    section = recipe.parallel
    if (
        section.shard_exchange == "collectives"
        or peer_units.IS_REBUILT
        or section.cpu_offload
        or recipe.lora is not None
    ):
        return False
    stored = getattr(torch, recipe.model.dtype)
    can = (
        stored == torch.float32
        and compute_dtype is not None
        and compute_dtype.itemsize < 4
        and layout.dp_replicate == 1
    )
    can = can and layout.num_shards > 1 and section.reduce_dtype == "float32"
    by_itself = device_type == "cuda" and layout.num_shards <= peer_memory._MEASURED_RANKS
    return can and (by_itself or section.shard_exchange == "peer_memory")


def _shared(units: list[_Unit], layout: ParallelConfig) -> int:
    """Shards that others read, and two places for what they send (`parallel/peer_shards.py`)."""
    largest = small = 0
    for unit in units:
        of_unit = sum(size for size in unit.shards if size < peer_units.SMALL_BYTES)
        small = max(small, of_unit)
        pieces = [min(peer_shards.MAX_PIECE_BYTES, size) for size in unit.shards if size >= peer_units.SMALL_BYTES]
        largest = max(largest, of_unit, *pieces, 0)
    return sum(sum(unit.shards) for unit in units) + 2 * ((layout.num_shards - 1) * largest + small)


def _token_buffers(recipe: Recipe, layout: ParallelConfig, hidden: int) -> int:
    """Two buffers of experts' tokens, with room for longer rows (`parallel/peer_memory.py`)."""
    return 2 * layout.ep * hidden * 9 // 8 if saved.exchanges_through_peers(recipe, layout, "cuda") else 0


def _wide(recipe: Recipe, layout: ParallelConfig, itemsize: int, device_type: str) -> int:
    """Bytes of a value of the buffer in which gradients are sent."""
    exchanges = recipe.parallel.exchange_gradients
    if exchanges is None:
        exchanges = device_type == "cuda" and layout.world <= HOST_RANKS
    return itemsize if exchanges else getattr(torch, recipe.parallel.reduce_dtype).itemsize


def _share_of_head(model: PreTrainedModel, layers: list[nn.Module], in_rows: set[str]) -> float:
    """What of the gradients outside of layers is there before those of layers: that of a head; of a tied one all."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    elsewhere = {id(parameter) for layer in layers for parameter in layer.parameters()}
    elsewhere |= {id(model.get_parameter(name)) for name in in_rows}
    root = sum(p.numel() for p in model.parameters() if id(p) not in elsewhere and p.requires_grad)
    if head is None or not root or not head.weight.requires_grad:
        return 0.0
    return 1.0 if head.weight is embeddings.weight else sum(p.numel() for p in head.parameters()) / root


def _loss(model: PreTrainedModel, recipe: Recipe, tokens: int, chosen: Mapping[str, str], itemsize: int) -> int:
    """Bytes that the loss takes: of a fused one the gradient of the head in fp32 and the logits of a chunk, else logits and their
    gradient in fp32."""
    vocab_size, head = model.config.get_text_config().vocab_size, model.get_output_embeddings()
    if not has_fused_loss(chosen):
        return tokens * vocab_size * 8
    is_trained = head is not None and head.weight.requires_grad and recipe.lora is None
    kept = (
        head.weight.numel() * 4
        if head is not None and is_trained and chosen["causal_lm_loss"] in ("auto", "linear")
        else 0
    )
    return kept + min(tokens, tokens_per_chunk(tokens, vocab_size)) * vocab_size * itemsize


def has_fused_loss(chosen: Mapping[str, str]) -> bool:
    """Whether a run with these kernels, by seam, computes its loss without storing all logits."""
    return chosen.get("causal_lm_loss", seams.EAGER) != seams.EAGER
