"""Merges an adapter into the checkpoint that it was trained on, file to file.

    merge_adapter("runs/one/adapter", "/models/Qwen3-30B-A3B", "merged")

PEFT reads the adapter and its scaling; each adapted weight is its stored value plus the product of the two factors, one
tensor at a time. Other weights of the adapted model keep their values, rounded to `dtype` if it is given; the rest of the
checkpoint (the talker of an omni model) is copied byte for byte.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from patchgen.runtime import registry
from patchgen.runtime.checkpoint.adapter_options import CHANGE_WEIGHTS, initial_factors, mergeable_config
from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.export import outputs_and_files, saved_tensors
from patchgen.runtime.checkpoint.file_reader import FileReader, unrepresentable
from patchgen.runtime.checkpoint.finite import is_finite
from patchgen.runtime.checkpoint.layout import assemble, class_name, disassemble
from patchgen.runtime.checkpoint.lazy_tensors import LazyTensor, Region, full_region, leaf, leaves, plan_reads
from patchgen.runtime.checkpoint.load import (
    integer_weight_problems,
    keys_of_buffers,
    mismatch_messages,
    require_loadable_config,
    stored_leaves,
    tied_groups,
)
from patchgen.runtime.checkpoint.model_files import candidate_models_on_meta, generated_folders, on_meta
from patchgen.runtime.checkpoint.offline import read_region, write_folder
from patchgen.runtime.checkpoint.quantised import read_folder
from patchgen.runtime.checkpoint.untrained_part import untrained_part_of
from patchgen.runtime.checkpoint.writing import MAX_FILE, Output, ReadableOutput

if TYPE_CHECKING:
    from peft import LoraConfig

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
ADAPTER_NAME = "default"


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to a parameter: `scaling * left @ right`, for each expert if there are any.

    Attributes:
        left [..., O, R], right [..., R, I]: of the parameter [..., O, I]; R is the rank of the adapter.
    """

    left: Tensor
    right: Tensor
    scaling: float

    def product(self, region: Region) -> Tensor:
        """A region of `scaling * left @ right`, in fp32."""
        *experts, rows, columns = (slice(*bounds) for bounds in region)
        left, right = self.left[(*experts, rows)].float(), self.right[(*experts, slice(None), columns)].float()
        return left @ right * self.scaling


@dataclass(frozen=True)
class MergedTensor(ReadableOutput):
    """A tensor of the output: the sum of a weight and its delta, both converted in the same way."""

    delta: LazyTensor = field(kw_only=True)

    def read(self, reader: FileReader) -> Tensor:
        """The sum, computed in fp32 on the CPU.

        Raises:
            CheckpointError: naming file and key; also for a sum that fp32 or the dtype of the output cannot represent.
        """
        shape = tuple(self.tensor.shape)
        total, delta = torch.empty(shape), torch.empty(shape)
        read_region(reader, self.tensor, full_region(shape), total)
        plan = plan_reads(self.delta, full_region(shape), delta)
        for part, region, view in plan.reads:
            assert isinstance(part.source, Factors | None), "the leaves of `merge_adapter`"
            view.copy_(part.source.product(region) if part.source is not None else torch.zeros(()))
        plan.finish()
        total.add_(delta)
        if not is_finite(total):
            raise CheckpointError(
                f"{self.name} is {float(total[~total.isfinite()][0]):g} after the merge, which is computed in fp32: the factors of "
                "the adapter are too large, or not finite."
            )
        lost = unrepresentable(total, self.dtype)
        if lost is not None:
            raise CheckpointError(f"{self.name} is {lost:g} after the merge, which {self.dtype} cannot represent.")
        return total.to(self.dtype)


