"""Bars of numerical tests, in units of the rounding error.

The same sums in another order differ by some units of eps, and how many the processor decides: wider vectors, other
matrix products. A bar of 1e-5 holds on one machine. So tests compare in one of two ways:

    require_as_exact(found, upstream, exact)         against a reference in fp64: no further from it than upstream is,
                                                     times FACTOR
    require_equal_up_to_rounding(found, expected)    where there is none: within some units of eps of the whole tensor

Both measure tensors as wholes, in the 2-norm: single elements near zero may be all rounding. What must be equal bit for
bit is compared with `torch.equal`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FACTOR = 4.0
"""Two orders of the same sums are rarely further apart than this."""

UNITS = 32.0
"""In fp32 4e-6. The largest seen in a test that takes this default is 11 (AVX-512, AVX2 and plain code, of torch, oneDNN
and MKL, in one thread and two)."""

Values = Tensor | Sequence[float] | float


def error(found: Values, reference: Values, *, floor: float = 0.0) -> float:
    """`|found - reference| / |reference|` in the 2-norm, computed in fp64.

    Infinite where shapes differ or a number is not finite, and where the reference is zero and the other is not.

    Args:
        floor: the least norm to divide by, for what is zero in exact arithmetic: a share of what it is added to.
    """
    found, reference = (torch.as_tensor(values).detach().double() for values in (found, reference))
    if found.shape != reference.shape or not bool(found.isfinite().all() and reference.isfinite().all()):
        return float("inf")
    distance, size = float((found - reference).norm()), max(float(reference.norm()), floor)
    return distance / size if size else (float("inf") if distance else 0.0)


def require_as_exact(
    found: Tensor, upstream: Tensor, exact: Tensor, *, factor: float = FACTOR, what: str = ""
) -> None:
    """`found` errs no more than `upstream` times `factor`; both are of one dtype, `exact` is of a wider one.

    A few units are allowed in any case: upstream's error may happen to be none.
    """
    theirs, ours = error(upstream, exact), error(found, exact)
    assert theirs < float("inf"), f"{what}: upstream's own numbers are no yardstick"
    bar = factor * (theirs + torch.finfo(upstream.dtype).eps)
    assert ours <= bar, f"{what} errs by {ours:.1e}, upstream by {theirs:.1e}: bar {bar:.1e}"


def require_equal_up_to_rounding(
    found: Values,
    expected: Values,
    *,
    units: float = UNITS,
    dtype: torch.dtype | None = None,
    floor: float = 0.0,
    what: str = "",
) -> None:
    """`found` and `expected` are within `units` of eps of each other.

    Args:
        units: of the eps of `dtype`, relative to the norm of `expected`.
        dtype: what was computed in; that of `found` unless given. Numbers and sequences are taken for fp32.
        floor: as in `error`.
    """
    if dtype is None:
        dtype = found.dtype if isinstance(found, Tensor) else torch.float32
    measured = error(found, expected, floor=floor) / torch.finfo(dtype).eps
    assert measured <= units, f"{what} is {measured:.1f} units of eps from what is expected: bar {units:.1f}"
