"""What a step changes in a model besides gradients, and whether the next step reads it.

self.seen += 1                       an attribute of a module or of its config
self.mean.lerp_(x.mean(), 0.1)       a buffer, a tensor in an attribute, or a parameter
self.history.append(x.shape)         a list, dict or set in an attribute
CACHE["x"] = x                       a global of the file, or an attribute of one of its classes
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from patchgen.runtime.verify.comparison import Step
from patchgen.runtime.verify.kept_state import configs_of, state_kept
from patchgen.runtime.verify.observe.facts import STATE, Fact
from patchgen.runtime.verify.observe.places import Source

EFFECT = "the next step computes something else after it, and each rank keeps its own"
_OF_FILE = "class "
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def _frozen(value: Any) -> Any:
    """A copy of a value that equals it as long as nothing in it changes; of other objects, which object it is."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _Values(value)
    if isinstance(value, Mapping):
        return (
            {key: _frozen(item) for key, item in value.items()} if type(value).__module__ == "builtins" else id(value)
        )
    if isinstance(value, list | tuple | set):
        return type(value).__name__, [_frozen(item) for item in value]
    return id(value)


class _Values:
    """The values of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.values = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Values) or self.values.shape != other.values.shape:
            return False
        return self.values.dtype == other.values.dtype and torch.equal(
            self.values.nan_to_num() if self.values.is_floating_point() else self.values,
            other.values.nan_to_num() if other.values.is_floating_point() else other.values,
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # it compares values that may change


def _holders(source: Source, model: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What may keep a value, by name: modules, configs, classes of the file, its globals."""
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        yield path, {**own, **module._buffers, **module._parameters}
    for config in configs_of(model):
        yield type(config).__name__, vars(config)
    names = vars(source.module)
    yield _OF_FILE, {name: value for name, value in names.items() if not name.startswith("__")}
    for kind in names.values():
        if isinstance(kind, type) and kind.__module__ == source.module.__name__:
            yield (
                f"{_OF_FILE}{kind.__name__}",
                {name: value for name, value in vars(kind).items() if not name.startswith("_")},
            )


def _state(source: Source, model: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (holder, name): _frozen(value)
        for holder, values in _holders(source, model)
        for name, value in values.items()
        if not isinstance(value, PreTrainedConfig)
    }


class _Changes(TorchDispatchMode):
    """The lines that change tensors in place, by the memory of the tensor."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self.lines: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                line = self.source.running_line()
                if line is not None:
                    self.lines[value.untyped_storage().data_ptr()] = line
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _assignments(source: Source) -> Iterator[dict[tuple[int, str], int]]:
    """Collects the lines that assign attributes of modules."""
    lines: dict[tuple[int, str], int] = {}
    original = nn.Module.__setattr__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        line = source.running_line()
        if line is not None:
            lines[id(module), name] = line
        original(module, name, value)

    nn.Module.__setattr__ = assign  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield lines
    finally:
        nn.Module.__setattr__ = original


def values_kept(source: Source, model: nn.Module, first: Callable[[], Step], second: Callable[[], Step]) -> list[Fact]:
    """What `first`, a step of the model, changes, and whether `second`, another step, then computes something else."""
    before = _state(source, model)
    with state_kept(model), _assignments(source) as assigned, _Changes(source) as changes:
        first()
        after = _state(source, model)
        lines = _lines(source, model, assigned, changes.lines)
    changed = [key for key, value in after.items() if key not in before or before[key] != value]
    if not changed:
        return []
    with state_kept(model):
        alone = second()
    with state_kept(model):
        first()
        following = second()
    is_read = not _are_equal(alone, following)
    # What the file keeps is there before its first step, so no step is without it: that it still changes must do.
    of_file = {
        holder: holder.removeprefix(_OF_FILE) or "the file" for holder, _ in changed if holder.startswith(_OF_FILE)
    }
    facts: dict[tuple[int, str], Fact] = {}
    for holder, name in changed:
        line = lines.get((holder, name)) or source.line_naming(name)
        effect = EFFECT if is_read or holder in of_file else ""
        what = f"a step changes '{name}' of {of_file.get(holder) or holder or 'the model'}"
        facts.setdefault((line, name), Fact(STATE, line, source.code(line), what, effect))
    return list(facts.values())


def _lines(
    source: Source, model: nn.Module, assigned: Mapping[tuple[int, str], int], changed: Mapping[int, int]
) -> dict[tuple[str, str], int]:
    """The lines that changed what holders keep, as far as they are known."""
    lines = {}
    identities = {path: id(module) for path, module in model.named_modules()}
    for holder, values in _holders(source, model):
        for name, value in values.items():
            line = assigned.get((identities.get(holder, 0), name))
            if line is None and isinstance(value, Tensor) and value.device.type != "meta":
                line = changed.get(value.untyped_storage().data_ptr())
            if line is not None:
                lines[holder, name] = line
    return lines


def _are_equal(first: Step, second: Step) -> bool:
    tensors = [{**step.outputs, **{f"gradient {k}": v for k, v in step.gradients.items()}} for step in (first, second)]
    return tensors[0].keys() == tensors[1].keys() and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in ((tensors[0][name], tensors[1][name]) for name in tensors[0])
    )
