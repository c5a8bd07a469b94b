"""The part of a checkpoint that the model does not load: an export copies it, file to file.

thinker.*    loaded, trained, exported                -+
talker.*     never read                                +->  the export: every key of the source, and its config
code2wav.*   never read                               -+
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.layout import Origin, assemble, class_name, pattern_of
from patchgen.runtime.checkpoint.lazy_tensors import LazyTensor, full_region, leaf
from patchgen.runtime.checkpoint.load import COMPUTED_BUFFERS, ignored_by_upstream, stored_leaves
from patchgen.runtime.checkpoint.model_files import config_files, files_opened_by_upstream, read_config, side_files
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, StoredTensor, read_folder
from patchgen.runtime.checkpoint.writing import ReadableOutput

FILE_FIELDS = ("dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path")
"""Config fields that describe the files next to it, not the model."""


@dataclass(frozen=True)
class CopiedTensor(ReadableOutput):
    """A tensor that is written as it is stored, byte for byte."""

    stored: StoredTensor = field(kw_only=True)

    @classmethod
    def of(cls, stored: StoredTensor) -> CopiedTensor:
        lazy = leaf(stored.name, stored.shape, stored.dtype, stored)
        return cls(stored.name, lazy, stored.dtype, stored=stored)

    def read(self, reader: FileReader) -> Tensor:
        """The tensor, on the CPU."""
        out = torch.empty(self.stored.shape, dtype=self.dtype)
        # As bytes, which are not checked for NaN.
        raw = replace(self.stored, dtype=torch.uint8, shape=(self.num_bytes,))
        reader.read(raw, full_region(raw.shape), out.reshape(-1).view(torch.uint8))
        return out


@dataclass(frozen=True)
class UntrainedPart:
    """The tensors of a checkpoint that the model was not loaded from, and the config of the complete model.

    Attributes:
        tensors: in any order.
        directory: their folder; None if there are none.
        config: of the complete model, if the loaded model is a part of it; otherwise None.
        trained_origin: the layout of the tensors that were loaded; None if the model was not loaded from a checkpoint.
    """

    tensors: tuple[CopiedTensor, ...] = ()
    directory: Path | None = None
    config: dict | None = None
    trained_origin: Origin | None = None

    def config_files(self, model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, str | Path]:
        """The config files: the model's own, or that of the complete model with the changes of its part.

        Args:
            dtype: of the trained floating-point tensors.
        """
        if self.config is None:
            return {**config_files(model, dtype)}
        fields = json.loads(json.dumps(self.config))
        own_config = _own_config(fields, model)
        assert own_config is not None, "`config` is only set if it contains that of this model"
        before = type(model.config).from_dict(json.loads(json.dumps(own_config))).to_dict()
        _update(own_config, _changed_fields(before, model.config.to_dict()))
        for key in ("dtype", "torch_dtype"):
            stored = getattr(torch, fields.get(key) or "", None)
            if dtype is not None and stored is not None:  # loading must not round the trained weights
                fields[key] = str(torch.promote_types(stored, dtype)).removeprefix("torch.")
        return {CONFIG: json.dumps(fields, indent=2) + "\n"}

    def side_files(self, source: Path | None) -> dict[str, Path]:
        """Tokenizer, processor and other files: those of `source`, or of the folder of the untrained part."""
        files = {}
        if self.directory is not None:
            files = {name: self.directory / name for name in files_opened_by_upstream(self.directory)}
        folder = source or self.directory
        return files | (side_files(folder) if folder is not None else {})


def find_untrained_part(model: PreTrainedModel, origin: Origin | None, source: Path | None) -> UntrainedPart:
    """The part of its checkpoint that `model` was not loaded from.

    Args:
        origin: of the model's weights; None: they were not loaded from a checkpoint, and there is no untrained part.
        source: the folder of the original, if it is not that of `origin`; ignored if its keys are not those of `origin`.

    Raises:
        CheckpointError: the folder is missing, and had tensors that would have been copied; or it is damaged.
    """
    if origin is None:
        return UntrainedPart()
    if source is not None and _has_same_tensors(source, origin) and _has_same_layers(source, model):
        directory = source
    else:
        directory = Path(origin.directory) if _has_same_tensors(Path(origin.directory), origin) else None
    if directory is None:
        lost = _lost_keys(model, origin)
        if not lost:
            return UntrainedPart(trained_origin=origin)
        not_it = (
            f"; {source} is not that checkpoint: its tensors or its numbers of layers are others" if source else ""
        )
        raise CheckpointError(
            f"{class_name(model)} is a part of the checkpoint that it was loaded from, and {origin.directory} no longer has the "
            f"other tensors ({', '.join(lost[:3])}, ...){not_it}. To fix: name their folder (--source), or export only the model "
            "(--trained-only; in Python trained_only=True)."
        )
    stored = read_folder(directory)
    unused = _unused_keys(model, stored_leaves(stored))
    shapes = {key: tensor.shape for key, tensor in stored.items() if key not in unused}
    config = read_config(directory) if (directory / CONFIG).is_file() else {}
    is_part = config.get("model_type") != model.config.model_type and _own_config(config, model) is not None
    # From a checkpoint of this very model, keys that only the user's `allow_unexpected` ignores are not copied.
    copied = unused if is_part else ignored_by_upstream(model, unused)
    return UntrainedPart(
        tuple(CopiedTensor.of(stored[key]) for key in unused if key in copied),
        directory if copied else None,
        config if is_part else None,
        Origin.of(directory, shapes),
    )


def _has_same_tensors(folder: Path, origin: Origin) -> bool:
    """Whether a folder has tensors like those that a model was loaded from, by the first key of each pattern.

    Raises:
        CheckpointError: it has safetensors that cannot be read.
    """
    if not any(folder.glob("*.safetensors")):
        return False
    return (
        Origin.of(folder, {key: stored.shape for key, stored in read_folder(folder).items()}).shapes == origin.shapes
    )


def _has_same_layers(folder: Path, model: PreTrainedModel) -> bool:
    """Whether a folder has as many layers and experts as the model: `Origin` records only the first of each."""
    assembly = assemble(model, stored_leaves(read_folder(folder)))
    names = {pattern_of(name) for name in assembly.parameters}
    keys = {pattern_of(key) for sources in assembly.sources.values() for key in sources}
    missing = [name for name in model.state_dict().keys() - assembly.parameters.keys() if pattern_of(name) in names]
    # Layers for multi-token prediction may be numbered like those of the model.
    extra = set(assembly.unexpected) - ignored_by_upstream(model, assembly.unexpected)
    return not missing and not any(pattern_of(key) in keys for key in extra)


def _lost_keys(model: PreTrainedModel, origin: Origin) -> list[str]:
    """The keys that would be copied if the folder of the original still existed.

    Without its config, a part of a larger model is recognised by its keys, which have a prefix that the model's names lack.
    """
    unused = _unused_keys(model, {key: leaf(key, shape, torch.float32, None) for key, shape in origin.shapes.items()})
    used = {key.partition(".")[0] for key in origin.shapes.keys() - set(unused)}
    own = {name.partition(".")[0] for name in model.state_dict()} | {model.base_model_prefix}
    lost = ignored_by_upstream(model, unused) if used & own else unused
    return sorted(key for key in lost if not key.endswith(COMPUTED_BUFFERS))


def _unused_keys(model: PreTrainedModel, leaves: Mapping[str, LazyTensor]) -> list[str]:
    return assemble(model, leaves).unexpected


def _own_config(fields: dict, model: PreTrainedModel) -> dict | None:
    """The model's own config within a config, at any depth."""
    if fields.get("model_type") == model.config.model_type:
        return fields
    inner = (_own_config(value, model) for value in fields.values() if isinstance(value, dict))
    return next((config for config in inner if config is not None), None)


def _changed_fields(before: Mapping, now: Mapping) -> dict:
    """The fields that differ, except FILE_FIELDS."""
    changed = {}
    for key, value in now.items():
        if key in FILE_FIELDS or (key in before and before[key] == value):
            continue
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            value = _changed_fields(before[key], value)
            if not value:
                continue
        changed[key] = value
    return changed


def _update(fields: dict, changes: Mapping) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(fields.get(key), dict):
            _update(fields[key], value)
        else:
            fields[key] = value
