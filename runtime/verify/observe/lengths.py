"""What a step computes from the length of a sequence, or from the largest position, beyond sizes of tensors.

    x * max(1.0, x.shape[1] / 8192)      the comparison has another outcome for other lengths
    x * math.log(x.shape[1])             the length is a number in a computation
    position_ids.max()                   of a slice, whose positions end earlier

Sizes of tensors that hold the length are numbers that remember how they follow from it. Comparing one with a number counts if the
outcome is not the same for all lengths; so `shape[1] > 1` and `shape[1] == other.shape[1]` do not.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.verify.observe.facts import LENGTH, Fact
from patchgen.runtime.verify.observe.places import Source

LENGTHS = (*range(2, 66), *(2**power for power in range(7, 21)))
"""For which outcomes of comparisons are computed."""
OTHER_POSITIONS = (-1, 2**20)  # a number of tokens follows from them: none, and more than limits are
EFFECT = "it is computed from the length of this rank's tokens"
OF_SIZES = ("__get__", "size", "__len__")
OF_COUNTS = ("numel", "nelement")
_SHAPES = """
    view reshape expand repeat arange zeros ones empty full new_zeros new_ones new_empty new_full narrow split chunk unfold
    __getitem__ __setitem__ tril triu pad unflatten expand_as select index_select tile roll linspace zeros_like ones_like
    rand randn randint randperm eye as_strided broadcast_to split_with_sizes tensor_split unbind interpolate diagonal
    avg_pool1d max_pool1d conv1d scaled_dot_product_attention repeat_interleave one_hot bincount size stride
    is_contiguous __get__ __len__ squeeze unsqueeze flatten permute transpose scatter_ gather topk
"""
SHAPES = frozenset(_SHAPES.split())
"""Functions that take a length as a size, an index or a bound of one."""
_POSITION_VIEWS = """
    view reshape expand unsqueeze squeeze contiguous to float long int clone detach __getitem__ add sub mul __add__ __sub__
    __radd__ __rsub__ __mul__ __rmul__ flatten transpose permute type chunk select expand_as masked_fill where
