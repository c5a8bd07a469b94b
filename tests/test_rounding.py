"""The bars of numerical tests let another order of sums pass, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import error, require_as_exact, require_equal_up_to_rounding


def product(seed: int, dtype: torch.dtype, order: torch.Tensor | None = None, split: int = 1) -> torch.Tensor:
    """`[24, 40]`: a chain of three products, summed in one order or another, in as many parts."""
    generator = torch.Generator().manual_seed(seed)
    matrices = [torch.randn(24, 40, generator=generator), *torch.randn(3, 40, 40, generator=generator)]
    result = matrices[0].to(dtype)
    for matrix in matrices[1:]:
        order = torch.arange(40) if order is None else order
        parts = zip(result[:, order].chunk(split, 1), matrix.to(dtype)[order].chunk(split, 0), strict=True)
        result = sum(left @ right for left, right in parts)
    return result


@given(seed=st.integers(0, 1000), split=st.sampled_from([1, 3, 8, 40]))
def test_another_order_of_sums_passes_and_one_wrong_number_does_not(seed: int, split: int):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    upstream, exact = product(seed, torch.float32), product(seed, torch.float64)
    found = product(seed, torch.float32, order, split)
    require_equal_up_to_rounding(found, upstream)
    require_as_exact(found, upstream, exact)

    defect = found.clone()
    defect[seed % 24, seed % 40] += 1e-3 * upstream.abs().mean()  # of 960 numbers one
    with pytest.raises(AssertionError):
        require_equal_up_to_rounding(defect, upstream)
    with pytest.raises(AssertionError):
        require_as_exact(defect, upstream, exact)


@pytest.mark.parametrize("found", [torch.tensor([1.0, float("nan")]), torch.ones(3), torch.zeros(2)], ids=str)
def test_what_is_missing_or_not_a_number_is_infinitely_or_wholly_wrong(found: torch.Tensor):
    assert error(found, torch.ones(2)) >= 1
    with pytest.raises(AssertionError, match="units of eps"):
        require_equal_up_to_rounding(found, torch.ones(2))
    with pytest.raises(AssertionError):
        require_as_exact(found, torch.ones(2), torch.ones(2, dtype=torch.float64))
    with pytest.raises(AssertionError, match="no yardstick"):
        require_as_exact(torch.ones(2), torch.full((2,), float("nan")), torch.ones(2, dtype=torch.float64))


def test_zero_is_met_by_zero_alone_or_within_a_share_of_what_it_is_added_to():
    assert error(torch.zeros(2), torch.zeros(2)) == 0
    assert error(torch.full((2,), 1e-9), torch.zeros(2)) == float("inf")
    require_equal_up_to_rounding(torch.full((2,), 1e-9), torch.zeros(2), floor=1.0)
    require_equal_up_to_rounding([1.0, 2.0], [1.0, 2.0 + 1e-7])
