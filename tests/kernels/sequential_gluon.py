"""Runs a Gluon kernel's own source on the CPU, program after program, with what it may and may not do checked.

Gluon has no interpreter. This is one for kernels in one group of warps whose copies go by TMA: a copy lands when it is
asked for, a product reads when it is issued, and these are errors: a wait that nothing will end, a copy into memory
that a product in flight still reads, a read past the end of an array, a result overwritten before it has left.
"""

from __future__ import annotations

from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np


class Tile(np.ndarray):
    """A tile of values with the methods that tensors and shared memory have in Gluon."""

    def to(self, dtype: object) -> Tile:
        return self

    def index(self, number: int) -> Tile:
        return self[number]

    def permute(self, order: list[int]) -> Tile:
        return self.transpose(order)

    def store(self, value: np.ndarray) -> None:
        assert not _Machine.current.leaving, "the result is overwritten before it has left"
        self[...] = value


class Barrier:
    """An `mbarrier`: a phase ends when all arrivals and all announced bytes are there."""

    def __init__(self):
        self.phase = self.arrivals = self.count = self.bytes = 0

    def progress(self, arrivals: int, announced: int) -> None:
        self.arrivals += arrivals
        self.bytes += announced
        if self.arrivals == self.count and self.bytes == 0:
            self.phase, self.arrivals = self.phase ^ 1, 0


class Pointer:
    def __init__(self, array: np.ndarray, offset: int = 0):
        self.array, self.offset = array, offset

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.array, self.offset + offset)


class Descriptor:
    """A tensor with the box that TMA copies; what lies outside the tensor reads as zero and is not written."""

    dtype = layout = None

    def __init__(self, array: np.ndarray, box: list[int]):
        self.array, self.block_shape = array, box
        self.block_type = SimpleNamespace(nbytes=int(np.prod(box)))

    def clipped(self, corner: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor and what of the box a copy at `corner` moves."""
        ends = [
            min(at + size, limit) for at, size, limit in zip(corner, self.block_shape, self.array.shape, strict=True)
        ]
        inside = [max(end - at, 0) for at, end in zip(corner, ends, strict=True)]
        whole = tuple(slice(at, at + size) for at, size in zip(corner, inside, strict=True))
        return whole, tuple(slice(0, size) for size in inside)


class _Machine:
    current: _Machine

    def __init__(self, program: int, programs: int):
        self.program, self.programs = program, programs
        self.products: list[tuple[np.ndarray, np.ndarray]] = []
        self.leaving = False
        type(self).current = self

    # gluon.language
    def load(self, pointer: Pointer) -> int:
        assert 0 <= pointer.offset < len(pointer.array), "read past the end"
        return int(pointer.array[pointer.offset])

    def allocate(self, dtype: object, shape: list[int], layout: object):
        if dtype == "barrier":
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=barriers.__getitem__)
        return np.full(shape, np.nan).view(Tile)

    # TMA and barriers
    def expect(self, barrier: Barrier, announced: int, pred: bool = True) -> None:
        if pred:
            barrier.progress(1, announced)

    def wait(self, barrier: Barrier, phase: int) -> None:
        assert barrier.phase != phase, "waits for ever"

    def read(self, source: Descriptor, corner: list[int], barrier: Barrier, target: Tile, pred: bool = True) -> None:
        if not pred:
            return
        for operands in self.products:
            assert not any(np.shares_memory(target, operand) for operand in operands), "a product reads this still"
        whole, part = source.clipped(corner)
        target[...] = 0
        target[part] = source.array[whole]
        barrier.progress(0, -source.block_type.nbytes)

    def write(self, target: Descriptor, corner: list[int], source: Tile) -> None:
        whole, part = target.clipped(corner)
        target.array[whole] = source[part]
        self.leaving = True

    def store_wait(self, pending: int) -> None:
        assert pending == 0
        self.leaving = False

    # products
    def multiply(self, left: Tile, right: Tile, acc: Tile, is_async: bool) -> Tile:
        self.products.append((left, right))
        return (acc + left @ right).view(Tile)

    def wait_products(self, pending: int, deps: list[Tile]) -> Tile:
        self.products = self.products[len(self.products) - pending :] if pending else []
        return deps[0]

    def globals(self) -> dict[str, object]:
        language = SimpleNamespace(
            load=self.load,
            allocate_shared_memory=self.allocate,
            program_id=lambda axis: self.program,
            num_programs=lambda axis: self.programs,
            minimum=min,
            maximum=max,
            where=lambda condition, one, other: one if condition else other,
            to_tensor=lambda value: value,
            static_range=range,
            static_assert=lambda condition: None,
            zeros=lambda shape, dtype, layout: np.zeros(shape).view(Tile),
            NVMMADistributedLayout=lambda *description: None,
            float32="value",
            int64="barrier",
        )
        return {
            "gl": language,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: setattr(barrier, "count", count),
                expect=self.expect,
                wait=self.wait,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self.read,
                async_copy_shared_to_global=self.write,
                store_wait=self.store_wait,
            ),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_products,
        }


def run_kernel(module: ModuleType, name: str, programs: int, *arguments: object, **constants: object) -> None:
    """Runs the kernel `module.name`, and what it calls, for each of `programs` programs.

    Raises:
        AssertionError: the kernel does what would be wrong on a GPU; see the top of this file.
    """
    sources = {key: value.fn for key, value in vars(module).items() if hasattr(value, "fn")}
    for program in range(programs):
        scope = vars(module) | _Machine(program, programs).globals()
        functions = {key: FunctionType(source.__code__, scope, key) for key, source in sources.items()}
        scope.update(functions)
        functions[name](*arguments, **constants)
