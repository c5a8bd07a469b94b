"""Replayed steps against the same steps without a graph, on gloo ranks with a recording that runs a step again."""

from __future__ import annotations

import cases_captured as cases
import pytest

from patchgen.runtime.parallel import peer_units

pytest.importorskip("triton")

LAYOUTS = [{}, {"ep": 2}, {"sp": 2}]
ONE, PADDED, MANY = (48,), (20, 17), (3, 5, 4, 6, 2, 7, 3, 4, 5, 2, 7)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replayed_steps_are_those_without_a_graph(layout, two_ranks):
    """Rows of other documents, of one, with padding and without: brought to one form, they are the same rows."""
    documents = [[(20, 28), (11, 37)], [(25, 23), (30, 18)], [ONE, PADDED], [PADDED, ONE], [(40, 8), (9, 39)]]
    for found in zip(
        two_ranks.run(cases.curve, documents, replays=True, **layout),
        two_ranks.run(cases.curve, documents, replays=False, **layout),
        strict=True,
    ):
        (replayed, times, graphs), (plain, _, _) = found
        assert (times, graphs) == (len(documents) - 1, 1)
        assert replayed == pytest.approx(plain, rel=1e-6)


def test_a_row_that_does_not_fit_is_computed_as_always_by_all(two_ranks):
    """More documents on one rank than its graph has room for: both ranks compute, then capture again."""
    documents = [[(20, 28)], [(20, 28)], [(20, 28), MANY], [(20, 28), MANY], [(30, 18)]]
    for (replayed, times, graphs), (plain, _, _) in zip(
        two_ranks.run(cases.curve, documents, replays=True),
        two_ranks.run(cases.curve, documents, replays=False),
        strict=True,
    ):
        assert (times, graphs) == (3, 2)
        assert replayed == pytest.approx(plain, rel=1e-6)


@pytest.mark.skipif(peer_units.IS_REBUILT, reason="torch rebuilt what units in peer memory read of FSDP2")
def test_what_is_frozen_keeps_no_step_from_being_replayed(two_ranks):
    """No optimizer writes it, so nobody says that it was written."""
    documents = [[(20, 28)], [(25, 23)], [(30, 18)]]
    for (replayed, times, graphs), (plain, _, _) in zip(
        two_ranks.run(cases.curve, documents, replays=True, frozen=True),
        two_ranks.run(cases.curve, documents, replays=False, frozen=True),
        strict=True,
    ):
        assert (times, graphs) == (2, 1)
        assert replayed == pytest.approx(plain, rel=1e-6)
