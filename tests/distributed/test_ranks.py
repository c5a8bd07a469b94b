"""A case that fails on ranks: whose error it is, and the ranks after it."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from patchgen import executed_code
from patchgen.runtime.verify import two_ranks
from patchgen.runtime.verify.layout import TWO_RANKS
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


def test_what_ranks_have_called_is_known_until_they_are_ended():
    """Those of the ranks themselves, everything once a failed case has ended some, and nothing of a pool that starts anew."""
    with contextlib.closing(RankPool(2)) as pool:
        assert pool.functions() == frozenset(), "none has started"
        pool.run(exec, "from patchgen.runtime.verify import seam_proof")
        assert "patchgen.runtime.verify.seam_proof:*" in pool.functions()
        with pytest.raises(CaseFailed):
            pool.run(exec, "1 / 0")
        assert pool.functions() == executed_code.everything()
        pool.run(exec, "0")
        assert pool.functions() == executed_code.everything(), "of the ranks before, too"
        pool.close()
        assert pool.functions() == frozenset()


def test_ranks_with_different_reasons_count_as_having_called_everything(monkeypatch):
    """Of layouts that agreed before as well: the ranks that knew what they had called are ended."""
    asked: list[str] = []

    def run(_pool: RankPool, *arguments: object, **_options: object) -> list:
        asked.append(str(arguments[0]))
        return [{"loss": 0.0}, {"reason": "it is wrong"} if len(asked) == 2 else {"loss": 0.0}]

    monkeypatch.setattr(RankPool, "run", run)
    monkeypatch.setattr(two_ranks, "find_generated", lambda model: model)
    monkeypatch.setattr(two_ranks, "head_takes_media", lambda *_: False)
    code: set[str] = set()
    layouts = list(TWO_RANKS)[:2]
    found = two_ranks.compare_on_two_ranks("m", "MForCausalLM", separates=False, layouts=layouts, code=code)  # pyright: ignore[reportArgumentType]
    assert [found[layout].reason for layout in layouts] == ["", "it is wrong"]
    assert code == executed_code.everything()
