"""From a recipe to a model that is ready to train on this rank: config, class, shards, weights, kernels."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import nn

from patchgen.runtime import attention, kept_dtypes, model_calls, parallel, registry, seams
from patchgen.runtime.checkpoint import LoadReport, load_pretrained
from patchgen.runtime.checkpoint.initialise import initialise
from patchgen.runtime.checkpoint.load import CheckpointMatch
from patchgen.runtime.checkpoint.quantised import forget_quantisation
from patchgen.runtime.objectives import choose, encoder_decoder
from patchgen.runtime.objectives.heads import TaskHead, UnknownHeadError, head_over
from patchgen.runtime.parallel import ParallelConfig, checkpointing, offloaded_inputs, report, sharding, undivided
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.parts import part_files
from patchgen.runtime.train import (
    architecture,
    attention_choice,
    lora_targets,
    optimizers,
    overrides,
    precision,
    resize_vocab,
    start_times,
)
from patchgen.runtime.train.recipe import KernelsConfig, ModelConfig, ParallelSection, Recipe, RecipeError
from patchgen.runtime.train.weight_sources import find_weights, is_model_type, weights_folder
from patchgen.runtime.verify import head_kinds
from patchgen.runtime.verify.verdict import one_line

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedConfig, PreTrainedModel

    class ShardedModel(PreTrainedModel, FSDPModule):
        """A model after `fully_shard`, which changes its class in place."""


ELEMENTWISE = ("rms_norm", "rotary", "swiglu")
"""Seams that compute each token by itself."""


def read_config(model: ModelConfig) -> PreTrainedConfig:
    """The config of `model.source` with its overrides and the size of its vocabulary (`model.resize_vocab`); registers
    `model.code` in this process.

    Raises:
        RecipeError: code that cannot be registered, an unknown source, values that its config class refuses, an override
            that the config has no field for, or a vocabulary that would shrink.
    """
    config = _read_overridden_config(model)
    if model.resize_vocab is not None:
        resize_vocab.resize(config, model, model.resize_vocab)
    return config


def _read_overridden_config(model: ModelConfig) -> PreTrainedConfig:
    """The config of `model.source` with its overrides."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    recipe_heads = architecture.register(model)
    is_type = is_model_type(model.source)
    try:
        config = (
            CONFIG_MAPPING[model.source]()
            if is_type
            else AutoConfig.from_pretrained(model.source, trust_remote_code=False)
        )
    except StrictDataclassError as error:
        values, advice = (
            ("its defaults", " To fix: name a folder with a config.json.") if is_type else ("this config.json", "")
        )
        raise RecipeError(
            f"model.source = '{model.source}': transformers' config class refuses {values} ({one_line(error)}).{advice}"
        ) from error
    except (OSError, ValueError) as error:
        recipe_code = recipe_heads if isinstance(recipe_heads, architecture.Architecture) else None
        raise RecipeError(
            f"model.source = '{model.source}'{_why_unreadable(model.source, recipe_code, error)}"
        ) from error
    forget_quantisation(config)
    if not model.overrides:
        return config
    try:
        modeling_source = inspect.getsource(sys.modules[find_head(config, recipe_heads).__module__])
    except registry.UnknownModelError as error:
        raise RecipeError(f"model.source = '{model.source}': {error}") from error
    overrides.require_fields(config, model.overrides, "model.overrides", modeling_source)
    try:
        # AutoConfig read it, so this reads it again from the folder or from the cache
        file_fields = {} if is_type else type(config).get_config_dict(model.source)[0]
        overridden_config = type(config).from_dict(overrides.with_overrides(config, model.overrides, file_fields))
        forget_quantisation(overridden_config)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise RecipeError(
            f"model.overrides: {type(config).__name__} refuses them in combination with the config of '{model.source}': "
            f"{one_line(error.__cause__ or error).removesuffix('.')}. To fix: override the fields that depend on them, too."
        ) from error
    overrides.require_applied(overridden_config, model.overrides, "model.overrides")
    return overridden_config


