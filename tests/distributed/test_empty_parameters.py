"""A parameter without elements stays whole, as torch's FSDP cannot gather it: the rest trains as without it."""

from __future__ import annotations

import cases_empty_parameters as cases
import pytest


@pytest.mark.parametrize("has_gradient", [False, True])
def test_steps_beside_an_empty_parameter(two_ranks, has_gradient):
    for first, second in two_ranks.run(cases.steps, has_gradient):
        assert 0 < second < first
