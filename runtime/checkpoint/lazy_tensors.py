"""Tensors without data that record how they are built from stored tensors, so that a rank reads only what its shard needs.

transformers converts checkpoints with operations on full tensors (stack the experts, concatenate gate and up,
transpose, permute for rotary embeddings). Run on a `LazyTensor`, the same operations only record where each element
comes from. A rank then asks for its region of a parameter (a range per dimension) and gets the regions of stored tensors
to read, each with the view of its own memory to read it into:

    experts.0.gate_proj [I, H] -+
    experts.1.gate_proj [I, H] -+- stack [2, I, H] -+
    experts.0.up_proj   [I, H] -+                   +- cat [2, 2I, H]   plan_reads(region of expert 1) -> 1.gate, 1.up
    experts.1.up_proj   [I, H] -+- stack [2, I, H] -+

    I expert intermediate size   H hidden size

Nothing here knows a model: every operation is a cat, slice, permute or reshape. One that computes values (dequantisation)
is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Region = tuple[tuple[int, int], ...]
"""Per dimension the first index and one past the last."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A stored tensor.

    Attributes:
        name: its key.
        source: where it is stored, in the caller's own terms.
    """

    name: str
    source: object


@dataclass(frozen=True, eq=False)
class _Cat:
    parents: tuple[LazyTensor, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class _Slice:
    parent: LazyTensor
    dim: int
    start: int


@dataclass(frozen=True, eq=False)
class _Permute:
    parent: LazyTensor
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Reshape:
    parent: LazyTensor


_Node: TypeAlias = "Leaf | _Cat | _Slice | _Permute | _Reshape"


class UnsupportedOperation(NotImplementedError):
    """An operation that does more than rearrange elements."""


class LazyTensor(Tensor):
    """A tensor of known shape and dtype, without data; `node` says how it is built, `meta` is a meta tensor like it."""

    node: _Node
    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, node: _Node) -> LazyTensor:
        lazy = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=meta.device
        )
        lazy.meta, lazy.node = meta, node
        return lazy

    def transposed(self) -> LazyTensor:
        """A stack `(n, a, b)` as `(n, b, a)`."""
        transposed = self.transpose(1, 2)
        assert isinstance(transposed, LazyTensor), "`__torch_dispatch__` returns lazy tensors"
        return transposed

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"LazyTensor({list(self.shape)}, {self.dtype}, {type(self.node).__name__})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*_metas(args), **_metas(kwargs or {}))
        recorder = _RECORDERS.get(func)
        if recorder is None:
            raise UnsupportedOperation(f"{func} computes new values, or is not known to the loader")
        return recorder(out, *args, **(kwargs or {}))


def leaf(name: str, shape: Sequence[int], dtype: torch.dtype, source: object) -> LazyTensor:
    """A lazy tensor for one that is stored in `source`."""
    return LazyTensor(torch.empty(tuple(shape), dtype=dtype, device="meta"), Leaf(name, source))


def _metas(tree: Any) -> Any:
    return tree_map_only(LazyTensor, lambda lazy: lazy.meta, tree)


# ------------------------------------------------------------------------------------------ what aten does


def _same(out: Tensor, parent: LazyTensor, *_args, **_kwargs) -> LazyTensor:
    return LazyTensor(out, parent.node)  # a copy, or another dtype: the reader casts


def _reshape(out: Tensor, parent: LazyTensor, *_args, **_kwargs) -> LazyTensor:
    return LazyTensor(out, _Reshape(parent))


def _permute(out: Tensor, parent: LazyTensor, order: Sequence[int]) -> LazyTensor:
    return LazyTensor(out, _Permute(parent, tuple(dim % parent.ndim for dim in order)))


def _transpose(out: Tensor, parent: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    order = list(range(parent.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(out, parent, order)


def _t(out: Tensor, parent: LazyTensor) -> LazyTensor:
    return _permute(out, parent, list(range(parent.ndim))[::-1])


def _slice(out: Tensor, parent: LazyTensor, dim: int = 0, start=None, end=None, step: int = 1) -> LazyTensor:
    if step != 1:
        raise UnsupportedOperation(f"a slice with step {step}")
    size = parent.shape[dim]
    first = 0 if start is None else start + size if start < 0 else min(start, size)
    return LazyTensor(out, _Slice(parent, dim % parent.ndim, first))


def _select(out: Tensor, parent: LazyTensor, dim: int, index: int) -> LazyTensor:
    dim %= parent.ndim
    index %= parent.shape[dim]
    return LazyTensor(out, _Reshape(LazyTensor(parent.meta.narrow(dim, index, 1), _Slice(parent, dim, index))))


def _split(outs: Sequence[Tensor], parent: LazyTensor, _sizes: object, dim: int = 0) -> list[LazyTensor]:
    starts = [0]
    for out in outs:
        starts.append(starts[-1] + out.shape[dim])
    return [
        LazyTensor(out, _Slice(parent, dim % parent.ndim, start)) for out, start in zip(outs, starts, strict=False)
    ]


def _unbind(outs: Sequence[Tensor], parent: LazyTensor, dim: int = 0) -> list[LazyTensor]:
    return [_select(out, parent, dim, index) for index, out in enumerate(outs)]


def _cat(out: Tensor, parents: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    kept = [parent for parent in parents if parent.ndim == out.ndim]  # aten lets empty 1-D tensors take part
    return LazyTensor(out, _Cat(tuple(kept), dim % out.ndim))


def _stack(out: Tensor, parents: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    dim %= out.ndim
    return LazyTensor(out, _Cat(tuple(LazyTensor(p.meta.unsqueeze(dim), _Reshape(p)) for p in parents), dim))


_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten.detach.default, _aten.alias.default, _aten._to_copy.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default)
_SQUEEZES = (_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
_RECORDERS: dict[object, Callable] = {
    **dict.fromkeys(_COPIES, _same),
    **dict.fromkeys((*_VIEWS, *_SQUEEZES), _reshape),
    _aten.transpose.int: _transpose,
    _aten.permute.default: _permute,
    _aten.t.default: _t,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbind,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
}


# ------------------------------------------------------------------------------------ the reads of a region


@dataclass
class ReadPlan:
    """How to fill one tensor: do `reads`, then call `finish`.

    Attributes:
        reads: (leaf, region of it, the view of the target, or of a buffer, that this region fills).
        final_copies: copies from buffers that are larger than what the target needs of them; empty if every element is
            read directly into the target.
    """

    reads: list[tuple[Leaf, Region, Tensor]] = field(default_factory=list)
    final_copies: list[Callable[[], object]] = field(default_factory=list)

    def finish(self) -> None:
        """Does the final copies, and frees the buffers."""
        for copy in self.final_copies:
            copy()
        self.final_copies.clear()
        self.reads.clear()


def full_region(shape: Sequence[int]) -> Region:
    """The region that covers a tensor of this shape."""
    return tuple((0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def plan_reads(lazy: LazyTensor, region: Region, out: Tensor) -> ReadPlan:
    """What to read so that `out` holds `lazy[region]`.

    Args:
        region: within the bounds of `lazy`.
        out: a tensor of the region's shape, any dtype, strides and device.
    """
    plan = ReadPlan()
    if 0 not in region_shape(region):
        _add_reads(lazy, region, out, plan)
    return plan


def leaves(lazy: LazyTensor) -> Iterator[Leaf]:
    """The stored tensors that `lazy` is built from, in no particular order, possibly with repeats."""
    pending = [lazy.node]
    while pending:
        node = pending.pop()
        if isinstance(node, Leaf):
            yield node
        elif isinstance(node, _Cat):
            pending += [parent.node for parent in reversed(node.parents)]
        else:
            pending.append(node.parent.node)


def is_permuted(lazy: LazyTensor) -> bool:
    """Whether dimensions are permuted anywhere between the stored tensors and `lazy`."""
    pending = [lazy.node]
    while pending:
        node = pending.pop()
        if isinstance(node, _Permute):
            return True
        if isinstance(node, _Cat):
            pending += [parent.node for parent in node.parents]
        elif not isinstance(node, Leaf):
            pending.append(node.parent.node)
    return False


def _add_reads(lazy: LazyTensor, region: Region, out: Tensor, plan: ReadPlan) -> None:
    node = lazy.node
    if isinstance(node, Leaf):
        plan.reads.append((node, region, out))
    elif isinstance(node, _Slice):
        dim = node.dim
        shifted = (region[dim][0] + node.start, region[dim][1] + node.start)
        _add_reads(node.parent, (*region[:dim], shifted, *region[dim + 1 :]), out, plan)
    elif isinstance(node, _Permute):
        parent_region: list = [None] * len(region)
        for index, dim in enumerate(node.order):
            parent_region[dim] = region[index]
        inverse = sorted(range(len(region)), key=node.order.__getitem__)
        _add_reads(node.parent, tuple(parent_region), out.permute(inverse), plan)
    elif isinstance(node, _Cat):
        dim, offset = node.dim, 0
        for parent in node.parents:
            size = parent.shape[dim]
            start, stop = max(region[dim][0], offset), min(region[dim][1], offset + size)
            if start < stop:
                part = (*region[:dim], (start - offset, stop - offset), *region[dim + 1 :])
                _add_reads(parent, part, out.narrow(dim, start - region[dim][0], stop - start), plan)
            offset += size
    else:
        _add_reshaped_reads(node.parent, lazy.shape, region, out, plan)


def _add_reshaped_reads(parent: LazyTensor, shape: Sequence[int], region: Region, out: Tensor, plan: ReadPlan) -> None:
    enclosing, parent_region = _enclosing_regions(tuple(parent.shape), tuple(shape), region)
    if enclosing == region:
        try:
            view = out.view(region_shape(parent_region))
        except RuntimeError:  # the strides of the target do not allow it
            view = None
        if view is not None:
            _add_reads(parent, parent_region, view, plan)
            return
    buffer = torch.empty(region_shape(enclosing), dtype=out.dtype, device=out.device)
    _add_reads(parent, parent_region, buffer.view(region_shape(parent_region)), plan)
    inner = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(region, enclosing, strict=True))
    plan.final_copies.append(lambda: out.copy_(buffer[inner]))


def _enclosing_regions(before: tuple[int, ...], after: tuple[int, ...], region: Region) -> tuple[Region, Region]:
    """The smallest region around `region` that is one before the reshape as well: in indices of the shape
    `after`, and in those of `before`."""
    enclosing: list[tuple[int, int]] = []
    parent: list[tuple[int, int]] = []
    for dims_before, dims_after in _dimension_groups(before, after):
        sizes_before, sizes_after = [before[d] for d in dims_before], [after[d] for d in dims_after]
        start, stop = _common_range(sizes_before, sizes_after, [region[dim] for dim in dims_after])
        enclosing += _region_of_range(sizes_after, start, stop)
        parent += _region_of_range(sizes_before, start, stop)
    return tuple(enclosing), tuple(parent)


def _dimension_groups(a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Groups of consecutive dimensions of both shapes with equal numbers of elements, as short as possible."""
    i = j = 0
    while i < len(a) or j < len(b):
        left, right = [], []
        if i < len(a):
            left.append(i)
            i += 1
        if j < len(b):
            right.append(j)
            j += 1
        while math.prod(a[d] for d in left) != math.prod(b[d] for d in right):
            if math.prod(a[d] for d in left) < math.prod(b[d] for d in right):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        yield left, right


