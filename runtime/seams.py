"""Which implementation serves each seam of the generated code.

A seam is a call in generated code that a kernel may serve. Every seam has the implementation `eager`: the upstream
code below the seam in the generated file; for experts the one in `experts_implementation`
(`runtime/experts_interface.py`). With every seam eager and no parallelism, a generated model computes exactly what
upstream computes, bit for bit, except convolutions, recurrences and scans over packed rows: they stop at document
bounds, where upstream's torch forms mix documents or refuse them (`parallel/mixers.py`).

    from patchgen.runtime import seams

    seams.configure(fused_moe="torch")          # from here on, in this process
    with seams.using(causal_lm_loss="chunked"):  # inside the block
        ...
    seams.selected()                             # {"fused_moe": "torch", "causal_lm_loss": "eager", ...}

Implementations are functions registered by name; `runtime/implementations.py` registers the built-in ones.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

EAGER = "eager"
AUTO = "auto"
AUTO_IN_TRAINING = ("fused_moe", "causal_lm_loss")
"""Seams that training serves with `AUTO` unless the recipe names an implementation; the others stay eager."""
_BUILT_IN = "patchgen.runtime.implementations"
"""Registers the built-in implementations when it is imported, at the first lookup."""


@dataclass
class Seam:
    """One seam.

    Attributes:
        implementations: by name, without `eager`.
        selected: the name of the selected one.
        why_unavailable: name -> returns why it cannot run on this machine, or None.
        prefers: name of an automatic one -> the implementations that it uses if they can run.
        rounds: name of one that rounds more than its inputs' dtype, as to FP8 -> the one that computes the same without.
    """

    name: str
    implementations: dict[str, Callable] = field(default_factory=dict)
    selected: str = EAGER
    why_unavailable: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    prefers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rounds: dict[str, str] = field(default_factory=dict)


_SEAMS: dict[str, Seam] = {
    name: Seam(name) for name in ("fused_moe", "causal_lm_loss", "rms_norm", "rotary", "swiglu")
}


def names() -> tuple[str, ...]:
    """The names of all seams."""
    return tuple(_SEAMS)


def implementations(seam: str) -> tuple[str, ...]:
    """The names of the implementations of `seam`, `eager` first."""
    importlib.import_module(_BUILT_IN)
    return (EAGER, *_seam(seam).implementations)


def register(
    seam: str,
    implementation: str,
    *,
    unavailable: Callable[[], str | None] | None = None,
    prefers: tuple[str, ...] = (),
    rounds: str | None = None,
) -> Callable[[Callable], Callable]:
    """Decorator: registers a function as `implementation` of `seam`.

    Args:
        unavailable: returns in one sentence why it cannot run on this machine, or None.
        prefers: for an automatic one: the implementations it uses if they can run.
        rounds: for one that rounds more than its inputs' dtype: the one that computes the same without. A proof in fp32 compares
            that one: the kernel's own tests hold the other to its reference.
    """

    def decorate(function: Callable) -> Callable:
        entry = _seam(seam)
        entry.implementations[implementation] = function
        entry.prefers[implementation] = prefers
        if rounds is not None:
            entry.rounds[implementation] = rounds
        if unavailable is not None:
            entry.why_unavailable[implementation] = unavailable
        return function

    return decorate


@contextlib.contextmanager
def registered(functions: Mapping[str, Callable], implementation: str) -> Iterator[None]:
    """Within the block `implementation` of each seam is the function of `functions`; after it, what it was, or none."""
    before = {seam: _seam(seam).implementations.get(implementation) for seam in functions if implementations(seam)}
    for seam, function in functions.items():
        _seam(seam).implementations[implementation] = function
    try:
        yield
    finally:
        for seam, function in before.items():
            if function is None:
                del _seam(seam).implementations[implementation]
            else:
                _seam(seam).implementations[implementation] = function


def unavailable(seam: str, implementation: str) -> str | None:
    """Why an implementation cannot run on this machine, in one sentence; None if nothing is known."""
    implementations(seam)
    reason = _seam(seam).why_unavailable.get(implementation)
    return reason() if reason is not None else None


def without_rounding(seam: str, implementation: str | None) -> str | None:
    """The implementation that a proof in fp32 compares in place of this one: itself, unless it rounds more than its inputs."""
    implementations(seam)
    return _seam(seam).rounds.get(implementation, implementation) if implementation is not None else None


def passed_over(seam: str) -> dict[str, str]:
    """Implementations that the selected one of `seam` prefers but that are unavailable -> the reason."""
    entry = _seam(seam)
    reasons = {name: unavailable(seam, name) for name in entry.prefers.get(entry.selected, ())}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def configure(**choices: str) -> None:
    """Selects implementations by name, for example `configure(fused_moe="torch")`.

    Raises:
        ValueError: an unknown seam or implementation; the message lists those that exist.
    """
    for seam_name, implementation in choices.items():
        available = implementations(seam_name)
        if implementation not in available:
            raise ValueError(
                f"The seam '{seam_name}' has no implementation '{implementation}'. Available: {', '.join(available)}."
            )
    for seam_name, implementation in choices.items():
        _SEAMS[seam_name].selected = implementation


@contextlib.contextmanager
def using(**choices: str) -> Iterator[None]:
    """As `configure`, undone at the end of the block."""
    before = {name: _seam(name).selected for name in choices}
    configure(**choices)
    try:
        yield
    finally:
        configure(**before)


def selected() -> dict[str, str]:
    """The implementation of every seam."""
    return {name: seam.selected for name, seam in _SEAMS.items()}


def for_training(used: Collection[str], named: Mapping[str, str | None]) -> dict[str, str]:
    """The implementations that a training run selects, by seam; every other seam is eager.

    Args:
        used: the seams that modules of the model call.
        named: the recipe's implementation of each seam; None: automatic.
    """
    automatic = {name: AUTO for name in AUTO_IN_TRAINING if name in used}
    return automatic | {name: implementation for name, implementation in named.items() if implementation is not None}


def implementation(seam: str) -> Callable:
    """The selected function of `seam`. Raises for an eager seam, whose code is the caller's."""
    entry = _seam(seam)
    if entry.selected == EAGER:
        raise RuntimeError(f"The seam '{seam}' is eager: guard the call with ops.serves('{seam}').")
    return entry.implementations[entry.selected]


def _seam(name: str) -> Seam:
    if name not in _SEAMS:
        nearest = difflib.get_close_matches(name, _SEAMS, n=1)
        hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
        raise ValueError(f"There is no seam '{name}'.{hint} Seams: {', '.join(_SEAMS)}.")
    return _SEAMS[name]
