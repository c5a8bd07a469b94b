"""Runs the observed steps: rows of one document for lengths, packed rows and rows with padding or media for values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from patchgen.runtime.attention_masks import UnsupportedError
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.verify import training_inputs as inputs
from patchgen.runtime.verify.observe import kept_values, lengths, reads
from patchgen.runtime.verify.observe.facts import LENGTH, STATE, UNKNOWN, VALUE, Fact
from patchgen.runtime.verify.observe.places import Source
from patchgen.runtime.verify.slices import RANKS, fake_rank
from patchgen.runtime.verify.verdict import one_line_error

if TYPE_CHECKING:
    from patchgen.runtime.verify.training_checks import Comparison
    from patchgen.runtime.verify.training_inputs import Batch

PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 31, 29, 23, 19, 17, 13)


def prime_length(model: nn.Module, most: int | None) -> int:
    """A length of at most `most` that divides no size of a parameter, so that a size that it divides is one of the sequence; 0 if
    there is none."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape if size}
    primes = (prime for prime in PRIMES if most is None or prime <= most)
    return next((prime for prime in primes if all(size % prime for size in sizes)), 0)


def facts_of(comparison: Comparison) -> tuple[tuple[Fact, ...], frozenset[int]]:
    """What steps of a fresh generated model do, as the trainer takes them on one rank, and the lines that they run."""
    fresh = comparison.with_separate_documents(comparison.separates_documents)
    model, found = fresh.generated, _Found()
    source, batches = Source(type(model)), _batches(fresh)
    first, second = batches[-1], batches[0]
    found.watch(  # before all others: a value that is kept from the first call on is new only once
        STATE,
        lambda: kept_values.values_kept(source, model, lambda: fresh.step(first), lambda: fresh.step(second)),
    )
    values = reads.Observed(source, model)
    with torch.no_grad():
        for batch in batches:
            found.watch(VALUE, lambda batch=batch: values.in_run(lambda: fresh.forward(batch)))
        if fresh.has_router_loss:
            with fresh.router_loss_on():
                found.watch(VALUE, lambda: values.in_run(lambda: fresh.forward(batches[0])))
        found.watch(LENGTH, lambda: _lengths_used(fresh, source))
    return merged(found.facts), frozenset(values.executed_lines)


def _lengths_used(fresh: Comparison, source: Source) -> list[Fact]:
    length = _length(fresh)
    if not length:
        raise ValueError("no length of its rows of text is one of no parameter")
    rows = inputs.trainer_inputs(inputs.rows_of(fresh.tokens, length))
    return lengths.lengths_used(source, length, rows.get("position_ids"), lambda: fresh.forward(rows))


def on_slices(comparison: Comparison, facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """The facts, where a length that is the whole sequence's also on a slice of it has no effect: the runtime has gathered it.

    It is observed in one of two ranks, of which the other does not exist: only sizes count. No process group may exist.
    """
    if not any(fact.kind == LENGTH and fact.effect for fact in facts):
        return tuple(facts)
    fresh = comparison.with_separate_documents(comparison.separates_documents)
    source, length = Source(type(fresh.generated)), _length(fresh, RANKS)
    if not length:
        return tuple(facts)
    row = {name: rows[:1] for name, rows in inputs.rows_of(fresh.tokens, RANKS * length).items()}
    batch = slice_batch(row, sp=RANKS, sp_rank=0)
    with fake_rank() as fresh.state, torch.no_grad():
        try:
            found = lengths.lengths_used(
                source, length, batch.get("position_ids"), lambda: fresh.forward(batch), whole=RANKS * length
            )
        except UnsupportedError:
            return tuple(facts)  # slices are refused
        except Exception as error:  # of values that were never exchanged: nothing says which lengths are a slice's
            reraise_machine_failure(error)
            return tuple(facts)
    of_slices = [fact for fact in found if fact.effect]
    kept = _without_effect(facts, {fact.line for fact in of_slices}, "the whole sequence's on every rank")
    return merged([*kept, *of_slices])


def _without_effect(facts: Sequence[Fact], lines: Collection[int], why: str) -> tuple[Fact, ...]:
    """The facts, those about lengths on other lines than these without their effect."""
    return tuple(
        Fact(fact.kind, fact.line, fact.code, f"{fact.what}, {why}")
        if fact.kind == LENGTH and fact.effect and fact.line not in lines
        else fact
        for fact in facts
    )


def merged(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Each fact once, with its effect if any batch shows one; by line."""
    by_place: dict[tuple[str, int, str], Fact] = {}
    for fact in facts:
        place = fact.kind, fact.line, "" if fact.line else fact.what
        if place not in by_place or (fact.effect and not by_place[place].effect):
            by_place[place] = fact
    return tuple(sorted(by_place.values(), key=lambda fact: (fact.line, fact.kind, fact.what)))


_IN_WORDS = {VALUE: "the values that a step reads", LENGTH: "the lengths that it uses", STATE: "what it keeps"}


class _Found:
    """The facts found so far; that something cannot be observed is one of them."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []

    def watch(self, kind: str, observed: Callable[[], list[Fact]]) -> None:
        try:
            self.facts += observed()
        except Exception as error:
            reraise_machine_failure(error)
            reason = one_line_error(error).rstrip(".")
            self.facts.append(Fact(kind, 0, "", f"{_IN_WORDS[kind]} could not be observed ({reason})", UNKNOWN))


def _length(comparison: Comparison, ranks: int = 1) -> int:
    """Of the rows whose lengths are watched, on each of `ranks`; 0: they cannot be."""
    if comparison.needs_media:
        return 0
    most = comparison.tokens.num_positions
    return prime_length(comparison.generated, most if most is None else most // ranks)


def _batches(comparison: Comparison) -> list[Batch]:
    """Plain rows, padded rows, and packed rows with and without media, as far as the model takes them."""
    rows = [comparison.plain]
    if not comparison.needs_media:
        rows.append(inputs.padded_rows(comparison.plain, left=False))
    if comparison.check_names:
        rows += [media.require_padded() for media in comparison.media.values()]
    else:
        rows.append(comparison.text.packed())
        rows += [media.packed(comparison.positions) for media in comparison.media.values()]
    return [inputs.trainer_inputs(batch) for batch in rows]
