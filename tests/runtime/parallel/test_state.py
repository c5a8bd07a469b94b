"""States of one layout share their process groups: each group costs a thread, or memory of the device, for good."""

from __future__ import annotations

import torch.distributed as dist

from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.slices import fake_rank


def test_states_of_one_layout_share_their_groups():
    with fake_rank() as first:
        again = ParallelState.create(ParallelConfig.for_world(2, sp=2), "cpu")
        assert again.sp_group is first.sp_group and again.ep_group is first.ep_group
        other = ParallelState.create(ParallelConfig.for_world(2, ep=2), "cpu")
        assert other.ep_group is not first.ep_group
        assert dist.get_world_size(other.ep_group) == 2 and dist.get_world_size(first.ep_group) == 1
    with fake_rank() as anew:  # another default group: the old ones are gone
        assert anew.data_mesh is not first.data_mesh and dist.get_world_size(anew.sp_group) == 2
