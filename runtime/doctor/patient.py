"""What is examined: a recipe and what it names, each part made when a check first asks for it.

    patient = Patient(recipe)
    patient.samples        # the first of the data, as training reads them
    patient.model          # with its weights, on this machine's device
    patient.release()      # the model is gone: the next may take its memory

A part that cannot be made is told once, by the check that first asks; the others learn what they lack (`Needs`).
"""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patchgen.runtime.checkpoint import host_memory, load_pretrained
from patchgen.runtime.checkpoint.incremental_load import IncrementalLoader
from patchgen.runtime.checkpoint.initialise import initialise
from patchgen.runtime.data.collate import collate
from patchgen.runtime.doctor import calls, layerwise, traces
from patchgen.runtime.doctor.finding import told_size
from patchgen.runtime.doctor.layerwise import Change, Layerwise
from patchgen.runtime.doctor.samples import ANY_TWO, Sample, first_samples
from patchgen.runtime.objectives import choose
from patchgen.runtime.parallel import sharding
from patchgen.runtime.train import model as models
from patchgen.runtime.train import setup
from patchgen.runtime.train.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Needs(Exception):
    """A check cannot run without a part that could not be made, or that this machine has no room for."""


class NoRoom(Needs):
    """The memory of this machine is too small for what is asked."""


def part(named: str) -> Callable[[Callable[[Any], Any]], property]:
    """A property that is made once. Its failure is raised once as it is, and from then on as `Needs`, which names the check
    that told of it."""

    def decorate(make: Callable[[Any], Any]) -> property:
        @functools.wraps(make)
        def get(self: Patient) -> Any:
            if make.__name__ in self.failures:
                raise Needs(f"it needs {named}: {self.failures[make.__name__]}.")
            if make.__name__ not in self.made:
                try:
                    self.made[make.__name__] = make(self)
                except Exception as error:
                    if isinstance(error, Needs) and not isinstance(error, NoRoom):
                        raise
                    self.failures[make.__name__] = f"see '{self.asking}'"
                    raise
            return self.made[make.__name__]

        return property(get)

    return decorate


