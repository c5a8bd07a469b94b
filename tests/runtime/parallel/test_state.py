"""States of one layout share their process groups: each group costs a thread, or memory of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.slices import fake_rank
from patchgen.runtime.verify.training_path import single_rank

THREADS = Path("/proc/self/task")


def test_states_of_one_layout_share_their_groups():
    with fake_rank() as first:
        again = ParallelState.create(ParallelConfig.for_world(2, sp=2), "cpu")
        assert again.sp_group is first.sp_group and again.ep_group is first.ep_group
        other = ParallelState.create(ParallelConfig.for_world(2, ep=2), "cpu")
        assert other.ep_group is not first.ep_group
        assert dist.get_world_size(other.ep_group) == 2 and dist.get_world_size(first.ep_group) == 1
    with fake_rank() as anew:  # another default group: the old ones are gone
        assert anew.data_mesh is not first.data_mesh and dist.get_world_size(anew.sp_group) == 2


@pytest.mark.skipif(not THREADS.is_dir(), reason="counts threads as Linux lists them")
def test_the_threads_of_a_default_group_end_with_it():
    """A sweep proves a hundred models in one process, each with a group of its own."""
    counts = []
    for _ in range(4):
        with single_rank():
            counts.append(len(list(THREADS.iterdir())))
    assert counts[-1] == counts[1], counts
