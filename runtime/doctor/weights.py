"""Do the weights fit the model, and does training update those that it should?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.layout import assemble
from patchgen.runtime.checkpoint.load import stored_leaves
from patchgen.runtime.checkpoint.quantised import read_folder
from patchgen.runtime.checkpoint.vocabulary import growth_advice
from patchgen.runtime.doctor.finding import Check, Finding, failed, first_names, passed
from patchgen.runtime.doctor.patient import MissingPart
from patchgen.runtime.parallel import sharding
from patchgen.runtime.train import lora_targets
from patchgen.runtime.train import model as models
from patchgen.runtime.train.setup import placeholder_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from patchgen.runtime.doctor.patient import Patient


class Weights(Check):
    """Every parameter comes from the checkpoint, in its shape and without rounding; every token of the first samples has a trained
    embedding."""

    name = "weights"

    def run(self, patient: Patient) -> Finding:
        if patient.checkpoint is None:
            return passed("The weights are random: the recipe names none.")
        try:
            grown, model = patient.grown, patient.model
            if patient.layerwise is not None:
                patient.layerwise.read_all()
        except CheckpointError as error:
            return failed(str(error), _advice(patient, str(error)))
        folder = models.weights_folder(patient.recipe.model)
        assert folder is not None, "patient.checkpoint is not None"
        for problem, advice in (*_rounded_weights(patient, folder), *_untrained_tokens(patient, model, grown)):
            return failed(problem, advice)
        new = [f"{name} grows from {stored} to {rows} rows" for name, (stored, rows) in grown.items()]
        tied = "tied to the embeddings" if _is_tied(model) else "a matrix of its own"
        count = sum(p.numel() for p in model.parameters())
        note = "" if patient.layerwise is None else "; larger than memory: its layers are loaded one after another"
        return passed(
            f"{count:,} parameters from {folder}; the head is {tied}{note}{''.join(f'; {line}' for line in new)}."
        )


def _is_tied(model: PreTrainedModel) -> bool:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embeddings.weight


def _advice(patient: Patient, error: str) -> str:
    """What to do about a checkpoint that was refused with `error`."""
    folder = models.weights_folder(patient.recipe.model)
    assert folder is not None, "a checkpoint was read"
    stored, state = read_folder(folder), patient.blueprint.state_dict()
    parameters = assemble(patient.blueprint, stored_leaves(stored)).parameters
    shapes = {name: lazy.shape for name, lazy in parameters.items()}
    new_rows = models.allowed_differences(patient.recipe, patient.blueprint)["new_rows"]
    if advice := growth_advice(patient.blueprint, shapes, new_rows):
        return advice
    transposed = [
        name
        for name, tensor in state.items()
        if name in stored and tensor.ndim > 1 and tuple(stored[name].shape) != tuple(tensor.shape)
        and tuple(stored[name].shape) == (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
    ]  # fmt: skip
    if transposed:
        return (
            f"{first_names(transposed)} are stored transposed: swap their last two dimensions where they were written."
        )
    head = next(
        (name for name, p in patient.blueprint.named_parameters(remove_duplicate=False) if _is_head(patient, p)), None
    )
    if head is not None and head in error:
        tie = patient.config.tie_word_embeddings
        return (
            f"config.tie_word_embeddings = {str(tie).lower()} contradicts the checkpoint's {head}: set it to "
            f"{str(not tie).lower()} in config.json, or export the weights again with it."
        )
    return "Name the weights that belong to this config (model.weights), or the config that belongs to them (model.source)."


def _is_head(patient: Patient, parameter: nn.Parameter) -> bool:
    head = patient.blueprint.get_output_embeddings()
    return head is not None and parameter is head.weight


def _rounded_weights(patient: Patient, folder: Path) -> Iterator[tuple[str, str]]:
    """Weights and buffers that the checkpoint stores in float32 beside 16-bit ones, and the recipe rounds."""
    stored, state = read_folder(folder), patient.blueprint.state_dict()
    sizes: Counter[torch.dtype] = Counter()
    for tensor in stored.values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    common = max((dtype for dtype in sizes if dtype.is_floating_point), key=lambda dtype: sizes[dtype])
    chosen = getattr(torch, patient.recipe.model.dtype)
    if chosen.itemsize >= 4:
        return
    lost = [
        key
        for name, keys in assemble(patient.blueprint, stored_leaves(stored)).sources.items()
        if state[name].itemsize < 4
        for key in keys
        if stored[key].dtype == torch.float32 != common
    ]
    if lost:
        yield (
            f"The checkpoint keeps {first_names(lost)} in float32 beside {str(common).removeprefix('torch.')}, and model.dtype = "
            f"{patient.recipe.model.dtype} rounds them: with a rounded router, tokens near a tie go to other experts.",
            "Set model.dtype: float32 (layers compute in parallel.param_dtype; upstream decides which modules stay in float32).",
        )


@torch.no_grad()
def _untrained_tokens(
    patient: Patient, model: PreTrainedModel, grown: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, str]]:
    """Tokens of the data with untrained embeddings: rows that are zero, or equal to others, and that are not new.

    Args:
        grown: name of each parameter with new rows -> its rows in the checkpoint and in the model.
    """
    try:
        ids = sorted({token for sample in patient.samples for token in sample.ids})
    except MissingPart:  # reported by the check `data`
        return
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor), "embeddings are a table"
    placeholders = placeholder_ids(patient.config)
    stored = next((rows[0] for name, rows in grown.items() if model.get_parameter(name) is weight), weight.shape[0])
    used = [
        token for token in ids if token < stored and token not in placeholders
    ]  # new rows are equal until they train
    rows = weight[torch.tensor(used, device=weight.device)].float().cpu()
    zeros = [token for token, row in zip(used, rows, strict=True) if not row.any()]
    _, group_of_row, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    duplicated = [token for token, group in zip(used, group_of_row.tolist(), strict=True) if counts[group] > 1]
    wrong, what = (zeros, "embeddings of zeros") if zeros else (duplicated, "equal embeddings")
    if wrong:
        shown = first_names([f"{patient.tokenizer.convert_ids_to_tokens(token)!r} = {token}" for token in wrong])
        yield (
            f"{len(wrong)} of the {len(used)} tokens in the first samples have {what} ({shown}): they were never trained, "
            "or the vocabulary was cut or padded.",
            "Take the checkpoint with its full vocabulary, or a tokenizer without these tokens.",
        )


class TrainedParameters(Check):
    """What should train gets a gradient, and nothing is frozen except what the recipe names."""

    name = "trained parameters"

    def run(self, patient: Patient) -> Finding:
        if patient.recipe.lora is not None:
            return passed(
                f"Only adapters train: {lora_targets.find_targets(patient.blueprint, patient.recipe.lora).summary}."
            )
        model, patterns = patient.blueprint, patient.recipe.model.freeze
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        share = sum(sizes[name] for name in trained) / sum(sizes.values())
        summary = f"{share:.1%} of the parameters train"
        if not any(p.requires_grad for p in _layer_parameters(model)):
            trained_names = first_names(sorted({name.rpartition(".")[0] for name in trained}))
            return failed(
                f"{summary}: model.freeze = {list(patterns)} freezes every layer of the language model; what trains is "
                f"{trained_names}.",
                "Name the tower that should stay as it is (`model.visual.*`), not the model around it; if a new head alone is to "
                "learn, say so with --skip 'trained parameters'.",
            )
        unnamed = sorted(set(sizes) - trained) if not patterns else []
        if unnamed:
            return failed(
                f"{summary}: {first_names(unnamed)} are frozen, and the recipe freezes nothing: the code of the model does.",
                "Remove requires_grad = False from the modeling file, and generate it again.",
            )
        return self._gradients_arrive(patient, summary, trained)

    @staticmethod
    def _gradients_arrive(patient: Patient, summary: str, trained: set[str]) -> Finding:
        """Whether gradients reach every trained matrix of the layers."""
        try:
            gradients = patient.gradient_summaries
        except MissingPart as error:
            return passed(f"{summary}. Whether gradients reach them was not checked: {error}")
        in_layers = {id(parameter) for parameter in _layer_parameters(patient.model)}
        dead = [
            name
            for name, parameter in patient.model.named_parameters()
            if name in trained and parameter.ndim > 1 and id(parameter) in in_layers
            and (name not in gradients or gradients[name].is_zero)
        ]  # fmt: skip
        if dead:
            return failed(
                f"{summary}, but no gradient reaches {first_names(dead)}.",
                "Look for detach(), no_grad() or a branch that is never taken in the forward of these modules.",
            )
        norm = math.hypot(*(summary_of_gradient.norm for summary_of_gradient in gradients.values()))
        return passed(f"{summary}; the norm of their gradient is {norm:.3g}.")


def _layer_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of the language model's layers."""
    decoder_modules = set(model.get_decoder().modules())
    layers = [layer for layer in sharding.find_layers(model, None) if layer in decoder_modules]
    return [parameter for layer in layers for parameter in layer.parameters()]
