"""An adapter added to the checkpoint that it was trained on, from file to file.

    merge_adapter("runs/one/adapter", "/models/Qwen3-30B-A3B", "merged")

PEFT reads the adapter and says what it is scaled by; a weight of the output is its stored value and the product of the
two factors, for one tensor at a time. What the adapter does not touch is copied, byte for byte: layers, towers, the voice
of an omni model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from patchgen.runtime import registry
from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.export import saved_tensors, with_rest
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.layout import Origin, assemble, class_name, disassemble
from patchgen.runtime.checkpoint.load import finish, keys_of_buffers, require_same_type, stored_leaves, tied_groups
from patchgen.runtime.checkpoint.model_files import empty_models, generated_folders, on_meta
from patchgen.runtime.checkpoint.offline import fill, write_folder
from patchgen.runtime.checkpoint.rest import find_rest
from patchgen.runtime.checkpoint.safetensor_files import read_folder
from patchgen.runtime.checkpoint.tensor_sources import Box, Moved, leaf, leaves, pull, whole
from patchgen.runtime.checkpoint.writing import MAX_FILE, Output, ReadOutput

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
NAME = "default"


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to a parameter: `scaling * left @ right`, over experts where there are any.

    Attributes:
        left [..., O, R], right [..., R, I]: of the parameter [..., O, I].
    """

    left: Tensor
    right: Tensor
    scaling: float

    def part(self, box: Box) -> Tensor:
        """A box of the sum, in fp32."""
        *experts, rows, columns = (slice(*bounds) for bounds in box)
        left, right = self.left[(*experts, rows)].float(), self.right[(*experts, slice(None), columns)].float()
        return left @ right * self.scaling


@dataclass(frozen=True)
class Merged(ReadOutput):
    """A tensor of the output: that of the checkpoint, and what is added to it, both made in the same way."""

    added: Moved = field(kw_only=True)

    def read(self, reader: FileReader) -> Tensor:
        """The sum, added up in fp32, on the CPU."""
        shape = tuple(self.moved.shape)
        total, added = torch.empty(shape), torch.empty(shape)
        fill(reader, self.moved, whole(shape), total)
        parts = pull(self.added, whole(shape), added)
        for found, box, view in parts.reads:
            assert isinstance(found.source, Factors | None), "leaves of what an adapter adds"
            view.copy_(found.source.part(box) if found.source is not None else torch.zeros(()))
        finish(parts)
        return total.add_(added).to(self.dtype)


def merge_adapter(
    adapter: str | Path,
    source: str | Path,
    directory: str | Path,
    *,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
    max_file: int = MAX_FILE,
) -> int:
    """Writes a checkpoint with an adapter of PEFT merged into it; returns how many parameters it changed.

    Args:
        adapter: the folder with `adapter_config.json`.
        source: the checkpoint that it was trained on: of the adapted model, or of a larger one that it is a part of.
        layout: as in `convert`; None: as the source lies.
        dtype: of the floating-point weights of the adapted model; None: as they are.

    Raises:
        CheckpointError: the adapter is of another model, or changes more than products of two factors; files that cannot
            be read or written.
    """
    adapter, source, directory = Path(adapter), Path(source), Path(directory)
    if source.resolve() == directory.resolve():
        raise CheckpointError(f"{source} is both the source and the output: give another output folder.")
    stored = read_folder(source)
    names = _module_names(adapter)
    model = next((model for model in _candidates(source) if _has_all(model, names)), None)
    if model is None:
        raise CheckpointError(
            f"{adapter} adapts {names[0]}{f' and {len(names) - 1} more modules' if names[1:] else ''}, which neither the "
            f"model of {source} has nor a part of it that is generated. Name the checkpoint that it was trained on."
        )
    require_same_type(model, source)
    factors = _factors(model, adapter)
    origin = Origin.of(source, {key: tensor.shape for key, tensor in stored.items()})
    parameters = assemble(model, stored_leaves(stored)).parameters
    for group in tied_groups(model):
        made = next((parameters[name] for name in group if name in parameters), None)
        parameters |= dict.fromkeys(group, made) if made is not None else {}
        if adapted := factors.keys() & set(group):
            raise CheckpointError(
                f"{adapter} adapts {min(adapted)}, which is one tensor with {', '.join(sorted({*group} - adapted))} in "
                f"{class_name(model)}: merged, it would change both. Keep the adapter beside the model."
            )
    saved = saved_tensors(model)
    missing = [f"missing: {name}" for name in saved if name not in parameters]
    if missing:
        raise CheckpointError(f"{source} does not fit {class_name(model)}:", missing)
    parameters = {name: parameters[name] for name in saved}
    made, files = with_rest(model, parameters, origin, source, layout=layout, dtype=dtype, trained_only=False)
    additions = {name: leaf(name, moved.shape, torch.float32, factors.get(name)) for name, moved in parameters.items()}
    added = disassemble(model, additions, layout=layout, origin=find_rest(model, origin, source).taken)
    outputs = [_merged(output, added) for output in made]
    write_folder(directory, outputs, files, max_file, keys_of_buffers(model, parameters))
    return len(factors.keys() & saved.keys())


