"""Data with what people say of them: pairs of a chosen and a rejected answer, texts with a class; and what the objective
asks of other models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from patchgen.runtime.data import DataError
from patchgen.runtime.data.loader import make_batch
from patchgen.runtime.doctor import calls
from patchgen.runtime.doctor.finding import Check, Finding, failed, few, not_checked, passed
from patchgen.runtime.doctor.samples import Sample
from patchgen.runtime.objectives import choose
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.train import model as models
from patchgen.runtime.train import setup
from patchgen.runtime.train.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

SEAM = 2
"""Tokens in which equal prompts may end differently."""
CUT = 0.05
"""Share of documents whose end a run may cut off without a word."""
SHOWN_CHARACTERS = 60
LEAST_PAIRS = 4
FAR_APART = 1.0
"""Nats per token by which every rejected answer must be likelier than the chosen one to be taken for it."""


def pairs_of(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Chosen and rejected halves."""
    chosen = [one for one in samples if one.half == "chosen"]
    return list(zip(chosen, (one for one in samples if one.half == "rejected"), strict=True))


def of_pairs(samples: Sequence[Sample], patient: Patient) -> Iterator[tuple[str, str]]:
    """What is wrong with pairs, and what to do about it: prompts that differ, answers that are empty or cut."""
    pairs, tokenizer = pairs_of(samples), patient.tokenizer
    for pair in pairs:
        prompts = [_prompt(one) for one in pair]
        if not _are_alike(*prompts):
            texts = [repr(tokenizer.decode(ids)[-SHOWN_CHARACTERS:]) for ids in prompts]
            yield (
                f"{pair[0].where}: chosen and rejected do not answer the same: {texts[0]} stands before the one, {texts[1]} "
                "before the other.",
                "Pair answers to one prompt: the messages before the answer must be equal, the system message among them.",
            )
        for half in pair:
            learned = [token for token, label in zip(half.ids, half.labels, strict=True) if label != IGNORED]
            if not tokenizer.decode(learned, skip_special_tokens=True).strip():
                yield (
                    f"{half.place}: the answer is empty: what is learned is {tokenizer.decode(learned)!r}.",
                    "Leave such pairs out, or look at the columns that the source's fields name (data.sources[].fields).",
                )
    cut = [one for one in samples if one.half and one.is_cut_in_run]
    if len(cut) > CUT * len(samples):
        yield (
            f"A run cuts off the end of {len(cut)} of the first {len(samples)} answers ({cut[0].place}): data.max_length = "
            f"{patient.recipe.data.longest} tokens. Beginnings of answers would be compared.",
            "Raise data.max_length (and data.tokens_per_batch with it), or leave such pairs out: data.on_long: skip.",
        )


def _prompt(sample: Sample) -> list[int]:
    """The tokens before the first that is learned."""
    return sample.ids[: next(place for place, label in enumerate(sample.labels) if label != IGNORED)]


def _are_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two prompts are the same, but for a token on the seam: it may hold a part of the answer."""
    shared = next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return max(len(one), len(other)) - shared <= SEAM


def of_classes(samples: Sequence[Sample], patient: Patient) -> Iterator[tuple[str, str]]:
    """Labels that the objective has no class for, in the words of a run."""
    objective = choose.objective_of(patient.recipe.objective)
    for sample in (one for one in samples if one.label is not None):
        batch = make_batch([(0, {**sample.fields, "label": sample.label})], pad_to=None, pad_token_id=0)
        try:
            objective.require_valid(batch)
        except DataError as error:
            yield (
                f"{sample.where}: {error}",
                "Number classes from 0 and set objective.options.num_labels to how many there are; 1 is for numbers.",
            )


class ObjectiveCheck(Check):
    """What the objective compares fits: a teacher has the same tokens, chosen answers are not the unlikely ones."""

    name = "objective"

    def run(self, patient: Patient) -> Finding:
        recipe = patient.recipe
        if (teacher := choose.teacher_recipe(recipe)) is not None:
            return _teacher(patient, teacher)
        if recipe.data.kind == "preference":
            return _preferences(patient)
        return passed(f"{recipe.objective.name} compares the model with no other.")


def _teacher(patient: Patient, other: Recipe) -> Finding:
    try:
        choose.require_same_tokens(patient.blueprint, models.build_on_meta(other))
    except RecipeError as error:
        return failed(str(error), "Take a teacher of the same family, with the tokenizer of the student.")
    told = f"The teacher, {other.model.source}, has a vocabulary of the same size"
    try:
        tokens = setup.data_parts(other).tokenizer.get_vocab()
    except RecipeError as error:
        return passed(f"{told}; whether its tokens mean the same was not looked at: {error}")
    own = patient.tokenizer.get_vocab()
    differing = sorted((token for token in own if tokens.get(token) != own[token]), key=own.get)
    if differing:
        shown = few([f"{token!r} = {own[token]}, there {tokens.get(token, 'none')}" for token in differing])
        return failed(
            f"{told}, and {len(differing)} of the student's {len(own)} tokens have another number there ({shown}): what it says "
            "of one token would be learned for another.",
            "Take a teacher with the tokenizer of the student, or the student's weights that belong to the teacher's.",
        )
    return passed(f"{told} and the same tokens.")


def _preferences(patient: Patient) -> Finding:
    """How likely the halves of pairs are."""
    pairs = pairs_of(patient.documents)
    if not patient.is_trained:
        return not_checked("weights are random: no answer is likelier than another.")
    margins = [chosen - rejected for chosen, rejected in likelihoods(patient, pairs)]
    mean, likelier = sum(margins) / len(margins), sum(margin > 0 for margin in margins)
    told = f"The chosen answer is the likelier one, per token, in {likelier} of {len(pairs)} pairs, by {mean:+.2f} nats in the mean"
    if len(pairs) >= LEAST_PAIRS and not likelier and mean < -FAR_APART:
        return failed(
            f"{told}: chosen and rejected are probably exchanged.",
            "Look at the pairs above and at the columns that the source names; where the rejected ones are this model's own "
            "samples, all is well: --skip objective.",
        )
    return passed(f"{told}.")


@torch.no_grad()
def likelihoods(patient: Patient, pairs: Sequence[tuple[Sample, Sample]]) -> list[tuple[float, float]]:
    """The mean log-probability of what is learned of each half."""
    documents = [half for pair in pairs for half in pair]
    logits = calls.logits(patient.model, patient.rows(documents), patient.kernels)
    means, start = [], 0
    for document in documents:
        own = logits[start : start + len(document.ids)].log_softmax(-1)
        start += len(document.ids)
        labels = document.fields["labels"]
        learned = (labels[1:] != IGNORED).nonzero()[:, 0]
        means.append(float(own[learned, labels[learned + 1]].mean()))
    return list(zip(means[::2], means[1::2], strict=True))
