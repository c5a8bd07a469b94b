"""Loads the weights of a checkpoint a few tensors at a time, for a model that never has all of them in memory.

weights = IncrementalLoader(model, "/models/Qwen3-235B-A22B") # reads headers, refuses what `load_pretrained` refuses
weights.read({"model.norm.weight": tensor})                   # fills it, converted as a load converts it
problems = list(weights.export_differences())                 # converts back and compares, one tensor in memory at a time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.export import outputs_and_files, saved_tensors
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.initialise import initialise
from patchgen.runtime.checkpoint.lazy_tensors import leaves
from patchgen.runtime.checkpoint.load import (
    fill_tensors,
    keys_of_buffers,
    match_checkpoint,
    stored_leaves,
)
from patchgen.runtime.checkpoint.offline import are_equal
from patchgen.runtime.checkpoint.quantised import read_folder
from patchgen.runtime.checkpoint.untrained_part import CopiedTensor, find_untrained_part
from patchgen.runtime.checkpoint.vocabulary import NewRows, fill_new_rows


class IncrementalLoader:
    """A checkpoint matched with a model, whose tensors can be loaded in any order.

    Args:
        model: on any device, not sharded; its `checkpoint_origin` is set.
        directory, allow_missing, allow_unexpected, new_rows, seed: as in `load_pretrained`.

    Raises:
        CheckpointError: where `load_pretrained` raises it before it reads weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        directory: str | Path,
        *,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
        new_rows: NewRows | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.directory, self.new_rows, self.seed = model, Path(directory), new_rows, seed
        self._match = match_checkpoint(model, self.directory, allow_missing, allow_unexpected, new_rows)
        self._may_be_infinite = keys_of_buffers(model, self._match.lazy_tensors)
        # nn.Module takes any attribute; its type says tensors and modules.
        model.checkpoint_origin = self._match.origin  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills tensors of the model in their own dtypes; a tied one is given by the first of its names in the state dict.

        Raises:
            CheckpointError: naming file and key of a tensor that cannot be read or has NaN, or of tied copies that differ.
        """
        match = self._match
        grown = {name: num_stored for name, (num_stored, _) in match.grown.items() if name in tensors}
        initialised = [name for name in match.initialised if name in tensors]
        initialise(self.model, [*initialised, *(grown if self.new_rows == "random" else ())], seed=self.seed)
        with FileReader(may_be_infinite=self._may_be_infinite) as reader:
            problems = fill_tensors(reader, match, tensors)
        if problems:
            raise CheckpointError(f"{self.directory} cannot be loaded:", problems)
        for name, num_stored in grown.items() if self.new_rows == "mean" else ():
            fill_new_rows(tensors[name], num_stored)

    def export_differences(self) -> Iterator[str]:
        """How an export of these weights would differ from the checkpoint, a sentence per tensor.

        Converts the parameters back and compares them with the files, one tensor in memory at a time; writes nothing. Tensors
        that the checkpoint lacks, and those that an export copies from it, are left out.
        """
        stored, match, saved = read_folder(self.directory), self._match, saved_tensors(self.model)
        parameters = {
            name: match.lazy_tensors[match.loaded_names.get(name, name)]
            for name in saved
            if name not in match.initialised
        }
        source = stored_leaves(stored)
        untrained = find_untrained_part(self.model, match.origin, self.directory)
        outputs, _ = outputs_and_files(self.model, parameters, untrained, self.directory, layout=None, dtype=None)
        tied_copy_keys = {part.name for name, _ in match.copies for part in leaves(match.lazy_tensors[name])}
        yield from sorted(
            f"{key} is only in the checkpoint."
            for key in stored.keys() - {output.name for output in outputs} - tied_copy_keys - set(match.ignored)
        )
        with FileReader(may_be_infinite=self._may_be_infinite) as reader:
            for output in outputs:
                if isinstance(output, CopiedTensor):
                    continue
                if output.name not in stored:
                    yield f"{output.name} is only in the export."
                elif tuple(output.tensor.shape) != tuple(stored[output.name].shape):
                    shapes = [list(shape) for shape in (output.tensor.shape, stored[output.name].shape)]
                    yield f"{output.name} is {shapes[0]} in the export and {shapes[1]} in the checkpoint."
                elif not are_equal(reader, output.tensor, source[output.name]):
                    yield f"{output.name} has other values in the export."
