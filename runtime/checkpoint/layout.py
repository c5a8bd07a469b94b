"""Conversion between the keys of a checkpoint and the parameters of a model, by transformers' own conversions, both ways.

    assemble       keys of a checkpoint -> parameters        (what `from_pretrained` does)
    disassemble    parameters -> keys of a checkpoint        (what `save_pretrained` does)

On `LazyTensor` tensors, nothing is read or computed here; `disassemble` takes any others, too. transformers supports
per-expert, stacked and renamed layouts; two more are derived here from its converters, for any model:

    merged        experts.gate_proj [E, I, H] + experts.up_proj [E, I, H]: the converter of single experts without its
                  stacking
    transposed    stacks with the last two dimensions exchanged

    E experts   I expert intermediate size   H hidden size
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.lazy_tensors import LazyTensor, UnsupportedOperation, is_permuted
from patchgen.runtime.checkpoint.safetensor_files import CONFIG
from patchgen.runtime.checkpoint.vocabulary import has_fewer_rows

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

PER_EXPERT, STACKED = "per-expert", "stacked"
LAYOUTS = (PER_EXPERT, STACKED)


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was loaded from: enough to write the same layout again, and to recognise the folder.

    Attributes:
        directory: of the checkpoint.
        shapes: the first key of each pattern (`pattern_of`) -> its shape.
        contents: a hash of all keys and shapes; "": not known (training states of earlier versions).
        dtypes: of the floating-point tensors, by pattern of the model's names; also by name, where a name differs from its pattern.
        config: the text of config.json; None: there is none, or it is not known.
    """

    directory: str
    shapes: dict[str, tuple[int, ...]]
    contents: str = ""
    dtypes: dict[str, str] = field(default_factory=dict)
    config: str | None = None

    @classmethod
    def of(
        cls, directory: object, shapes: Mapping[str, Sequence[int]], parameters: Mapping[str, Tensor] | None = None
    ) -> Origin:
        """
        Args:
            shapes: of all keys of the checkpoint.
            parameters: what the model loaded from it, by name in its state dict, with the dtypes of the files.
        """
        first: dict[str, tuple[str, tuple[int, ...]]] = {}
        for key in sorted(shapes, key=dot_natural_key):
            first.setdefault(pattern_of(key), (key, tuple(shapes[key])))
        listed = json.dumps(sorted((key, list(shape)) for key, shape in shapes.items()))
        contents = hashlib.sha256(listed.encode()).hexdigest()[:32]
        file = Path(str(directory)) / CONFIG
        config = file.read_text(encoding="utf-8") if file.is_file() else None
        return cls(str(directory), dict(first.values()), contents, _dtypes_by_pattern(parameters or {}), config)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict) -> Origin:
        shapes = {key: tuple(shape) for key, shape in fields["shapes"].items()}
        known = fields.get("contents", ""), fields.get("dtypes", {}), fields.get("config")
        return cls(fields["directory"], shapes, *known)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The dtype that the files have for a floating-point tensor of the model, by its name in the state dict; of a tensor that
        they lack, that of most patterns; None: not known."""
        found = self.dtypes.get(name) or self.dtypes.get(pattern_of(name))
        most = found or next((dtype for dtype, _ in Counter(self.dtypes.values()).most_common(1)), None)
        return getattr(torch, most) if most else None

    def has_tensors_of(self, other: Origin) -> bool:
        """Whether this is the same checkpoint as `other`, by keys and shapes; if not all of them are known, by the first key
        of each pattern."""
        known = self.contents and other.contents
        return self.contents == other.contents if known else self.shapes == other.shapes


def pattern_of(key: str) -> str:
    """The key with the numbers of layers and experts replaced by 0."""
    return ".".join("0" if part.isdigit() else part for part in key.split("."))


def _dtypes_by_pattern(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    dtypes: dict[str, str] = {}
    names = sorted((name for name, tensor in tensors.items() if tensor.is_floating_point()), key=dot_natural_key)
    for name in names:  # a pattern's own name, of number 0, comes first
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        if dtypes.setdefault(pattern_of(name), dtype) != dtype:
            dtypes[name] = dtype
    return dtypes


@dataclass
class Assembly:
    """How a checkpoint's tensors make up those of a model.

    Attributes:
        parameters: name in the model's state dict -> its tensor, built from the checkpoint's.
        sources: name in the model's state dict -> the keys that it is built from, also of a name that cannot be built.
        unexpected: keys that belong to no parameter or persistent buffer.
        problems: sentences about tensors that appear twice, cannot be converted or have another shape.
    """

    parameters: dict[str, LazyTensor] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@contextlib.contextmanager
def unsharded_classes(model: nn.Module) -> Iterator[None]:
    """Undoes FSDP2's swap of module classes: transformers looks conversions up by class name."""
    swapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
    classes = [type(module) for module in swapped]
    for module, cls in zip(swapped, classes, strict=True):
        module.__class__ = cls.__mro__[2]
    try:
        yield
    finally:
        for module, cls in zip(swapped, classes, strict=True):
            module.__class__ = cls


