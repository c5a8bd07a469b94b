"""Counters of samples that cannot be used."""

from __future__ import annotations

from patchgen.runtime.data.problems import MAX_PLACES, Counters


def test_many_samples_of_one_outcome_do_not_crowd_out_another():
    counters = Counters()
    for number in range(MAX_PLACES + 5):
        counters.add("skipped", f"a:{number}", "too long")
    counters.add("bad", "a:7", "no text")
    rank = Counters()
    rank.add_many("truncated", 2 * MAX_PLACES, [(f"b:{number}", "long") for number in range(2 * MAX_PLACES)])
    counters.merge(Counters.from_dict(rank.as_dict()))
    counters.merge(rank)
    assert counters.summary() == (
        f"1 bad (first: a:7: no text); {MAX_PLACES + 5} skipped (first: a:0: too long); "
        f"{4 * MAX_PLACES} truncated (first: b:0: long)"
    )
    assert len(counters.places) == 2 * MAX_PLACES + 1


def test_an_outcome_without_places_is_counted():
    """As in what an earlier release saved after a thousand places of another outcome."""
    counters = Counters.from_dict({"counts": {"bad": 1, "skipped": 2}, "places": [["skipped", "a:0", "too long"]]})
    assert counters.summary() == "1 bad; 2 skipped (first: a:0: too long)"
