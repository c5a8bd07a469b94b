"""A process ends with the one that started it: by the kernel's signal, and by the thread that looks at the parent's id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import os, sys, time
from patchgen.runtime import parent_process
if sys.argv[1] == "thread":
    parent_process.sys.platform = "an unknown system"
    parent_process.POLL_SECONDS = 0.05
parent_process.end_with_parent(int(sys.argv[2]) if len(sys.argv) > 2 else None)
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("way", ["signal", "thread"])
def test_a_child_ends_with_its_killed_parent(way):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, way], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    child = int((lines - {"ready"}).pop())
    assert is_alive(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.stdout.close()


def test_a_child_of_a_parent_that_has_ended_already_ends():
    """Its parent now is another process than the launcher whose id it was handed."""
    done = subprocess.run([sys.executable, "-c", CHILD, "thread", str(os.getppid())], capture_output=True, timeout=30)
    assert done.returncode == -signal.SIGKILL


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
