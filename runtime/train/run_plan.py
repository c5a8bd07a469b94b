"""Whether a recipe can run, and what it would run: `patchgen train RECIPE --dry-run`."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from patchgen.runtime import attention, attention_kinds
from patchgen.runtime.checkpoint.load import match_checkpoint
from patchgen.runtime.objectives import choose
from patchgen.runtime.parallel import checkpointing, report, tables
from patchgen.runtime.parallel.config import ParallelConfig, draw
from patchgen.runtime.parallel.offloaded_inputs import KEPT_ATTENTION
from patchgen.runtime.train import (
    attention_choice,
    captured,
    flops,
    lora,
    lora_targets,
    memory,
    optimizers,
    planned_device,
    precision,
    resize_vocab,
    router_balance,
    run_lock,
    run_log,
)
from patchgen.runtime.train import model as models
from patchgen.runtime.train.feed import micro_batches_per_step
from patchgen.runtime.train.planned_device import PlannedDevice
from patchgen.runtime.train.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# bfloat16 has 8 bits of precision: near 0.02, a typical weight, updates below half of 1.2e-4 are rounded away.
SMALL_LR = 6e-5
DRAWN_RANKS = 64  # of more ranks no table is printed
PURPOSES = {  # dimension -> what its ranks do
    "sp": "share a sequence",
    "ep": "share the experts",
    "ep_shard": "hold shards of the same experts",
    "dp_replicate": "hold the same shards",
}


def require_valid(recipe: Recipe, world_size: int) -> None:
    """Refuses a recipe before any rank starts.

    Raises:
        RecipeError: sizes do not fit the number of ranks, options contradict each other, or a kernel cannot run here.
    """
    layout, train = require_layout(recipe, world_size), recipe.train
    choose.require_valid(recipe)
    if train.cuda_graph:
        captured.require_replayable(recipe, layout)
    attention_choice.require_available(recipe.model.attention)
    models.require_kernels(recipe.kernels)
    precision.require_available(recipe, models.compute_dtype(recipe))
    for kind in recipe.log.trackers:
        run_log.require_tracker(kind)
    run_lock.require_writable(recipe.directory)
    for name, data in (("data", recipe.data), ("eval_data", recipe.eval_data)):
        if data is not None and (reason := run_lock.why_not_writable(data.cache_root)):
            raise RecipeError(
                f"The cache folder {data.cache_root} cannot be written: {reason}. To fix: name another {name}.cache_dir."
            )
    for field, is_set, size in (
        ("head_groups", recipe.parallel.head_groups > 1, "sp"),
        ("expert_capacity", recipe.parallel.expert_capacity is not None, "ep"),
    ):
        if is_set and getattr(layout, size) == 1:
            raise RecipeError(
                f"parallel.{field} is set, but parallel.{size} is 1: it would have no effect. To fix: remove it, or set "
                f"parallel.{size}."
            )
    attends = recipe.model.attention
    if recipe.parallel.offload_attention and attends in attention.ORDER and attends not in KEPT_ATTENTION:
        raise RecipeError(
            f"parallel.offload_attention: the results of model.attention = {attends} cannot be kept, for it is no operator of "
            f"torch's dispatcher. To fix: use one of {', '.join(KEPT_ATTENTION)}, or remove parallel.offload_attention."
        )
    if recipe.parallel.expert_exchange == "peer_memory" and recipe.parallel.expert_capacity is not None:
        raise RecipeError(
            "parallel.expert_capacity bounds the rows of an all-to-all, which parallel.expert_exchange = peer_memory does "
            "not use. To fix: remove one of them."
        )
    if recipe.lora is not None:
        if recipe.model.freeze:
            raise RecipeError(
                "lora trains adapters only: model.freeze has nothing left to freeze. Remove one of them."
            )
        lora.require_trainable(recipe.lora, recipe.kernels.fused_moe, layout.dp_replicate)
    first_rank = os.environ.get("RANK", "0") == "0"
    if first_rank and recipe.lora is None and recipe.model.dtype != "float32" and recipe.optim.lr < SMALL_LR:
        warnings.warn(
            f"model.dtype = {recipe.model.dtype} stores parameters in 16 bits: with optim.lr = {recipe.optim.lr:g} "
            "most updates round to nothing. Set model.dtype: float32; layers compute in parallel.param_dtype.",
            stacklevel=2,
        )


def require_layout(recipe: Recipe, world_size: int) -> ParallelConfig:
    """The layout of `world_size` ranks; needs neither their devices nor the model.

    Raises:
        RecipeError: the sizes or the batches of a step do not fit this number of ranks.
    """
    layout, train = models.parallel_config(recipe.parallel, world_size), recipe.train
    micro_batches_per_step(train.batches_per_step, layout.num_batches, router_loss=train.router_loss)
    if recipe.eval_data is not None:
        try:
            micro_batches_per_step(train.eval_batches, layout.num_batches)
        except RecipeError as error:
            raise RecipeError(str(error).replace("batches_per_step", "eval_batches")) from error
    return layout


def require_valid_on_some_ranks(recipe: Recipe) -> None:
    """Refuses a recipe that is valid on no number of ranks: tries each that its layout and its batches per step allow.

        sp: 2, ep: 3, batches_per_step: 12      6, 12 and 24 ranks, with 3, 6 and 12 batch groups

    Raises:
        RecipeError: what `require_valid` says of the smallest.
    """
    section, batches_per_step = recipe.parallel, recipe.train.batches_per_step
    smallest = section.dp_replicate * math.lcm(section.sp, section.ep)
    world_sizes = range(smallest, batches_per_step * section.sp + 1, smallest)
    errors = []
    for world_size in [size for size in world_sizes if batches_per_step % (size // section.sp) == 0] or [smallest]:
        try:
            require_valid(recipe, world_size)
            return
        except RecipeError as error:
            errors.append(error)
    raise errors[0]


def describe(
    recipe: Recipe,
    model: PreTrainedModel,
    world_size: int,
    device: PlannedDevice | None = None,
    unchecked: Sequence[str] = (),
) -> str:
    """Rank map, what runs where, cost and memory of a run on `world_size` ranks.

    Args:
        model: as `checks.build_runnable` returns it.
        device: of each rank; None: that of this machine.
        unchecked: of `planned_device.plannable`.
    """
    layout = models.parallel_config(recipe.parallel, world_size)
    device = device or planned_device.planned(None)
    checkpointing.apply(model, recipe.parallel.activation_checkpointing)
    chosen = models.configure_seams(recipe, model)
    cost = flops.model_cost(model)
    options = models.sharding_options(recipe.parallel, device.device)
    if not choose.objective_of(recipe.objective).is_models_own:
        chosen["causal_lm_loss"] = "by the objective, in chunks"
    estimate = memory.estimate(model, recipe, layout, options.param_dtype, chosen, device_type=device.kind)
    train, tokens = recipe.train, recipe.data.tokens_per_batch
    peak = recipe.log.peak_tflops or device.peak_tflops
    step_flops = cost.flops([tokens] * train.batches_per_step)
    rates = [optimizers.lr_factor(step, recipe.optim, train.steps) * recipe.optim.lr for step in (0, train.steps - 1)]
    weights = models.find_weights(recipe.model)
    lines = [
        f"planned for  {world_size:,} x {device.text}",
        *([f"unchecked    {', '.join(unchecked)}: only a machine with that device can tell"] if unchecked else []),
        f"model        {type(model).__name__}, {cost.parameters / 1e6:,.1f} M parameters, {cost.active / 1e6:,.1f} M "
        f"active per token; weights: {weights or 'random'}",
        *([f"vocabulary   {line}"] if (line := _vocabulary(recipe, model)) else []),
        f"objective    {recipe.objective.name}",
        *([f"teacher      {recipe.teacher.source}, not counted in the memory below"] if recipe.teacher else []),
        f"step         {train.batches_per_step} batches of up to {tokens} tokens, "
        f"{micro_batches_per_step(train.batches_per_step, layout.num_batches)} per batch group; "
        f"{step_flops / 1e12:.3g} TFLOP with documents as long as a batch"
        + (f", {step_flops / world_size / peak / 1e12 / 0.4:.2f} s at 40 % MFU" if peak else ""),
        f"optimizer    {recipe.optim.name}, lr {rates[0]:.2e} at step 1, {rates[1]:.2e} at step {train.steps}",
        *(f"{name:<12} {chosen.get(name, 'eager')}" for name in report.seam_users(model)),
        *_attention_lines(recipe, model, device),
        *_table_lines(recipe, model, layout),
        *(
            [f"lora         {lora_targets.find_targets(model, recipe.lora).summary}"]
            if recipe.lora is not None
            else []
        ),
        *([f"balance      {line}"] if (line := router_balance.summary(recipe, model)) else []),
        *([f"precision    {line}"] if (line := precision.summary(model, recipe)) else []),
        f"run          {recipe.directory}",
        "",
        estimate.text(),
        *_share_of_device(estimate.total, device),
        *_host_memory(recipe, model, layout, options.param_dtype),
        "",
        draw(layout) if layout.world <= DRAWN_RANKS else summary(layout),
    ]
    return "\n".join(lines)


def _attention_lines(recipe: Recipe, model: PreTrainedModel, device: PlannedDevice) -> list[str]:
    """The attention of each kind of layer, and why nothing faster was chosen; for a GPU of another machine what decides there."""
    if device.kind == "cuda" and not device.is_here:
        return ["attention    chosen there: the fastest of those installed that takes these layers"]
    names = attention_kinds.named_in(model.config)
    return attention_choice.explain(type(model), model.config, names, models.compute_dtype(recipe)).splitlines()


def _table_lines(recipe: Recipe, model: PreTrainedModel, layout: ParallelConfig) -> list[str]:
    """Large embeddings: whose rows are sent for, and which are gathered all the same."""
    names, gathered = tables.choose(model, recipe.parallel.shard_tables_above, world=layout.world)
    counts = {
        name: f"{name}, {model.get_parameter(name).numel() / 1e9:,.2f} B parameters" for name in (*names, *gathered)
    }
    return [f"table        {counts[name]}: rows are sent for" for name in names] + [
        f"table        {counts[name]}: gathered, for {reason}" for name, reason in gathered.items()
    ]


def _share_of_device(total: int, device: PlannedDevice) -> list[str]:
    """How much of the device's memory the estimate is."""
    if device.memory is None:
        return []
    share = total / device.memory
    more = "; it does not fit: docs/troubleshooting.md says what takes less" if share > 1 else ""
    return [f"  {share:.0%} of the {device.memory / 2**30:.0f} GiB of a device{more}"]


