"""Convolutions and delta rules over slices of a sequence against upstream's functions, document by document."""

from __future__ import annotations

import cases_mixers as cases
import pytest


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("sp", [1, 2, 4])
def test_convolution(sp, packed, two_ranks, four_ranks):
    (four_ranks if sp == 4 else two_ranks).run(cases.convolution_agrees, packed, sp)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize(("sp", "key_heads", "value_heads"), [(1, 2, 4), (2, 2, 4), (2, 1, 4), (4, 2, 4), (4, 4, 4)])
def test_recurrence(sp, key_heads, value_heads, packed, two_ranks, four_ranks):
    (four_ranks if sp == 4 else two_ranks).run(cases.recurrence_agrees, packed, sp, key_heads, value_heads)
