"""Groups of gloo with one worker thread each, for torch's two write one string at once.

When a collective has ended, the worker thread that ran it notes its name in a `std::string` of the group, with no lock and
after whoever waits for it was told (torch 2.13, `ProcessGroupGloo::runLoop`). So another worker can end the next collective,
or one that was in flight beside it, at that time. A name of more than 15 characters lies in allocated memory, and
ALLGATHER_COALESCED, every gather of a DTensor, is one: two gathers then free the same memory, or the name of another
collective is written into memory that is free. A rank dies in malloc, hangs, or goes on with what it does not know is wrong.

One worker writes alone. It runs the collectives of its group in the order in which they were issued, which the ranks of a
group have in common anyway.
"""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any

import torch.distributed as dist


def use_one_worker() -> None:
    """Lets every group of gloo that this process makes from now on have one worker thread; before `init_process_group`.

    torch has no argument for it: it makes these groups from a timeout, and drops the options it is given.
    """
    group_class: Any = getattr(dist, "ProcessGroupGloo", None)  # none where torch is built without gloo
    if group_class is None or hasattr(group_class.__init__, "__wrapped__"):
        return
    of_torch = group_class.__init__

    @functools.wraps(of_torch)
    def made(group, store, rank, size, options=None, *, timeout=dist.default_pg_timeout) -> None:
        if isinstance(options, datetime.timedelta):  # the place of either
            options, timeout = None, options
        of_torch(group, store, rank, size, _options(group_class, timeout) if options is None else options)

    group_class.__init__ = made


def _options(group_class: Any, timeout: datetime.timedelta) -> Any:
    """What torch makes of a timeout, but for the number of workers."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = group_class._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [group_class.create_device(interface=name) for name in interfaces] or [
        group_class.create_default_device()
    ]
    return options
