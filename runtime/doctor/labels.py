"""Are labels unshifted ids or classes, with a loss on the answers and nowhere else? Shows the first samples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from patchgen.runtime.data import DataError
from patchgen.runtime.doctor.chat_template import KINDS_WITHOUT_TEMPLATE, Turn, find_turn, special_ids
from patchgen.runtime.doctor.finding import Check, Finding, failed, passed
from patchgen.runtime.doctor.objective_data import class_problems, pair_problems
from patchgen.runtime.doctor.samples import Sample, transform_outputs
from patchgen.runtime.parallel.batch import IGNORED

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

NUM_SHOWN_SAMPLES = 2
MAX_LABELS = 10
SHOWN_CHARACTERS = 400
MAX_UNKNOWN_SHARE = 0.01
"""The share of tokens that may be unknown to the tokenizer."""
LABEL_ADVICE = (
    "Let the transform of this source return labels equal to the ids, -100 for tokens without a loss: the model shifts them "
    "itself."
)
MIN_REPEATED = 4
"""A special token that is repeated at least so often is shown once, with the number of repetitions."""
MAX_OFFSET = 3
"""The most tokens by which a mask may be off and still be recognised as off."""


class Data(Check):
    """The first samples of the data can be encoded."""

    name = "data"

    def run(self, patient: Patient) -> Finding:
        try:
            samples = patient.samples
        except DataError as error:
            shifted = next(filter(None, map(shift_problem, transform_outputs(patient.recipe.data))), None)
            return failed(
                f"{error}{f' The {shifted}' if shifted else ''}",
                LABEL_ADVICE if shifted else "Fix what this error names.",
            )
        ids = [token for sample in samples for token in sample.ids]
        unknown = patient.tokenizer.unk_token_id
        if unknown is not None and ids.count(unknown) > MAX_UNKNOWN_SHARE * len(ids):
            return failed(
                f"{ids.count(unknown)} of the first {len(ids)} tokens are {patient.tokenizer.unk_token!r}: the tokenizer does not "
                "know the characters of these texts.",
                "Check the encoding and script of the texts, or take a model whose tokenizer has their alphabet.",
            )
        return passed(f"{len(samples)} samples with {len(ids)} tokens, starting at {samples[0].record}.")


class Labels(Check):
    """Labels are the ids themselves (the model shifts them) or classes, and cover each answer from its first token to its last;
    pairs share their prompt, classes exist."""

    name = "labels"

    def run(self, patient: Patient) -> Finding:
        samples = patient.samples
        details = "\n".join(shown_sample(sample, patient.tokenizer) for sample in samples[:NUM_SHOWN_SAMPLES])
        for sample in samples if patient.recipe.data.kind != "token_classes" else ():
            problem = shift_problem(sample)
            if problem is not None:
                return failed(f"{sample.name}: {problem}", LABEL_ADVICE, details)
        for problem, advice in (
            *_mask_problems(patient, samples),
            *pair_problems(samples, patient),
            *class_problems(samples, patient),
        ):
            return failed(problem, advice, details)
        return passed(_label_summary(samples), details)


def _label_summary(samples: Sequence[Sample]) -> str:
    """Which labels the samples have, or how many of their tokens have a loss."""
    counts = Counter(sample.label for sample in samples if sample.label is not None)
    if counts:
        summary = ", ".join(f"{label:g} ({count} x)" for label, count in sorted(counts.items())[:MAX_LABELS])
        more = f" and {len(counts) - MAX_LABELS} more" if len(counts) > MAX_LABELS else ""
        return f"{len(samples)} samples have the labels {summary}{more}."
    total = sum(len(sample.ids) for sample in samples)
    num_labels = sum(label != IGNORED for sample in samples for label in sample.labels)
    pairs = sum(sample.half == "chosen" for sample in samples)
    what = f"{pairs} pairs, each with one prompt," if pairs else f"{len(samples)} samples"
    return f"{num_labels} of {total} tokens in {what} have a loss."


def _mask_problems(patient: Patient, samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    """Samples whose labels do not cover exactly the answers, with advice."""
    if patient.recipe.data.kind in KINDS_WITHOUT_TEMPLATE:
        return
    turn = find_turn(patient)
    for sample in samples:
        problem = _mask_problem(sample, turn, patient.tokenizer)
        if problem:
            yield (
                f"{sample.name}: {problem}",
                "Put the loss on all tokens after the header of the turn, including its end token: fix the transform, or the "
                "{% generation %} marks of the chat template.",
            )


def shift_problem(sample: Sample) -> str | None:
    """How the labels with a loss differ from the ids; None: they do not."""
    ids, labels = sample.ids, sample.labels
    if all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True)):
        return None
    labelled = [position for position, label in enumerate(labels) if label != IGNORED]
    for distance, direction, neighbour in ((1, "left", "next"), (-1, "right", "previous")):
        inside = [position for position in labelled if 0 <= position + distance < len(ids)]
        if inside and all(labels[position] == ids[position + distance] for position in inside):
            return (
                f"labels are shifted to the {direction} by one already: each is the id of the {neighbour} token. The model "
                "shifts them again and would learn the wrong token."
            )
    wrong = next(position for position in labelled if labels[position] != ids[position])
    return f"the label of token {wrong} is {labels[wrong]}, and the token is {ids[wrong]}."


def labelled_spans(labels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each span of consecutive tokens with a loss."""
    start = None
    for position, label in enumerate([*labels, IGNORED]):
        if label != IGNORED and start is None:
            start = position
        elif label == IGNORED and start is not None:
            yield start, position
            start = None