"""
POSITION_VIEWS = frozenset(_POSITION_VIEWS.split())
REDUCTIONS = frozenset(["max", "min", "amax", "amin", "argmax", "argmin", "sum", "mean", "aminmax"])


class _Traced:
    """A number with the rule by which it follows from the length."""

    rule: Callable[[int], Any]


class _Whole(_Traced, int):
    pass


class _Real(_Traced, float):
    pass


def traced(value: Any, rule: Callable[[int], Any]) -> Any:
    """The number, remembering its rule; other values as they are."""
    kind = {int: _Whole, float: _Real}.get(type(value))
    if kind is None:
        return value
    number = kind(value)
    number.rule = rule
    return number


def _plain(value: Any) -> Any:
    if isinstance(value, _Whole):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, _Real) else value


def _at(value: Any, length: int) -> Any:
    return value.rule(length) if isinstance(value, _Traced) else value


class Lengths:
    """A context in which sizes remember the length.

    Attributes:
        length: of the rows, a prime that divides no size of a parameter.
        whole: of the sequence of which the rows are slices: its sizes do not count. 0: the rows are whole.
        contrary: the line whose first comparison has the other outcome; None: none.
        found: line -> what is computed there.
        compared: the lines where all that is found is a comparison.
        reduced: the lines where all that is found is a largest position, or another one of them all.
        other_position: a line, and what its largest position is instead.
    """

    def __init__(
        self,
        source: Source,
        length: int,
        whole: int = 0,
        contrary: int | None = None,
        other_position: tuple[int, int] | None = None,
    ) -> None:
        self.source, self.length, self.whole, self.contrary = source, length, whole, contrary
        self.found: dict[int, str] = {}
        self.converted: dict[int, str] = {}
        self.compared: set[int] = set()
        self.reduced: set[int] = set()
        self.other_position = other_position

    def outcome(self, outcome: bool, number: Any) -> bool:
        """Notes a comparison with a number here that comes out otherwise for other lengths; returns its outcome."""
        line = self.source.running_line()
        if line is None:
            return outcome
        if line not in self.found:
            self.compared.add(line)
        self.reduced.discard(line)
        self.found.setdefault(line, f"a length is compared with {number:g}")
        if line != self.contrary:
            return outcome
        self.contrary = None
        return not outcome

    def remembering(self, size: Any) -> Any:
        """A size, with its rule if it holds the length."""
        if type(size) is not int or not size or size % self.length or (self.whole and not size % self.whole):
            return size
        share = size // self.length
        return traced(size, lambda length: share * length)

    def note_conversion(self, what: str) -> None:
        line = self.source.running_line()
        if line is not None:
            self.converted.setdefault(line, what)

    def note(self, what: str) -> None:
        line = self.source.running_line()
        if line is not None:
            self.found.setdefault(line, what)
            self.compared.discard(line)
            self.reduced.discard(line)

    def reduction(self, result: Any, name: str) -> Any:
        """Notes what is computed of all positions here; returns it, or another position."""
        line = self.source.running_line()
        if line is None:
            return result
        is_all = line not in self.found or line in self.reduced
        self.note(f"the {name} of positions is computed")
        if is_all and isinstance(result, Tensor):
            self.reduced.add(line)
        if self.other_position is not None and line == self.other_position[0]:
            return torch.full_like(result, self.other_position[1])
        return result

    @contextlib.contextmanager
    def watching(self, positions: Tensor | None) -> Iterator[None]:
        """Watches the block; `positions` are those that the model gets."""
        global _ACTIVE
        names = vars(self.source.module)
        replaced = {name: value for name, value in names.items() if value is math or _is_of_math(value)}
        for name, value in replaced.items():
            names[name] = _Math() if value is math else _through(value)
        before, _ACTIVE = _ACTIVE, self
        try:
            with _Sizes(self, positions):
                yield
        finally:
            _ACTIVE = before
            names.update(replaced)


_ACTIVE: Lengths | None = None


def _is_of_math(value: Any) -> bool:
    return getattr(value, "__module__", None) == "math" and callable(value)


class _Math:
    """`math` for numbers that remember the length."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(math, name)
        return _through(value) if callable(value) else value


def _through(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*args: Any) -> Any:
        result = function(*map(_plain, args))
        if any(isinstance(arg, _Traced) for arg in args):
            return traced(result, lambda length: function(*(_at(arg, length) for arg in args)))
        return result

    return computed


