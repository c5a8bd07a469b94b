"""Runs a Gluon kernel's own source on the CPU, program after program, its partitions as threads that take turns.

Gluon has no interpreter. This is one for kernels on Hopper that load by TMA or `cp.async`, multiply by `wgmma` and store by
TMA. After each step a random draw says which partition goes on or which copy lands, so that the same seed gives the same
run. What is copied into holds NaN until the copy lands, as does memory that nobody wrote, and what threads stored is NaN
again when it was read. These are errors:

- a wait that nothing will end, arrivals beyond what a barrier counts, and at the end memory that was filled more or less
  often than it was freed, said by two barriers allocated one after the other;
- a copy into memory that a product in flight still reads or another copy has to do with;
- values stored over others that nobody read;
- a copy out, or a product of what threads wrote, without a fence; a result used before its product is done;
- a read or a write past the end of an array; an element of the output written twice; an end before the results have left.
"""

from __future__ import annotations

import ast
import inspect
import math
import random
from collections.abc import Callable
from threading import Lock, Thread
from types import FunctionType, ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
from triton.language import constexpr


class Tile(np.ndarray):
    """A tile of values with the methods that tensors and shared memory have in Gluon."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: object) -> Tile:
        return self

    def index(self, number: int) -> Tile:
        return self[number]

    def slice(self, start: int, length: int, dim: int) -> Tile:
        return self[(slice(None),) * dim + (slice(start, start + length),)]

    def permute(self, order: list[int]) -> Tile:
        return self.transpose(order)

    def split(self) -> tuple[Tile, Tile]:
        return self[..., 0], self[..., 1]

    def _reinterpret(self, dtype: object, shape: list[int], layout: object) -> Tile:
        return self.reshape(shape)

    def store(self, value: np.ndarray) -> None:
        assert np.isnan(self).all(), "stored over what nobody read"
        _Machine.current.overwrite(self)
        self[...] = value
        _Machine.current.running.is_fenced = False
        _Machine.current.pause()

    def load(self, layout: object) -> Tile:
        values = self.copy()
        self[...] = np.nan
        _Machine.current.pause()
        return values


class Product(NamedTuple):
    """What `warpgroup_mma` returns; it can be added to, and is a tile when all products are waited for."""

    value: Tile


class Barrier:
    """An `mbarrier`: a phase ends when all arrivals and all announced bytes are there."""

    def __init__(self):
        self.phases = self.arrivals = self.count = self.bytes = 0

    def progress(self, arrivals: int, announced: int) -> None:
        self.arrivals += arrivals
        self.bytes += announced
        assert self.arrivals <= self.count, "more arrivals than the barrier counts"
        if self.arrivals == self.count and self.bytes == 0:
            self.phases, self.arrivals = self.phases + 1, 0


class Pointer(NamedTuple):
    array: np.ndarray
    offset: np.ndarray | int = 0
    dtype = SimpleNamespace(element_ty=None)

    def __add__(self, offset: np.ndarray | int) -> Pointer:
        return Pointer(self.array, self.offset + offset)

    def load(self, mask: np.ndarray | None = None, other: int = 0) -> Tile | int | float:
        offset = self.offset if mask is None else np.where(mask, self.offset, 0)
        assert np.all((offset >= 0) & (offset < len(self.array))), "read past the end"
        values = self.array[offset]
        if mask is not None:
            values = np.where(mask, values, other)
        return values.view(Tile) if values.ndim else values.item()

    def store(self, values: np.ndarray, mask: np.ndarray) -> None:
        offset = self.offset[mask]
        assert np.all((offset >= 0) & (offset < len(self.array))), "write past the end"
        assert np.isnan(self.array[offset]).all(), "written twice"
        self.array[offset] = values[mask]


class Descriptor:
    """A tensor with the box that TMA copies; what lies outside the tensor reads as zero and is not written."""

    dtype = layout = None

    def __init__(self, array: np.ndarray, box: list[int]):
        self.array, self.block_shape = array, box
        self.block_type = SimpleNamespace(nbytes=int(np.prod(box)))

    def clipped(self, corner: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor and what of the box a copy at `corner` moves."""
        sizes = zip(corner, self.block_shape, self.array.shape, strict=True)
        inside = [max(min(size, limit - at), 0) for at, size, limit in sizes]
        whole = tuple(slice(at, at + size) for at, size in zip(corner, inside, strict=True))
        return whole, tuple(slice(0, size) for size in inside)