def _why_unreadable(source: str, recipe_code: architecture.Architecture | None, error: Exception) -> str:
    """Why transformers finds no config at a source, and what to do: the rest of a sentence."""
    from transformers import CONFIG_MAPPING

    if "trust_remote_code" in str(error):
        return (
            ": its config.json needs custom code (auto_map), which only runs if the recipe allows it: set model.code: FOLDER "
            "for code that you have, or model.trust_remote_code: true for the code beside that config.json. The file that trains "
            "is generated from it with `patchgen generate NAME --source FOLDER`."
        )
    if (model_type := _unknown_type(source)) is not None:
        return (
            f": its config.json says model_type '{model_type}', which transformers {transformers.__version__} does not know, "
            f"and {f'the code of the recipe registers {recipe_code.model_types}' if recipe_code else 'no code is named'}. Name the "
            f"folder with configuration_{model_type}.py and modeling_{model_type}.py as model.code, and generate the file that "
            f"trains with `patchgen generate {model_type} --source FOLDER`."
        )
    close_matches = ", ".join(difflib.get_close_matches(source, list(CONFIG_MAPPING), n=3))
    return (
        " is neither a folder with a config.json, nor a reachable model on the Hub, nor a model type"
        f"{f' (did you mean {close_matches}?)' if close_matches else ''}.\n{error}"
    )


def _unknown_type(source: str) -> str | None:
    """The model type in a folder's config.json, if transformers does not know it."""
    from transformers import CONFIG_MAPPING

    file = Path(source) / "config.json"
    try:
        model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type") if file.is_file() else None
    except (ValueError, AttributeError):
        return None
    return model_type if isinstance(model_type, str) and model_type not in CONFIG_MAPPING else None


_HEADS_OF_KINDS = {
    head_kinds.CLASSIFICATION: "a sequence classifier",
    head_kinds.TOKEN: "a token classifier",
    head_kinds.ANSWERS: "a question-answering head",
    head_kinds.BASE: "a base model without a head",
    head_kinds.CONDITIONAL: "an encoder-decoder",
}


def build_on_meta(recipe: Recipe) -> PreTrainedModel:
    """The generated model of a recipe on the meta device, with the parameters of `model.freeze` frozen.

    Raises:
        RecipeError: no such model or no head for the objective, a head of another kind, an attention that cannot run here, or a
            pattern or target that matches none of its parameters.
    """
    config = read_config(recipe.model)
    attention.register()
    try:
        head, config = find_head_and_config(config, architecture.register(recipe.model))
    except registry.UnknownModelError as error:
        raise RecipeError(f"model.source = '{recipe.model.source}': {error}") from error
    objective, kind = choose.objective_of(recipe.objective), head_kinds.kind_of(head.__name__)
    trains_encoder_decoder = (
        kind == head_kinds.CONDITIONAL and objective.is_models_own and encoder_decoder.has_loss_seam(head)
    )
    if trains_encoder_decoder:
        head = encoder_decoder.accept_packed_rows(head)
    attention_names = attention_choice.choose(recipe.model.attention, head, config, dtype=compute_dtype(recipe))
    if objective.head is not None:
        head = _task_head(objective, head, config, recipe.objective.name)
    elif kind is not None and not trains_encoder_decoder:
        raise RecipeError(
            f"objective.name = {recipe.objective.name} trains language models, but {sys.modules[head.__module__].__file__} was "
            f"generated for {head.__name__}, {_HEADS_OF_KINDS[kind]}. Generate the causal head; sequence classification and reward "
            "models train from it with objective.name = classification or reward, token classification, question answering and "
            "base models with token_classification, question_answering and embedding. An encoder-decoder trains with "
            "objective.name = next_token if its loss is the seam causal_lm_loss; train others in another trainer (docs/tasks)."
        )
    dtype = getattr(torch, recipe.model.dtype)
    with torch.device("meta"):
        model = head._from_config(config, attn_implementation=attention_names, dtype=dtype)
    kept_dtypes.keep_in_fp32(model, dtype)
    if recipe.model.resize_vocab is not None:
        resize_vocab.require_resized(model)
    separate = recipe.model.separate_documents
    if trains_encoder_decoder and not separate:
        separate = True
    if separate is not None:
        model_calls.separate_documents(model, separate)
    optimizers.freeze(model, recipe.model.freeze)
    if recipe.lora is None:
        optimizers.require_effective_groups(model, recipe.optim)
        if recipe.optim.name == "muon":  # what it refuses is told before weights load
            matrices = optimizers.muon_matrices(model, dict(model.named_parameters()), recipe.optim)
            optimizers.muon_parts(model, matrices, recipe.optim)
    else:  # optim.groups match adapter parameters, which do not exist yet
        lora_targets.find_targets(model, recipe.lora)
    return model.train()


