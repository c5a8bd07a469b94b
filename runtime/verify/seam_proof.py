"""The kernels behind the seams, one at a time, against the eager model: within a tolerance, and really called.

A kernel that is configured but never called trains nothing faster and fails no comparison. So the calls are counted,
and a seam that the executed code contains but never reaches has failed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING

from patchgen.runtime import seams
from patchgen.runtime.parts import parts_of
from patchgen.runtime.verify.comparison import EQUAL, Difference, Step, compare_gradients, compare_outputs, train_step
from patchgen.runtime.verify.conditioning import SHAKES, is_rounding, shaken_step

if TYPE_CHECKING:
    from torch import nn

    from patchgen.runtime.verify.inputs import Case

TOLERANCE = 1e-4
"""Relative, fp32, on the loss and on every gradient; beyond it, what rounding alone moves (`conditioning.py`)."""

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


def prove_seams(
    model: nn.Module, case: Case, expected: Step, implementations: Collection[str] | None = None
) -> list[SeamResult]:
    """Compares implementations of the seams of `model` (all, or those named) with `expected`, upstream's step on `case`."""
    wanted = [
        (seam, implementation)
        for seam in seams.names()
        for implementation in seams.implementations(seam)
        if implementation != seams.EAGER and (implementations is None or implementation in implementations)
    ]
    if not wanted:
        return []
    with seams_reached(type(model).__module__, *(file.__name__ for _, _, file in parts_of(model))) as reached:
        train_step(model, case)
    results = []
    for seam, implementation in wanted:
        if seam not in reached:
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
    if max(loss.relative, gradient.relative) > TOLERANCE and not _is_rounding(model, case, actual, expected):
        name, worst = max(gradients.items(), key=lambda item: item[1].relative)
        reason = f"beyond {TOLERANCE:.0e}: loss {loss.relative:.1e}, gradient of {name} {worst.relative:.1e}"
        return SeamResult(seam, implementation, FAILED, calls[0], loss, gradient, reason)
    return SeamResult(seam, implementation, PASSED, calls[0], loss, gradient)


def _is_rounding(model: nn.Module, case: Case, actual: Step, expected: Step) -> bool:
    """Whether all that is beyond the bar moves as far when the weights of the eager model move by their last bit."""

    def eager_step(shaken: nn.Module) -> Step:
        with all_eager():
            return train_step(shaken, case)

    shaken = [shaken_step(model, eager_step, seed) for seed in range(SHAKES)]
    found = {name: one for name, one in compare_outputs(actual, expected).items() if name == "loss"}
    found |= {f"gradient of {name}": one for name, one in compare_gradients(actual, expected).items()}
    return all(is_rounding(name, actual, expected, shaken) for name, one in found.items() if one.relative > TOLERANCE)


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
def seams_reached(*module_names: str) -> Iterator[set[str]]:
    """Collects the seams that stand in the functions of modules that run inside the block.

    A function that a small config never calls (the other of two rotary forms) has a seam that could not be reached; one
    that ran and did not reach its seam is a defect.
    """
    files = {sys.modules[name].__file__ for name in module_names}
    reached: set[str] = set()

    def on_event(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in files and "ops" in code.co_names:
            reached.update(name for name in code.co_names if name in known)

    known = set(seams.names())
    sys.setprofile(on_event)
    try:
        yield reached
    finally:
        sys.setprofile(None)
