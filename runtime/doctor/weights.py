"""Do the weights fit the model, and do those train that should?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.layout import assemble
from patchgen.runtime.checkpoint.load import stored_leaves
from patchgen.runtime.checkpoint.safetensor_files import read_folder
from patchgen.runtime.doctor.finding import Check, Finding, failed, few, passed
from patchgen.runtime.doctor.patient import Needs
from patchgen.runtime.parallel import sharding
from patchgen.runtime.train import lora_targets
from patchgen.runtime.train import model as models

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from patchgen.runtime.doctor.patient import Patient


class Weights(Check):
    """Every parameter comes from the checkpoint, in its shape and without losing digits; every token has an embedding."""

    name = "weights"

    def run(self, patient: Patient) -> Finding:
        if patient.checkpoint is None:
            return passed("The weights are random: the recipe names none.")
        try:
            model = patient.model
            if patient.layerwise is not None:
                patient.layerwise.read_all()
        except CheckpointError as error:
            return failed(str(error), _advice(patient, str(error)))
        folder = models.weights_folder(patient.recipe.model)
        assert folder is not None, "the place of the weights was found above"
        for problem, advice in (*_rounded(patient, folder), *_untrained(patient, model)):
            return failed(problem, advice)
        tied = "tied to the embeddings" if _is_tied(model) else "a matrix of its own"
        count = sum(p.numel() for p in model.parameters())
        held = "" if patient.layerwise is None else "; larger than memory: its layers are held one after another"
        return passed(f"{count:,} parameters from {folder}; the head is {tied}{held}.")


def _is_tied(model: PreTrainedModel) -> bool:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embeddings.weight


def _advice(patient: Patient, told: str) -> str:
    """What the refusal of a checkpoint means, where shapes or ties say it."""
    folder = models.weights_folder(patient.recipe.model)
    assert folder is not None, "a checkpoint that was refused lies somewhere"
    stored, state = read_folder(folder), patient.blueprint.state_dict()
    turned = [
        name
        for name, tensor in state.items()
        if name in stored and tensor.ndim > 1 and tuple(stored[name].shape) != tuple(tensor.shape)
        and tuple(stored[name].shape) == (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
    ]  # fmt: skip
    if turned:
        return f"{few(turned)} lie there transposed: exchange their last two dimensions where they were written."
    head = next(
        (name for name, p in patient.blueprint.named_parameters(remove_duplicate=False) if _is_head(patient, p)), None
    )
    if head is not None and head in told:
        tie = patient.config.tie_word_embeddings
        return (
            f"config.tie_word_embeddings = {str(tie).lower()}, and the checkpoint says otherwise of {head}: set it to "
            f"{str(not tie).lower()} in config.json, or export the weights again with it."
        )
    return "Name the weights that belong to this config (model.weights), or the config that belongs to them (model.source)."


def _is_head(patient: Patient, parameter: nn.Parameter) -> bool:
    head = patient.blueprint.get_output_embeddings()
    return head is not None and parameter is head.weight


def _rounded(patient: Patient, folder: Path) -> Iterator[tuple[str, str]]:
    """Weights and buffers that the checkpoint keeps wider than its others, for a reason, and the model in 16 bits."""
    stored, state = read_folder(folder), patient.blueprint.state_dict()
    sizes: Counter[torch.dtype] = Counter()
    for tensor in stored.values():
        sizes[tensor.dtype] += tensor.num_bytes // tensor.dtype.itemsize
    common = max((dtype for dtype in sizes if dtype.is_floating_point), key=lambda dtype: sizes[dtype])
    chosen = getattr(torch, patient.recipe.model.dtype)
    if chosen.itemsize >= 4:
        return
    kept = {
        f"{path}."
        for module in sharding.kept_in_fp32(patient.blueprint, chosen)
        for path, one in patient.blueprint.named_modules()
        if one is module
    }
    lost = [
        key
        for name, keys in assemble(patient.blueprint, stored_leaves(stored)).sources.items()
        if state[name].itemsize < 4 and not name.startswith(tuple(kept))
        for key in keys
        if stored[key].dtype == torch.float32 != common
    ]
    if lost:
        yield (
            f"The checkpoint keeps {few(lost)} in float32 beside {str(common).removeprefix('torch.')}, and model.dtype = "
            f"{patient.recipe.model.dtype} rounds them: of a router that is other experts for tokens near a tie.",
            "Set model.dtype: float32 (layers compute in parallel.param_dtype; upstream says which modules stay wide).",
        )


@torch.no_grad()
def _untrained(patient: Patient, model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Tokens of the data whose embeddings nobody has trained: rows of zeros, or alike."""
    try:
        ids = sorted({token for sample in patient.samples for token in sample.ids})
    except Needs:  # told by the check of the data
        return
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor), "embeddings are a table"
    configs = (patient.config, patient.config.get_text_config())
    places = {value for one in configs for value in vars(one).values() if type(value) is int}  # media among them
    used = [token for token in ids if token < weight.shape[0] and token not in places]
    rows = weight[torch.tensor(used, device=weight.device)].float().cpu()
    empty = [token for token, row in zip(used, rows, strict=True) if not row.any()]
    _, which, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    alike = [token for token, place in zip(used, which.tolist(), strict=True) if counts[place] > 1]
    wrong, what = (empty, "embeddings of zeros") if empty else (alike, "one and the same embedding")
    if wrong:
        shown = few([f"{patient.tokenizer.convert_ids_to_tokens(token)!r} = {token}" for token in wrong])
        yield (
            f"{len(wrong)} of the {len(used)} tokens in the first samples have {what} ({shown}): the vocabulary was cut or "
            "padded, and nobody trained them.",
            "Take the checkpoint with its whole vocabulary, or the tokenizer that has no more tokens than it.",
        )


