"""torchtitan's Qwen3 MoE, built as its trainer does, for `bench_train.py`: a peer that is tuned for speed.

Its `parallelize_qwen3` is called with its `JobConfig`, as its documentation recommends for performance: blocks and loss by
`torch.compile`, its FSDP2 and expert parallelism, `grouped_mm` experts, varlen attention within documents, activation
checkpointing of none, of chosen operators or of all of a layer, fused AdamW, its `clip_grad_norm_`, Python's garbage
collection off. fp32 parameters, bf16 compute, fp32 reduction; the router learns and nothing forces its balance.

On the CPU, which is for seeing that the numbers agree, nothing is compiled, and what needs a GPU is replaced: the attention
kernel (by SDPA per document), the Triton kernel of the order of tokens (by torchtitan's own reference) and `histc` of whole
numbers (by `bincount`).

Needs the package `torchtitan` (0.2.2), and `tyro`, which its configuration imports.

    S tokens of this rank's row   E experts   H hidden size   M width of an expert
"""

# pyright: reportMissingImports=false
# The peer need not be installed where types are checked.
from __future__ import annotations

import functools
import gc
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import named_weights
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

MODES = ("none", "selective", "full")  # of activation checkpointing, the fastest first
# Packages whose `__init__` import data sets, metrics and checkpoints, which only the trainer needs.
WITHOUT_INIT = ("qwen3", "llama3", "llama4")
NAMES = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
NAMES |= {"output.weight": "lm_head.weight"}
LAYER_NAMES = {f"attention.w{letter}.weight": f"self_attn.{letter}_proj.weight" for letter in "qkvo"}
LAYER_NAMES |= {f"attention.{letter}_norm.weight": f"self_attn.{letter}_norm.weight" for letter in "qk"}
LAYER_NAMES |= {"attention_norm.weight": "input_layernorm.weight"}
LAYER_NAMES |= {"ffn_norm.weight": "post_attention_layernorm.weight"}
LAYER_NAMES |= {"moe.router.gate.weight": "mlp.gate.weight", "moe.experts.w2": "mlp.experts.down_proj"}
GATE_UP = "mlp.experts.gate_up_proj"  # (E, 2 M, H): first the gate's rows, then the others
HALVES = {"moe.experts.w1": 0, "moe.experts.w3": 1}
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # what compilation and checkpointing put into names


def version() -> str:
    """The version of torchtitan, if this process has imported it, to append to others."""
    return f", torchtitan {importlib.metadata.version('torchtitan')}" if "torchtitan" in sys.modules else ""


def import_parts() -> None:
    """Imports what a step needs of torchtitan, without what its packages import for data, metrics and checkpoints.

    Raises:
        ModuleNotFoundError: torchtitan or what it needs is not installed.
    """
    folder = importlib.import_module("torchtitan.models").__path__
    for model in WITHOUT_INIT:
        name = f"torchtitan.models.{model}"
        if name not in sys.modules:
            spec = importlib.machinery.PathFinder.find_spec(name, folder)
            if spec is None:
                raise ModuleNotFoundError(f"{name} is not installed: this needs torchtitan 0.2.2.", name=name)
            sys.modules[name] = importlib.util.module_from_spec(spec)  # a package with a path, its `__init__` not run
    # The model takes two names from `train_spec` that come from `model`; the rest of it is for the trainer.
    sys.modules.setdefault("torchtitan.protocols.train_spec", importlib.import_module("torchtitan.protocols.model"))
    importlib.import_module("torchtitan.models.qwen3.infra.parallelize")


