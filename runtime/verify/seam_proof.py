"""The kernels behind the seams, one at a time, against upstream's eager step: within a tolerance, and actually called.

A kernel that is configured but never called speeds up nothing and fails no comparison. So calls are counted, and a seam
that the executed functions contain but never reach has failed.
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
from patchgen.runtime.verify.comparison import (
    EQUAL,
    Difference,
    Step,
    compare_gradients,
    compare_outputs,
    name_of_worst,
    train_step,
    worst_of,
)
from patchgen.runtime.verify.conditioning import beyond_rounding

if TYPE_CHECKING:
    from torch import nn

    from patchgen.runtime.verify.inputs import Case

TOLERANCE = 1e-4
"""Relative, fp32, on the loss and on every gradient; beyond it, what rounding alone explains (`conditioning.py`)."""

PASSED = "passed"
ABSENT = "absent"  # the model has no such seam, or this input does not run the modules that have it
FAILED = "failed"
UNAVAILABLE = "unavailable"  # the implementation cannot run on this machine


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
    model: nn.Module,
    case: Case,
    expected: Step,
    implementations: Collection[str] | None = None,
    *,
    training: bool = True,
) -> list[SeamResult]:
    """Compares implementations of the seams of `model` with `expected`, upstream's step on `case`.

    Args:
        implementations: their names; None: all but those that round more than fp32.
        training: whether `expected` is of training mode.
    """
    requested = [
        (seam, implementation)
        for seam in seams.names()
        for implementation in seams.implementations(seam)
        if implementation != seams.EAGER
        and seams.without_rounding(seam, implementation) == implementation
        and (implementations is None or implementation in implementations)
    ]
    if not requested:
        return []
    with _executed_seams(type(model).__module__, *(file.__name__ for _, _, file in parts_of(model))) as executed:
        train_step(model, case, training=training)
    return [
        _prove_implementation(model, case, expected, seam, implementation, training=training)
        if seam in executed
        else SeamResult(seam, implementation, ABSENT)
        for seam, implementation in requested
    ]


def _prove_implementation(
    model: nn.Module, case: Case, expected: Step, seam: str, implementation: str, *, training: bool
) -> SeamResult:
    with all_eager(), seams.using(**{seam: implementation}), _counting_calls(seam, implementation) as calls:
        try:
            actual = train_step(model, case, training=training)
        except (NotImplementedError, ImportError) as refusal:
            return SeamResult(seam, implementation, UNAVAILABLE, calls[0], reason=str(refusal).splitlines()[0])
    loss = compare_outputs(actual, expected).get("loss", EQUAL)
    gradients = compare_gradients(actual, expected)
    gradient = worst_of(gradients.values())
    if calls[0] == 0:
        reason = f"the executed code contains ops.{seam}, but no call reached '{implementation}'"
        return SeamResult(seam, implementation, FAILED, 0, loss, gradient, reason)

    def eager_step(eager: nn.Module) -> Step:
        with all_eager():
            return train_step(eager, case, training=training)

    differences = {"loss": loss, **{f"gradient of {name}": value for name, value in gradients.items()}}
    beyond = {key: value for key, value in differences.items() if not value.relative <= TOLERANCE}  # NaN is beyond
    if beyond_rounding(beyond, actual, expected, model, eager_step):
        reason = f"beyond {TOLERANCE:.0e}: loss {loss.relative:.1e}, gradient of {name_of_worst(gradients)} {gradient.relative:.1e}"
        return SeamResult(seam, implementation, FAILED, calls[0], loss, gradient, reason)
    return SeamResult(seam, implementation, PASSED, calls[0], loss, gradient)


@contextlib.contextmanager
def all_eager() -> Iterator[None]:
    """Every seam eager: the generated model computes what upstream computes."""
    with seams.using(**dict.fromkeys(seams.names(), seams.EAGER)):
        yield


@contextlib.contextmanager
def _counting_calls(seam: str, implementation: str) -> Iterator[list[int]]:
    """Counts the calls of the selected implementation of `seam`."""
    original: Callable = seams.implementation(seam)
    calls = [0]

    @wraps(original)
    def counting(*args, **kwargs):
        calls[0] += 1
        return original(*args, **kwargs)

    with seams.registered({seam: counting}, implementation):
        yield calls


@contextlib.contextmanager
def _executed_seams(*module_names: str) -> Iterator[set[str]]:
    """Collects the seams in those functions of modules that are called inside the block.

    A function that a small config never calls (the other of two rotary forms) has a seam that could not be reached; one
    that ran and did not reach its seam is a defect.
    """
    files = {sys.modules[name].__file__ for name in module_names}
    executed: set[str] = set()

    def on_event(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in files and "ops" in code.co_names:
            executed.update(name for name in code.co_names if name in seam_names)

    seam_names = set(seams.names())
    sys.setprofile(on_event)
    try:
        yield executed
    finally:
        sys.setprofile(None)
