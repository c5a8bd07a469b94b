"""Expert parallelism on real ranks: experts over all ranks against all experts in one process."""

from __future__ import annotations

import cases_experts as cases
import cases_gradient_order
import cases_token_prefetch
import pytest
import torch
from torch import Tensor, nn

from patchgen.kernels.peers.published import TokenCounts
from patchgen.runtime.parallel.expert_peers import PrefetchedTokens

KINDS = ["balanced", "uneven", "no tokens on rank 1", "all on one expert", "none for rank 0", "slots left out"]


@pytest.mark.parametrize("exchange", ["all_to_all", "peer_memory"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_over_ranks_equal_experts_in_one_process(kind, world, exchange, two_ranks, four_ranks):
    pool = two_ranks if world == 2 else four_ranks
    pool.run(cases.agrees, kind, num_experts=8, biased=kind == "uneven", exchange=exchange)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_that_holds_changes_nothing(kind, four_ranks):
    four_ranks.run(cases.agrees, kind, num_experts=8, capacity=100)


def test_rows_over_the_bound_are_left_out_and_counted(two_ranks):
    two_ranks.run(cases.capacity_drops_and_counts)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_does_not_exchange_sizes_again(mode, two_ranks):
    assert two_ranks.run(cases.recomputation_exchanges_no_sizes, mode) == [1, 1]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_reads_no_tokens_again(mode, two_ranks):
    assert two_ranks.run(cases.recomputation_reads_no_tokens_again, mode) == [(1, 1), (1, 1)]


@pytest.mark.parametrize(("final", "times"), [(True, 1), (False, 2)])
def test_gradients_that_are_handed_over_leave_at_once_and_once(final, times, two_ranks):
    assert two_ranks.run(cases_gradient_order.count_gradient_sends, final) == [times, times]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_gradients_that_nobody_waits_for_come_beside_the_next_exchange(mode, two_ranks):
    """Those of the layer above; of the last of two, when the backward ends."""
    assert two_ranks.run(cases_gradient_order.count_deferred_gradients, mode) == [[0, 1, 0] * 2] * 2


@pytest.mark.parametrize("kind", ["uneven", "no tokens on rank 1", "slots left out"])
@pytest.mark.sampled(3)
def test_tokens_sent_before_their_experts_are_known_and_sums_pushed_change_no_bit(kind, two_ranks):
    """Two steps: both times sent ahead, and pushed by the Triton experts."""
    found = two_ranks.run(cases_token_prefetch.tokens_sent_ahead, kind, "triton", changes=False, mode="none")
    assert found == [(2, 2)] * 2


def test_nothing_is_pushed_while_torch_computes_a_layer_again(two_ranks):
    """It ends that before the sums are added up: a rank that reads late would find the next exchange's rows."""
    found = two_ranks.run(
        cases_token_prefetch.tokens_sent_ahead, "uneven", "triton", changes=False, mode="torch", delay=0.7
    )
    assert found == [(2, 2)] * 2


@pytest.mark.parametrize(
    ("changes", "mode", "times"), [(True, "none", 1), (False, "full", 2), (False, "selective", 2)]
)
def test_tokens_are_sent_ahead_once_where_they_turn_out_to_be_others_or_are_computed_again(
    changes, mode, times, two_ranks
):
    found = two_ranks.run(cases_token_prefetch.tokens_sent_ahead, "uneven", "torch", changes=changes, mode=mode)
    assert found == [(times, 0)] * 2


def test_nothing_is_sent_ahead_or_pushed_where_a_checkpointing_of_the_user_keeps_what_operators_return(two_ranks):
    found = two_ranks.run(cases_token_prefetch.tokens_sent_ahead, "uneven", "triton", changes=False, mode="operators")
    assert found == [(0, 0)] * 2


def test_an_error_between_a_router_and_its_experts_does_not_end_sending_ahead(two_ranks):
    assert two_ranks.run(cases_token_prefetch.an_error_before_the_experts_turns_nothing_off) == [[1, 2, 3]] * 2


def test_tokens_sent_ahead_are_those_that_lie_there_in_this_order_and_unchanged():
    def are(source: Tensor, tokens: Tensor) -> bool:
        return PrefetchedTokens(
            nn.Identity(), source, source._version, TokenCounts((8,), torch.tensor([0, 8])), source
        ).matches(tokens)

    whole = torch.randn(2, 8, 4)
    assert are(whole, whole.view(-1, 4))
    assert not are(whole[:1], whole[1]), "the other half"
    swapped = whole.transpose(0, 1)
    assert not are(swapped, whole.view(-1, 4)), "another order"
    assert not are(whole, whole.view(-1, 4).clone())
    sent = PrefetchedTokens(nn.Identity(), whole, whole._version, TokenCounts((16,), torch.tensor([0, 16])), whole)
    tokens = whole.view(-1, 4)
    assert sent.matches(tokens)
    tokens.mul_(1.5)
    assert not sent.matches(tokens), "changed in place"


def test_an_error_between_two_buffers_is_told_by_the_next_exchange(two_ranks):
    for told in two_ranks.run(cases_token_prefetch.an_error_between_two_buffers_is_told):
        assert "exchange 2 of experts' tokens" in told
        assert "create a new ParallelState" in told


@pytest.mark.parametrize(("times", "found"), [(5, 6), (4, 4)])
def test_what_is_repeated_ends_on_the_buffer_that_it_did_not_begin_with(times, found, two_ranks):
    assert (
        two_ranks.run(cases_token_prefetch.a_repeated_block_begins_on_the_buffer_that_it_did_not_end_on, times)
        == [(found, 2)] * 2
    )


def test_buffers_grow_with_the_tokens_of_any_rank(two_ranks):
    (small, large, same), other = two_ranks.run(cases.buffers_grow_with_the_tokens_of_any_rank)
    assert 0 < small < large == same
    assert other == [small, large, same]


def test_peer_memory_is_refused_where_ranks_cannot_have_it(two_ranks):
    two_ranks.run(cases.unavailable_peer_memory_is_refused)


@pytest.mark.parametrize("exchange", ["all_to_all", "peer_memory"])
@pytest.mark.parametrize("at_once", [False, True])
def test_shared_experts_run_beside_the_exchange(at_once, exchange, two_ranks):
    two_ranks.run(cases.shared_experts_run_beside_the_exchange, at_once, exchange)


def test_a_computation_that_an_error_left_behind_is_forgotten(two_ranks):
    two_ranks.run(cases.a_computation_that_an_error_left_behind_is_forgotten)


def test_one_worker_of_a_rank_runs_the_collectives_of_a_group(two_ranks):
    assert two_ranks.run(cases.workers_of_the_group) == [1, 1]  # torch's two free one string twice: `gloo_groups.py`
