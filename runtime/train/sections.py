"""The sections of a recipe, as frozen, checked dataclasses; `recipe.py` puts them together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """What is trained.

    Attributes:
        source: a folder or Hub name with a config.json, or the type of a generated model ("qwen3_moe") for that type's
            default config.
        code: a folder or module with an architecture that transformers does not know (configuration_*.py, modeling_*.py,
            processing_*.py); each process registers its classes and `patchgen generate --source` has read it.
        generated: the folder that `patchgen generate` wrote to, whose models go before those of this installation.
        trust_remote_code: run the code that `source` itself brings, as `code`. Nothing else runs it.
        overrides: fields of the config that are replaced, nested like the config.
        weights: "auto": those in `source` if it holds any, else random; "random"; or a folder with weights.
        allow_missing: patterns of parameters that the weights may lack (new heads); they keep their random values.
        dtype: what parameters and optimizer state are stored in.
        attention: a name of runtime/attention.py, or one for each config in the model's ({"": NAME, vision_config: NAME}); null
            chooses, for each kind of layer, the fastest that can run here and has what it asks for: sinks, soft caps, windows, the
            size of its heads.
        separate_documents: compute each packed document in a row of its own, padded behind, or before with "left": for models that
            cannot be told where documents end; null: where the proof of the model shows that it needs it.
        freeze: patterns of parameter names (`model.visual.*`) that are not trained.
    """

    source: str
    code: str | None = None
    generated: str | None = None
    trust_remote_code: bool = False
    overrides: dict[str, Any] = Field(default_factory=dict)
    weights: str = "auto"
    allow_missing: tuple[str, ...] = ()
    dtype: DtypeName = "float32"
    attention: str | dict[str, Any] | None = None
    separate_documents: bool | Literal["left"] | None = None
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True, config=STRICT)
class ParallelSection:
    """How ranks share the work; `dp_shard` is what the other sizes leave of the ranks.

    Attributes:
        dp_replicate: copies of the sharded model (HSDP).
        sp: ranks that share a sequence (Ulysses).
        ep: ranks that share the experts.
        head_groups: groups in which the heads of an attention travel under sp, so that computing overlaps with it.
        expert_capacity: null, or the rows a rank may send to another in an expert exchange (no host sync with it).
        expert_exchange: how tokens reach their experts; auto: "peer_memory" between up to four GPUs of one host, else "all_to_all".
        param_dtype: what layers compute in; null: bfloat16 on GPUs, as stored on CPUs.
        reduce_dtype: what gradients are summed in.
        exchange_gradients: sum gradients on arrival, not on the way; null: where that saves bytes within a host.
        shard_exchange: how shards are gathered and gradients summed; auto: "peer_memory" between up to four GPUs of one host, else
            "collectives".
        reshard_after_forward: free a layer's gathered parameters after its forward.
        prefetch: layers gathered ahead of the one that runs.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        compile_layers: torch.compile each layer.
        activation_checkpointing: what a layer keeps for the backward.
        stall_timeout: seconds without progress after which a rank reports where it waits and ends.
    """

    dp_replicate: Count = 1
    sp: Count = 1
    ep: Count = 1
    head_groups: Count = 1
    expert_capacity: Count | None = None
    expert_exchange: Literal["auto", "all_to_all", "peer_memory"] = "auto"
    param_dtype: DtypeName | None = None
    reduce_dtype: DtypeName = "float32"
    exchange_gradients: bool | None = None
    shard_exchange: Literal["auto", "collectives", "peer_memory"] = "auto"
    reshard_after_forward: bool = True
    prefetch: CountOrZero = 1
    cpu_offload: bool = False
    compile_layers: bool = False
    activation_checkpointing: Literal["none", "full", "selective", "offload"] = "none"
    stall_timeout: Positive = 600.0


@dataclass(frozen=True, config=STRICT)
class KernelsConfig:
    """Which implementation serves each seam. A named one that no module of the model calls is an error.

    Attributes:
        fused_moe: null: "auto" where the model has experts.
        causal_lm_loss: null: "auto" where the model has the seam.
        rms_norm: null: upstream's code.
        rotary: null: upstream's code.
        swiglu: null: upstream's code.
    """

    fused_moe: str | None = None
    causal_lm_loss: str | None = None
    rms_norm: str | None = None
    rotary: str | None = None
    swiglu: str | None = None


@dataclass(frozen=True, config=STRICT)
class GroupConfig:
    """Parameters with settings of their own; the first group that matches a name counts.

    Attributes:
        pattern: of parameter names (`model.visual.*`), as in the shell.
        lr: peak learning rate; null: that of `optim`.
        weight_decay: null: that of `optim`.
    """

    pattern: str
    lr: Positive | None = None
    weight_decay: NotNegative | None = None


@dataclass(frozen=True, config=STRICT)
class OptimConfig:
    """The optimizer, its schedule, and what happens to gradients before it.

    Attributes:
        name: "muon" takes the matrices of layers; embeddings, heads, vectors and stacked experts get AdamW.
        lr: peak learning rate.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled; on parameters of two or more dimensions.
        decay_vectors: also on biases and norms.
        momentum: of Muon.
        muon_lr: peak learning rate of what Muon takes; null: `lr`, its update scaled to AdamW's size.
        groups: parameters with settings of their own.
        schedule: after the warmup: constant; linear or cosine down to `min_lr_ratio`; or warmup-stable-decay, linear
            over the last `decay_steps`.
        warmup_steps: linear from 0.
        decay_steps: of "wsd".
        min_lr_ratio: the last learning rate, as a share of the peak.
        max_grad_norm: gradients are scaled down to it.
        on_nonfinite: a step with a gradient that is not finite is skipped, or stops the run.
        max_skipped: skipped steps in a row that stop the run after all.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 1e-5
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    decay_vectors: bool = False
    momentum: BelowOne = 0.95
    muon_lr: Positive | None = None
    groups: tuple[GroupConfig, ...] = ()
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: CountOrZero = 0
    decay_steps: CountOrZero = 0
    min_lr_ratio: Fraction = 0.1
    max_grad_norm: Positive = 1.0
    on_nonfinite: Literal["skip", "stop"] = "skip"
    max_skipped: Count = 20


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """The loop.

    Attributes:
        steps: optimizer steps; the run ends earlier if the data do.
        batches_per_step: packed batches of one step over all ranks; what each batch group gets of them is accumulated.
            The same number gives the same losses on any number of ranks, unless samples are read as a stream.
        router_loss: over which tokens the loads of the experts are counted, where the model adds the loss of its routers
            (`model.overrides: {output_router_logits: true}`): each packed row balances its own; or the whole step does
            ("global"), which lets experts specialise, and cannot be accumulated. Padding counts in neither.
        seed: of random weights, and of whatever draws random numbers in a step.
        deterministic: torch's deterministic algorithms, where they exist.
        first_loss_limit: the largest plausible first loss per label, in nats, before the first optimizer step; null:
            1.5 ln V + 1, or 1.5 L + 1 where `patchgen doctor` measured L with this checkpoint. Above it the run ends.
        cuda_graph: replay forward and backward as one CUDA graph; for rows so short that the host cannot launch their kernels as
            fast as they run (4,096 tokens per GPU, say). Needs `data.pad_batches`, and one batch per batch group and step.
        eval_every: steps between evaluations; at the end of a run there is one in any case. 0: only then.
        eval_batches: packed batches of an evaluation over all ranks.
        profile_start: first step of the profiler's window.
        profile_steps: its length; 0: no profile. Traces go to `profile/` of the run.
        restarts: times that failed ranks are started again, from the last checkpoint.
    """

    steps: Count = 1000
    batches_per_step: Count = 1
    router_loss: Literal["row", "global"] = "row"
    seed: CountOrZero = 0
    deterministic: bool = False
    first_loss_limit: Positive | None = None
    cuda_graph: bool = False
    eval_every: CountOrZero = 0
    eval_batches: Count = 8
    profile_start: Count = 10
    profile_steps: CountOrZero = 0
    restarts: CountOrZero = 0


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """What is saved, and when.

    Attributes:
        every: steps between checkpoints; 0: only at the end and when stopped.
        keep: the newest that stay.
        asynchronous: write while training goes on.
        on_failed: a save that fails (a full disk) stops the run, or is told, and so is a line of the log; the next is tried.
        export: write the trained model in upstream's layout to `export/` at the end.
    """

    every: CountOrZero = 0
    keep: Count = 3
    asynchronous: bool = True
    on_failed: Literal["stop", "continue"] = "stop"
    export: bool = True


