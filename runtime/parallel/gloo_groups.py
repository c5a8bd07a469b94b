"""Gloo process groups with one worker thread each: torch's default of two has a data race.

After a collective, the worker thread stores its name in a `std::string` of the group, without a lock and after waiters were
notified (torch 2.13, `ProcessGroupGloo::runLoop`). Another worker may do the same for the next collective, or a concurrent one,
at that moment. Names of more than 15 characters are heap-allocated, ALLGATHER_COALESCED (every gather of a DTensor) among
them: two gathers then free the same memory, or a name is written into freed memory. The rank crashes in malloc, hangs, or
continues with corrupted memory.

A single worker cannot race. It runs the collectives of its group in the order they were issued, which is the same on all
ranks of a group anyway.
"""

from __future__ import annotations

import datetime
import functools
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist


def use_one_worker() -> None:
    """Gives every gloo group created from now on one worker thread; call it before `init_process_group`.

    torch has no argument for it: it creates these groups from a timeout, and from torch 2.14 on from `enable_reconfigure`, an
    option by the same name, and ignores other options.
    """
    group_class: Any = getattr(dist, "ProcessGroupGloo", None)  # none where torch is built without gloo
    if group_class is None or hasattr(group_class.__init__, "__wrapped__"):
        return
    original = group_class.__init__

    @functools.wraps(original)
    def init(group, store, rank, size, options=None, *, timeout=dist.default_pg_timeout, **named_options) -> None:
        if isinstance(options, datetime.timedelta):  # a parameter of either type
            options, timeout = None, options
        if options is None:
            options = _options(group_class, timeout)
            while named_options:
                setattr(options, *named_options.popitem())  # an AttributeError if this torch has no such option
        original(group, store, rank, size, options, **named_options)

    group_class.__init__ = init


def warn_of_several_workers() -> None:
    """Warns if the default group uses gloo with several workers, because it was created before `use_one_worker`."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    if backends.get("cpu") != "gloo" or dist.group.WORLD is None:
        return
    options: Any = dist.group.WORLD._get_backend(torch.device("cpu")).options
    if (workers := options._threads) > 1:
        warnings.warn(
            f"The default process group uses gloo with {workers} worker threads. In torch's gloo they write one string at once, "
            "which can end a rank in malloc or corrupt its memory. To fix: call patchgen.runtime.parallel.gloo_groups."
            "use_one_worker() before torch.distributed.init_process_group().",
            stacklevel=3,
        )


def _options(group_class: Any, timeout: datetime.timedelta) -> Any:
    """The options that torch builds from a timeout, with one worker."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = group_class._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [group_class.create_device(interface=name) for name in interfaces] or [
        group_class.create_default_device()
    ]
    return options