def _merged(output: Output, added: Mapping[str, Moved]) -> Output:
    touched = output.name in added and any(part.source is not None for part in leaves(added[output.name]))
    return Merged(output.name, output.moved, output.dtype, added=added[output.name]) if touched else output


def _module_names(adapter: Path) -> list[str]:
    """The modules that an adapter changes, by the names that they have in the model it was trained in.

    Raises:
        CheckpointError: it cannot be read, or changes more than products of two factors.
    """
    try:
        with safe_open(adapter / WEIGHTS, "pt") as file:
            keys = list(file.keys())
    except Exception as error:  # safetensors has no class of its own for what is wrong with a file
        raise CheckpointError(f"{adapter} holds no readable PEFT adapter ({WEIGHTS}): {error}") from error
    wrong = [key for key in keys if not key.endswith((".lora_A.weight", ".lora_B.weight"))]
    if wrong or not keys:
        raise CheckpointError(
            f"{adapter} holds {wrong[0] if wrong else 'nothing'}: only the two factors of LoRA (lora_A, lora_B) are merged "
            "from files. Load it with PEFT, and call merge_and_unload."
        )
    names = [key.removeprefix(PREFIX).rpartition(".lora_")[0].replace(".base_layer", "") for key in keys]
    return list(dict.fromkeys(names))


def _candidates(source: Path) -> Iterator[PreTrainedModel]:
    """The models that a folder's config describes, then those of its parts that are generated."""
    config = None
    for model in empty_models(source):
        config = model.config
        yield model
    parts = [config] if config is not None else []
    while parts:
        part = parts.pop(0)
        inner = [getattr(part, name, None) for name in part.sub_configs]
        parts += [one for one in inner if isinstance(one, PreTrainedConfig)]
        if part is config:
            continue
        for folder in generated_folders():
            with contextlib.suppress(registry.UnknownModelError):
                head = registry.find_head(part, directory=folder)
                yield on_meta(lambda head=head, part=part: head._from_config(part, attn_implementation="eager"))


def _has_all(model: PreTrainedModel, names: list[str]) -> bool:
    modules = dict(model.named_modules())
    return all(name in modules for name in names)


def _factors(model: PreTrainedModel, adapter: Path) -> dict[str, Factors]:
    """What an adapter adds, by the name of the parameter in `model`, which PEFT puts its layers into and gets back."""
    import peft
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    adapted = peft.PeftModel.from_pretrained(model, adapter, adapter_name=NAME, low_cpu_mem_usage=True)
    found = {}
    with safe_open(adapter / WEIGHTS, "pt") as file:
        for path, layer in adapted.named_modules():
            if not isinstance(layer, LoraLayer) or NAME not in layer.lora_A:
                continue
            weight = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
            assert isinstance(weight, Tensor), "a layer of PEFT adapts one parameter"
            name = parameters[id(weight)]
            factors = [file.get_tensor(f"{path}.{part}.weight") for part in ("lora_A", "lora_B")]
            if layer.lora_variant.get(NAME) is not None or factors[0].ndim != 2:
                raise CheckpointError(
                    f"{adapter} changes {name} by more than a product of two factors ({type(layer).__name__}, as "
                    "adapter_config.json has it). Load it with PEFT, and call merge_and_unload."
                )
            found[name] = _of_layer(layer, weight, *factors)
    adapted.unload()
    return found


def _of_layer(layer, weight: Tensor, first: Tensor, second: Tensor) -> Factors:
    """The factors of a layer of PEFT, in the order of its parameter's dimensions.

    Args:
        weight: what is adapted, on the meta device.
        first [E R, I], second [O, R E]: as PEFT stores them.
    """
    from peft.tuners.lora.layer import ParamWrapper

    if not isinstance(layer, ParamWrapper):
        left, right = (first.T, second.T) if layer.fan_in_fan_out else (second, first)
        return Factors(left, right, layer.scaling[NAME])
    layer.lora_A[NAME].weight, layer.lora_B[NAME].weight = nn.Parameter(first), nn.Parameter(second)
    weight.data = weight.data.float()  # PEFT rounds factors to the parameter's dtype
    left, right, scaling = layer.get_delta_factors(NAME)
    left, right = left.detach(), right.detach()
    *experts, rows, columns = weight.shape
    return Factors(left.reshape(*experts, rows, -1), right.reshape(*experts, -1, columns), scaling)