def _arithmetic(name: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        pair = (other, self) if name.startswith("__r") and name != "__round__" else (self, other)
        result = function(*map(_plain, pair))
        return traced(result, lambda length: function(*(_at(item, length) for item in pair)))

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        outcome = function(_plain(self), _plain(other))
        other = _ACTIVE.remembering(other) if _ACTIVE is not None else other
        if _ACTIVE is not None and not isinstance(other, bool) and _is_open(function, self, other, outcome):
            return _ACTIVE.outcome(outcome, _plain(other))
        return outcome

    return method


def _is_open(function: Callable[[Any, Any], bool], number: Any, other: Any, outcome: bool) -> bool:
    """Whether the outcome is another one for other lengths."""
    for length in LENGTHS:
        try:
            if function(_at(number, length), _at(other, length)) != outcome:
                return True
        except (ArithmeticError, ValueError):
            continue
    return False


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, *args: traced(function(_plain(self), *args), lambda length: function(self.rule(length), *args))


def _conversion(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    base = {int: "__int__", float: "__float__"}[convert]

    def method(self: Any) -> Any:
        if _ACTIVE is not None:
            _ACTIVE.note_conversion(f"a length is made {convert.__name__}, and what follows from it was not observed")
        return getattr(int if isinstance(self, _Whole) else float, base)(self)

    return method


for _kind in (_Whole, _Real):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        _function = getattr(operator, _name)
        for _method in (f"__{_name}__", f"__r{_name}__"):
            setattr(_kind, _method, _arithmetic(_method, _function))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_kind, f"__{_name}__", _comparison(getattr(operator, _name)))
    for _name, _function in {
        "neg": operator.neg, "abs": abs, "round": round, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
    }.items():  # fmt: skip
        setattr(_kind, f"__{_name}__", _unary(_function))
    _kind.__hash__ = _kind.__mro__[2].__hash__  # pyright: ignore[reportAttributeAccessIssue]
    for _name, _convert in {"__int__": int, "__float__": float}.items():
        setattr(_kind, _name, _conversion(_convert))


class _Sizes(TorchFunctionMode):
    """Makes sizes remember the length, and notes computations with them and with the largest position."""

    def __init__(self, lengths: Lengths, positions: Tensor | None) -> None:
        super().__init__()
        self.lengths = lengths
        self.positions: dict[int, Tensor] = {} if positions is None else {id(positions): positions}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in OF_COUNTS:
            # Whether the sequence is whole is said by the tensor's sizes: two heads make a slice's count one of a sequence.
            return math.prod(map(self._remembering, args[0].shape))
        if name in OF_SIZES:
            return self._remembering(result)
        operands = (*args, *(kwargs or {}).values())
        kinds = _Real if name in SHAPES else _Traced  # a size is whole
        if any(isinstance(operand, kinds) for operand in operands):
            self.lengths.note(f"a length is an operand of {name.strip('_')}")
        if name == "arange" and any(isinstance(operand, _Traced) for operand in operands):
            self.positions[id(result)] = result
        if any(isinstance(operand, Tensor) and id(operand) in self.positions for operand in operands):
            if name in REDUCTIONS:
                return self.lengths.reduction(result, name)
            elif name in POSITION_VIEWS:
                for one in result if isinstance(result, tuple | list) else (result,):
                    self.positions[id(one)] = one
        return result

    def _remembering(self, result: Any) -> Any:
        if isinstance(result, torch.Size):
            return torch.Size(map(self._remembering, result))
        return self.lengths.remembering(result)


def lengths_used(
    source: Source, length: int, positions: Tensor | None, run: Callable[[], Tensor], *, whole: int = 0
) -> list[Fact]:
    """What `run`, the loss of rows of `length` tokens, computes from their length or from the largest position.

    A comparison has no effect if the loss is the same with its other outcome: a table that grows, a warning. A largest position has
    none if the loss is the same with a position before the first token's and with one after any other.

    Args:
        whole: the length of the sequence of which the rows are slices; 0: they are whole.
    """
    lengths = Lengths(source, length, whole)
    with lengths.watching(positions):
        loss = run()
    effects = dict.fromkeys(lengths.found, EFFECT)
    for line in lengths.compared:
        if _is_same(loss, Lengths(source, length, whole, contrary=line), positions, run):
            effects[line] = ""
    for line in lengths.reduced:
        others = (Lengths(source, length, whole, other_position=(line, position)) for position in OTHER_POSITIONS)
        if all(_is_same(loss, other, positions, run) for other in others):
            effects[line] = ""
    converted = {line: what for line, what in lengths.converted.items() if line not in lengths.found}
    return [
        Fact(LENGTH, line, source.code(line), what, effects.get(line, ""))
        for line, what in sorted({**lengths.found, **converted}.items())
    ]


def _is_same(loss: Tensor, contrary: Lengths, positions: Tensor | None, run: Callable[[], Tensor]) -> bool:
    """Whether the loss is the same with the other outcome of a comparison or another largest position; not if that raises."""
    try:
        with contrary.watching(positions):
            return torch.equal(run(), loss)
    except Exception as error:
        reraise_machine_failure(error)
        return False