class Peer:
    """One model of torchtitan on this rank, and how it is trained.

    Args:
        sizes: of the model, in the words of `Qwen3MoeConfig`.
        ep: ranks that share the experts of a layer.
        tokens: of the longest row.
        mode: of activation checkpointing, one of `MODES`.
        device: "cuda", or "cpu".

    Attributes:
        model: sharded, on the meta device until `fill`.
    """

    def __init__(self, sizes: dict, ep: int, *, tokens: int, mode: str, device: str) -> None:
        import_parts()
        from torchtitan.components.loss import build_cross_entropy_loss
        from torchtitan.models.moe import moe
        from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3
        from torchtitan.models.qwen3.model.model import Qwen3Model

        self.device = device
        self.forget_compiled()
        _keep_uncompiled(moe)
        if device == "cpu":
            _run_on_cpu()
        gc.disable()  # as its trainer, which collects every 50 steps
        self.dims = dims_of(ep)
        self.job = job_of(tokens=tokens, mode=mode, ep=ep, device=device)
        arguments = arguments_of(sizes)
        arguments.update_from_config(self.job)
        with torch.device("meta"):
            model = Qwen3Model(arguments)
        self.model = parallelize_qwen3(model, self.dims, self.job).train()
        if device == "cpu":
            for module in self.model.modules():  # gloo cannot scale as it sums; the factor is 1
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        self.loss = build_cross_entropy_loss(self.job)

    def fill(self) -> None:
        """Weights by the names that our model gives them."""
        self.forget_compiled()  # of rows of another length: a run has one length
        if next(self.model.parameters()).is_meta:
            self.model.to_empty(device=self.device)
            with torch.no_grad():
                self.model.init_weights(buffer_device=torch.device(self.device))
        for name, parameter in self.model.named_parameters():
            named_weights.place(full_weight(name, parameter.shape, self.device), parameter)

    def optimizer(self) -> torch.optim.Optimizer:
        from torchtitan.components.optimizer import build_optimizers

        return build_optimizers([self.model], self.job.optimizer, self.dims)

    def step(
        self, model: Peer, optimizer: torch.optim.Optimizer, inputs: dict, state: object, items: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One training step: this rank's share of the loss, and the norm of all gradients before they are clipped."""
        from torchtitan.distributed.utils import clip_grad_norm_
        from torchtitan.models.attention import VarlenMetadata

        ids = inputs["input_ids"]
        bounds, longest = inputs.get("cu_seq_lens_q"), inputs.get("max_length_q")
        if bounds is None:
            longest = ids.shape[1]
            bounds = torch.tensor([0, longest], dtype=torch.int32, device=ids.device)
        documents = VarlenMetadata(bounds, bounds, longest, longest)
        logits = self.model(ids, attention_masks=documents, positions=inputs["position_ids"])
        share = self.loss(logits, inputs["shift_labels"]) / items
        del logits  # as its trainer: they would be kept through the backward
        share.backward()
        parameters = list(self.model.parameters())
        norm = clip_grad_norm_(parameters, 1.0, foreach=True, ep_enabled=self.dims.ep_enabled)
        optimizer.step()
        optimizer.zero_grad()
        return share.detach(), norm

    def close(self) -> None:
        """Frees the model, and the compiled code that refers to it."""
        del self.model
        self.forget_compiled()
        gc.enable()

    def forget_compiled(self) -> None:
        """Discards compiled code, so that each model and length is compiled as in a separate process."""
        torch._dynamo.reset()


@functools.cache
def dims_of(ep: int) -> Any:
    """The `ParallelDims` of all ranks, cached because each creates process groups."""
    from torchtitan.distributed import ParallelDims

    world = dist.get_world_size()
    return ParallelDims(dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=ep, etp=1, world_size=world)


def job_of(*, tokens: int, mode: str, ep: int, device: str) -> Any:
    """The `JobConfig` of torchtitan; what is not named here is its default."""
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.training.seq_len, job.training.local_batch_size = tokens, 1
    job.training.mixed_precision_param, job.training.mixed_precision_reduce = "bfloat16", "float32"
    job.compile.enable = device == "cuda"
    job.activation_checkpoint.mode, job.activation_checkpoint.selective_ac_option = mode, "op"
    job.parallelism.expert_parallel_degree = ep
    job.optimizer.name, job.optimizer.lr, job.optimizer.weight_decay = "AdamW", 1e-5, 0.01
    job.optimizer.implementation = "fused"
    return job


def arguments_of(sizes: dict) -> Any:
    """The `Qwen3ModelArgs` of a `Qwen3MoeConfig` of these sizes."""
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**sizes)
    experts = MoEArgs(
        num_experts=config.num_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=config.norm_topk_prob,
        score_before_experts=False,
        top_k=config.num_experts_per_tok,
        use_grouped_mm=True,
        load_balance_coeff=None,
    )
    return Qwen3ModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
        rope_theta=dict(config.rope_parameters or {})["rope_theta"],
        qk_norm=True,
        attn_type="varlen",
        attn_mask_type="block_causal",
        enable_weight_tying=False,
        moe_enabled=True,
        moe_inter_dim=config.moe_intermediate_size,
        moe_args=experts,
    )


def full_weight(name: str, shape: torch.Size, device: str) -> Tensor:
    """The full weight of a parameter of torchtitan's model, from its name in our model.

    Raises:
        KeyError: our model has no such weight.
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    if name in NAMES:
        return named_weights.weight_of(NAMES[name], shape, device)
    _, layer, inner = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if inner not in HALVES:
        return named_weights.weight_of(prefix + LAYER_NAMES[inner], shape, device)
    gate_up = named_weights.weight_of(prefix + GATE_UP, (shape[0], 2 * shape[1], shape[2]), device)
    return gate_up.chunk(2, dim=1)[HALVES[inner]]


def _keep_uncompiled(moe: Any) -> None:
    """Each model compiles the experts' product anew: torchtitan replaces the function once per process, for one layout."""
    if not hasattr(moe, "bench_uncompiled"):
        moe.bench_uncompiled = moe._run_experts_grouped_mm
    moe._run_experts_grouped_mm = moe.bench_uncompiled


# --------------------------------------------------------------------------------------------- on the CPU


def _run_on_cpu() -> None:
    """Replaces what needs a GPU."""
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.attention import VarlenAttentionWrapper
    from torchtitan.models.moe import kernels
    from torchtitan.models.moe import utils as permutation

    parallel_dims.device_type = "cpu"
    VarlenAttentionWrapper._compiled_varlen_attn = _attend_per_document
    permutation.generate_permute_indices = functools.partial(kernels.generate_permute_indices, use_cpu=True)
    if not hasattr(torch.histc, "__wrapped__"):
        torch.histc = _counting(torch.histc)


def _attend_per_document(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: object, scale: float, window_size: tuple[int, int]
) -> Tensor:
    """`(S, heads, head size)` from a query of that shape, keys and values `(S, heads of these, head size)`."""
    if tuple(window_size) != (-1, 0):
        raise ValueError(f"Expected causal attention, window (-1, 0), got {window_size}.")
    outputs = []
    for first, last in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        q, k, v = (full[first:last].transpose(0, 1)[None] for full in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _counting(histc: Callable) -> Callable:
    """`torch.histc`, also of integers from 0 to `bins` - 1, which torch has on GPUs alone."""

    @functools.wraps(histc)
    def count(values: Tensor, *, bins: int, min: int, max: int) -> Tensor:
        if values.is_floating_point():
            return histc(values, bins=bins, min=min, max=max)
        return torch.bincount(values, minlength=bins)

    return count