class TrainedParameters(Check):
    """What should learn gets a gradient, and nothing else is frozen than what the recipe names."""

    name = "trained parameters"

    def run(self, patient: Patient) -> Finding:
        if patient.recipe.lora is not None:
            return passed(
                f"Adapters alone: {lora_targets.find_targets(patient.blueprint, patient.recipe.lora).summary}."
            )
        model, patterns = patient.blueprint, patient.recipe.model.freeze
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        share = sum(sizes[name] for name in trained) / sum(sizes.values())
        told = f"{share:.1%} of the parameters train"
        layers = [layer for layer in sharding.find_layers(model, None) if _is_inside(layer, model.get_decoder())]
        named = f"model.freeze = {list(patterns)}"
        if not any(p.requires_grad for layer in layers for p in layer.parameters()):
            left = few(sorted({name.rpartition(".")[0] for name in trained}))
            return failed(
                f"{told}: {named} freezes every layer of the language model; what is left is {left}.",
                "Name the tower that should stay as it is (`model.visual.*`), not the model around it; if a new head alone is to "
                "learn, say so with --skip 'trained parameters'.",
            )
        unnamed = sorted(set(sizes) - trained) if not patterns else []
        if unnamed:
            return failed(
                f"{told}: {few(unnamed)} are frozen, and the recipe freezes nothing: the code of the model does.",
                "Remove requires_grad = False from the modeling file, and generate it again.",
            )
        return self._reached(patient, told, trained)

    @staticmethod
    def _reached(patient: Patient, told: str, trained: set[str]) -> Finding:
        try:
            slopes = patient.slopes
        except Needs as error:
            return passed(f"{told}. Whether gradients reach them was not looked at: {error}")
        decoder = patient.model.get_decoder()
        layers = [layer for layer in sharding.find_layers(patient.model, None) if _is_inside(layer, decoder)]
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        dead = [
            name
            for name, parameter in patient.model.named_parameters()
            if name in trained and parameter.ndim > 1 and id(parameter) in inside
            and (name not in slopes or slopes[name].is_zero)
        ]  # fmt: skip
        if dead:
            return failed(
                f"{told}, but no gradient reaches {few(dead)}.",
                "Look for detach(), no_grad() or a branch that is never taken in the forward of these modules.",
            )
        size = math.hypot(*(one.norm for one in slopes.values()))
        return passed(f"{told}; the norm of their gradient is {size:.3g}.")


def _is_inside(layer: nn.Module, whole: nn.Module) -> bool:
    return any(module is layer for module in whole.modules())
