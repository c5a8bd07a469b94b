"""The three calls for reinforcement learning over FSDP x EP x SP, beside plain transformers on one process."""

from __future__ import annotations

from functools import cache

import cases_rl as cases
import pytest
from rounding import require_equal_up_to_rounding

upstream = cache(cases.of_upstream)


def require_same(results: list[tuple], name: str) -> None:
    before, losses, norms, weights = upstream(name)
    for values, rows, found_losses, found_norms, _ in results:
        require_equal_up_to_rounding(values, before[rows], what="log-probabilities")
        require_equal_up_to_rounding(found_losses, losses, what="losses")
        require_equal_up_to_rounding(found_norms, norms, what="norms")
    trained = results[0][-1]
    assert trained.keys() == weights.keys()
    for key, expected in weights.items():
        require_equal_up_to_rounding(trained[key], expected, units=100, what=key)  # two steps of Adam


@pytest.mark.parametrize(
    ("micro_batches", "layout"),
    [(2, {}), (1, {"ep": 2}), (2, {"sp": 2, "ep": 2}), (1, {"sp": 2, "ep": 4})],
    ids=["fsdp", "fsdp-ep2", "sp2-ep2-fsdp", "sp2-ep4"],
)
def test_four_ranks(four_ranks, micro_batches, layout):
    require_same(four_ranks.run(cases.steps, "qwen3_moe", micro_batches, **layout), "qwen3_moe")


def test_one_rank(one_rank):
    require_same(one_rank.run(cases.steps, "qwen3_moe", 2), "qwen3_moe")


def test_the_loss_of_routers_is_the_same_in_every_layout(one_rank, four_ranks):
    """Added to the step, not to what is told as its loss."""
    name = "qwen3_moe_router_loss"
    (_, _, losses, norms, _), *_ = one_rank.run(cases.steps, name, 2, router_loss=True)
    (_, _, without, smaller, _), *_ = one_rank.run(cases.steps, name, 2)
    assert losses[0] == without[0] and norms[0] != smaller[0]
    for _, _, found, found_norms, _ in four_ranks.run(cases.steps, name, 1, router_loss=True, sp=2, ep=2):
        require_equal_up_to_rounding(found, losses)
        require_equal_up_to_rounding(found_norms, norms)


def test_a_step_that_is_not_finite_changes_nothing(two_ranks):
    assert two_ranks.run(cases.nothing_changes, "qwen3_moe") == [(False, True, True)] * 2


@pytest.mark.parametrize("sp", [1, 2])
def test_rows_with_images_have_upstreams_positions(two_ranks, sp):
    """Nobody hands in positions: upstream computes them from the images and the padding, from full rows."""
    expected = cases.upstreams_image_log_probs("qwen2_vl")
    for before, during in two_ranks.run(cases.image_log_probs, "qwen2_vl", sp=sp):
        require_equal_up_to_rounding(before, expected)
        require_equal_up_to_rounding(during, expected)
