"""Do pairs, classes and a teacher fit the objective? Pairs and classes are problems of the labels, the rest a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from patchgen.runtime.data import DataError
from patchgen.runtime.data.loader import make_batch
from patchgen.runtime.data.turn_spans import common_prefix_length
from patchgen.runtime.doctor import calls
from patchgen.runtime.doctor.finding import Check, Finding, failed, first_names, not_checked, passed
from patchgen.runtime.doctor.samples import Sample
from patchgen.runtime.objectives import choose
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.train import model as models
from patchgen.runtime.train import setup
from patchgen.runtime.train.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

BOUNDARY_TOKENS = 2
"""Tokens at the end of equal prompts that may differ, because they may contain a part of the answer."""
MAX_CUT_SHARE = 0.05
"""The share of the first documents of pairs that a run may truncate."""
SHOWN_CHARACTERS = 60
"""Characters of a prompt that are shown: its last."""
MIN_PAIRS = 4
"""Fewer pairs do not show whether chosen and rejected are swapped."""
SWAPPED_MARGIN = 1.0
"""Nats per token by which rejected answers must be likelier than chosen ones for the two to count as swapped."""


def pairs_of(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """The chosen and the rejected half of each pair."""
    chosen = [sample for sample in samples if sample.half == "chosen"]
    return list(zip(chosen, (sample for sample in samples if sample.half == "rejected"), strict=True))


def pair_problems(samples: Sequence[Sample], patient: Patient) -> Iterator[tuple[str, str]]:
    """Problems of pairs with advice: different prompts, empty or truncated answers."""
    pairs, tokenizer = pairs_of(samples), patient.tokenizer
    for pair in pairs:
        prompts = [_prompt(sample) for sample in pair]
        if not _are_equal_prompts(*prompts):
            texts = [repr(tokenizer.decode(ids)[-SHOWN_CHARACTERS:]) for ids in prompts]
            yield (
                f"{pair[0].record}: chosen and rejected do not answer the same prompt: one ends with {texts[0]}, the other with "
                f"{texts[1]}.",
                "Pair answers to one prompt: all messages before the answer must be equal, the system message included.",
            )
        for half in pair:
            answer = [token for token, label in zip(half.ids, half.labels, strict=True) if label != IGNORED]
            if not tokenizer.decode(answer, skip_special_tokens=True).strip():
                yield (
                    f"{half.name}: the answer is empty: the tokens with a loss are {tokenizer.decode(answer)!r}.",
                    "Leave such pairs out, or check the columns that data.sources[].columns names.",
                )
    cut = [sample for sample in samples if sample.half and sample.is_cut_in_run]
    documents = "answers" if patient.recipe.data.kind == "preference" else "texts"
    if len(cut) > MAX_CUT_SHARE * len(samples):
        yield (
            f"A run truncates {len(cut)} of the first {len(samples)} {documents} ({cut[0].name}) to data.max_length = "
            f"{patient.recipe.data.length_limit} tokens, and would compare only their beginnings.",
            "Raise data.max_length (and data.tokens_per_batch with it), or leave such pairs out: data.on_long: skip.",
        )


def _prompt(sample: Sample) -> list[int]:
    """The tokens before the first one with a loss."""
    return sample.ids[: next(position for position, label in enumerate(sample.labels) if label != IGNORED)]


def _are_equal_prompts(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two prompts are equal, up to `BOUNDARY_TOKENS` at their end."""
    return max(len(first), len(second)) - common_prefix_length(first, second) <= BOUNDARY_TOKENS


def class_problems(samples: Sequence[Sample], patient: Patient) -> Iterator[tuple[str, str]]:
    """Labels without a class, in the words of the error that would end a run."""
    objective = choose.objective_of(patient.recipe.objective)
    for sample in (sample for sample in samples if sample.label is not None):
        batch = make_batch([(0, {**sample.fields, "label": sample.label})], pad_to=None, pad_token_id=0)
        try:
            objective.require_valid(batch)
        except DataError as error:
            yield (
                f"{sample.record}: {error}",
                "Number classes from 0 and set objective.options.num_labels to how many there are; 1 is for regression.",
            )


class ObjectiveCheck(Check):
    """A teacher has the student's tokens, special ones left out; chosen answers are not all much less likely than rejected
    ones."""

    name = "objective"

    def run(self, patient: Patient) -> Finding:
        recipe = patient.recipe
        if (teacher := choose.teacher_recipe(recipe)) is not None:
            return _teacher(patient, teacher)
        if recipe.data.kind == "preference":
            return _preferences(patient)
        return passed(f"{recipe.objective.name} has neither a teacher nor preference pairs to check.")


def _teacher(patient: Patient, teacher: Recipe) -> Finding:
    try:
        choose.require_same_vocab_size(patient.blueprint, models.build_on_meta(teacher))
    except RecipeError as error:
        return failed(str(error), "Take a teacher of the same family, with the tokenizer of the student.")
    summary = f"The teacher, {teacher.model.source}, has a vocabulary of the same size"
    try:
        tokenizer = setup.data_parts(teacher).tokenizer
    except RecipeError as error:
        return not_checked(f"{summary}; whether its tokens are the same is unknown: {error}")
    if differing := setup.differing_ids(patient.tokenizer, tokenizer):
        shown = first_names([f"{index} = {own!r}, teacher {other!r}" for index, (own, other) in differing.items()])
        return failed(
            f"{summary}, and {len(differing)} of the student's {len(patient.tokenizer)} ids mean another token in it "
            f"({shown}): the student would learn one token's probability for another.",
            "Take a teacher with the tokenizer of the student, or student weights trained with the teacher's tokenizer.",
        )
    return passed(f"{summary}, and the same tokens under the ids that both have, special tokens left out.")


def _preferences(patient: Patient) -> Finding:
    pairs = pairs_of(patient.documents)
    if not patient.is_trained:
        return not_checked("weights are random, so likelihoods mean nothing.")
    margins = [chosen - rejected for chosen, rejected in mean_log_probs(patient, pairs)]
    mean, likelier = sum(margins) / len(margins), sum(margin > 0 for margin in margins)
    summary = (
        f"The chosen answer is likelier per token in {likelier} of {len(pairs)} pairs; on average chosen minus rejected is "
        f"{mean:+.2f} nats per token"
    )
    if len(pairs) >= MIN_PAIRS and not likelier and mean < -SWAPPED_MARGIN:
        return failed(
            f"{summary}: chosen and rejected are probably swapped.",
            "Look at the pairs that `labels` shows and at the columns that the source names. If the rejected answers are this "
            "model's own samples, nothing is wrong: --skip objective.",
        )
    return passed(f"{summary}.")


@torch.no_grad()
def mean_log_probs(patient: Patient, pairs: Sequence[tuple[Sample, Sample]]) -> list[tuple[float, float]]:
    """The mean log-probability of the tokens with a loss, for both halves of each pair."""
    documents = [half for pair in pairs for half in pair]
    logits = calls.logits(patient.model, patient.rows(documents), patient.kernels)
    means, start = [], 0
    for document in documents:
        log_probabilities = logits[start : start + len(document.ids)].log_softmax(-1)
        start += len(document.ids)
        labels = document.fields["labels"]
        predicting = (labels[1:] != IGNORED).nonzero()[:, 0]  # each predicts the token after it
        means.append(float(log_probabilities[predicting, labels[predicting + 1]].mean()))
    return list(zip(means[::2], means[1::2], strict=True))
