"""The part of a checkpoint that the model does not load: an export copies it, file to file.

thinker.*    loaded, trained, exported                -+
talker.*     never read                                +->  the export: every key of the source, and its config
code2wav.*   never read                               -+
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.layout import Assembly, Origin, assemble, class_name
from patchgen.runtime.checkpoint.lazy_tensors import full_region, leaf
from patchgen.runtime.checkpoint.load import COMPUTED_BUFFER_SUFFIXES, ignored_by_upstream, stored_leaves
from patchgen.runtime.checkpoint.model_files import config_files, files_opened_by_upstream, read_config, side_files
from patchgen.runtime.checkpoint.placement import rank_and_world_size
from patchgen.runtime.checkpoint.quantised import read_folder
from patchgen.runtime.checkpoint.quantised_tensors import QuantisedTensor
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, StoredTensor
from patchgen.runtime.checkpoint.writing import ReadableOutput
from patchgen.runtime.checkpoint.written_config import config_text, own_config

_OTHERS = "its tensors or its numbers of layers are others"


@dataclass(frozen=True)
class CopiedTensor(ReadableOutput):
    """A tensor that is written as it is stored, byte for byte; a quantised one as the numbers that it stands for."""

    stored: StoredTensor = field(kw_only=True)

    @classmethod
    def of(cls, stored: StoredTensor) -> CopiedTensor:
        lazy = leaf(stored.name, stored.shape, stored.dtype, stored)
        return cls(stored.name, lazy, stored.dtype, stored=stored)

    def read(self, reader: FileReader) -> Tensor:
        """The tensor, on the CPU."""
        out = torch.empty(self.stored.shape, dtype=self.dtype)
        if isinstance(self.stored, QuantisedTensor):
            reader.read(self.stored, full_region(self.stored.shape), out)
            return out
        # As bytes, which are not checked for NaN.
        raw = replace(self.stored, dtype=torch.uint8, shape=(self.num_bytes,))
        reader.read(raw, full_region(raw.shape), out.reshape(-1).view(torch.uint8))
        return out


@dataclass(frozen=True)
class UntrainedPart:
    """The tensors of a checkpoint that the model was not loaded from, and how those were stored that it was.

    Attributes:
        tensors: in any order.
        directory: their folder; None if there are none.
        is_part: whether the loaded model is a part of the complete one, whose config the checkpoint has.
        trained_origin: layout, dtypes and config of what was loaded; None if the model was not loaded from a checkpoint.
    """

    tensors: tuple[CopiedTensor, ...] = ()
    directory: Path | None = None
    is_part: bool = False
    trained_origin: Origin | None = None

    def config_files(self, model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, str | Path]:
        """The config files: those of the original, with what was changed in the model's own config.

        Args:
            dtype: of the trained floating-point tensors.
        """
        source = self.trained_origin.config if self.trained_origin is not None else None
        if source is not None and not self.is_part and json.loads(source).get("model_type") != model.config.model_type:
            source = None  # only the part of a larger model is written
        return {**config_files(model, dtype), CONFIG: config_text(model, source, dtype)}

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
        source: the folder of the original, if it is not that of `origin`; with a warning, that of `origin` is taken if `source` has
            the weights of another checkpoint.

    Raises:
        CheckpointError: no folder is that of the original, whose other tensors would have been copied; or one is damaged.
    """
    if origin is None:
        return UntrainedPart()
    folders = list(dict.fromkeys(folder for folder in (source, Path(origin.directory)) if folder is not None))
    found = ((folder, _matching(folder, origin)) for folder in folders)
    directory, stored = next(((folder, stored) for folder, stored in found if stored), (None, {}))
    if directory is None:
        return _without_folder(model, origin, [folder for folder in folders if folder == source or folder.is_dir()])
    is_other = source is not None and source != directory and any(source.glob("*.safetensors"))
    if is_other and rank_and_world_size()[0] == 0:
        _warn_caller(
            f"{source} is not the checkpoint that {class_name(model)} was loaded from: {_OTHERS}. The layout and "
            f"what was not trained are those of {directory}. To fix: name the folder of that checkpoint (--source), or none."
        )
    return untrained_part_of(model, directory, stored, assemble(model, stored_leaves(stored)))


def untrained_part_of(
    model: PreTrainedModel, directory: Path, stored: Mapping[str, StoredTensor], assembly: Assembly
) -> UntrainedPart:
    """The part of a folder that is not the model's.

    Args:
        stored: its tensors.
        assembly: how they make up `model`.
    """
    unused = assembly.unexpected
    shapes = {key: tensor.shape for key, tensor in stored.items() if key not in unused}
    config = read_config(directory) if (directory / CONFIG).is_file() else {}
    is_part = config.get("model_type") != model.config.model_type and own_config(config, model) is not None
    copied = ignored_by_upstream(model, unused)  # not what only the user's `allow_unexpected` ignores
    if is_part:  # the rest is of the complete model, except layers that the part was loaded without
        own = {_stack_of(key) for sources in assembly.sources.values() for key in sources}
        copied |= {key for key in unused if _stack_of(key) not in own}
    return UntrainedPart(
        tuple(CopiedTensor.of(stored[key]) for key in unused if key in copied),
        directory if copied else None,
        is_part,
        Origin.of(directory, shapes, assembly.parameters),
    )


def _stack_of(key: str) -> str:
    """What the key has before its first number, the path of a list of layers; without a number the key."""
    return re.split(r"\.\d+\.", key, maxsplit=1)[0]


def _warn_caller(message: str) -> None:
    """Warns at the line outside this package that called it."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals["__name__"].startswith((f"{__package__}.", "torch.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _without_folder(model: PreTrainedModel, origin: Origin, others: list[Path]) -> UntrainedPart:
    """No untrained part, for a model whose original has no folder; `others` are folders that were tried.

    Raises:
        CheckpointError: there was one, which is lost.
    """
    lost = _lost_keys(model, origin)
    if not lost:
        return UntrainedPart(trained_origin=origin)
    not_it = "".join(f"; {folder} is not that checkpoint: {_OTHERS}" for folder in others)
    raise CheckpointError(
        f"{class_name(model)} is a part of the checkpoint that it was loaded from, and {origin.directory} no longer has the "
        f"other tensors ({', '.join(lost[:3])}, ...){not_it}. To fix: name their folder (--source), or export only the model "
        "(--trained-only; in Python trained_only=True)."
    )


def _matching(folder: Path, origin: Origin) -> dict[str, StoredTensor]:
    """The tensors of a folder, if it is the checkpoint of `origin`; otherwise none.

    Raises:
        CheckpointError: it has safetensors that cannot be read.
    """
    stored = read_folder(folder) if any(folder.glob("*.safetensors")) else {}
    here = Origin.of(folder, {key: tensor.shape for key, tensor in stored.items()})
    return stored if here.has_tensors_of(origin) else {}


def _lost_keys(model: PreTrainedModel, origin: Origin) -> list[str]:
    """The keys that would be copied if the folder of the original still existed.

    Without its config, a part of a larger model is recognised by its keys, which have a prefix that the model's names lack.
    """
    leaves = {key: leaf(key, shape, torch.float32, None) for key, shape in origin.shapes.items()}
    unused = assemble(model, leaves).unexpected
    used = {key.partition(".")[0] for key in origin.shapes.keys() - set(unused)}
    own = {name.partition(".")[0] for name in model.state_dict()} | {model.base_model_prefix}
    lost = ignored_by_upstream(model, unused) if used & own else unused
    return sorted(key for key in lost if not key.endswith(COMPUTED_BUFFER_SUFFIXES))
