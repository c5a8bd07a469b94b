"""Weights into a model some at a time, for one that never holds all of them.

weights = WeightsInParts(model, "/models/Qwen3-235B-A22B")    # reads headers, refuses what `load_pretrained` refuses
weights.read({"model.norm.weight": tensor})                   # fills it, converted as a load converts it
problems = weights.differences_of_export()                    # there and back again, one tensor in memory at a time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.export import saved_tensors, with_rest
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.initialise import initialise
from patchgen.runtime.checkpoint.load import (
    NUM_THREADS,
    compare_copies,
    fitting,
    keys_of_buffers,
    read_all,
    stored_leaves,
)
from patchgen.runtime.checkpoint.offline import are_equal
from patchgen.runtime.checkpoint.rest import Passed
from patchgen.runtime.checkpoint.safetensor_files import read_folder
from patchgen.runtime.checkpoint.tensor_sources import leaves


class WeightsInParts:
    """A checkpoint and how a model's tensors are made of it.

    Args:
        model: on any device, not sharded; it learns where its weights come from.
        directory: as `load_pretrained` takes it, like the other arguments.

    Raises:
        CheckpointError: what `load_pretrained` would refuse before it reads a byte.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        directory: str | Path,
        *,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self.model, self.directory, self.seed = model, Path(directory), seed
        self._fit = fitting(model, self.directory, allow_missing, allow_unexpected)
        self._may_be_infinite = keys_of_buffers(model, self._fit.parameters)
        # nn.Module takes any attribute; its type says tensors and modules.
        model.checkpoint_origin = self._fit.origin  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills tensors of the model, by the first of their names in its state dict, in their own dtypes.

        Raises:
            CheckpointError: a file and key that cannot be read or holds NaN, or copies of a tied tensor that differ.
        """
        fit = self._fit
        initialise(self.model, [name for name in fit.initialised if name in tensors], seed=self.seed)
        wanted = {name: fit.parameters[fit.wanted[name]] for name in tensors if name in fit.wanted}
        copies = [(name, owner) for name, owner in fit.copies if owner in tensors]
        with (
            FileReader(may_be_infinite=self._may_be_infinite) as reader,
            ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="load") as pool,
        ):
            errors = read_all(reader, pool, wanted, tensors)
            errors = errors or compare_copies(reader, pool, copies, fit.wanted, fit.parameters, tensors)
        if errors:
            raise CheckpointError(f"{self.directory} cannot be loaded:", errors)

    def differences_of_export(self) -> Iterator[str]:
        """What an export of these weights would hold otherwise than the checkpoint, a line for each tensor: the conversion
        there and back, read from the files and compared, one tensor in memory at a time; nothing is written."""
        stored, fit, own = read_folder(self.directory), self._fit, saved_tensors(self.model)
        moved = {name: fit.parameters[fit.wanted.get(name, name)] for name in own if name not in fit.initialised}
        source = stored_leaves(stored)
        made, _ = with_rest(self.model, moved, fit.origin, self.directory, layout=None, dtype=None, trained_only=False)
        copied = {part.name for name, _ in fit.copies for part in leaves(fit.parameters[name])}
        yield from sorted(
            f"{key} is in the checkpoint alone."
            for key in stored.keys() - {output.name for output in made} - copied - set(fit.ignored)
        )
        with FileReader(may_be_infinite=self._may_be_infinite) as reader:
            for output in made:
                if isinstance(output, Passed):
                    continue
                if output.name not in stored:
                    yield f"{output.name} is in the export alone."
                elif tuple(output.moved.shape) != tuple(stored[output.name].shape):
                    shapes = [list(one) for one in (output.moved.shape, stored[output.name].shape)]
                    yield f"{output.name} is {shapes[0]} in the export and {shapes[1]} in the checkpoint."
                elif not are_equal(reader, output.moved, source[output.name]):
                    yield f"{output.name} has other values in the export."
