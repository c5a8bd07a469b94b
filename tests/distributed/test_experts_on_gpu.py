"""Expert parallelism through peer memory on GPUs: two processes, on two GPUs or sharing one."""

from __future__ import annotations

import cases_experts as cases
import cases_replayed_experts
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


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("sends_ahead", [False, True])
def test_replayed_layers_exchange_as_without_a_graph(sends_ahead, num_layers, two_processes):
    """Bits of output and gradients; a capture ends on the buffer that it did not begin with."""
    for eager, recorded in two_processes.run(cases_replayed_experts.replays_what_it_runs, num_layers, sends_ahead):
        assert eager == (5 if sends_ahead else 4) * num_layers
        assert recorded == eager + eager % 2