class _Copy:
    """A copy under way, of or into `memory`, that `land` ends, after those of `before`."""

    def __init__(self, land: Callable[[], None], memory: Tile | None = None, before: tuple[_Copy, ...] = ()):
        self.land, self.memory, self.before, self.has_landed = land, memory, before, False

    def is_able(self) -> bool:
        return all(copy.has_landed for copy in self.before)


class _Partition(Thread):
    """Some warps with a function of their own. It runs while it holds `turn`, up to the next `pause`."""

    def __init__(self, machine: _Machine, warps: int, function: Callable, arguments: tuple):
        super().__init__(daemon=True)
        self.machine, self.warps, self.function, self.arguments = machine, warps, function, arguments
        self.turn = Lock()
        self.turn.acquire()
        self.is_able, self.is_done, self.error = lambda: True, False, None
        self.products: list[tuple[Tile, Tile]] = []
        self.copies: list[_Copy] = []
        self.stores: list[_Copy] = []
        self.is_fenced = False
        self.start()

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not self.machine.is_over:
                self.function(*self.arguments)
                assert all(store.has_landed for store in self.stores), "ends before its results have left"
        except BaseException as error:
            self.error = error
        self.is_done = True
        self.machine.turn.release()


class _Machine:
    """One program: its partitions, what is under way, and the functions of Gluon that its source calls."""

    current: _Machine

    def __init__(self, program: int, programs: int, warps: int, seed: int):
        self.program, self.programs, self.warps = program, programs, warps
        self.random = random.Random(seed)
        self.partitions: list[_Partition] = []
        self.copies: list[_Copy] = []
        self.written_by_threads: dict[int, Tile] = {}
        self.barriers: list[list[Barrier]] = []
        self.is_over = False
        self.turn = Lock()
        self.turn.acquire()
        type(self).current = self

    def specialize(self, functions: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
        """Runs the partitions in turns to their end; each of them, and the copies, may be much slower than others."""
        self.partitions = [
            _Partition(self, number, *work) for number, work in zip([self.warps, *warps], functions, strict=True)
        ]
        speed = {partition: 10 ** -self.random.uniform(0, 2) for partition in self.partitions}
        speed_of_copies = 10 ** -self.random.uniform(0, 2)
        try:
            while True:
                able = [one for one in (*self.partitions, *self.copies) if one.is_able()]
                if not able:
                    break
                [self.running] = self.random.choices(able, [speed.get(one, speed_of_copies) for one in able])
                if isinstance(self.running, _Copy):
                    self.copies.remove(self.running)
                    self.running.land()
                    self.running.has_landed = True
                    continue
                self._give_turn(self.running)
                if self.running.is_done:
                    self.running.is_able = lambda: False
                    if self.running.error:
                        raise self.running.error
            assert all(partition.is_done for partition in self.partitions), "waits for ever"
        finally:
            self.is_over = True
            for partition in self.partitions:
                if not partition.is_done:
                    self._give_turn(partition)
        for all_filled, all_free in zip(self.barriers[::2], self.barriers[1::2], strict=True):
            for filled, free in zip(all_filled, all_free, strict=True):
                assert filled.phases == free.phases, "memory was not freed as often as it was filled"
                assert not any((filled.arrivals, filled.bytes, free.arrivals)), "arrivals without a phase"

    def _give_turn(self, partition: _Partition) -> None:
        partition.turn.release()
        self.turn.acquire()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Lets others go on; comes back when `until` holds."""
        mine = self.running
        mine.is_able = until
        self.turn.release()
        mine.turn.acquire()
        if self.is_over:
            raise SystemExit

    def overwrite(self, memory: Tile) -> None:
        reading = [operand for partition in self.partitions for pair in partition.products for operand in pair]
        assert not any(np.may_share_memory(memory, operand) for operand in reading), "a product reads this still"
        others = [copy.memory for copy in self.copies if copy.memory is not None]
        assert not any(np.may_share_memory(memory, other) for other in others), "a copy of or into this is under way"
        memory[...] = np.nan

    def allocate(self, dtype: object, shape: list[int], layout: object):
        if dtype == "barrier":
            self.barriers.append([Barrier() for _ in range(shape[0])])
            return SimpleNamespace(index=self.barriers[-1].__getitem__)
        return np.full(shape, np.nan).view(Tile)

    # Barriers
    def expect(self, barrier: Barrier, announced: int) -> None:
        barrier.progress(1, announced)
        self.pause()

    def arrive(self, barrier: Barrier, pred: bool = True) -> None:
        if pred:
            barrier.progress(1, 0)
        self.pause()

    def wait(self, barrier: Barrier, phase: int, pred: bool = True) -> None:
        if pred:
            self.pause(lambda: barrier.phases % 2 != phase)
            self.running.is_fenced = False

    def fence(self) -> None:
        if self.partitions:
            self.running.is_fenced = True

    # Copies
    def read_box(self, source: Descriptor, corner: list[int], barrier: Barrier, target: Tile) -> None:
        def land() -> None:
            whole, part = source.clipped(corner)
            target[...] = 0
            target[part] = source.array[whole]
            barrier.progress(0, -source.block_type.nbytes)

        self.overwrite(target)
        self.copies.append(_Copy(land, target))
        self.pause()

    def read_pointers(self, target: Tile, source: Pointer, mask: np.ndarray | None = None) -> None:
        def land() -> None:
            target[...] = source.load(mask)
            self.written_by_threads[target.ctypes.data] = target

        self.overwrite(target)
        self.running.copies.append(_Copy(land, target))
        self.copies.append(self.running.copies[-1])
        self.pause()

    def arrive_after_copies(self, barrier: Barrier, increment_count: bool) -> None:
        """Each thread arrives when its copies are there; all together here."""
        assert not increment_count, "the barrier has to count these arrivals"
        arrivals = 32 * self.running.warps
        self.copies.append(_Copy(lambda: barrier.progress(arrivals, 0), before=tuple(self.running.copies)))
        self.running.copies = []
        self.pause()

    def write_box(self, target: Descriptor, corner: list[int], source: Tile) -> None:
        def land() -> None:
            whole, part = target.clipped(corner)
            assert np.isnan(target.array[whole]).all(), "written twice"
            target.array[whole] = source[part]
            source[...] = np.nan

        assert self.running.is_fenced, "stored without a fence"
        self.running.stores.append(_Copy(land, source))
        self.copies.append(self.running.stores[-1])
        self.pause()

    def store_wait(self, pending: int) -> None:
        stores = self.running.stores[: len(self.running.stores) - pending]
        self.pause(lambda: all(store.has_landed for store in stores))

    # Products
    def multiply(self, left: Tile, right: Tile, acc: Tile | Product, is_async: bool, use_acc: bool = True) -> Product:
        by_threads = any(np.may_share_memory(left, memory) for memory in self.written_by_threads.values())
        assert self.running.is_fenced or not by_threads, "multiplied without a fence"
        self.running.products.append((left, right))
        self.pause()
        before = acc.value if isinstance(acc, Product) else acc
        return Product(before + left @ right if use_acc else left @ right)

    def wait_products(self, pending: int, deps: list[Tile | Product]) -> Tile | Product:
        products = self.running.products
        self.running.products = products[max(len(products) - pending, 0) :]
        self.pause()
        [acc] = deps
        return acc.value if isinstance(acc, Product) and not self.running.products else acc

    def scope(self) -> dict[str, object]:
        """What the sources of kernels import from Gluon and from Triton's language."""

        def no_layout(*description: object) -> None:
            return None

        language = SimpleNamespace(
            load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
            store=lambda pointer, values, mask: pointer.store(values, mask),
            allocate_shared_memory=self.allocate,
            warp_specialize=self.specialize,
            program_id=lambda axis: self.program,
            num_programs=lambda axis: self.programs,
            arange=lambda start, end, layout: np.arange(start, end).view(Tile),
            minimum=np.minimum,
            maximum=np.maximum,
            sigmoid=lambda x: 1 / (1 + np.exp(-x)),
            math=SimpleNamespace(erf=lambda x: np.vectorize(math.erf, otypes=[float])(x).view(Tile)),
            where=_where,
            to_tensor=lambda value: value,
            multiple_of=lambda value, number: value,
            max_contiguous=lambda value, number: value,
            static_range=range,
            static_assert=lambda condition: None,
            zeros=lambda shape, dtype, layout: np.zeros(shape).view(Tile),
            convert_layout=lambda value, layout: value,
            NVMMADistributedLayout=no_layout,
            NVMMASharedLayout=SimpleNamespace(get_default_for=no_layout),
            SwizzledSharedLayout=no_layout,
            BlockedLayout=no_layout,
            SliceLayout=no_layout,
            float32="value",
            int64="barrier",
        )
        return {
            "gl": language,
            "tl": language,
            "_INTERPRETED": True,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: setattr(barrier, "count", count),
                expect=self.expect,
                arrive=self.arrive,
                wait=self.wait,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self.read_box,
                async_copy_shared_to_global=self.write_box,
                store_wait=self.store_wait,
            ),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self.read_pointers, mbarrier_arrive=self.arrive_after_copies
            ),
            "fence_async_shared": self.fence,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_products,
        }


