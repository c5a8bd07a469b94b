"""The values of tensors that Python reads in a step, and whether other values would run other modules.

    if mask.any():                       a value: the step is run again with the other outcome
        x = self.first(x)                first runs in one of the two: ranks with other data wait for each other
    for i in index.unique():             a size that values decide: run again with none
        x = self.experts[i](x)

Reads of the runtime's own functions do not count: ranks agree on them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import fp32_parameters, sharding
from patchgen.runtime.verify.kept_state import state_kept
from patchgen.runtime.verify.observe import lines
from patchgen.runtime.verify.observe.facts import VALUE, Fact
from patchgen.runtime.verify.observe.places import Source, is_of_runtime

READ_FROM_MEMORY = ("tolist", "numpy", "__array__")
"""Reads that no operator of torch is dispatched for."""
READ = "a value is read"
ON_ONE_RANK = ("serves", "rms_norm", "rotary", "swiglu")
"""Functions of `ops` that wait for no other rank."""
NAMES = {
    "__bool__": "bool()",
    "__int__": "int()",
    "__float__": "float()",
    "__index__": "an index",
    "__contains__": "in",
}
CONVERSIONS = ("int()", "float()", "an index")
FAR, FAR_WHOLE = 1e9, 10_000
MANY = 256
"""How many reads of a line are answered otherwise together: a loop that ends by them goes on after as many."""
SIZE = "a size that values decide"
MOST_TRIES = 3
"""In how many forwards a line is read otherwise while no effect shows; in others only if its value is of another kind."""


class Reads:
    """A context that collects reads, and answers some of them otherwise.

    Attributes:
        found: line -> what reads there.
        other: the line whose first `times` reads are answered by `answer`; None: none.
    """

    def __init__(
        self, source: Source, other: int | None = None, answer: Callable[[Any], Any] | None = None, times: int = 1
    ) -> None:
        self.source, self.other, self.answer, self.times = source, other, answer, times
        self.found: dict[int, str] = {}
        self.values: dict[int, Any] = {}
        self._answered = 0
        self.reads = 0

    def again(self) -> Reads:
        """The same answers from the first read on."""
        return Reads(self.source, self.other, self.answer, self.times)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with _Calls(self), _Operators(self):
            yield

    def note(self, what: str, value: Any) -> Any:
        """Notes a read of `value` here; returns the value, or the other answer."""
        line = self.source.running_line()
        if line is None:
            return value
        if self.found.get(line, READ) == READ:
            self.found[line] = what
        self.values.setdefault(line, value)
        if line != self.other or self.answer is None or self._answered == self.times:
            return value
        self._answered += 1
        return self.answer(value)


class _Calls(TorchFunctionMode):
    """Functions of torch that return a number made of a tensor's values."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = self.reads.reads
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        is_read = self.reads.reads > before and isinstance(result, bool | int | float)
        what = NAMES.get(name, f"{name}()")
        return self.reads.note(f"{what} reads a value", result) if is_read or name in READ_FROM_MEMORY else result


class _Operators(TorchDispatchMode):
    """Operators that read a tensor's values, or whose result has a size that these decide."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.data_dependent_output in func.tags:
            self.reads.reads += 1
            line = self.reads.source.running_line()
            if line is not None:
                self.reads.found.setdefault(line, READ)
        elif torch.Tag.dynamic_output_shape in func.tags and _has_open_size(func, args):
            return self.reads.note(SIZE, result)
        return result


def _has_open_size(func: Any, args: tuple) -> bool:
    """Whether values decide the size of a result: an index of numbers has its own."""
    if func.overloadpacket is not torch.ops.aten.index:
        return True
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


# ------------------------------------------------------------------------------------------------- other answers


class _Contrary:
    """A number whose first comparison has the other outcome."""

    def _outcome(self, outcome: Any) -> Any:
        if outcome is NotImplemented or vars(self).get("has_answered"):
            return outcome
        self.has_answered = True
        return not outcome


def _contrary_kind(kind: type) -> type:
    def comparison(name: str) -> Callable[[Any, Any], Any]:
        original = getattr(kind, name)
        return lambda self, other: self._outcome(original(self, other))

    names = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
    methods: dict[str, Any] = {name: comparison(name) for name in names}
    methods["__bool__"] = lambda self: self._outcome(kind.__bool__(self))
    methods["__hash__"] = kind.__hash__
    return type(f"Contrary{kind.__name__.capitalize()}", (_Contrary, kind), methods)


_CONTRARY = {kind: _contrary_kind(kind) for kind in (int, float)}


def contrary(value: Any) -> Any:
    """The value with the other outcome: False for True, numbers that compare otherwise, a tensor without rows for one with some."""
    if isinstance(value, bool):
        return not value
    if type(value) in _CONTRARY:
        return _CONTRARY[type(value)](value)
    if isinstance(value, list | tuple):
        return type(value)(map(contrary, value)) if isinstance(value, list) else (contrary(value[0]), *value[1:])
    if isinstance(value, Tensor) and value.dim():
        return value[:0] if len(value) else value.new_zeros(1, *value.shape[1:])
    return value


def larger(value: Any) -> Any:
    """The value plus one, as a count of repetitions."""
    if isinstance(value, list):
        return [larger(item) for item in value]
    return value + 1 if isinstance(value, int | float) and not isinstance(value, bool) else value


def far(value: Any) -> Any:
    """A number beyond a threshold, of the built-in kind: `int()` and `float()` return no other."""
    return type(value)(FAR_WHOLE if isinstance(value, int) else FAR)


def far_below(value: Any) -> Any:
    """The same in the other direction."""
    return -far(value)


def other_answers(what: str, value: Any) -> tuple[Callable[[Any], Any], ...]:
    """What a read that returned `value` may be answered instead."""
    if what == SIZE or isinstance(value, bool):
        return (contrary,)
    if what.startswith(CONVERSIONS) and isinstance(value, int | float):
        return larger, far, far_below
    return contrary, larger


# -------------------------------------------------------------------------------------------------- the effect


def gathered_units(model: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 and expert parallelism gather when they are called. Others may run on some ranks alone: gradients
    that a rank lacks are zeros (`parallel/unused.py`)."""
    experts = [model.get_submodule(path.rpartition(".")[0]) for path in sharding.expert_paths(model)]
    with warnings.catch_warnings(action="ignore"):
        in_fp32, _ = fp32_parameters.find(model, torch.bfloat16)
    try:
        layers = sharding.find_layers(model, None)
    except ValueError:  # it has none, and the root gathers all
        layers = []
    return [*layers, *experts, *sharding.shared_by_experts(experts), *in_fp32]