def merge_adapter(
    adapter: str | Path,
    source: str | Path,
    directory: str | Path,
    *,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
    max_file: int = MAX_FILE,
) -> int:
    """Writes a checkpoint with a PEFT adapter merged into it; returns the number of changed parameters.

    Args:
        adapter: the folder with `adapter_config.json`.
        source: the checkpoint that it was trained on: of the adapted model, or of one that contains it.
        layout: as in `convert`; None: that of the source.
        dtype: of the floating-point weights of the adapted model; None: unchanged.

    Raises:
        CheckpointError: the adapter is of another model, or adds something other than a product of two factors; files
            cannot be read or written.
    """
    adapter, source, directory = Path(adapter), Path(source), Path(directory)
    if source.resolve() == directory.resolve():
        raise CheckpointError(f"{source} is both the source and the output: give another output folder.")
    config = mergeable_config(adapter)
    stored = read_folder(source)
    model = _adapted_model(adapter, source)
    require_loadable_config(model, source)
    assembly = assemble(model, stored_leaves(stored))
    parameters = dict(assembly.parameters)
    problems = integer_weight_problems(model.state_dict(), parameters, stored)
    for group in tied_groups(model):
        loaded = next((parameters[name] for name in group if name in parameters), None)
        parameters |= dict.fromkeys(group, loaded) if loaded is not None else {}
    saved, untrained = saved_tensors(model), untrained_part_of(model, source, stored, assembly)
    allowed = {*model.state_dict()} - {*saved} | {tensor.name for tensor in untrained.tensors}
    problems = [*mismatch_messages(model, assembly, stored, allowed=allowed), *problems]
    if problems:
        raise CheckpointError(f"{source} does not fit {class_name(model)}:", problems)
    factors = _factors(model, adapter, config, parameters)
    parameters = {name: parameters[name] for name in saved}
    outputs, files = outputs_and_files(model, parameters, untrained, source, layout=layout, dtype=dtype)
    delta_leaves = {
        name: leaf(name, lazy.shape, torch.float32, factors.get(name)) for name, lazy in parameters.items()
    }
    deltas = disassemble(model, delta_leaves, layout=layout, origin=untrained.trained_origin)
    merged = [_merged(output, deltas) for output in outputs]
    write_folder(directory, merged, files, max_file, keys_of_buffers(model, parameters))
    return len(factors.keys() & saved.keys())


def _adapted_model(adapter: Path, source: Path) -> PreTrainedModel:
    """The model of a checkpoint, or the part of it, that has the modules that an adapter adapts."""
    names = _module_names(adapter)
    model = next((model for model in _candidates(source) if _has_modules(model, names)), None)
    if model is None:
        raise CheckpointError(
            f"{adapter} adapts {names[0]}{f' and {len(names) - 1} more modules' if names[1:] else ''}, but neither "
            f"the model of {source} nor a generated part of it has them. To fix: name the checkpoint that it was trained on."
        )
    return model


def _merged(output: Output, deltas: Mapping[str, LazyTensor]) -> Output:
    is_adapted = output.name in deltas and any(part.source is not None for part in leaves(deltas[output.name]))
    return MergedTensor(output.name, output.tensor, output.dtype, delta=deltas[output.name]) if is_adapted else output


def _module_names(adapter: Path) -> list[str]:
    """The modules that an adapter changes, by name in the model.

    Raises:
        CheckpointError: it cannot be read, or has tensors other than LoRA factors.
    """
    try:
        with safe_open(adapter / WEIGHTS, "pt") as file:
            keys = list(file.keys())
    except Exception as error:  # safetensors raises errors of several classes
        raise CheckpointError(f"{adapter} holds no readable PEFT adapter ({WEIGHTS}): {error}") from error
    wrong = [key for key in keys if not key.endswith((".lora_A.weight", ".lora_B.weight"))]
    if wrong or not keys:
        raise CheckpointError(
            f"{adapter} holds {wrong[0] if wrong else 'nothing'}: only LoRA factors (lora_A, lora_B) can be merged "
            "from files. To fix: load it with PEFT, and call merge_and_unload; of an adapter with the embeddings or the head of a "
            "grown vocabulary, after resize_token_embeddings of the base model, or set lora.merge: true in its run."
        )
    names = [key.removeprefix(PREFIX).rpartition(".lora_")[0].replace(".base_layer", "") for key in keys]
    return list(dict.fromkeys(names))


def _candidates(source: Path) -> Iterator[PreTrainedModel]:
    """The models that a folder's config may describe, then the generated models of parts of it."""
    config = None
    for model in candidate_models_on_meta(source):
        config = model.config
        yield model
    parts = [config] if config is not None else []
    while parts:
        part = parts.pop(0)
        inner = [getattr(part, name, None) for name in part.sub_configs]
        parts += [config_of_part for config_of_part in inner if isinstance(config_of_part, PreTrainedConfig)]
        if part is config:
            continue
        for folder in generated_folders():
            with contextlib.suppress(registry.UnknownModelError):
                head = registry.find_head(part, directory=folder)
                yield on_meta(lambda head=head, part=part: head._from_config(part, attn_implementation="eager"))