def class_name(model: nn.Module) -> str:
    """The name of the model's class before it was sharded."""
    with unsharded_classes(model):
        return type(model).__name__


def conversions(model: PreTrainedModel, *, legacy: bool) -> list[WeightTransform]:
    """transformers' conversions for `model`, sharded or not; a new copy."""
    with unsharded_classes(model):
        return get_model_conversion_mapping(model, add_legacy=legacy)


def assemble(model: PreTrainedModel, stored: Mapping[str, LazyTensor], *, may_grow: Collection[str] = ()) -> Assembly:
    """How the tensors of a checkpoint make up the parameters and persistent buffers of `model`.

    Args:
        model: on any device, sharded or not.
        stored: key in the checkpoint -> tensor of its shape and dtype.
        may_grow: names of parameters that may have fewer rows in the checkpoint.
    """
    state = model.state_dict()
    transforms = conversions(model, legacy=True)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    converters += _merged_experts(converters)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix

    found = Assembly()
    pending: dict[str, WeightConverter] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            found.unexpected.append(key)
            continue
        others = found.sources.setdefault(name, [])
        if others and (pattern is None or name not in pending):
            found.problems.append(f"{name} appears twice: in {others[0]} and in {key}.")
            continue
        others.append(key)
        if pattern is None:
            found.parameters[name] = stored[key]
            continue
        if name not in pending:
            pending[name] = deepcopy(by_pattern[pattern])
        part: Any = stored[key]  # transformers takes tensors as well as futures
        pending[name].add_tensor(name, key, pattern, part)
    for name, converter in pending.items():
        keys = found.sources.pop(name)
        # MergeModulelist stacks by order and does not check the numbers.
        stacks = any(isinstance(operation, MergeModulelist) for operation in converter.operations)
        if stacks and (gaps := _missing_numbers(keys)):
            found.problems.append(f"{name} cannot be built from {_summarise(keys)}: their numbers have gaps.{gaps}")
            found.sources[name] = keys
            continue
        try:
            converted = converter.convert(name, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError, AttributeError, UnsupportedOperation) as error:
            reason = " ".join(str(error).split())
            found.problems.append(f"{name} cannot be built from {_summarise(keys)}: {reason}{_missing_numbers(keys)}")
            found.sources[name] = keys
            continue
        for target, tensor in cast("dict[str, Any]", converted).items():
            found.parameters[target] = tensor[0] if isinstance(tensor, list) else tensor
            found.sources[target] = keys
    for name, tensor in found.parameters.items():
        if name in state and not (name in may_grow and has_fewer_rows(tensor.shape, state[name].shape)):
            _check_shape(found, name, tensor, state[name].shape)
    _transpose_squares(found, stored)
    return found


def _check_shape(found: Assembly, name: str, tensor: LazyTensor, shape: torch.Size) -> None:
    """Adds a problem for a tensor of the wrong shape, unless it is a transposed stack, which is transposed back."""
    if tensor.shape == shape:
        return
    if tensor.ndim == 3 and (*tensor.shape[:1], tensor.shape[2], tensor.shape[1]) == shape:
        found.parameters[name] = tensor.transposed()
        return
    keys = found.sources[name]
    found.problems.append(
        f"{name} is {list(shape)} in the model, {list(tensor.shape)} in the checkpoint "
        f"(from {_summarise(keys)}).{_missing_numbers(keys)}"
    )


def _transpose_squares(found: Assembly, stored: Mapping[str, LazyTensor]) -> None:
    """Transposes square stacks (of equal last dimensions) of modules whose other stacks were transposed."""
    stacks = {
        name: tensor
        for name, tensor in found.parameters.items()
        if tensor.ndim == 3 and all(stored[key].ndim == 3 for key in found.sources[name])
    }
    for name in _squares_to_transpose(stacks, {name for name, tensor in stacks.items() if is_permuted(tensor)}):
        found.parameters[name] = stacks[name].transposed()


def _squares_to_transpose(stacks: Mapping[str, Tensor], transposed: Collection[str]) -> list[str]:
    """The square stacks that are not yet transposed, of modules in which all other stacks were transposed."""
    modules: dict[str, list[str]] = {}
    for name in stacks:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    found = []
    for names in modules.values():
        squares = [name for name in names if stacks[name].shape[1] == stacks[name].shape[2]]
        others = [name for name in names if name not in squares]
        if others and all(name in transposed for name in others):
            found += [name for name in squares if name not in transposed]
    return found


def _summarise(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} ... {keys[-1]}, {len(keys)} keys"


def _missing_numbers(keys: Sequence[str]) -> str:
    """A sentence that names missing keys of numbered series; empty if there are none."""
    groups: dict[tuple[str, ...], set[int]] = {}
    for key in keys:
        parts = key.split(".")
        for place, part in enumerate(parts):
            if part.isdigit():
                groups.setdefault((*parts[:place], "*", *parts[place + 1 :]), set()).add(int(part))
    counts = [len(numbers) for numbers in groups.values()]
    count = 1 + max((max(numbers) for numbers in groups.values() if len(numbers) > 1), default=-1)
    gaps = [
        ".".join(name).replace("*", str(number))
        for name, numbers in groups.items()
        if len(numbers) > 1 and len(numbers) >= max(counts) - 1
        for number in range(count)
        if number not in numbers
    ]
    return f" Missing: {', '.join(gaps[:5])}." if gaps else ""