def _where(condition: np.ndarray | bool, one: Tile | int, other: Tile | int) -> Tile | int:
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other).view(Tile)
    return one if condition else other


def run_kernel(module: ModuleType, name: str, programs: int, warps: int, seed: int, *arguments: object) -> None:
    """Runs the kernel `module.name`, and what it calls, for each of `programs` programs.

    Raises:
        AssertionError: the kernel does what would be wrong on a GPU; see the top of this file.
    """
    for program in range(programs):
        language = _Machine(program, programs, warps, seed + program).scope()
        _on_cpu(vars(module)[name].fn, language, {})(*arguments)


def _on_cpu(source: FunctionType, language: dict[str, object], made: dict[FunctionType, FunctionType]) -> FunctionType:
    """The function with the names of Gluon bound to `language`, as have those that it calls, which `made` collects."""
    if source not in made:
        scope = source.__globals__ | language
        made[source] = FunctionType(source.__code__, scope, source.__name__)
        for name in source.__code__.co_names:
            if hasattr(scope.get(name), "fn"):
                scope[name] = _on_cpu(scope[name].fn, language, made)
            elif isinstance(scope.get(name), constexpr):
                scope[name] = scope[name].value
    return made[source]


def sources(module: ModuleType) -> list[FunctionType]:
    """The functions of a module that a compiler takes."""
    return [value.fn for value in vars(module).values() if hasattr(value, "fn")]


def copies_not_carried(*functions: FunctionType) -> list[str]:
    """Where a variable is set to another one in a loop, and was before it: carried here, on a GPU not; see `stage_before`."""
    found = []
    for function in functions:
        tree = ast.parse(inspect.getsource(function))
        for loop in [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]:
            assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
            before = {name for one in assignments if one.lineno < loop.lineno for name in _copied(one)}
            within = [one for one in ast.walk(loop) if isinstance(one, ast.Assign)]
            found += [ast.unparse(one) for one in within if _copied(one) & before]
    return found


def _copied(assignment: ast.Assign) -> set[str]:
    """The names that are set to another name."""
    pairs = [(assignment.targets[0], assignment.value)]
    if all(isinstance(side, ast.Tuple) for side in pairs[0]):
        pairs = zip(*(side.elts for side in pairs[0]), strict=True)
    return {one.id for one, other in pairs if isinstance(one, ast.Name) and isinstance(other, ast.Name)}