def _host_memory(
    recipe: Recipe, model: PreTrainedModel, layout: ParallelConfig, compute_dtype: torch.dtype | None
) -> list[str]:
    """The host memory that layers' inputs take."""
    itemsize = (compute_dtype or getattr(torch, recipe.model.dtype)).itemsize
    size = memory.host_bytes(model, recipe, layout, itemsize)
    what = "inputs of layers and results of attention" if recipe.parallel.offload_attention else "inputs of layers"
    return [f"  {size / 2**30:.2f} GiB of host memory for each rank: {what}, per micro-batch"] if size else []


def summary(layout: ParallelConfig) -> str:
    """What the ranks of a large layout hold, by groups, in place of a table with a column for each."""
    lines = [
        f"{layout.world:,} ranks, each with 1/{layout.num_shards} of the dense parameters and of the experts: 1/{layout.ep} of "
        f"them, each in {layout.ep_shard} shards",
        f"  {layout.num_batches:,} different batches per micro-step, one for each {layout.sp} ranks: rank r reads batch "
        + ("r" if layout.sp == 1 else f"r // {layout.sp}"),
    ]
    for name, purpose in PURPOSES.items():
        groups = layout.groups(name)
        if len(groups[0]) > 1:
            shown = ", ".join(_ranks_text(group) for group in groups[:2]) + (", ..." if len(groups) > 2 else "")
            lines.append(f"  {name:<13} {len(groups):>5,} x {len(groups[0]):>5,} ranks that {purpose}: {shown}")
    return "\n".join(lines)


def _ranks_text(ranks: Sequence[int]) -> str:
    """`0-7`, or `0, 8 ... 1016` for ranks that are not neighbours."""
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"[{ranks[0]}-{ranks[-1]}]"
    return f"[{ranks[0]} {ranks[1]} ... {ranks[-1]}]" if len(ranks) > 2 else f"[{ranks[0]} {ranks[1]}]"


def _vocabulary(recipe: Recipe, model: PreTrainedModel) -> str:
    """How the vocabulary grows; "" if the recipe does not say so, or only the ranks download the weights."""
    section, weights = recipe.model.resize_vocab, models.find_weights(recipe.model)
    if section is None or not isinstance(weights, Path):
        return ""
    match = match_checkpoint(model, weights, **models.allowed_differences(recipe, model))
    return resize_vocab.summary(section, model.config.get_text_config().vocab_size, match.grown)
