"""Expert parallelism through peer memory on GPUs: two processes, on two GPUs or sharing one."""

from __future__ import annotations

import cases_experts as cases
import pytest
import torch

from patchgen.runtime.verify import ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def two_processes():
    if not torch.cuda.is_available():
        pytest.skip("it needs a CUDA device")
    with pytest.MonkeyPatch.context() as patch:
        # Ranks are forked from a process that loads these first; some packages start CUDA when they are loaded.
        patch.setattr(ranks, "PRELOADED", [])
        pool = ranks.RankPool(2)
        yield pool
        pool.close()


@pytest.mark.parametrize("kind", ["balanced", "uneven", "no tokens on rank 1", "all on one expert", "slots left out"])
def test_experts_agree_without_a_wait_for_the_device(kind, two_processes):
    """bf16 errors within 1.5 times those of one process; the same bits twice; the host waits for no device."""
    for error, change in two_processes.run(cases.agrees_on_gpu, kind):
        assert error < 1.5
        assert change == 0
