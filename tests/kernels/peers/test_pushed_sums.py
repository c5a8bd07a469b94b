"""Sums that ranks write into each other's memory: against sums that stay where they are, all ranks in one process."""

from __future__ import annotations

import pytest
import torch
from test_peer_rows import COUNTS, DEVICE, OWN, TOP_K, publish, routing, tokens

from patchgen.kernels.moe.combine import sum_slots
from patchgen.kernels.peers import pushed_sums
from patchgen.kernels.peers.pushed_sums import PushTargets


@pytest.mark.parametrize("hidden", [40, 33, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sampled(3)
def test_pushed_sums_are_those_that_were_published_before(hidden: int, dtype: torch.dtype):
    """To the bit; where a rank has none of a token's experts nothing is written, and nothing read: NaN there."""
    index, total = routing(), sum(COUNTS)
    whole = torch.cat(index)
    space = torch.full((len(COUNTS) * max(COUNTS) * hidden,), torch.nan, dtype=dtype, device=DEVICE)
    published, _ = publish([space for _ in COUNTS])
    sums = []
    for rank in range(len(COUNTS)):
        is_here = (whole // OWN == rank).flatten()
        rows = torch.randn(int(is_here.sum()), hidden, device=DEVICE).to(dtype)
        row_of_slot = torch.where(is_here, is_here.cumsum(0) - 1, -1).int()
        weights = torch.rand(total, TOP_K, device=DEVICE)
        targets = PushTargets(published, tokens(), rank)
        pushed_sums.push(targets, rows, weights, row_of_slot, TOP_K)
        assert targets.was_pushed
        sums.append(sum_slots(rows, weights, row_of_slot, TOP_K))
    for rank, first in enumerate(torch.tensor([0, *COUNTS]).cumsum(0)[:-1].tolist()):
        expected = torch.zeros(COUNTS[rank], hidden, device=DEVICE)
        for part in sums:
            expected += part[first : first + COUNTS[rank]].float()
        targets = PushTargets(published, tokens(), rank)
        received = targets.received((COUNTS[rank], hidden), dtype)
        for source in range(len(COUNTS)):
            is_there = (index[rank] // OWN == source).any(dim=1)
            assert received[source][~is_there].isnan().all()
            assert not received[source][is_there].isnan().any()
        out = torch.full((COUNTS[rank], hidden), torch.nan, dtype=dtype, device=DEVICE)
        pushed_sums.launch_sum_received(targets, index[rank], OWN, out)
        again = pushed_sums.sum_received(targets, index[rank], OWN, out)
        if DEVICE == "cuda" or dtype == torch.float32:
            assert torch.equal(out, expected.to(dtype))
        else:  # the interpreter cuts off bits where a GPU rounds
            torch.testing.assert_close(out.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
        torch.testing.assert_close(again.float(), out.float(), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_an_offer_is_taken_once_and_ends_with_its_block():
    published, _ = publish([torch.zeros(3, device=DEVICE)] * len(COUNTS))
    targets = PushTargets(published, tokens(), 0)
    with pushed_sums.offer(targets):
        assert pushed_sums.take_offer() is targets
        assert pushed_sums.take_offer() is None
    with pushed_sums.offer(targets):
        pass
    assert pushed_sums.take_offer() is None
