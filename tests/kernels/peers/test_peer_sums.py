"""The sum of parts of several ranks: exact in their order, NaN where they sent something else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

pytest.importorskip("triton")

from patchgen.kernels.peers.peer_sums import launch_sum_parts, sum_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25)
@given(
    num=some.sampled_from([1, 7, 4096, 4097]),
    ranks=some.integers(2, 4),
    rank=some.integers(0, 3),
    dtype=some.sampled_from([torch.float32, torch.bfloat16]),
    differs=some.booleans(),
)
def test_parts_are_added_up_in_the_order_of_the_ranks(num, ranks, rank, dtype, differs):
    rank %= ranks
    parts = torch.randn(ranks, num, dtype=torch.float32, generator=torch.Generator().manual_seed(num)).to(
        DEVICE, dtype
    )
    received = torch.full((ranks - 1, num + 3), float("nan"), dtype=dtype, device=DEVICE)[:, :num]
    for place in range(ranks - 1):
        received[place] = parts[(rank + 1 + place) % ranks]
    tags = torch.full((ranks - 1,), 5, device=DEVICE)
    tags[-1] += differs
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    for function in (sum_parts, launch_sum_parts):  # by torch on CPUs, and the kernel
        out = torch.full((num,), float("nan"), device=DEVICE)
        if function is sum_parts:
            sum_parts(parts[rank], received, tags, out, rank=rank, tag=5)
        else:
            launch_sum_parts(parts[rank], received, tags, out, rank, 5)
        assert torch.equal(out, expected) if not differs else bool(out.isnan().all())


def test_parts_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match="found"):
        sum_parts(torch.ones(3), torch.ones(1, 4), torch.ones(1, dtype=torch.int64), torch.ones(4), rank=0, tag=1)