def _task_head(
    objective: choose.Objective, head: type[PreTrainedModel], config: PreTrainedConfig, name: str
) -> type[PreTrainedModel]:
    """The objective's head on the base model of `head`; sets the number of classes and the dropout in the config."""
    if objective.scores is not None and config.num_labels != objective.scores:
        config.num_labels = objective.scores
    if objective.dropout is not None:
        config.classifier_dropout = objective.dropout
    assert objective.head is not None, "the caller checks that the objective has a head"
    try:
        return head_over(objective.head, head, config)
    except UnknownHeadError as error:
        raise RecipeError(f"objective.name = {name}: {error}") from error


def find_head(config: PreTrainedConfig, recipe_heads: architecture.RecipeHeads = None) -> type[PreTrainedModel]:
    """The generated head of a config, or of the first of its sub-configs that has one (the thinker of an omni model).

    Args:
        recipe_heads: of the recipe's custom architecture or generated models, which take precedence.

    Raises:
        registry.UnknownModelError: neither has one; the error is that of the config itself.
    """
    first_error = None
    for candidate in (config, *_sub_configs(config)):
        if recipe_heads is not None and (head := recipe_heads.head(candidate)) is not None:
            return head
        try:
            return registry.find_head(candidate)
        except registry.UnknownModelError as error:
            first_error = first_error or error
    assert first_error is not None, "the config itself is a candidate"
    raise first_error


def find_head_and_config(
    config: PreTrainedConfig, recipe_heads: architecture.RecipeHeads = None
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """`find_head`, and the config or sub-config that this head takes.

    Raises:
        registry.UnknownModelError: no generated file has the head or a model that it builds.
    """
    head = find_head(config, recipe_heads)
    if head.config_class is not type(config):
        config = next(sub for sub in _sub_configs(config) if type(sub) is head.config_class)
    part_files(head, config)  # raises for a part without a generated file
    return head, config


def _sub_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None]


def require_kernels(section: KernelsConfig) -> None:
    """Refuses named kernels that this machine cannot run.

    Raises:
        RecipeError: with the reason.
    """
    for name, kernel in obstructed_kernels(section).items():
        raise RecipeError(f"kernels.{name} = '{kernel}' cannot run here: {_obstacle(name, kernel)}.")


def obstructed_kernels(section: KernelsConfig) -> dict[str, str]:
    """Seam -> the named kernel that this machine cannot run."""
    named = {name: getattr(section, name) for name in seams.names()}
    return {
        name: kernel for name, kernel in named.items() if kernel is not None and _obstacle(name, kernel) is not None
    }


def _obstacle(name: str, kernel: str) -> str | None:
    """Why this machine cannot run the kernel of a seam; None if nothing is known."""
    reason = seams.unavailable(name, kernel)
    if reason is None and kernel in ("triton", *precision.FP8_EXPERTS) and not torch.cuda.is_available():
        from triton import knobs

        return None if knobs.runtime.interpret else "it needs a CUDA device"
    return reason


