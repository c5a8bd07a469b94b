"""Where gradients are exchanged, and what a torch that reduces in another way is told. Sums are compared on ranks, in
tests/distributed/test_models.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from patchgen.runtime.parallel.exchange_reduce import ExchangeReduce, share_hosts


@pytest.mark.parametrize(
    ("shape", "dimension", "hosts", "expected"),
    [
        ((1, 8), "fsdp", "aaaaaaaa", True),
        ((1, 8), "fsdp", "aaaabbbb", False),
        ((2, 4), "fsdp", "aaaabbbb", True),
        ((2, 4), "dp_replicate", "aaaabbbb", False),
        ((4, 2), "fsdp", "aaabbbbb", False),  # one of the groups lies on two hosts: the same answer for all
    ],
)
def test_groups_that_each_share_a_host(shape, dimension, hosts, expected):
    mesh = SimpleNamespace(mesh=torch.arange(8).view(shape), mesh_dim_names=("dp_replicate", "fsdp"))
    assert share_hosts(mesh, dimension, hosts) is expected


def test_the_input_travels_narrow_and_the_output_is_wide():
    reduce = ExchangeReduce(4, torch.bfloat16)
    for as_computed, sent in ((True, torch.bfloat16), (False, torch.float32)):
        reduce.as_computed = as_computed
        given = reduce.allocate((32,), dtype=torch.float32, device=torch.device("cpu"))
        summed = reduce.allocate((8,), dtype=torch.float32, device=torch.device("cpu"))
        assert (given.dtype, summed.dtype) == (sent, torch.float32)


def test_another_order_of_allocations_is_refused():
    reduce = ExchangeReduce(4, torch.bfloat16)
    reduce.allocate((32,), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="an output of 8 elements after its input, and asks for 32"):
        reduce.allocate((32,), dtype=torch.float32, device=torch.device("cpu"))
