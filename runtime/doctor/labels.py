"""Are labels the tokens that follow, learned where an answer stands and nowhere else? The first samples, to look at."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from patchgen.runtime.data import DataError
from patchgen.runtime.doctor.chat_template import WITHOUT, Turn, find_turn, special_ids
from patchgen.runtime.doctor.finding import Check, Finding, failed, passed
from patchgen.runtime.doctor.judged import of_classes, of_pairs
from patchgen.runtime.doctor.samples import Sample, own_samples
from patchgen.runtime.parallel.batch import IGNORED

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

SHOWN = 2
MOST_LABELS = 10
SHOWN_CHARACTERS = 400
UNKNOWN_SHARE = 0.01
OWN_LABELS = (
    "Hand over labels that are the ids of the same places, -100 where nothing is learned: the model shifts them itself (the "
    "transform of this source makes them)."
)
LEAST_REPEATED = 4
"""Of one token, from which on it is shown once."""
REACH = 3
"""Tokens by which a mask may be off and still be recognised."""


class Data(Check):
    """The first samples can be made."""

    name = "data"

    def run(self, patient: Patient) -> Finding:
        try:
            samples = patient.samples
        except DataError as error:
            shifted = next(filter(None, map(shift_of, own_samples(patient.recipe.data))), None)
            return failed(
                f"{error}{f' The {shifted}' if shifted else ''}", OWN_LABELS if shifted else "As the message says."
            )
        ids = [token for sample in samples for token in sample.ids]
        unknown = patient.tokenizer.unk_token_id
        if unknown is not None and ids.count(unknown) > UNKNOWN_SHARE * len(ids):
            return failed(
                f"{ids.count(unknown)} of the first {len(ids)} tokens are {patient.tokenizer.unk_token!r}: the tokenizer has none "
                "for these texts.",
                "Look at the texts (their encoding, their script), or take a model whose tokenizer has their alphabet.",
            )
        return passed(f"{len(samples)} samples of {len(ids)} tokens, from {samples[0].where} on.")


class Labels(Check):
    """Labels are the ids themselves (the model shifts them) or classes, and cover each answer from its first token to its last;
    pairs share what they answer, classes exist."""

    name = "labels"

    def run(self, patient: Patient) -> Finding:
        samples = patient.samples
        shown = "\n".join(show(one, patient.tokenizer) for one in samples[:SHOWN])
        for sample in samples if patient.recipe.data.kind != "token_classes" else ():
            wrong = shift_of(sample)
            if wrong is not None:
                return failed(f"{sample.place}: {wrong}", OWN_LABELS, shown)
        for problem, advice in (*_masks(patient, samples), *of_pairs(samples, patient), *of_classes(samples, patient)):
            return failed(problem, advice, shown)
        return passed(_told(patient, samples), shown)


def _told(patient: Patient, samples: Sequence[Sample]) -> str:
    """What is learned of the samples."""
    counts = Counter(one.label for one in samples if one.label is not None)
    if counts:
        told = ", ".join(f"{label:g} ({count} x)" for label, count in sorted(counts.items())[:MOST_LABELS])
        more = f" and {len(counts) - MOST_LABELS} more" if len(counts) > MOST_LABELS else ""
        return f"{len(samples)} samples have the labels {told}{more}."
    total = sum(len(one.ids) for one in samples)
    learned = sum(label != IGNORED for one in samples for label in one.labels)
    pairs = sum(one.half == "chosen" for one in samples)
    what = f"{pairs} pairs, each of one prompt," if pairs else f"{len(samples)} samples"
    return f"{learned} of {total} tokens in {what} are learned."


def _masks(patient: Patient, samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    if patient.recipe.data.kind in WITHOUT:
        return
    turn = find_turn(patient)
    for sample in samples:
        wrong = _mask_problem(sample, turn, patient.tokenizer)
        if wrong:
            yield (
                f"{sample.place}: {wrong}",
                "Learn from the first token behind the header of the turn through the token that ends it: fix the transform, "
                "or the {% generation %} marks of the chat template.",
            )


def shift_of(sample: Sample) -> str | None:
    """What labels are instead of the ids; None: they are these."""
    ids, labels = sample.ids, sample.labels
    if all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True)):
        return None
    learned = [place for place, label in enumerate(labels) if label != IGNORED]
    for distance, told in ((1, "shifted to the left"), (-1, "shifted to the right")):
        inside = [place for place in learned if 0 <= place + distance < len(ids)]
        if inside and all(labels[place] == ids[place + distance] for place in inside):
            return (
                f"labels are {told} by one already: each is the id of the {'next' if distance == 1 else 'last'} place. The "
                "model shifts again, and would learn the token after the next."
            )
    place = next(place for place in learned if labels[place] != ids[place])
    return f"the label of token {place} is {labels[place]}, and the token is {ids[place]}."


def runs(labels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and behind-the-last place of each stretch that is learned."""
    start = None
    for place, label in enumerate([*labels, IGNORED]):
        if label != IGNORED and start is None:
            start = place
        elif label == IGNORED and start is not None:
            yield start, place
            start = None


