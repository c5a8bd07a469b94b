"""What is examined: a recipe and everything it names, each part built when a check first needs it.

    patient = Patient(recipe)
    patient.samples        # the first of the data, as training reads them
    patient.model          # with its weights, on this machine's device
    patient.release()      # frees the model's memory for the next one

If a part cannot be built, the check that first needs it reports the error; for the others it is a `MissingPart`.
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

from patchgen.runtime import kept_dtypes
from patchgen.runtime.checkpoint import host_memory, load_pretrained
from patchgen.runtime.checkpoint.incremental_load import IncrementalLoader
from patchgen.runtime.checkpoint.initialise import initialise
from patchgen.runtime.checkpoint.load import CheckpointMatch, match_checkpoint
from patchgen.runtime.data.collate import collate
from patchgen.runtime.doctor import calls, layerwise, traces
from patchgen.runtime.doctor.finding import format_bytes
from patchgen.runtime.doctor.layerwise import Change, Layerwise
from patchgen.runtime.doctor.samples import ANY_TWO, Sample, first_samples
from patchgen.runtime.objectives import choose
from patchgen.runtime.parallel import sharding
from patchgen.runtime.train import model as models
from patchgen.runtime.train import setup
from patchgen.runtime.train.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class MissingPart(Exception):
    """A part is missing, or a check cannot run here: its finding is "not checked", for this reason."""


class NotEnoughMemory(MissingPart):
    """The memory of this machine is too small for a part."""


def cached_part(description: str) -> Callable[[Callable[[Any], Any]], property]:
    """A property that is built once. An error is raised as it is the first time, later as a `MissingPart` with the name of the
    check that reported it."""

    def decorate(build: Callable[[Any], Any]) -> property:
        @functools.wraps(build)
        def get(self: Patient) -> Any:
            if build.__name__ in self.failures:
                raise MissingPart(f"it needs {description}: {self.failures[build.__name__]}.")
            if build.__name__ not in self.built:
                try:
                    self.built[build.__name__] = build(self)
                except Exception as error:
                    if isinstance(error, MissingPart) and not isinstance(error, NotEnoughMemory):
                        raise
                    self.failures[build.__name__] = f"see '{self.current_check}'"
                    raise
            return self.built[build.__name__]

        return property(get)

    return decorate


class Patient:
    """A recipe with its checkpoint and data.

    Attributes:
        recipe: as given; the proof sets its attention, whether documents have rows of their own, and the modalities that
            share no row.
        proof_has_run: whether the proof has set them.
        device: the first GPU, or the CPU.
        scratch: a folder that is deleted at the end.
        checkpoint: the folder or name of the weights; None: they are random.
        current_check: the name of the check that is running.
        memory: the most bytes that models may take; None: nine tenths of the free memory.
        layerwise: the weights of a model that is loaded layer by layer; None: it is loaded at once.
        weights: the checkpoint that `layerwise` reads; None: weights are random.
        built: the parts that were built, by name.
        failures: the parts that cannot be built -> why, or which check reported it.
    """

    def __init__(self, recipe: Recipe, *, memory: int | None = None) -> None:
        self.recipe, self.current_check, self.proof_has_run, self.memory = recipe, "", False, memory
        self.layerwise: Layerwise | None = None
        self.weights: IncrementalLoader | None = None
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.built: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="patchgen-doctor-")

    @property
    def scratch(self) -> Path:
        return Path(self._scratch.name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which layers compute in the run."""
        return models.compute_dtype(self.recipe, self.device.type)

    @cached_part("the location of the weights")
    def checkpoint(self) -> Path | str | None:
        return models.find_weights(self.recipe.model)

    @property
    def is_trained(self) -> bool:
        """Whether the complete model comes from a checkpoint, without new random parts."""
        return models.needs_all_weights(self.recipe, self.blueprint)

    @cached_part("the config")
    def config(self) -> PreTrainedConfig:
        return models.read_config(self.recipe.model)

    @cached_part("the tokenizer")
    def parts(self) -> setup.DataParts:
        _ = self.blueprint  # its errors must not be reported as the tokenizer's
        return setup.data_parts(self.recipe)

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @cached_part("the data")
    def samples(self) -> list[Sample]:
        """The first documents of the sources; of pairs both halves, the chosen one first."""
        incompatible = self.recipe.data.separate_modalities or () if self.proof_has_run else ANY_TWO
        return first_samples(self.recipe.data, self.parts, incompatible)

    @property
    def documents(self) -> list[Sample]:
        """The samples of a model with a language-model head.

        Raises:
            MissingPart: the model has another head.
        """
        if choose.objective_of(self.recipe.objective).head is not None:
            raise MissingPart(
                f"it needs a language-model head, and objective.name = {self.recipe.objective.name} puts another on the model."
            )
        return self.samples

    @property
    def row(self) -> dict[str, Any]:
        """All samples in one packed row, `(1, S)` for S tokens, on the host; of pairs the chosen halves."""
        return self.rows([sample for sample in self.documents if sample.half != "rejected"])

    def rows(self, samples: list[Sample]) -> dict[str, Any]:
        """Samples in one packed row."""
        pad = self.tokenizer.pad_token_id
        return collate([sample.fields for sample in samples], pad_to=None, pad_token_id=0 if pad is None else pad)

    @cached_part("the structure of the model")
    def blueprint(self) -> PreTrainedModel:
        """The model on the meta device, frozen as the recipe says."""
        return models.build_on_meta(self.recipe)

    @cached_part("the keys and shapes of the weights")
    def match(self) -> CheckpointMatch | None:
        """What the checkpoint has of the model, from headers; None: the weights are random.

        Raises:
            RecipeError: what the recipe allows has no effect (`models.require_effective`).
        """
        folder = models.weights_folder(self.recipe.model)
        if folder is None:
            return None
        match = match_checkpoint(self.blueprint, folder, **models.allowed_differences(self.recipe, self.blueprint))
        models.require_effective(self.recipe, self.blueprint, match)
        return match

    @property
    def grown(self) -> dict[str, tuple[int, int]]:
        """The parameters with rows for more tokens than the checkpoint has -> both numbers (`model.resize_vocab`)."""
        return self.match.grown if self.match is not None else {}

    @property
    def is_quantised(self) -> bool:
        """Whether weights of the checkpoint are quantised: exports have them in its plain dtype, rounded."""
        return self.match is not None and bool(self.match.dequantised)

    @cached_part("the model")
    def model(self) -> PreTrainedModel:
        """The generated model with its weights in the dtype that layers compute in, not sharded; if it is larger than memory,
        its layers are loaded one after another."""
        name = str(self.dtype).removeprefix("torch.")
        recipe = replace(self.recipe, model=replace(self.recipe.model, dtype=name))
        model = models.build_on_meta(recipe)
        options = {**models.allowed_differences(recipe, model), "seed": recipe.train.seed}
        if not self.fits_in_memory(model):
            self.layerwise, self.weights = self.load_layerwise(model, options)
            return model.train()
        sharding.materialise(model, self.device)
        folder = models.weights_folder(recipe.model)
        if folder is None:
            initialise(model, models.weight_names(model), seed=recipe.train.seed)
        else:
            load_pretrained(model, folder, **options)
        return model.train()

    def fits_in_memory(self, model: PreTrainedModel) -> bool:
        """Whether all of its parameters fit into memory at once."""
        return sum(p.numel() for p in model.parameters()) * self.dtype.itemsize <= self.available_bytes

    def load_layerwise(
        self, model: PreTrainedModel, options: dict[str, Any]
    ) -> tuple[Layerwise, IncrementalLoader | None]:
        """Gives a model on the meta device, generated or upstream's, the checkpoint's weights, layer by layer.

        Raises:
            NotEnoughMemory: not even one layer fits.
        """
        kept_dtypes.keep_in_fp32(model, self.dtype)
        folder = models.weights_folder(self.recipe.model)
        loader = None if folder is None else IncrementalLoader(model, folder, **options)
        read = loader.read if loader else lambda tensors: initialise(model, list(tensors), seed=options["seed"])
        try:
            return Layerwise(model, self.device, read, self.available_bytes), loader
        except layerwise.DoesNotFit as error:
            raise NotEnoughMemory(
                f"{error}, and {self._memory_limit_text}: use a machine with more memory."
            ) from error

    def changed(self, changes: Sequence[Change]) -> AbstractContextManager[None]:
        """A block in which some tensors of the model have other values."""
        return layerwise.changed(changes) if self.layerwise is None else self.layerwise.changed(changes)

    @cached_part("the kernels that the recipe names")
    def kernels(self) -> dict[str, str]:
        """The implementation of each seam that a run selects."""
        return models.configure_seams(self.recipe, self.model)

    @cached_part("the loss of the samples")
    def loss(self) -> float:
        return calls.loss(self.model, self.row, self.kernels)

    @cached_part("the gradients")
    def gradient_summaries(self) -> dict[str, calls.GradientSummary]:
        """A summary of every gradient, from one backward pass of the row."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.require_memory(max((p.numel() * p.element_size() for p in trained), default=0) * 2, "gradients")
        return calls.gradient_summaries(self.model, self.row, self.kernels)

    @property
    def probe(self) -> dict[str, Any]:
        """One sample, with media if any has them, as the trainer passes it to the model."""
        sample = max(self.documents, key=lambda document: len(document.fields))
        return calls.model_inputs(self.rows([sample]), self.device)

    @cached_part("the outputs of the model's layers")
    def expected_trace(self) -> traces.ExpectedTrace:
        """The outputs of the layers for the probe, computed by eager code."""
        model, probe, paths = self.model, self.probe, traces.recorded_paths(self.model)
        perturbed = traces.record_perturbed(model, probe, paths)
        return traces.ExpectedTrace(traces.record(model, probe, paths), perturbed, calls.tolerance(self.dtype))

    def release(self) -> None:
        """Frees the model's memory; parts that were computed with it are kept."""
        if "model" in self.built:
            del self.built["model"]
            self.layerwise = self.weights = None
            gc.collect()
        self.failures.setdefault("model", "its memory was freed for the next check")  # an earlier reason stays
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def available_bytes(self) -> int:
        """The number of bytes that a model may take."""
        if self.memory is not None:
            return self.memory
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else host_memory.available()
        return int(min(0.9 * free, 1 << 62))

    @property
    def _memory_limit_text(self) -> str:
        if self.memory is not None:
            return f"--memory allows {format_bytes(self.memory)}"
        return f"{format_bytes(self.available_bytes)} are available on {setup.device_name(self.device)}"

    def require_memory(self, num_bytes: int, what: str) -> None:
        """Raises NotEnoughMemory unless this many bytes are available (`available_bytes`)."""
        if num_bytes > self.available_bytes:
            raise NotEnoughMemory(
                f"{what} take {format_bytes(num_bytes)}, and {self._memory_limit_text}: use a machine with more memory."
            )

    def close(self) -> None:
        """Deletes the scratch folder."""
        self._scratch.cleanup()
