"""A case that fails on ranks: whose error it is, and the ranks after it."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from patchgen.runtime.verify.ranks import CaseFailed, RankPool

ON_THE_SECOND = "import torch; torch.distributed.get_rank() and "
NO_MEMORY = f"{ON_THE_SECOND}(_ for _ in ()).throw(torch.OutOfMemoryError('none left'))"


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("case", "is_inconclusive", "told"),
    [
        (f"{ON_THE_SECOND}1 / 0", False, "ZeroDivisionError"),
        (NO_MEMORY, True, "OutOfMemoryError"),
        (f"import os; {ON_THE_SECOND}os.kill(os.getpid(), 9)", True, "rank 1:\nthe process ended (exit code -9)"),
        (f"import os; {ON_THE_SECOND}os.kill(os.getpid(), 11)", False, "rank 1:\nthe process ended (exit code -11)"),
    ],
)
def test_an_error_of_the_case_is_told_from_one_of_the_ranks(pool, case, is_inconclusive, told):
    with pytest.raises(CaseFailed) as failed:
        pool.run(exec, case)
    assert told in str(failed.value) and failed.value.is_inconclusive is is_inconclusive
    assert failed.value.results == [None], "of the other rank"
    assert not failed.value.has_waited


@pytest.mark.parametrize(
    ("case", "told", "has_waited"),
    [
        ("dist.get_rank() or dist.barrier()", "Timed out waiting", True),
        ("time.sleep(4 * dist.get_rank()); dist.barrier()", "rank 1:", True),
        ("time.sleep(9)", "ranks [0, 1] did not end", False),  # they may be slow
        (f"dist.get_rank() or dist.barrier(); {ON_THE_SECOND}os.kill(os.getpid(), 9)", "exit code -9", False),
        (f"dist.get_rank() or dist.barrier(); {ON_THE_SECOND}1 / 0", "ZeroDivisionError", False),
    ],
)
def test_ranks_that_waited_for_each_other_are_told_from_others(case, told, has_waited):
    with contextlib.closing(RankPool(2, collective_timeout=2)) as pool, pytest.raises(CaseFailed) as failed:
        pool.run(exec, f"import os, time; import torch.distributed as dist; {case}", timeout=8)
    assert told in str(failed.value) and failed.value.has_waited == has_waited


def test_a_rank_that_dies_between_cases_fails_the_next_and_is_replaced(pool):
    ((first, _),) = {tuple(pool.run(os.getpid))}
    os.kill(first, signal.SIGKILL)
    pool._processes[0].join()
    with pytest.raises(CaseFailed, match="rank 0:\nthe process ended") as failed:
        pool.run(os.getpid)
    assert failed.value.is_inconclusive
    assert first not in pool.run(os.getpid)