@dataclass(frozen=True, config=STRICT)
class LogConfig:
    """What is recorded.

    Attributes:
        directory: of the run; null: `runs/` and the recipe's name. A run that is in it is continued.
        every: steps between lines on the terminal; the JSONL log has every step.
        trackers: also write there; each needs its package.
        project: of wandb and trackio.
        peak_tflops: of one device in the compute dtype, for MFU; null: by the device's name.
        expert_load: record how unevenly experts are loaded.
    """

    directory: str | None = None
    every: Count = 1
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "patchgen"
    peak_tflops: Positive | None = None
    expert_load: bool = True


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Adapters through PEFT: only they are trained and saved.

    Attributes:
        rank: of the two factors.
        alpha: the update is scaled by `alpha / rank`.
        rslora: by `alpha / sqrt(rank)` instead (rank-stabilised LoRA).
        dropout: of the adapter's input.
        target_modules: names or endings of linear layers, a regular expression of whole names (a text instead of a list), or
            "all-linear". A tower (`visual`, `audio_tower`) is adapted where a target names it, or matches nothing else.
        exclude_modules: names or endings, or a regular expression, of modules that stay as they are.
        layers_to_transform: numbers of the layers that are adapted; null: all.
        layers_pattern: names of the lists of layers that these numbers are of; null: any.
        target_parameters: names or endings of stacked experts' parameters (`mlp.experts.gate_up_proj`): in any layout, as
            the experts are divided. Any other parameter: on one rank.
        merge: at the end of the run, add the adapters to the weights, too, and write the model to `export/`.
    """

    rank: Count = 16
    alpha: Positive = 32.0
    rslora: bool = False
    dropout: BelowOne = 0.0
    target_modules: str | tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    exclude_modules: str | tuple[str, ...] | None = None
    layers_to_transform: tuple[CountOrZero, ...] | None = None
    layers_pattern: tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] = ()
    merge: bool = False


@dataclass(frozen=True, config=STRICT)
class ObjectiveConfig:
    """What is learned: docs/objectives.md.

    Attributes:
        name: next_token, dpo, reward, classification, distillation, or a class of one's own: module:Class.
        options: of that class.
    """

    name: str = "next_token"
    options: dict[str, Any] = Field(default_factory=dict)
