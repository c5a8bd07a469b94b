"""The sections of a recipe, as frozen, validated dataclasses; `recipe.py` combines them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, config=STRICT)
class ResizeVocabConfig:
    """A vocabulary with more tokens than the weights have rows for: embeddings and head grow, and never shrink.

    Attributes:
        to: rows for every token of the tokenizer in `source`, or at least this many; weights that have as many stay as they are.
        multiple_of: the number of rows is rounded up to a multiple of this.
        new_rows: mean: the plain mean of the rows that the weights have; random: upstream's initial values (a normal distribution
            with the config's initializer_range). With adapters or frozen embeddings, which leave new rows as they are, only random.
    """

    to: Literal["tokenizer"] | PositiveInt = "tokenizer"
    multiple_of: PositiveInt = 1
    new_rows: Literal["mean", "random"] = "mean"


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """What is trained.

    Attributes:
        source: a folder or Hub name with a config.json, or the type of a generated model ("qwen3_moe") for that type's
            default config.
        code: a folder or module with an architecture that transformers does not know (configuration_*.py, modeling_*.py,
            processing_*.py), from which `patchgen generate --source` generated the model; each process registers its classes.
        generated: the output folder of `patchgen generate`; its models take precedence over the installed ones.
        trust_remote_code: use the code in `source` as `code`. It is not run otherwise.
        overrides: fields of the config to replace, nested like the config.
        weights: "auto": those in `source` if there are any, else random; "random"; or a folder with weights.
        allow_missing: patterns of parameters that the weights may lack (new heads); they keep their random values.
        ignore_keys: patterns of keys in the weights that are not loaded (`v_head.*` of a model from PPO), and not exported.
        resize_vocab: null, or how the vocabulary grows to that of the tokenizer ({} for the defaults); the export has its size.
        dtype: what parameters and optimizer state are stored in.
        attention: a name of runtime/attention.py, or one for each config in the model's ({"": NAME, vision_config: NAME}, where
            "" is the config itself); null chooses, for each kind of layer, the fastest that runs here and supports what it
            needs: sinks, soft caps, windows, its head size.
        separate_documents: compute each packed document in its own row, padded on the right, or on the left with "left": for models
            that take no document bounds; null: if the proof of the model shows that it is needed.
        freeze: patterns of parameter names (`model.visual.*`) that are not trained.
    """

    source: str
    code: str | None = None
    generated: str | None = None
    trust_remote_code: bool = False
    overrides: dict[str, Any] = Field(default_factory=dict)
    weights: str = "auto"
    allow_missing: tuple[str, ...] = ()
    ignore_keys: tuple[str, ...] = ()
    resize_vocab: ResizeVocabConfig | None = None
    dtype: DtypeName = "float32"
    attention: str | dict[str, Any] | None = None
    separate_documents: bool | Literal["left"] | None = None
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True, config=STRICT)
class ParallelSection:
    """How ranks share the work; `dp_shard` follows from the other sizes and the number of ranks.

    Attributes:
        dp_replicate: number of copies of the sharded model (HSDP).
        sp: ranks that share a sequence (Ulysses).
        ep: ranks that share the experts.
        head_groups: groups of attention heads exchanged one after the other under sp, overlapped with computation.
        expert_capacity: null, or the most rows that a rank sends to each other rank in an expert exchange, which then needs no
            host sync; rows beyond it are dropped and counted.
        expert_exchange: how tokens reach their experts; auto: "peer_memory" between up to four GPUs of one host, else "all_to_all".
        param_dtype: the dtype that layers compute in; null: bfloat16 on GPUs, as stored on CPUs.
        reduce_dtype: the dtype that gradients are summed in.
        exchange_gradients: send gradients in the dtype in which they are computed, by an all-to-all, and sum them on arrival,
            instead of a reduce-scatter in `reduce_dtype`; null: on GPUs of one host, if it saves bytes.
        shard_exchange: how shards are gathered and gradients summed; auto: "peer_memory" between up to four GPUs of one host with
            torch before 2.15, else "collectives".
        reshard_after_forward: free a layer's gathered parameters after its forward.
        prefetch: number of layers gathered ahead of the running one.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        compile_layers: torch.compile each layer.
        shard_tables_above: embeddings of more parameters that are not tied to a head are not gathered: ids are sent to the ranks of
            their rows, rows come back; null: all are gathered.
        activation_checkpointing: what a layer keeps for the backward. none: all activations; full: its input, the layer is computed
            again; selective: matrix products, attention and what is exchanged, the cheap rest is computed again; offload: all, in
            host memory.
        offload_inputs: with activation_checkpointing full or selective, keep the input of each layer in host memory.
        offload_attention: with offload_inputs and full, keep the results of attention there, too, instead of computing them again.
        stall_timeout: seconds without progress after which a rank reports where it waits and exits.
    """

    dp_replicate: PositiveInt = 1
    sp: PositiveInt = 1
    ep: PositiveInt = 1
    head_groups: PositiveInt = 1
    expert_capacity: PositiveInt | None = None
    expert_exchange: Literal["auto", "all_to_all", "peer_memory"] = "auto"
    param_dtype: DtypeName | None = None
    reduce_dtype: DtypeName = "float32"
    exchange_gradients: bool | None = None
    shard_exchange: Literal["auto", "collectives", "peer_memory"] = "auto"
    reshard_after_forward: bool = True
    prefetch: NonNegativeInt = 1
    cpu_offload: bool = False
    compile_layers: bool = False
    shard_tables_above: PositiveInt | None = 2**31
    activation_checkpointing: Literal["none", "full", "selective", "offload"] = "none"
    offload_inputs: bool = False
    offload_attention: bool = False
    stall_timeout: PositiveFloat = 600.0

    def __post_init__(self) -> None:
        mode = self.activation_checkpointing
        if self.offload_inputs and mode not in ("full", "selective"):
            raise ValueError(
                f"parallel.offload_inputs is set, but parallel.activation_checkpointing is {mode}, which keeps no input of a layer "
                "alone. To fix: set parallel.activation_checkpointing: full (or selective), or remove parallel.offload_inputs."
            )
        if self.offload_inputs and self.compile_layers:
            raise ValueError(
                "parallel.offload_inputs and parallel.compile_layers: the graph of a compiled layer decides itself what is kept, "
                "on the device. To fix: remove one of them; kernels.rotary and others are compiled without it."
            )
        if self.offload_attention and not (self.offload_inputs and mode == "full"):
            raise ValueError(
                "parallel.offload_attention needs parallel.offload_inputs: true and parallel.activation_checkpointing: full; "
                f"found {str(self.offload_inputs).lower()} and {mode}. To fix: set these, or remove it."
            )


@dataclass(frozen=True, config=STRICT)
class KernelsConfig:
    """Which implementation serves each seam: eager, which is upstream's code, or one of those below. Naming one other than eager
    for a seam that no module calls is an error.

    Attributes:
        fused_moe: auto, torch, triton, fp8, fp8_wide_gradients or sonic; null: auto where the model has experts, or fp8 by
            `train.precision`.
        causal_lm_loss: auto, linear or chunked; null: auto where the model has the seam.
        rms_norm: auto, compiled or quack; null: eager.
        rotary: compiled; null: eager.
        swiglu: compiled; null: eager.
    """

    fused_moe: str | None = None
    causal_lm_loss: str | None = None
    rms_norm: str | None = None
    rotary: str | None = None
    swiglu: str | None = None


@dataclass(frozen=True, config=STRICT)
class ParameterGroupConfig:
    """Parameters with their own settings; the first group that matches a name applies.

    Attributes:
        pattern: a shell-style pattern of parameter names (`model.visual.*`).
        lr: peak learning rate; null: that of `optim`.
        weight_decay: null: that of `optim`. Applies to biases and norms only with `decay_vectors`.
    """

    pattern: str
    lr: PositiveFloat | None = None
    weight_decay: NonNegativeFloat | None = None


@dataclass(frozen=True, config=STRICT)
class OptimConfig:
    """The optimizer, its schedule, and what happens to gradients before it.

    Attributes:
        name: "muon" takes the matrices of layers and of experts, each by itself; embeddings, heads and vectors get AdamW.
        lr: peak learning rate.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled weight decay, on parameters of two or more dimensions.
        decay_vectors: weight decay also on biases and norms.
        momentum: of Muon.
        muon_lr: peak learning rate of Muon's parameters, whose updates are scaled to AdamW's size; null: `lr`.
        muon_experts: stacked experts get Muon as well, gate and up apart; false: AdamW.
        muon_by_head: patterns of matrices whose rows are heads, such as `*.q_proj.weight`: each head by itself.
        groups: parameters with their own settings; the first group that matches applies.
        schedule: after the warmup: constant; linear or cosine down to `min_lr_ratio`; or warmup-stable-decay, linear
            over the last `decay_steps`.
        warmup_steps: linear; the first step has 1 / `warmup_steps` of the peak.
        decay_steps: length of the final decay of "wsd".
        min_lr_ratio: what the learning rate decays to, as a share of the peak; reached after the last step.
        max_grad_norm: gradients are clipped to this norm.
        on_nonfinite: a step with a gradient that is not finite is skipped, or stops the run.
        max_skipped: this many skipped steps in a row stop the run.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: PositiveFloat = 1e-5
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    decay_vectors: bool = False
    momentum: FractionBelowOne = 0.95
    muon_lr: PositiveFloat | None = None
    muon_experts: bool = True
    muon_by_head: tuple[str, ...] = ()
    groups: tuple[ParameterGroupConfig, ...] = ()
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: NonNegativeInt = 0
    min_lr_ratio: Fraction = 0.1
    max_grad_norm: PositiveFloat = 1.0
    on_nonfinite: Literal["skip", "stop"] = "skip"
    max_skipped: PositiveInt = 20


