"""A process whose gloo worker still holds a tensor ends with its own status, after its threads, exit handlers and output."""

from __future__ import annotations

import subprocess
import sys

import pytest

HELD = """
import threading, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD  # keeps its threads when the group is destroyed


class Held:
    # Freed by the thread that lets go of the tensor last: the worker then waits, as a busy machine makes it wait.
    def __del__(self):
        freed_by.append(threading.current_thread())
        freed.set()
        if freed_by[-1] is not threading.main_thread():
            time.sleep(1)


freed_by, freed = [], threading.Event()
while not freed_by or freed_by[-1] is threading.main_thread():
    freed.clear()
    tensor = torch.ones(8)
    tensor.held = Held()
    work = dist.all_reduce(tensor, async_op=True)
    del tensor, work
    freed.wait()
dist.destroy_process_group()
"""
END = "from patchgen.runtime.process_exit import end_process\n"


def run(script: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", END + script], stderr=subprocess.PIPE, text=True, timeout=120, **options
    )


@pytest.mark.parametrize("status", [0, 7])
def test_a_late_worker_of_gloo_does_not_change_the_exit_status(status):
    done = run(f"{HELD}\nend_process({status})")
    assert done.returncode == status, done.stderr


def test_threads_exit_handlers_and_output_come_first():
    script = """
import atexit, threading, time
atexit.register(lambda: print("handler"))
thread = threading.Thread(target=lambda: (time.sleep(0.3), print("thread")))
thread.start()
print("body")
end_process(3)
"""
    done = run(script, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout.split()) == (3, ["body", "thread", "handler"])


def test_an_interrupt_while_threads_are_awaited_loses_no_output():
    script = """
import atexit, os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
atexit.register(lambda: print("handler"))
threading.Thread(target=lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGINT), time.sleep(0.5))).start()
print("body")
end_process(0)
"""
    done = run(script, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout.split()) == (1, ["body", "handler"]), done.stderr
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize("closed", ["", "sys.stdout = None\n", "sys.stderr = None\n", "sys.stdout.close()\n"])
def test_streams_that_are_closed_are_no_failure(closed):
    assert run(f"import sys\n{closed}end_process(0)").returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_output_that_cannot_be_written_is_a_failure():
    with open("/dev/full", "w") as full:
        done = run("print('lost')\nend_process(0)", stdout=full)
    assert done.returncode == 1
    assert "No space left" in done.stderr
