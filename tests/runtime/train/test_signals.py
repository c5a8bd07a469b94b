"""A process that is asked to end while its main thread waits in C, where Python runs no handler, still ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from patchgen.runtime.parallel import watch
from patchgen.runtime.train.signals import StopRequest

BLOCKED = """
import hashlib
from torch import nn
from patchgen.runtime.parallel import watch
from patchgen.runtime.train.signals import StopRequest

watch.STOP_GRACE_SECONDS = 1.0
with StopRequest() as stop, watch.Watch(nn.Linear(1, 1), timeout=600, stop_requested=stop.has_arrived):
    print("blocked", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)  # as a wait for a device does: it returns to no handler
"""


def test_a_blocked_process_that_is_asked_to_end_says_where_it_was_and_ends():
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout.readline() == "blocked\n"
    time.sleep(1.5)  # longer than the shortest silence: without the request it would wait on
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == watch.EXIT_STATUS, told
    assert "No progress for" in told and "pbkdf2_hmac" not in told.splitlines()[0]


def test_a_request_is_noted_once_and_by_both_ways_of_asking():
    with StopRequest() as stop:
        assert not stop.requested() and not stop.has_arrived()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested() and stop.has_arrived()
        os.kill(os.getpid(), signal.SIGINT)  # the same request, handed on by a launcher
        stop._requested_at -= 10
        with pytest.raises(KeyboardInterrupt, match="a second time"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
    assert signal.set_wakeup_fd(-1) == -1
