"""Its folder goes onto the path: tests of single passes, a folder deeper, import generation_cases too."""

from __future__ import annotations

import contextlib

import pytest


@pytest.fixture(scope="module")
def two_ranks():
    """Two gloo ranks for the tests of a file."""
    from patchgen.runtime.verify.ranks import RankPool  # loads torch, which most tests here do without

    with contextlib.closing(RankPool(2)) as pool:
        yield pool
