"""Tensors that are not there: they record how they are made of others, and read no more of those than is asked for.

transformers converts checkpoints with operations on whole tensors (stack the experts, concatenate gate and up,
transpose, permute for rotary embeddings). Run on `Moved` tensors, the same operations only record where each element
comes from. A rank then asks for its own box of a parameter and learns which boxes of which tensors of the file it is
made of, and where in its own memory their bytes go:

    experts.0.gate_proj [I, H] -+
    experts.1.gate_proj [I, H] -+- stack [2, I, H] -+
    experts.0.up_proj   [I, H] -+                   +- cat [2, 2I, H]   pull(box of expert 1) -> boxes of 1.gate, 1.up
    experts.1.up_proj   [I, H] -+- stack [2, I, H] -+

No model is known here, only what aten does with the places of elements: cat, slice, permute and reshape are all there
is. An operation that computes (dequantisation) is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Box = tuple[tuple[int, int], ...]
"""Per dimension the first index and the one after the last."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor that exists somewhere.

    Attributes:
        name: its key.
        source: what holds it, in the reader's own terms.
    """

    name: str
    source: object


@dataclass(frozen=True, eq=False)
class _Cat:
    parents: tuple[Moved, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class _Slice:
    parent: Moved
    dim: int
    start: int


@dataclass(frozen=True, eq=False)
class _Permute:
    parent: Moved
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Reshape:
    parent: Moved


_Origin: TypeAlias = "Leaf | _Cat | _Slice | _Permute | _Reshape"


class UnknownMove(NotImplementedError):
    """An operation that does more than move elements."""


class Moved(Tensor):
    """A tensor of known shape and dtype, without elements; `origin` says how it is made."""

    origin: _Origin
    shadow: Tensor

    @staticmethod
    def __new__(cls, shadow: Tensor, origin: _Origin) -> Moved:
        moved = torch.Tensor._make_wrapper_subclass(
            cls, shadow.shape, strides=shadow.stride(), dtype=shadow.dtype, device=shadow.device
        )
        moved.shadow, moved.origin = shadow, origin
        return moved

    def turned(self) -> Moved:
        """It with its last two dimensions of three exchanged."""
        turned = self.transpose(1, 2)
        assert isinstance(turned, Moved), "what `__torch_dispatch__` makes of one"
        return turned

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"Moved({list(self.shape)}, {self.dtype}, {type(self.origin).__name__})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*_shadows(args), **_shadows(kwargs or {}))
        recorder = _RECORDERS.get(func)
        if recorder is None:
            raise UnknownMove(f"{func} computes new values, or is not known to the loader")
        return recorder(out, *args, **(kwargs or {}))


def leaf(name: str, shape: Sequence[int], dtype: torch.dtype, source: object) -> Moved:
    """A tensor that exists in `source`."""
    return Moved(torch.empty(tuple(shape), dtype=dtype, device="meta"), Leaf(name, source))


def _shadows(tree: Any) -> Any:
    return tree_map_only(Moved, lambda moved: moved.shadow, tree)


# ------------------------------------------------------------------------------------------ what aten does


def _same(out: Tensor, parent: Moved, *_args, **_kwargs) -> Moved:
    return Moved(out, parent.origin)  # a copy, or another dtype: the reader casts


def _reshape(out: Tensor, parent: Moved, *_args, **_kwargs) -> Moved:
    return Moved(out, _Reshape(parent))


def _permute(out: Tensor, parent: Moved, order: Sequence[int]) -> Moved:
    return Moved(out, _Permute(parent, tuple(dim % parent.ndim for dim in order)))


def _transpose(out: Tensor, parent: Moved, dim0: int, dim1: int) -> Moved:
    order = list(range(parent.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(out, parent, order)


def _t(out: Tensor, parent: Moved) -> Moved:
    return _permute(out, parent, list(range(parent.ndim))[::-1])


def _slice(out: Tensor, parent: Moved, dim: int = 0, start=None, end=None, step: int = 1) -> Moved:
    if step != 1:
        raise UnknownMove(f"a slice with step {step}")
    size = parent.shape[dim]
    first = 0 if start is None else start + size if start < 0 else min(start, size)
    return Moved(out, _Slice(parent, dim % parent.ndim, first))


def _select(out: Tensor, parent: Moved, dim: int, index: int) -> Moved:
    dim %= parent.ndim
    index %= parent.shape[dim]
    return Moved(out, _Reshape(Moved(parent.shadow.narrow(dim, index, 1), _Slice(parent, dim, index))))


def _split(outs: Sequence[Tensor], parent: Moved, _sizes: object, dim: int = 0) -> list[Moved]:
    starts = [0]
    for out in outs:
        starts.append(starts[-1] + out.shape[dim])
    return [Moved(out, _Slice(parent, dim % parent.ndim, start)) for out, start in zip(outs, starts, strict=False)]


def _unbind(outs: Sequence[Tensor], parent: Moved, dim: int = 0) -> list[Moved]:
    return [_select(out, parent, dim, index) for index, out in enumerate(outs)]


def _cat(out: Tensor, parents: Sequence[Moved], dim: int = 0) -> Moved:
    kept = [parent for parent in parents if parent.ndim == out.ndim]  # aten lets empty 1-D tensors take part
    return Moved(out, _Cat(tuple(kept), dim % out.ndim))


def _stack(out: Tensor, parents: Sequence[Moved], dim: int = 0) -> Moved:
    dim %= out.ndim
    return Moved(out, _Cat(tuple(Moved(p.shadow.unsqueeze(dim), _Reshape(p)) for p in parents), dim))


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


# --------------------------------------------------------------------------------- what a box is made of


@dataclass
class Pull:
    """How to fill one tensor.

    Attributes:
        reads: (leaf, its box, the view of the target that the box fills).
        finishes: calls to make after all reads, in order; they copy out of buffers that hold more than the target
            needed. Empty where every element is read to its place.
    """

    reads: list[tuple[Leaf, Box, Tensor]] = field(default_factory=list)
    finishes: list[Callable[[], object]] = field(default_factory=list)


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def pull(moved: Moved, box: Box, out: Tensor) -> Pull:
    """What to read, so that `out` holds `moved[box]`.

    Args:
        moved: what is wanted.
        box: the part that is wanted; must lie inside.
        out: a tensor of the box's shape, any dtype, strides and device.
    """
    found = Pull()
    if 0 not in box_shape(box):
        _pull(moved, box, out, found)
    return found


def leaves(moved: Moved) -> Iterator[Leaf]:
    """The tensors that `moved` is made of, in no particular order, some perhaps repeatedly."""
    pending = [moved.origin]
    while pending:
        origin = pending.pop()
        if isinstance(origin, Leaf):
            yield origin
        elif isinstance(origin, _Cat):
            pending += [parent.origin for parent in reversed(origin.parents)]
        else:
            pending.append(origin.parent.origin)


def is_turned(moved: Moved) -> bool:
    """Whether dimensions were exchanged on the way from the tensors that `moved` is made of."""
    pending = [moved.origin]
    while pending:
        origin = pending.pop()
        if isinstance(origin, _Permute):
            return True
        if isinstance(origin, _Cat):
            pending += [parent.origin for parent in origin.parents]
        elif not isinstance(origin, Leaf):
            pending.append(origin.parent.origin)
    return False


def _pull(moved: Moved, box: Box, out: Tensor, found: Pull) -> None:
    origin = moved.origin
    if isinstance(origin, Leaf):
        found.reads.append((origin, box, out))
    elif isinstance(origin, _Slice):
        dim = origin.dim
        shifted = (box[dim][0] + origin.start, box[dim][1] + origin.start)
        _pull(origin.parent, (*box[:dim], shifted, *box[dim + 1 :]), out, found)
    elif isinstance(origin, _Permute):
        theirs: list = [None] * len(box)
        for place, dim in enumerate(origin.order):
            theirs[dim] = box[place]
        inverse = sorted(range(len(box)), key=origin.order.__getitem__)
        _pull(origin.parent, tuple(theirs), out.permute(inverse), found)
    elif isinstance(origin, _Cat):
        dim, offset = origin.dim, 0
        for parent in origin.parents:
            size = parent.shape[dim]
            start, stop = max(box[dim][0], offset), min(box[dim][1], offset + size)
            if start < stop:
                part = (*box[:dim], (start - offset, stop - offset), *box[dim + 1 :])
                _pull(parent, part, out.narrow(dim, start - box[dim][0], stop - start), found)
            offset += size
    else:
        _pull_reshaped(origin.parent, moved.shape, box, out, found)


def _pull_reshaped(parent: Moved, shape: Sequence[int], box: Box, out: Tensor, found: Pull) -> None:
    larger, theirs = _through_reshape(tuple(parent.shape), tuple(shape), box)
    if larger == box:
        try:
            view = out.view(box_shape(theirs))
        except RuntimeError:  # the strides of the target do not allow it
            view = None
        if view is not None:
            _pull(parent, theirs, view, found)
            return
    buffer = torch.empty(box_shape(larger), dtype=out.dtype, device=out.device)
    _pull(parent, theirs, buffer.view(box_shape(theirs)), found)
    inner = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, larger, strict=True))
    found.finishes.append(lambda: out.copy_(buffer[inner]))


def _through_reshape(theirs: tuple[int, ...], ours: tuple[int, ...], box: Box) -> tuple[Box, Box]:
    """The smallest box around `box` that is a box before the reshape as well, in both shapes."""
    larger: list[tuple[int, int]] = []
    parent: list[tuple[int, int]] = []
    for their_dims, our_dims in _dimension_groups(theirs, ours):
        mine = [box[dim] for dim in our_dims]
        their_sizes, our_sizes = [theirs[d] for d in their_dims], [ours[d] for d in our_dims]
        fitting = _common_range(their_sizes, our_sizes, mine)
        start, stop = fitting
        larger += _box_of_range(our_sizes, start, stop)
        parent += _box_of_range(their_sizes, start, stop)
    return tuple(larger), tuple(parent)


def _dimension_groups(a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dimensions of both shapes with the same number of elements, as short as possible."""
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


