"""Pools of ranks, shared by all tests of a session."""

from __future__ import annotations

import os

import pytest

from patchgen.runtime.verify.ranks import RankPool

# One rank is one thread: more of them only fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def one_rank():
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight_ranks():
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks():
    pool = RankPool(4)
    yield pool
    pool.close()