def _common_range(before: list[int], after: list[int], region: list[tuple[int, int]]) -> tuple[int, int]:
    """The smallest range of flat indices around `region` that is a region of both shapes."""
    total = math.prod(after)
    start = stop = 0
    for size, (first, last) in zip(after, region, strict=True):
        start, stop = start * size + first, stop * size + last - 1
    stop += 1
    while True:
        wider = _widen_to_region(after, *_widen_to_region(before, start, stop))
        if wider == (start, stop) or wider == (0, total):
            return wider
        start, stop = wider


def _widen_to_region(sizes: list[int], start: int, stop: int) -> tuple[int, int]:
    """Widens a flat range until it is a region: fixed leading indices, one range, full trailing dimensions."""
    inner = math.prod(sizes)
    for size in sizes:
        inner //= max(size, 1)
        if inner and start // inner != (stop - 1) // inner:  # the first index in which the ends differ
            return start // inner * inner, -(-stop // inner) * inner
    return start, stop


def _region_of_range(sizes: list[int], start: int, stop: int) -> list[tuple[int, int]]:
    """The region of a flat range that `_widen_to_region` returned."""
    region, inner, is_full = [], math.prod(sizes), False
    for size in sizes:
        inner //= max(size, 1)
        if is_full or not inner:
            region.append((0, size))
            continue
        first, last = start // inner, (stop - 1) // inner
        region.append((first % size, last % size + 1))
        is_full = first != last
    return region
