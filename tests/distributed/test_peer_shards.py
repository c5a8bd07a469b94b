"""Shards that ranks read from each other's memory: FSDP2's numbers to the bit; copies that are never old."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cases_peer_shards as cases
import pytest
import torch

from patchgen.runtime.parallel import peer_memory, peer_units

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(peer_units.IS_REBUILT, reason="torch rebuilt what units in peer memory read of FSDP2")


@pytest.mark.parametrize("small", [0, 300, 2**20], ids=["all large", "both", "all small"])
@pytest.mark.parametrize("accumulate_unsharded", [False, True])
def test_the_numbers_are_fsdps_to_the_bit(small, accumulate_unsharded, two_ranks):
    two_ranks.run(cases.equals_fsdp, accumulate_unsharded, writes=True, freeze=None, small=small)


@pytest.mark.parametrize("piece", [2, 22, 256])
@pytest.mark.sampled(3)
def test_large_gradients_leave_in_pieces_to_the_same_bits(piece, four_ranks):
    """Of one element; of some that no shard is a multiple of, and the last shards end in an early one; of most of a shard."""
    four_ranks.run(cases.equals_fsdp, False, writes=True, freeze=None, small=40, piece=piece)


@pytest.mark.parametrize("freeze", [None, "layers.0.up.weight"])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False, "prefetch": 2}], ids=str)
def test_optimizers_that_write_no_copies_and_frozen_units(freeze, options, four_ranks):
    four_ranks.run(cases.equals_fsdp, False, writes=False, freeze=freeze, small=300, **options)


@pytest.mark.parametrize("accumulate_unsharded", [False, True])
def test_a_head_that_is_not_tied_is_summed_first_to_the_same_bits(accumulate_unsharded, two_ranks):
    two_ranks.run(cases.equals_fsdp, accumulate_unsharded, writes=True, freeze=None, small=150, tied=False)
    for first, *others in two_ranks.run(cases.order_of_reductions):
        assert first == ["head.weight"], first
        assert ["embedding.weight"] in others[2:], others
        for layer in ("layers.1", "layers.0"):  # large ones as soon as they are whole, each by itself
            place = others.index([f"{layer}.down.weight"])
            assert others[place + 1 : place + 3] == [[f"{layer}.up.weight"], [f"{layer}.up.bias"]], others


def test_what_others_send_has_room_for_one_parameter_or_a_piece_of_it(two_ranks):
    for room, largest in two_ranks.run(cases.room_for_what_others_send, 2**20):
        assert largest <= room < largest + peer_memory.ALIGNMENT
    for room, largest in two_ranks.run(cases.room_for_what_others_send, peer_memory.ALIGNMENT):
        assert room == peer_memory.ALIGNMENT < largest - peer_memory.ALIGNMENT


@pytest.mark.parametrize("option", ["recomputes", "peeks"])
def test_what_a_backward_still_reads_is_not_freed(option, two_ranks):
    two_ranks.run(cases.equals_fsdp, False, writes=True, freeze=None, small=0, **{option: True})


def test_a_large_parameter_is_freed_as_soon_as_nobody_reads_it(two_ranks):
    for unread, read in two_ranks.run(cases.parameters_that_are_freed_before_a_layer_ends):
        assert unread == 0 < read


@pytest.mark.parametrize("small", [0, 150, 2**20], ids=["all large", "both", "all small"])
@pytest.mark.parametrize("piece", [100, 2**20], ids=["in pieces", "whole"])
def test_a_rank_without_a_gradient_adds_zeros(piece, small, two_ranks):
    two_ranks.run(cases.a_rank_without_a_large_gradient_adds_zeros, small, piece)


def test_a_head_without_a_gradient_on_one_rank_is_named(two_ranks):
    for message in two_ranks.run(cases.a_rank_without_a_gradient_of_the_head):
        assert "number 1 of the step: rank 0: sum head.weight; rank 1: sum layers.1.down.weight" in message
        assert "shard_exchange: collectives" in message


def test_a_model_is_freed(two_ranks):
    assert all(all(found) for found in two_ranks.run(cases.a_model_is_freed))


def test_four_ranks_sum_in_their_order(four_ranks):
    four_ranks.run(cases.equals_fsdp, False, writes=True, freeze=None, small=0)


def test_a_change_is_seen_by_all(two_ranks):
    two_ranks.run(cases.a_change_is_seen_by_all)


def test_a_sum_lives_until_it_was_waited_for(two_ranks):
    assert all(count >= 6 for count in two_ranks.run(cases.a_sum_lives_until_it_was_waited_for))


def test_ranks_that_sum_different_gradients_get_nan(two_ranks):
    assert all(all(found) for found in two_ranks.run(cases.ranks_that_sum_different_gradients_get_nan))


def test_what_cannot_be_read_is_refused_by_name(two_ranks):
    for unknown, nothing in two_ranks.run(cases.where_it_is_refused):
        assert "must be 'auto', 'collectives' or 'peer_memory', not 'by post'" in unknown
        assert "no parameters are sharded and have a narrower compute dtype" in nothing


@pytest.mark.gpu
def test_two_gpus_have_the_same_numbers():
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two CUDA devices")
    script = Path(__file__).with_name("peer_shards_on_gpu.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