def _merged_experts(converters: Sequence[WeightConverter]) -> list[WeightConverter]:
    """Converters for the merged layout: experts are stacked, but gate and up are not concatenated."""
    merged = []
    for converter in converters:
        kept = [operation for operation in converter.operations if not isinstance(operation, MergeModulelist)]
        if len(kept) == len(converter.operations) or len(converter.target_patterns) != 1:
            continue
        # Without remaining operations, only the suffix .weight differs from the key of the model.
        ending = r"(?:\.weight)?$" if kept else r"\.weight$"
        variant = WeightConverter(
            source_patterns=[
                pattern.replace(".*.", ".").removesuffix(".weight") + ending for pattern in converter.source_patterns
            ],
            target_patterns=list(converter._original_target_patterns),
            operations=kept or [Concatenate(dim=0)],
        )
        variant.scope_prefix = converter.scope_prefix
        variant.base_model_prefix = getattr(converter, "base_model_prefix", None)
        merged.append(variant)
    return merged


# ---------------------------------------------------------------------------------------------------- out


def disassemble(
    model: PreTrainedModel, tensors: Mapping[str, AnyTensor], *, layout: str | None, origin: Origin | None
) -> dict[str, AnyTensor]:
    """The keys and tensors to write for a model.

    Args:
        model: on any device, sharded or not.
        tensors: the tensors of its state dict that are to be written.
        layout: "per-expert" or "stacked"; None: that of `origin`, or upstream's without one.
        origin: the checkpoint that the weights were loaded from.

    Raises:
        CheckpointError: no such layout, or no conversion of the model to it.
    """
    if layout is not None and layout not in LAYOUTS:
        raise CheckpointError(f"There is no layout '{layout}'. Layouts: {', '.join(LAYOUTS)}.")
    selected = _used_conversions(model, origin)
    available = [entry for entry in conversions(model, legacy=False) if _splits_experts(entry)]
    if layout == PER_EXPERT:
        selected = [entry for entry in selected if not _splits_experts(entry)] + available
        counts = set(_expert_counts(model.config.to_dict()))
        stacks = [name for name, tensor in tensors.items() if tensor.ndim == 3 and tensor.shape[0] in counts]
        if stacks and not available:
            raise CheckpointError(
                f"{class_name(model)} has no layout with one key per expert: transformers does not convert "
                f"{', '.join(stacks[:3])}. To fix: leave out the layout."
            )
    elif layout == STACKED:
        selected = [entry for entry in selected if not _splits_experts(entry)]
    before = getattr(model, "_weight_conversions", None)
    model._weight_conversions = selected
    try:
        written: dict[str, Any] = revert_weight_conversion(model, dict(tensors))
    finally:
        if before is None:
            del model._weight_conversions
        else:
            model._weight_conversions = before
    if origin is None or layout is not None:
        return written
    shapes = {pattern_of(key): shape for key, shape in origin.shapes.items()}
    transposed = [key for key, tensor in written.items() if _was_transposed(tensor, shapes.get(pattern_of(key)))]
    stacks = {key: tensor for key, tensor in written.items() if tensor.ndim == 3 and pattern_of(key) in shapes}
    transposed += _squares_to_transpose(stacks, set(transposed))
    return written | {key: written[key].transpose(1, 2) for key in transposed}


def _expert_counts(config: Mapping) -> Iterator[int]:
    """The numbers of experts in a config and its sub-configs."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _expert_counts(value)
        elif "expert" in str(key) and type(value) is int:
            yield value


def _used_conversions(model: PreTrainedModel, origin: Origin | None) -> list[WeightTransform]:
    """The conversions that loading the original used; without an original, those that `save_pretrained` reverts."""
    if origin is None:
        return [entry for entry in conversions(model, legacy=False) if not isinstance(entry, PrefixChange)]
    transforms = conversions(model, legacy=True)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    for key in origin.shapes:
        rename_source_key(key, renamings, converters)
    used = [entry for entry in transforms if entry.was_used()]
    # Nothing else loads the merged layout: it is written as single experts.
    merged = _merged_experts(converters)
    if any(entry.rename_source_key(key)[1] is not None for key in origin.shapes for entry in merged):
        used += [entry for entry in converters if _splits_experts(entry) and entry not in used]
    return used


def _splits_experts(entry: WeightTransform) -> bool:
    return isinstance(entry, WeightConverter) and any(
        isinstance(operation, MergeModulelist | SplitModulelist) for operation in entry.operations
    )


def _was_transposed(tensor: Tensor, shape: tuple[int, ...] | None) -> bool:
    """Whether a stack was transposed in the original, which has `shape`."""
    return (
        shape is not None
        and tensor.ndim == 3
        and tensor.shape != shape
        and (tensor.shape[0], tensor.shape[2], tensor.shape[1]) == shape
    )