def configure_seams(recipe: Recipe, model: nn.Module) -> dict[str, str]:
    """Selects the kernels; returns seam -> implementation.

    Raises:
        RecipeError: an unknown implementation, a named seam that the model does not call, an unknown objective, or a model that
            computes its loss without the seam that the objective needs.
    """
    users_by_seam, objective = report.seam_users(model), choose.objective_of(recipe.objective)
    choose.require_seam(objective, model, users_by_seam)
    if not objective.is_models_own:  # it computes from hidden states: no next-token loss kernel runs
        users_by_seam.pop("causal_lm_loss", None)
    named = {name: getattr(recipe.kernels, name) for name in seams.names()}
    if "fused_moe" in users_by_seam:
        named["fused_moe"] = precision.experts_kernel(recipe)
    implementations = seams.for_training(users_by_seam, named)
    try:
        seams.configure(**dict.fromkeys(seams.names(), seams.EAGER) | implementations)
        report.require_seams(users_by_seam, implementations)
    except ValueError as error:
        raise RecipeError(f"kernels: {error}") from error
    return implementations


def parallel_config(section: ParallelSection, world_size: int) -> ParallelConfig:
    """The layout of `world_size` ranks.

    Raises:
        RecipeError: the sizes do not fit.
    """
    try:
        return ParallelConfig.for_world(world_size, dp_replicate=section.dp_replicate, sp=section.sp, ep=section.ep)
    except ValueError as error:
        raise RecipeError(f"parallel: {error}") from error


def compute_dtype(recipe: Recipe, device_type: str | None = None) -> torch.dtype:
    """The dtype that layers compute in on a device type; default: cuda if available."""
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return _param_dtype(recipe.parallel, device_type) or getattr(torch, recipe.model.dtype)


def _param_dtype(section: ParallelSection, device_type: str) -> torch.dtype | None:
    name = section.param_dtype or ("bfloat16" if device_type == "cuda" else None)
    return getattr(torch, name) if name else None


def sharding_options(section: ParallelSection, device: torch.device) -> sharding.ShardingOptions:
    """How parameters are kept and gathered, for `shard_model`."""
    return sharding.ShardingOptions(
        param_dtype=_param_dtype(section, device.type),
        reduce_dtype=getattr(torch, section.reduce_dtype),
        exchange_gradients=section.exchange_gradients,
        shard_exchange=section.shard_exchange,
        reshard_after_forward=section.reshard_after_forward,
        prefetch=section.prefetch,
        cpu_offload=section.cpu_offload,
        compile_layers=section.compile_layers,
        shard_tables_above=section.shard_tables_above,
    )


def build_model(recipe: Recipe, state: ParallelState, device: torch.device) -> ShardedModel:
    """The model of a recipe, sharded over the ranks, with its weights (collective)."""
    model = build_on_meta(recipe)
    precision.convert(model, recipe)
    checkpointing.apply(model, recipe.parallel.activation_checkpointing)
    if recipe.parallel.offload_inputs:
        offloaded_inputs.apply(model, attention=recipe.parallel.offload_attention)
    sharding.shard_model(model, state, options=sharding_options(recipe.parallel, device))
    if kept := precision.kept_fp8_forms(recipe, state.config):
        undivided.keep_fp8(model, transposed=kept > 1)
    sharding.materialise(model, device)
    start_times.mark("model")
    folder = weights_folder(recipe.model)
    if folder is None:
        initialise(model, weight_names(model), seed=recipe.train.seed)
    else:
        load_report = load_pretrained(model, folder, **allowed_differences(recipe, model), seed=recipe.train.seed)
        require_effective(recipe, model, load_report)
        if _is_first_rank():
            print(load_report, flush=True)  # reports what was initialised or left out
            if (section := recipe.model.resize_vocab) and not load_report.grown:
                size = model.config.get_text_config().vocab_size
                print(f"model.resize_vocab: {resize_vocab.summary(section, size, {})}", flush=True)
    return cast("ShardedModel", model)