@contextlib.contextmanager
def called(model: nn.Module, source: Source) -> Iterator[list[str]]:
    """Collects, in order, the calls of modules that ranks gather, and those of the runtime by the file: what they do together."""
    units = {id(unit) for unit in gathered_units(model)}
    paths = {id(part): path for path, part in model.named_modules() if id(part) in units}
    sequence: list[str] = []
    original = nn.Module.__call__

    def call(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(part) in paths:
            sequence.append(paths[id(part)])
        return original(part, *args, **kwargs)

    def on_event(frame: FrameType, event: str, _: object) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or caller.f_code.co_filename != source.file:
            return
        if is_of_runtime(frame.f_code.co_filename) and frame.f_code.co_name not in ON_ONE_RANK:
            sequence.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    nn.Module.__call__ = call
    sys.setprofile(on_event)
    try:
        yield sequence
    finally:
        sys.setprofile(before)
        nn.Module.__call__ = original


class Observed:
    """The values that forwards of a model read, and which modules other values would run.

    What a value decides may run in some of the forwards only: a line is tried again until it shows an effect.

    Attributes:
        executed_lines: of the file, by these forwards.
    """

    def __init__(self, source: Source, model: nn.Module) -> None:
        self.source, self.model = source, model
        self.executed_lines: set[int] = set()
        self._tried: dict[int, Counter[tuple[str, str]]] = {}
        """Line -> what was read there, and the kind of its value -> the forwards in which it was answered otherwise."""
        self._with_effect: set[int] = set()

    def in_run(self, run: Callable[[], Tensor]) -> list[Fact]:
        """The facts of `run`, the loss of a forward, about lines that are tried in it: those that showed no effect yet."""
        reads = Reads(self.source)
        with lines.executed(self.source.file) as executed:
            usual = self._calls(run, reads)
        self.executed_lines |= executed
        following = functools.cache(lambda: self._following(run, Reads(self.source)))
        facts = []
        for line, what in sorted(reads.found.items()):
            first = reads.values.get(line)
            if not self._is_to_try(line, (what, _kind_of(first))):
                continue
            answers = [(answer, 1) for answer in other_answers(what, first)]
            if isinstance(first, bool):
                answers.append((lambda _, other=not first: other, MANY))  # `any(row.any() for row in x)`
            effects = (self._effect(run, Reads(self.source, line, *answer), usual, following) for answer in answers)
            effect = next(filter(None, effects), "")
            if effect:
                self._with_effect.add(line)
            facts.append(Fact(VALUE, line, self.source.code(line), what, effect))
        return facts

    def _is_to_try(self, line: int, kind: tuple[str, str]) -> bool:
        """Whether another value on a line may still show what no forward showed; counts the try."""
        tried = self._tried.setdefault(line, Counter())
        if line in self._with_effect or (kind in tried and tried.total() >= MOST_TRIES):
            return False
        tried[kind] += 1
        return True

    def _calls(self, run: Callable[[], object], reads: Reads) -> list[str]:
        with called(self.model, self.source) as sequence, reads.watching():
            run()
        return sequence

    def _following(self, run: Callable[[], Tensor], reads: Reads) -> Tensor | None:
        """The loss of a forward that follows one with these answers; None if there is none. The model stays as it was."""
        with state_kept(self.model):
            try:
                with reads.watching():
                    run()
                return run()
            except Exception as error:
                reraise_machine_failure(error)
                return None

    def _effect(
        self, run: Callable[[], Tensor], reads: Reads, usual: list[str], following: Callable[[], Tensor | None]
    ) -> str:
        """What else runs with another value, or in the forward after it; empty if nothing does.

        An error ends the calls early, which is no effect: a rank that stops makes none wait. What ran before it counts.
        """
        is_refused = False
        with state_kept(self.model), called(self.model, self.source) as other, reads.watching():
            try:
                run()
            except Exception as error:
                reraise_machine_failure(error)
                is_refused = True
        pairs = zip(usual, other, strict=False)
        differing = next((theirs for ours, theirs in pairs if ours != theirs), None)
        longer = other if is_refused else max(usual, other, key=len)
        beyond = longer[min(len(usual), len(other)) :]
        if differing is None and not beyond:
            after, usually = self._following(run, reads.again()), following()
            is_same = after is None or usually is None or torch.equal(after, usually)
            return (
                "" if is_same else "on another value a step keeps what the next one reads, and each rank keeps its own"
            )
        name = differing or beyond[0]
        return f"on another value other modules run, {name} first, and ranks whose data differ wait for each other"


def _kind_of(value: Any) -> str:
    """The kind of a value that is read: its type, and which of the two it is if it decides one of two ways."""
    if isinstance(value, Tensor):
        return f"Tensor with{'' if len(value) else 'out'} rows" if value.dim() else "Tensor"
    return repr(value) if isinstance(value, bool) else type(value).__name__
