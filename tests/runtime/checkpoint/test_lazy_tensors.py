"""Regions of lazy tensors against the same operations on real tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchgen.runtime.checkpoint.lazy_tensors import UnsupportedOperation, full_region, leaf, plan_reads


def evaluate(lazy, region, values, *, dtype=torch.int64, transposed=False):
    """`lazy[region]`, read leaf by leaf; also how many elements were read."""
    shape = [stop - start for start, stop in region]
    out = torch.full(shape[::-1], -1, dtype=dtype).permute(*range(len(shape))[::-1]) if transposed else None
    out = torch.full(shape, -1, dtype=dtype) if out is None else out
    plan = plan_reads(lazy, region, out)
    count = 0
    for found, inner, view in plan.reads:
        piece = values[found.name][tuple(slice(*bounds) for bounds in inner)]
        view.copy_(piece)
        count += piece.numel()
    plan.finish()
    return out, count


@st.composite
def programs(draw):
    """Some tensors and a chain of the operations that conversions consist of."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = draw(st.integers(1, 3))
    steps = draw(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 10), st.integers(0, 10)), max_size=6))
    return shape, count, steps


def run(tensors, steps):
    """Applies the steps that fit."""
    current = list(tensors)
    for kind, a, b in steps:
        first = current[0]
        dim = a % first.ndim if first.ndim else 0
        if kind == 0 and first.ndim < 4:
            current = [torch.stack(current, dim=a % (first.ndim + 1))]
        elif kind == 1 and first.ndim:
            current = [torch.cat(current, dim=dim)]
        elif kind == 2 and first.ndim > 1:
            current = [one.transpose(dim, b % first.ndim) for one in current]
        elif kind == 3 and first.ndim:
            current = [piece.contiguous() for one in current for piece in one.chunk(1 + b % 3, dim=dim)]
            current = [one for one in current if one.shape == current[0].shape]
        elif kind == 4 and first.ndim:
            size = first.shape[dim]
            factor = next(f for f in (3, 2, 1) if size % f == 0)
            shape = [*first.shape[:dim], factor, size // factor, *first.shape[dim + 1 :]]
            current = [one.reshape(shape) for one in current]
        elif kind == 5 and first.ndim:
            current = [one.flatten(dim - 1 if dim else 0, dim) for one in current]
        elif kind == 6 and first.ndim > 1:
            current = [piece for one in current for piece in one.unbind(dim)][:4]
        elif kind == 7 and first.ndim:
            start = b % first.shape[dim]
            current = [one.narrow(dim, start, first.shape[dim] - start) for one in current]
        elif kind == 8 and first.ndim and first.shape[dim] % 2 == 0:  # what transformers calls Interleave
            shape = list(first.shape)
            shape[dim : dim + 1] = [2, first.shape[dim] // 2]
            current = [one.reshape(shape).transpose(dim, dim + 1).reshape(first.shape).contiguous() for one in current]
    return current[0]


@given(programs(), st.data())
@settings(max_examples=150)
def test_any_region_of_any_chain_of_operations(program, data):
    shape, count, steps = program
    numbers = torch.arange(count * torch.Size(shape).numel()).view(count, *shape)
    values = {str(place): numbers[place] for place in range(count)}
    expected = run(list(values.values()), steps)
    lazy = run([leaf(name, shape, torch.int64, None) for name in values], steps)
    assert lazy.shape == expected.shape
    region = []
    for size in expected.shape:
        start = data.draw(st.integers(0, size))
        region.append((start, data.draw(st.integers(start, size))))
    part = expected[tuple(slice(*bounds) for bounds in region)]
    got, _ = evaluate(lazy, tuple(region), values, transposed=data.draw(st.booleans()))
    assert torch.equal(got, part)


def test_only_the_elements_of_the_region_are_read():
    """Single experts, stacked, gate and up concatenated: one expert's upper rows come from one gate alone."""
    gates = [leaf(f"gate.{expert}", (6, 5), torch.int64, None) for expert in range(4)]
    ups = [leaf(f"up.{expert}", (6, 5), torch.int64, None) for expert in range(4)]
    lazy = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
    values = {one.node.name: torch.randint(0, 99, (6, 5)) for one in (*gates, *ups)}
    out, count = evaluate(lazy, ((2, 3), (1, 4), (0, 5)), values)
    assert torch.equal(out[0], values["gate.2"][1:4])
    assert count == 15
    transposed = lazy.transpose(1, 2).contiguous()
    out, count = evaluate(transposed, ((2, 3), (0, 5), (7, 9)), values)
    assert torch.equal(out[0], values["up.2"][1:3].T)
    assert count == 10


def test_operations_that_compute_are_refused():
    lazy = leaf("weight", (2, 2), torch.float32, None)
    with pytest.raises(UnsupportedOperation, match="mul"):
        lazy * 2
    assert plan_reads(lazy, full_region((2, 2)), torch.empty(2, 2)).reads