def _has_modules(model: PreTrainedModel, names: list[str]) -> bool:
    modules = dict(model.named_modules())
    return all(name in modules for name in names)


def _factors(
    model: PreTrainedModel, adapter: Path, config: LoraConfig, parameters: Mapping[str, LazyTensor]
) -> dict[str, Factors]:
    """What an adapter adds, by parameter of `model`, which PEFT wraps and unwraps again.

    Args:
        parameters: the stored values of the parameters, by name.

    Raises:
        CheckpointError: it adapts a tied parameter, or adds something other than a product of two factors.
    """
    import peft
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _require_untied(model, adapter)
    # The initialisation needs the stored weights: it is run below, a layer at a time.
    plain = copy.deepcopy(config)
    plain.init_lora_weights = True
    adapted = peft.PeftModel.from_pretrained(
        model, adapter, adapter_name=ADAPTER_NAME, config=plain, low_cpu_mem_usage=True
    )
    factors_by_name = {}
    with safe_open(adapter / WEIGHTS, "pt") as file, FileReader() as reader:
        for path, layer in adapted.named_modules():
            if not isinstance(layer, LoraLayer) or ADAPTER_NAME not in layer.lora_A:
                continue
            weight = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
            assert isinstance(weight, Tensor), "a LoRA layer adapts one parameter"
            name = names[id(weight)]
            lora_a, lora_b = (file.get_tensor(f"{path}.{part}.weight") for part in ("lora_A", "lora_B"))
            if layer.lora_variant.get(ADAPTER_NAME) is not None or lora_a.ndim != 2:
                raise CheckpointError(
                    f"{adapter} changes {name} by more than a product of two factors ({type(layer).__name__}, "
                    "according to adapter_config.json). To fix: load it with PEFT, and call merge_and_unload."
                )
            if config.init_lora_weights in CHANGE_WEIGHTS:
                stored = torch.empty(tuple(weight.shape))
                read_region(reader, parameters[name], full_region(stored.shape), stored)
                first_a, first_b = initial_factors(layer, config, ADAPTER_NAME, stored)
                lora_a, lora_b = torch.cat([lora_a.float(), first_a]), torch.cat([lora_b.float(), -first_b], dim=1)
            factors_by_name[name] = _factors_of_layer(layer, weight, lora_a, lora_b)
    adapted.unload()
    return factors_by_name


def _require_untied(model: PreTrainedModel, adapter: Path) -> None:
    """Raises CheckpointError for an adapter of a parameter that is tied to another."""
    adapted = {f"{name}.weight" for name in _module_names(adapter)}
    for group in tied_groups(model):
        if found := adapted & set(group):
            raise CheckpointError(
                f"{adapter} adapts {min(found)}, which is tied to {', '.join(sorted({*group} - found))} in "
                f"{class_name(model)}: merging would change both. To fix: keep the adapter as a separate folder."
            )


def _factors_of_layer(layer, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Factors:
    """The factors of a LoRA layer, with the dimensions in the order of its parameter.

    Args:
        weight: the adapted parameter, on the meta device.
        lora_a [E R, I], lora_b [O, R E]: as PEFT stores them; E experts, 1 for a matrix.
    """
    from peft.tuners.lora.layer import ParamWrapper

    if not isinstance(layer, ParamWrapper) or weight.ndim == 2:
        left, right = (lora_a.T, lora_b.T) if layer.fan_in_fan_out else (lora_b, lora_a)
        return Factors(left, right, layer.scaling[ADAPTER_NAME])
    layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight = nn.Parameter(lora_a), nn.Parameter(lora_b)
    weight.data = weight.data.float()  # PEFT rounds factors to the parameter's dtype
    left, right, scaling = layer.get_delta_factors(ADAPTER_NAME)
    left, right = left.detach(), right.detach()
    *experts, rows, columns = weight.shape
    return Factors(left.reshape(*experts, rows, -1), right.reshape(*experts, -1, columns), scaling)
