"""What a checkpoint holds beside the model that trains: it is copied, file to file, into what is exported.

thinker.*    loaded, trained, written as it is now    -+
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
from patchgen.runtime.checkpoint.load import DERIVED, stored_leaves, unexpected_by_upstream
from patchgen.runtime.checkpoint.model_files import config_files, names_that_loading_opens, read_config, side_files
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, StoredTensor, read_folder
from patchgen.runtime.checkpoint.tensor_sources import Moved, leaf, whole
from patchgen.runtime.checkpoint.writing import ReadOutput

OF_THE_FILE = ("dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path")
"""What a config says of the files that it lies with, not of the model."""


@dataclass(frozen=True)
class Passed(ReadOutput):
    """A tensor that is written as it is stored, byte for byte."""

    stored: StoredTensor = field(kw_only=True)

    @classmethod
    def of(cls, stored: StoredTensor) -> Passed:
        moved = leaf(stored.name, stored.shape, stored.dtype, stored)
        return cls(stored.name, moved, stored.dtype, stored=stored)

    def read(self, reader: FileReader) -> Tensor:
        """The tensor, on the CPU."""
        out = torch.empty(self.stored.shape, dtype=self.dtype)
        raw = replace(
            self.stored, dtype=torch.uint8, shape=(self.num_bytes,)
        )  # bytes are never NaN: nothing is judged
        reader.read(raw, whole(raw.shape), out.reshape(-1).view(torch.uint8))
        return out


@dataclass(frozen=True)
class Rest:
    """What of a checkpoint the model was not made of.

    Attributes:
        tensors: in any order.
        directory: where they lie; None without any.
        config: that of the whole, where the model is a part of it; else None: the model's own says it all.
        taken: the layout of what the model was made of; None without an original.
    """

    tensors: tuple[Passed, ...] = ()
    directory: Path | None = None
    config: dict | None = None
    taken: Origin | None = None

    def config_files(self, model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, str | Path]:
        """The config files: the model's own, or those of the whole with what was changed in the part.

        Args:
            dtype: of the floating-point tensors that trained.
        """
        if self.config is None:
            return {**config_files(model, dtype)}
        fields = json.loads(json.dumps(self.config))
        part = _part(fields, model)
        assert part is not None, "a config is kept of a whole that this model is a part of"
        before = type(model.config).from_dict(json.loads(json.dumps(part))).to_dict()
        _update(part, _changed(before, model.config.to_dict()))
        for key in ("dtype", "torch_dtype"):
            stored = getattr(torch, fields.get(key) or "", None)
            if dtype is not None and stored is not None:  # loading must not take digits from what trained
                fields[key] = str(torch.promote_types(stored, dtype)).removeprefix("torch.")
        return {CONFIG: json.dumps(fields, indent=2) + "\n"}

    def side_files(self, source: Path | None) -> dict[str, Path]:
        """The files beside the weights: those of `source`, or else of where the rest lies."""
        own = self.directory
        beside = {name: own / name for name in names_that_loading_opens(own)} if own is not None else {}
        folder = source or own
        return beside | (side_files(folder) if folder is not None else {})


def find_rest(model: PreTrainedModel, origin: Origin | None, source: Path | None) -> Rest:
    """What `model` was loaded beside.

    Args:
        origin: of its weights; None: they come from no checkpoint, and there is no rest.
        source: the folder of the original, if not where it was loaded from; one without these keys says nothing.

    Raises:
        CheckpointError: there is a rest, and its folder is not there any more, or damaged.
    """
    if origin is None:
        return Rest()
    directory = next((folder for folder in (source, Path(origin.directory)) if _holds(folder, origin)), None)
    if directory is None:
        left = _left_out(model, {key: leaf(key, shape, torch.float32, None) for key, shape in origin.shapes.items()})
        lost = sorted(key for key in unexpected_by_upstream(model, left) if not key.endswith(DERIVED))
        if not lost:
            return Rest(taken=origin)
        raise CheckpointError(
            f"{class_name(model)} is a part of what it was loaded from, and {origin.directory} does not hold the rest any "
            f"more ({', '.join(lost[:3])}, ...). Name its folder (--source), or write what trained by itself "
            "(--trained-only; in Python trained_only=True)."
        )
    stored = read_folder(directory)
    left = _left_out(model, stored_leaves(stored))
    shapes = {key: tensor.shape for key, tensor in stored.items() if key not in left}
    config = read_config(directory) if (directory / CONFIG).is_file() else {}
    is_part = config.get("model_type") != model.config.model_type and _part(config, model) is not None
    # What the user left out of a checkpoint of the model's own type stays out.
    passed = left if is_part else unexpected_by_upstream(model, left)
    return Rest(
        tuple(Passed.of(stored[key]) for key in left if key in passed),
        directory if passed else None,
        config if is_part else None,
        Origin.of(directory, shapes),
    )


def _holds(folder: Path | None, origin: Origin) -> bool:
    """Whether a folder has the keys that a model was loaded from.

    Raises:
        CheckpointError: it has safetensors that cannot be read.
    """
    if folder is None or not any(folder.glob("*.safetensors")):
        return False
    return {pattern_of(key) for key in origin.shapes} == {pattern_of(key) for key in read_folder(folder)}


def _left_out(model: PreTrainedModel, leaves: Mapping[str, Moved]) -> list[str]:
    return assemble(model, leaves).unexpected


def _part(fields: dict, model: PreTrainedModel) -> dict | None:
    """The fields of the model's own config in a config, at any depth."""
    if fields.get("model_type") == model.config.model_type:
        return fields
    inner = (_part(value, model) for value in fields.values() if isinstance(value, dict))
    return next((part for part in inner if part is not None), None)


def _changed(before: Mapping, now: Mapping) -> dict:
    """The fields that differ, but for those that are of the files."""
    found = {}
    for key, value in now.items():
        if key in OF_THE_FILE or (key in before and before[key] == value):
            continue
        both = isinstance(value, dict) and isinstance(before.get(key), dict)
        found |= {key: changed} if both and (changed := _changed(before[key], value)) else {} if both else {key: value}
    return found


def _update(fields: dict, changes: Mapping) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(fields.get(key), dict):
            _update(fields[key], value)
        else:
            fields[key] = value