class Patient:
    """A recipe with its checkpoint and data.

    Attributes:
        recipe: as given, until the proof has said which attention runs and which modalities share no row.
        is_decided: whether it has.
        device: the first GPU, or the CPU.
        scratch: a folder that is deleted at the end.
        checkpoint: the folder or name of the weights; None: they are random.
        asking: the name of the check that runs now.
        memory: the most bytes that models may take; None: nine tenths of what is free.
        layerwise: the weights of a model that is larger, layer by layer; None: it is held whole.
        weights: what they are read from then; None: they are random.
    """

    def __init__(self, recipe: Recipe, *, memory: int | None = None) -> None:
        self.recipe, self.asking, self.is_decided, self.memory = recipe, "", False, memory
        self.layerwise: Layerwise | None = None
        self.weights: IncrementalLoader | None = None
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.made: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="patchgen-doctor-")

    @property
    def scratch(self) -> Path:
        return Path(self._scratch.name)

    @property
    def dtype(self) -> torch.dtype:
        """What layers compute in, as in the run."""
        return models.compute_dtype(self.recipe, self.device.type)

    @part("the place of the weights")
    def checkpoint(self) -> Path | str | None:
        return models.find_weights(self.recipe.model)

    @property
    def is_trained(self) -> bool:
        """Whether the whole model comes from a checkpoint, no new part of it random."""
        return models.is_from_checkpoint(self.recipe, self.blueprint)

    @part("the config")
    def config(self) -> PreTrainedConfig:
        return models.read_config(self.recipe.model)

    @part("the tokenizer")
    def parts(self) -> setup.DataParts:
        _ = self.blueprint  # what is wrong with it is not the tokenizer's
        return setup.data_parts(self.recipe)

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @part("the data")
    def samples(self) -> list[Sample]:
        """The first documents of each source, at least one; of pairs both halves, one behind the other."""
        apart = self.recipe.data.separate_modalities or ()
        return first_samples(self.recipe.data, self.parts, apart if self.is_decided else ANY_TWO)

    @property
    def documents(self) -> list[Sample]:
        """The samples that a language-model head is asked about.

        Raises:
            Needs: the model has none.
        """
        if choose.objective_of(self.recipe.objective).head is not None:
            raise Needs(
                f"it asks a language-model head, and objective.name = {self.recipe.objective.name} puts another on the model."
            )
        return self.samples

    @property
    def row(self) -> dict[str, Any]:
        """All samples in one packed row, `(1, S)`, on the host; of pairs the chosen halves."""
        return self.rows([one for one in self.documents if one.half != "rejected"])

    def rows(self, samples: list[Sample]) -> dict[str, Any]:
        """Samples in one packed row."""
        pad = self.tokenizer.pad_token_id
        return collate([one.fields for one in samples], pad_to=None, pad_token_id=0 if pad is None else pad)

    @part("the shape of the model")
    def blueprint(self) -> PreTrainedModel:
        """The model without memory, frozen as the recipe says."""
        return models.build_on_meta(self.recipe)

    @part("the model")
    def model(self) -> PreTrainedModel:
        """The generated model with its weights in the dtype that layers compute in, not sharded, kernels selected; larger
        than memory, its layers one after another."""
        name = str(self.dtype).removeprefix("torch.")
        recipe = replace(self.recipe, model=replace(self.recipe.model, dtype=name))
        model = models.build_on_meta(recipe)
        options = {**models.may_differ(recipe, model), "seed": recipe.train.seed}
        if not self.has_room(model):
            self.layerwise, self.weights = self.in_layers(model, options)
            return model.train()
        for module in sharding.kept_in_fp32(model, self.dtype):
            module.float()
        sharding.materialise(model, self.device)
        folder = models.weights_folder(recipe.model)
        if folder is None:
            initialise(model, models.initial_names(model), seed=recipe.train.seed)
        else:
            load_pretrained(model, folder, **options)
        return model.train()

    def has_room(self, model: PreTrainedModel) -> bool:
        """Whether all weights fit into memory at once."""
        return sum(p.numel() for p in model.parameters()) * self.dtype.itemsize <= self.room

    def in_layers(self, model: PreTrainedModel, options: dict[str, Any]) -> tuple[Layerwise, IncrementalLoader | None]:
        """Gives a model of the meta device, generated or upstream's, the checkpoint's weights, layer by layer.

        Raises:
            NoRoom: not even one layer fits.
        """
        for module in sharding.kept_in_fp32(model, self.dtype):
            module.float()
        folder = models.weights_folder(self.recipe.model)
        parts = None if folder is None else IncrementalLoader(model, folder, **options)
        read = parts.read if parts else lambda tensors: initialise(model, list(tensors), seed=options["seed"])
        try:
            return Layerwise(model, self.device, read, self.room), parts
        except layerwise.DoesNotFit as error:
            raise NoRoom(f"{error}, and {self._told_room}: run the doctor where they fit.") from error

    def changed(self, changes: Sequence[Change]) -> AbstractContextManager[None]:
        """A block within which some tensors of the model have other values."""
        return layerwise.changed(changes) if self.layerwise is None else self.layerwise.changed(changes)

    @part("the kernels that the recipe names")
    def kernels(self) -> dict[str, str]:
        """The implementation of each seam that a run selects."""
        return models.configure_seams(self.recipe, self.model)

    @part("the loss of the samples")
    def loss(self) -> float:
        return calls.loss(self.model, self.row, self.kernels)

    @part("the gradients")
    def slopes(self) -> dict[str, calls.Slope]:
        """What is kept of the gradient of every parameter that one reaches, from one backward of the row."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.require_room(max((p.numel() * p.element_size() for p in trained), default=0) * 2, "gradients")
        return calls.slopes(self.model, self.row, self.kernels)

    @property
    def probe(self) -> dict[str, Any]:
        """One sample alone, with media if any has them, as the trainer hands it over."""
        richest = max(self.documents, key=lambda one: len(one.fields))
        return calls.handed(self.rows([richest]), self.device)

    @part("what the layers of the model compute")
    def yardstick(self) -> traces.Yardstick:
        """Of the probe, every kernel eager."""
        model, probe, paths = self.model, self.probe, traces.watched(self.model)
        shaken = traces.record_shaken(model, probe, paths)
        return traces.Yardstick(traces.record(model, probe, paths), shaken, calls.bar(self.dtype))

    def release(self) -> None:
        """Gives the model's memory back; what was made of it stays."""
        if "model" in self.made:
            del self.made["model"]
            self.layerwise = self.weights = None
            gc.collect()
        self.failures |= {"model": "its memory was given to what came next"}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def room(self) -> int:
        """How many bytes a model may take."""
        if self.memory is not None:
            return self.memory
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else host_memory.available()
        return int(min(0.9 * free, 1 << 62))

    @property
    def _told_room(self) -> str:
        if self.memory is not None:
            return f"--memory allows {told_size(self.memory)}"
        return f"{told_size(self.room)} may be taken of {setup.device_name(self.device)}"

    def require_room(self, num_bytes: int, what: str) -> None:
        """Raises NoRoom unless so many bytes may be taken of the device."""
        if num_bytes > self.room:
            raise NoRoom(f"{what} take {told_size(num_bytes)}, and {self._told_room}: run the doctor where they fit.")

    def close(self) -> None:
        """Deletes what was written."""
        self._scratch.cleanup()
