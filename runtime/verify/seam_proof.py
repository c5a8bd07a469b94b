"""The kernels behind the seams, one at a time, against the eager model: within a tolerance, and really called.

A kernel that is configured but never called trains nothing faster and fails no comparison. So the calls are counted,
and where the code that ran contains the seam but never reached it, the seam has not passed.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING

from patchgen.runtime import seams
from patchgen.runtime.verify.comparison import EQUAL, Difference, Step, compare_gradients, compare_outputs, train_step

if TYPE_CHECKING:
    from torch import nn

    from patchgen.runtime.verify.inputs import Case

TOLERANCE = 1e-4
"""Relative, fp32, on the loss and on every gradient."""

PASSED = "passed"
ABSENT = "absent"  # the model has no such seam, or this input does not run the modules that have it
FAILED = "failed"
UNAVAILABLE = "unavailable"  # the implementation says that it cannot run here


@dataclass(frozen=True)
class SeamResult:
    """One implementation of one seam."""

    seam: str
    implementation: str
    status: str
    calls: int = 0
    loss: Difference = EQUAL
    gradient: Difference = EQUAL
    """The worst over all parameters."""
    reason: str = ""


def prove_seams(model: nn.Module, case: Case, expected: Step) -> list[SeamResult]:
    """Compares every implementation of every seam of `model` with `expected`, the step of upstream on `case`."""
    with count_forwards(model) as ran:
        train_step(model, case)
    in_source = seams_in_source(type(model).__module__, ran)
    results = []
    for seam in seams.names():
        for implementation in seams.implementations(seam):
            if implementation == seams.EAGER:
                continue
            if seam not in in_source:
                results.append(SeamResult(seam, implementation, ABSENT))
            else:
                results.append(_prove_implementation(model, case, expected, seam, implementation))
    return results


def _prove_implementation(model: nn.Module, case: Case, expected: Step, seam: str, implementation: str) -> SeamResult:
    with all_eager(), seams.using(**{seam: implementation}), _counted(seam, implementation) as calls:
        try:
            actual = train_step(model, case)
        except (NotImplementedError, ImportError) as refusal:
            return SeamResult(seam, implementation, UNAVAILABLE, calls[0], reason=str(refusal).splitlines()[0])
    outputs = compare_outputs(actual, expected)
    gradients = compare_gradients(actual, expected)
    loss, gradient = outputs.get("loss", EQUAL), EQUAL
    for found in gradients.values():
        gradient = gradient.worst(found)
    if calls[0] == 0:
        reason = f"the code that ran contains ops.{seam}, but no call reached '{implementation}'"
        return SeamResult(seam, implementation, FAILED, 0, loss, gradient, reason)
    if max(loss.relative, gradient.relative) > TOLERANCE:
        name, worst = max(gradients.items(), key=lambda item: item[1].relative)
        reason = f"beyond {TOLERANCE:.0e}: loss {loss.relative:.1e}, gradient of {name} {worst.relative:.1e}"
        return SeamResult(seam, implementation, FAILED, calls[0], loss, gradient, reason)
    return SeamResult(seam, implementation, PASSED, calls[0], loss, gradient)


@contextlib.contextmanager
def all_eager() -> Iterator[None]:
    """Every seam eager: the generated model computes what upstream computes."""
    with seams.using(**dict.fromkeys(seams.names(), seams.EAGER)):
        yield


@contextlib.contextmanager
def _counted(seam: str, implementation: str) -> Iterator[list[int]]:
    """Counts the calls of the implementation that serves `seam` now."""
    original: Callable = seams.implementation(seam)
    calls = [0]

    @wraps(original)
    def counting(*args, **kwargs):
        calls[0] += 1
        return original(*args, **kwargs)

    seams.register(seam, implementation)(counting)
    try:
        yield calls
    finally:
        seams.register(seam, implementation)(original)


@contextlib.contextmanager
def count_forwards(model: nn.Module) -> Iterator[set[str]]:
    """Collects the names of the classes whose forward runs."""
    ran: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: ran.add(type(module).__name__))
        for module in model.modules()
    ]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def seams_in_source(module_name: str, ran: set[str]) -> set[str]:
    """The seams called in the source of the classes that ran, or in the functions of the module that those name."""
    tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    definitions = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    classes = {name for name, node in definitions.items() if isinstance(node, ast.ClassDef)}
    waiting, seen = [name for name in ran if name in definitions], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        named = {node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)}
        bases = {base.id for base in getattr(definitions[name], "bases", ()) if isinstance(base, ast.Name)}
        waiting += [other for other in (named - classes) | bases if other in definitions and other not in seen]
    found = {
        node.func.attr
        for name in seen
        for node in ast.walk(definitions[name])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_ops(node.func.value)
    }
    return found & set(seams.names())


def _is_ops(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "ops"