@dataclass(frozen=True, config=STRICT)
class Fp8Config:
    """Linear layers with `precision: fp8`; those of experts are `kernels.fused_moe`.

    Attributes:
        exclude: patterns of paths of linear layers that stay in the compute dtype (`model.layers.0.*`).
        weight_gradients: what gradients of their weights are computed in; bfloat16: that of the layers.
    """

    exclude: tuple[str, ...] = ()
    weight_gradients: Literal["bfloat16", "fp8"] = "bfloat16"


@dataclass(frozen=True, config=STRICT)
class RouterBiasConfig:
    """How the selection bias of each expert is moved with `router_balance: bias`.

    Attributes:
        rate: what a bias is moved by after a step, up if its expert got fewer tokens than the mean, down if it got more.
        by: sign: by the rate; size: by the rate times the error of the load, as a multiple of the mean load.
        warmup_steps: linear; the first step has 1 / `warmup_steps` of the rate.
        bound: null, or the largest absolute value of a bias.
    """

    rate: PositiveFloat = 0.001
    by: Literal["sign", "size"] = "sign"
    warmup_steps: NonNegativeInt = 0
    bound: PositiveFloat | None = None


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """The loop.

    Attributes:
        steps: optimizer steps; the run ends earlier if the data do.
        batches_per_step: packed batches of one step over all ranks; each batch group (the ranks that read the same batches)
            accumulates its share of them.
            The same number gives the same losses on any number of ranks, unless samples are read as a stream.
        router_balance: how experts are kept busy. loss: the router loss of the model, with the coefficient of its config
            (`router_aux_loss_coef`; 0.01 if that is 0); bias: without a loss, by moving a bias per expert that models such as
            DeepSeek-V3 add to the scores for selection alone; none: as the config says. null: loss if the experts start from
            random weights and the model has that loss, else none. docs/tasks/balanced_experts.md.
        router_bias: how that bias is moved.
        router_loss: the tokens over which expert loads are counted, if the model adds a router loss: those of each packed row, or
            of the full step ("global"), which lets experts specialise and cannot be combined with accumulation. Padding is not
            counted.
        precision: null: all products in `parallel.param_dtype`; fp8: those of experts, and of the linear layers of attention and
            dense MLPs, in FP8 (e4m3) on GPUs from Hopper on. What is stored and exported is the same. The linear layers cost a
            small model 0.5 % of its held-out loss, nearly all by those of two of its six layers (kernels/README.md);
            `kernels.fused_moe: fp8` alone cost none.
        fp8: which of these linear layers, and what of them.
        seed: of random weights and of random numbers in a step.
        deterministic: use torch's deterministic algorithms where they exist.
        first_loss_limit: the largest plausible first loss per label, in nats, before the first optimizer step; null:
            1.5 ln V + 1 for a vocabulary of V tokens, or 1.5 L + 1 if `patchgen doctor` measured L with this checkpoint on
            these data. Above it the run ends.
        cuda_graph: replay forward and backward as one CUDA graph; for rows so short that launching kernels takes longer than
            running them (4,096 tokens per GPU, say). Needs `data.pad_batches`, and one batch per batch group and step.
        eval_every: steps between evaluations; there is one at the end of a run that was not stopped. 0: only that one.
        eval_batches: maximum number of packed batches of an evaluation, over all ranks.
        patience: evaluations in a row without a lower loss after which the run ends; 0: it takes all steps.
        prompts: texts that the model continues at each evaluation, by its likeliest tokens, for the log and the page of the run. In
            a run on conversations each is a user's message.
        prompt_tokens: the most tokens of a continuation.
        profile_start: first step of the profiler's window, counted from where the run starts or resumes.
        profile_steps: number of steps in the profiler's window; 0: no profile. Traces go to `profile/` of the run.
        restarts: how often failed ranks are restarted from the last checkpoint.
    """

    steps: PositiveInt = 1000
    batches_per_step: PositiveInt = 1
    router_balance: Literal["none", "loss", "bias"] | None = None
    router_bias: RouterBiasConfig = Field(default_factory=RouterBiasConfig)
    router_loss: Literal["row", "global"] = "row"
    precision: Literal["fp8"] | None = None
    fp8: Fp8Config = Field(default_factory=Fp8Config)
    seed: NonNegativeInt = 0
    deterministic: bool = False
    first_loss_limit: PositiveFloat | None = None
    cuda_graph: bool = False
    eval_every: NonNegativeInt = 0
    eval_batches: PositiveInt = 8
    patience: NonNegativeInt = 0
    prompts: tuple[str, ...] = ()
    prompt_tokens: PositiveInt = 64
    profile_start: PositiveInt = 10
    profile_steps: NonNegativeInt = 0
    restarts: NonNegativeInt = 0


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """What is saved, and when.

    Attributes:
        every: steps between checkpoints; 0: only at the end and when stopped.
        keep: number of newest checkpoints to keep.
        keep_best: save a checkpoint at each evaluation with a lower loss than all before it, and keep the last of these, too.
        asynchronous: write while training continues.
        on_failed: a failed write of a checkpoint or the log (a full disk, say) stops the run, or is reported and skipped.
        export: write the trained model in upstream's layout to `export/` at the end; "best": that of the step that `keep_best`
            keeps.
        export_dtype: of the exported floating-point weights; null: for each tensor, that of the checkpoint that was loaded; of
            a model that started from random weights, `model.dtype`.
    """

    every: NonNegativeInt = 0
    keep: PositiveInt = 3
    keep_best: bool = False
    asynchronous: bool = True
    on_failed: Literal["stop", "continue"] = "stop"
    export: bool | Literal["best"] = True
    export_dtype: DtypeName | None = None