def _mask_problem(sample: Sample, turn: Turn | None, tokenizer: Any) -> str:
    """Where the learned stretches of a conversation do not begin behind the header of a turn, or miss its end."""
    ids, labels = sample.ids, sample.labels
    stretches = list(runs(labels))
    if len(ids) > 1 and stretches == [(0, len(ids))]:
        return "every token is learned, those of the user as well."
    if turn is None:
        return ""
    header, size = list(turn.header_ids), len(turn.header_ids)
    for start, end in stretches:
        if size and ids[max(0, start - size) : start] != header:
            for off in (*range(1, REACH + 1), *range(-REACH, 0)):
                if start + off >= size and ids[start + off - size : start + off] == header:
                    first = tokenizer.decode(ids[min(start, start + off) : max(start, start + off)])
                    late = "early" if off > 0 else "late"
                    what = "which belongs to the header" if off > 0 else "which is not learned"
                    return f"the mask of the answer begins {abs(off)} token(s) too {late}: {first!r}, {what}."
        if turn.end_id is None or (sample.is_cut and end == len(ids)) or ids[end - 1] == turn.end_id:
            continue
        before, behind = ids[max(start, end - 1 - REACH) : end - 1][::-1], ids[end : end + REACH]
        told = f"{tokenizer.convert_ids_to_tokens(turn.end_id)!r}, which ends the turn"
        if turn.end_id in behind:
            off = behind.index(turn.end_id) + 1
            return f"the mask of the answer ends {off} token(s) too early: {told}, is not learned."
        if turn.end_id in before:
            off = before.index(turn.end_id) + 1
            return f"the mask of the answer ends {off} token(s) too late: it goes on behind {told}."
    return ""


def show(sample: Sample, tokenizer: Any) -> str:
    """A sample as text, what is learned between double brackets; one with a label is learned as a whole."""
    parts, behind = [], 0
    for start, end in runs(sample.labels) if sample.label is None else ():
        parts += [_text(sample.ids[behind:start], tokenizer), f"[[{_text(sample.ids[start:end], tokenizer)}]]"]
        behind = end
    text = "".join([*parts, _text(sample.ids[behind:], tokenizer)])
    cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
    said = "" if sample.label is None else f", label {sample.label:g}"
    return f"{sample.place}{said}: {cut}"


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    """Tokens as text, the places of a picture as one with their number."""
    found, plain, special = [], [], special_ids(tokenizer)
    for token, group in itertools.groupby(ids):
        count = len(list(group))
        if count >= LEAST_REPEATED and token in special:
            found += [tokenizer.decode(plain), f"{tokenizer.decode([token])} (x {count})"]
            plain = []
        else:
            plain += [token] * count
    return "".join([*found, tokenizer.decode(plain)])
