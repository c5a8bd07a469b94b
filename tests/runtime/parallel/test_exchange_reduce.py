"""Which groups exchange gradients, and the buffers of an exchange. Sums are compared on ranks, in
tests/distributed/test_models.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from patchgen.runtime.parallel import exchange_reduce
from patchgen.runtime.parallel.exchange_reduce import ExchangeReduce, copy_in_gradients, groups_share_hosts


@pytest.mark.parametrize(
    ("shape", "dimension", "hosts", "expected"),
    [
        ((1, 8), "fsdp", "aaaaaaaa", True),
        ((1, 8), "fsdp", "aaaabbbb", False),
        ((2, 4), "fsdp", "aaaabbbb", True),
        ((2, 4), "dp_replicate", "aaaabbbb", False),
        ((4, 2), "fsdp", "aaabbbbb", False),  # one of the groups spans two hosts: the same answer for all
    ],
)
def test_whether_each_group_shares_a_host(shape, dimension, hosts, expected):
    mesh = SimpleNamespace(mesh=torch.arange(8).view(shape), mesh_dim_names=("dp_replicate", "fsdp"))
    assert groups_share_hosts(mesh, dimension, hosts) is expected


def test_the_input_has_the_compute_dtype_and_the_output_that_of_the_sum():
    reduce = ExchangeReduce(4, torch.bfloat16)
    for sends_compute_dtype, sent in ((True, torch.bfloat16), (False, torch.float32)):
        reduce.sends_compute_dtype = sends_compute_dtype
        sent_buffer = reduce.allocate((32,), dtype=torch.float32, device=torch.device("cpu"))
        summed = reduce.allocate((8,), dtype=torch.float32, device=torch.device("cpu"))
        assert (sent_buffer.dtype, summed.dtype) == (sent, torch.float32)


def test_another_order_of_allocations_is_refused():
    reduce = ExchangeReduce(4, torch.bfloat16)
    reduce.allocate((32,), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="an output of 8 elements after its input; found 32"):
        reduce.allocate((32,), dtype=torch.float32, device=torch.device("cpu"))


@settings(max_examples=30)
@given(
    shapes=some.lists(some.tuples(some.integers(1, 7), some.integers(1, 5)), min_size=1, max_size=4),
    world=some.integers(2, 4),
    dtype=some.sampled_from([torch.bfloat16, torch.float32]),
)
def test_buffers_are_filled_as_fsdp_fills_them(shapes, world, dtype):
    gradients = [torch.randn(shape, dtype=dtype) for shape in shapes]
    size = sum(-(-rows // world) * world * columns for rows, columns in shapes)
    expected = torch._chunk_cat(gradients, dim=0, num_chunks=world).view(-1)
    found = torch.full((size,), float("nan"), dtype=dtype)
    copy_in_gradients(gradients, found, world)
    assert torch.equal(found, expected)


def test_fsdp_fills_other_buffers_by_itself():
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    exchange_reduce._replace_copy_in()
    exchange_reduce._replace_copy_in()
    copy_in = _fsdp_collectives.foreach_reduce_scatter_copy_in
    assert not hasattr(copy_in.__wrapped__, "__wrapped__"), "replaced once"
    gradients = [torch.randn(3, 2), torch.randn(4)]
    ours = ExchangeReduce(2, torch.float32).allocate((12,), dtype=torch.float32, device=torch.device("cpu"))
    theirs = torch.empty(12)
    for buffer in (ours, theirs):
        copy_in(gradients, buffer, 2)
    assert torch.equal(ours, theirs)