@dataclass(frozen=True, config=STRICT)
class LogConfig:
    """What is recorded.

    Attributes:
        directory: the run's folder, with log, checkpoints and export; null: `runs/NAME`, by the recipe's name. A run found there is
            resumed.
        every: steps between lines on the terminal; the JSONL log has every step.
        trackers: services to log to as well; each needs its package.
        project: of wandb and trackio.
        peak_tflops: of one device in the compute dtype, for MFU; null: by the device's name.
        expert_load: record the loads of experts, show them on the run's page, and warn once of routers that have collapsed.
    """

    directory: str | None = None
    every: PositiveInt = 1
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "patchgen"
    peak_tflops: PositiveFloat | None = None
    expert_load: bool = True


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Adapters through PEFT: only they are trained and saved.

    Attributes:
        rank: rank of the two factors.
        alpha: the update is scaled by `alpha / rank`.
        rslora: scale by `alpha / sqrt(rank)` instead (rank-stabilised LoRA).
        dropout: dropout of the adapter's input.
        target_modules: names or endings of linear layers, a regular expression of full names (a string instead of a list), or
            "all-linear". Modules of a tower (`visual`, `audio_tower`) are adapted only by a target that names the tower, or
            that matches nothing outside of towers.
        exclude_modules: names or endings, or a regular expression, of modules that get no adapter.
        layers_to_transform: indices of the layers to adapt; null: all.
        layers_pattern: names of the layer lists that these indices refer to; null: any.
        target_parameters: names or endings of stacked experts' parameters (`mlp.experts.gate_up_proj`), which train on any
            number of ranks, sharded like the experts; or of any other parameters, which train on one rank only.
        merge: at the end of the run also merge the adapters into the weights and write the model to `export/`.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    rslora: bool = False
    dropout: FractionBelowOne = 0.0
    target_modules: str | tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    exclude_modules: str | tuple[str, ...] | None = None
    layers_to_transform: tuple[NonNegativeInt, ...] | None = None
    layers_pattern: tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] = ()
    merge: bool = False


@dataclass(frozen=True, config=STRICT)
class ObjectiveConfig:
    """The training objective: docs/objectives.md.

    Attributes:
        name: next_token, dpo, reward, classification, token_classification, question_answering, embedding, distillation, or a
            custom class, module:Class.
        options: of that class.
    """

    name: str = "next_token"
    options: dict[str, Any] = Field(default_factory=dict)