def _common_range(theirs: list[int], ours: list[int], box: list[tuple[int, int]]) -> tuple[int, int]:
    """The smallest range of flat indices around `box` that is a box in both shapes."""
    total = math.prod(ours)
    start = stop = 0
    for size, (first, last) in zip(ours, box, strict=True):
        start, stop = start * size + first, stop * size + last - 1
    stop += 1
    while True:
        wider = _align(ours, *_align(theirs, start, stop))
        if wider == (start, stop) or wider == (0, total):
            return wider
        start, stop = wider


def _align(sizes: list[int], start: int, stop: int) -> tuple[int, int]:
    """Widens a flat range until it is a box: fixed leading indices, one range, whole trailing dimensions."""
    inner = math.prod(sizes)
    for size in sizes:
        inner //= max(size, 1)
        if inner and start // inner != (stop - 1) // inner:  # the first index in which the ends differ
            return start // inner * inner, -(-stop // inner) * inner
    return start, stop


def _box_of_range(sizes: list[int], start: int, stop: int) -> list[tuple[int, int]]:
    """The box of an aligned flat range."""
    box, inner, is_whole = [], math.prod(sizes), False
    for size in sizes:
        inner //= max(size, 1)
        if is_whole or not inner:
            box.append((0, size))
            continue
        first, last = start // inner, (stop - 1) // inner
        box.append((first % size, last % size + 1))
        is_whole = first != last
    return box