def set_pad_token(model: PreTrainedModel, tokenizer: Any) -> None:
    """Sets the pad token of a model with a new head (`TaskHead`) if its config has none: classifiers find the last token by it."""
    text = model.config.get_text_config()
    if isinstance(model, TaskHead) and text.pad_token_id is None and tokenizer is not None:
        text.pad_token_id = tokenizer.pad_token_id


def allowed_differences(recipe: Recipe, model: nn.Module) -> dict[str, Any]:
    """How the checkpoint may differ from the model, as options of `load_pretrained`: patterns of weights that may be missing or
    unexpected (a new head starts from a checkpoint with another head), and what the rows of new tokens are."""
    missing, unexpected = recipe.model.allow_missing, recipe.model.ignore_keys
    if isinstance(model, TaskHead):
        missing, unexpected = missing + model.new_weights, unexpected + model.causal_only
    resize = recipe.model.resize_vocab
    return {"allow_missing": missing, "allow_unexpected": unexpected, "new_rows": resize.new_rows if resize else None}


def require_effective(recipe: Recipe, model: PreTrainedModel, loaded: LoadReport | CheckpointMatch) -> None:
    """Refuses differences that the recipe allows and that would have no effect, or none that is meant.

    Raises:
        RecipeError: a pattern of `model.ignore_keys` that leaves out no key; new tokens that would keep one and the same row.
    """
    for pattern in recipe.model.ignore_keys:
        if not fnmatch.filter(loaded.ignored, pattern):
            raise RecipeError(
                f"model.ignore_keys: {pattern!r} matches no key of the checkpoint that the model does not use. Remove or correct "
                "it."
            )
    resize_vocab.require_distinct_rows(recipe, model, loaded.grown)


def needs_all_weights(recipe: Recipe, model: nn.Module) -> bool:
    """Whether all weights must come from a checkpoint: one is given, and none of the model's weights may be missing. Rows of new
    tokens (`model.resize_vocab`) do not count."""
    return find_weights(recipe.model) is not None and not allowed_differences(recipe, model)["allow_missing"]


def weight_names(model: nn.Module) -> list[str]:
    """The names that a checkpoint of the model contains: parameters, tied ones once, and persistent buffers."""
    saved = model.state_dict().keys()
    parameters = [name for name, _ in model.named_parameters()]
    return parameters + [name for name, _ in model.named_buffers() if name in saved]


def check_slices_and_report(
    recipe: Recipe, model: PreTrainedModel, state: ParallelState, seam_implementations: Mapping[str, str]
) -> str:
    """Refuses a model that computes other results on sequence slices, or a loss of routers of other tokens (collective);
    returns a report of what runs where.

    Raises:
        ValueError: as `selfcheck.require_sliceable` and `require_router_order`.
    """
    from patchgen.runtime.parallel import selfcheck

    # They mix no tokens, and would be compiled for the small rows of the check.
    eager = {name: seams.EAGER for name in ELEMENTWISE if seam_implementations.get(name) in ("auto", "compiled")}
    with parallel.using(state), precision.exact(model), seams.using(**eager):
        vocab_size = model.config.get_text_config().vocab_size
        selfcheck.require_sliceable(model, state, vocab_size=vocab_size, padded=False)
        selfcheck.require_router_order(model, state, vocab_size=vocab_size)
    described = report.describe(
        model, state, seam_implementations, _attention_by_layer(recipe) if _is_first_rank() else ""
    )
    in_fp8 = precision.summary(model, recipe)
    return f"{described}\nprecision {in_fp8}" if in_fp8 else described


def _attention_by_layer(recipe: Recipe) -> str:
    """Which kinds of layers get which attention; "" if there is one for all."""
    attention_names = recipe.model.attention
    if attention_names is None or attention_names in attention.ORDER:
        return ""
    head, config = find_head_and_config(read_config(recipe.model), architecture.register(recipe.model))
    return attention_choice.explain(head, config, attention_names, compute_dtype(recipe))


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