def _mask_problem(sample: Sample, turn: Turn | None, tokenizer: Any) -> str:
    """How the first wrong span of labels misses the header or the end token of its turn; empty: none does."""
    ids, labels = sample.ids, sample.labels
    spans = list(labelled_spans(labels))
    if len(ids) > 1 and spans == [(0, len(ids))]:
        return "every token has a loss, those of the user included."
    if turn is None:
        return ""
    header, size = list(turn.header_ids), len(turn.header_ids)
    for start, end in spans:
        if size and ids[max(0, start - size) : start] != header:
            for off in (*range(1, MAX_OFFSET + 1), *range(-MAX_OFFSET, 0)):
                if start + off >= size and ids[start + off - size : start + off] == header:
                    text = tokenizer.decode(ids[min(start, start + off) : max(start, start + off)])
                    direction = "early" if off > 0 else "late"
                    what = "belongs to the header" if off > 0 else "has no loss"
                    return f"the mask of the answer begins {abs(off)} token(s) too {direction}: {text!r} {what}."
        if turn.end_id is None or (sample.is_cut and end == len(ids)) or ids[end - 1] == turn.end_id:
            continue
        before, after = ids[max(start, end - 1 - MAX_OFFSET) : end - 1][::-1], ids[end : end + MAX_OFFSET]
        end_token = f"the end token {tokenizer.convert_ids_to_tokens(turn.end_id)!r}"
        if turn.end_id in after:
            off = after.index(turn.end_id) + 1
            return f"the mask of the answer ends {off} token(s) too early: {end_token} has no loss."
        if turn.end_id in before:
            off = before.index(turn.end_id) + 1
            return f"the mask of the answer ends {off} token(s) too late: it continues after {end_token}."
    return ""


def shown_sample(sample: Sample, tokenizer: Any) -> str:
    """A sample as text, with the tokens that have a loss in double brackets, or with its label."""
    parts, shown_end = [], 0
    for start, end in labelled_spans(sample.labels) if sample.label is None else ():
        parts += [_text(sample.ids[shown_end:start], tokenizer), f"[[{_text(sample.ids[start:end], tokenizer)}]]"]
        shown_end = end
    text = "".join([*parts, _text(sample.ids[shown_end:], tokenizer)])
    shortened = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
    label = "" if sample.label is None else f", label {sample.label:g}"
    return f"{sample.name}{label}: {shortened}"


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    """Tokens as text, repeated placeholders as one with their number."""
    parts, plain, special = [], [], special_ids(tokenizer)
    for token, group in itertools.groupby(ids):
        count = len(list(group))
        if count >= MIN_REPEATED and token in special:
            parts += [tokenizer.decode(plain), f"{tokenizer.decode([token])} (x {count})"]
            plain = []
        else:
            plain += [token] * count
    return "".join([*parts, tokenizer.decode(plain)])
