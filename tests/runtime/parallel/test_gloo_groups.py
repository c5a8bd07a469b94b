"""Groups of gloo have one worker: two write one string of torch's at once, and a rank dies of it."""

from __future__ import annotations

import datetime
import warnings

import pytest
import torch
import torch.distributed as dist

from patchgen.runtime import launch
from patchgen.runtime.parallel import ParallelConfig, gloo_groups
from patchgen.runtime.parallel.state import ParallelState


def _options(group: dist.ProcessGroup):
    return group._get_backend(torch.device("cpu")).options


def test_the_groups_of_a_run_have_one_worker(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with launch.process_group():
        own = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=7))
        found = [_options(group) for group in (dist.group.WORLD, own)]
        assert [options._threads for options in found] == [1, 1]
        assert [options._timeout for options in found] == [launch.COLLECTIVE_TIMEOUT, datetime.timedelta(seconds=7)]
        total = torch.ones(3)
        dist.all_reduce(total, group=own)
        assert total.tolist() == [1.0] * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_default_group_with_several_workers_is_reported(workers, monkeypatch):
    gloo_groups.use_one_worker()
    if workers == 2:  # torch's own
        monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__.__wrapped__)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ParallelState.create(ParallelConfig.for_world(1), "cpu")
    finally:
        dist.destroy_process_group()
    messages = [str(one.message) for one in caught if "gloo" in str(one.message)]
    assert [f"gloo with {workers} worker threads" in one for one in messages] == [True] * (workers - 1)


def test_groups_are_made_from_options_and_timeouts_as_torch_makes_them(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    gloo_groups.use_one_worker()
    of_torch = dist.ProcessGroupGloo.__init__
    gloo_groups.use_one_worker()
    assert dist.ProcessGroupGloo.__init__ is of_torch  # once
    timeout = datetime.timedelta(seconds=5)
    by_place, by_name = (
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout),
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timeout),
    )
    for group in (by_place, by_name):
        assert (group.options._threads, group.options._timeout, len(group.options._devices)) == (1, timeout, 1)
    given = gloo_groups._options(dist.ProcessGroupGloo, timeout)
    given._threads = 3
    assert dist.ProcessGroupGloo(dist.HashStore(), 0, 1, given).options._threads == 3


def test_what_else_torch_creates_a_group_with_is_an_option_of_the_same_name():
    """torch 2.14 creates groups with `enable_reconfigure=`, which earlier releases have not; each has `global_ranks_in_group`."""
    gloo_groups.use_one_worker()
    create = dist.ProcessGroupGloo
    group = create(dist.HashStore(), 0, 1, timeout=datetime.timedelta(seconds=5), global_ranks_in_group=[0])
    assert (group.options._threads, group.options.global_ranks_in_group) == (1, [0])
    with pytest.raises(TypeError):  # of torch: given options are the caller's, and say all
        create(dist.HashStore(), 0, 1, group.options, global_ranks_in_group=[1])
    assert group.options.global_ranks_in_group == [0]
    with pytest.raises(AttributeError, match="unheard_of"):
        create(dist.HashStore(), 0, 1, timeout=datetime.timedelta(seconds=5), unheard_of=True)
