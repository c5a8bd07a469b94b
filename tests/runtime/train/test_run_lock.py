"""The lock of a run's directory: it holds while its process lives, and no longer."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from patchgen.runtime.train import run_lock
from patchgen.runtime.train.recipe import RecipeError


def test_what_a_killed_run_leaves_holds_up_nobody(tmp_path):
    child = os.fork()
    if child == 0:
        with run_lock.locked(tmp_path):
            time.sleep(60)
        os._exit(0)
    try:
        holder = tmp_path / run_lock.OWNER
        while not (holder.exists() and holder.read_text().endswith("\n")):
            time.sleep(0.01)
        with pytest.raises(RecipeError, match=f"in use: process {child} on"):
            run_lock.require_free(tmp_path)
        with pytest.raises(RecipeError, match=f"in use: process {child} on"), run_lock.locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    run_lock.require_free(tmp_path)
    with run_lock.locked(tmp_path):
        assert json.loads((tmp_path / run_lock.OWNER).read_text())["process"] == os.getpid()


def test_a_directory_that_is_not_there_is_free_and_is_not_made(tmp_path):
    run_lock.require_free(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_written_is_refused_before_it_is_made(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for directory in (file, file / "run"):
        with pytest.raises(RecipeError, match=r"cannot be written: .*file is not a folder. To fix: name another log"):
            run_lock.require_writable(directory)
        with pytest.raises(RecipeError, match="cannot be written"), run_lock.locked(directory):
            pass
    run_lock.require_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder in which nobody can write")
def test_a_folder_in_which_nobody_can_write_is_refused_to_root_as_well(tmp_path):
    """Its permissions say that root may."""
    with pytest.raises(
        RecipeError, match="directory of the run, /proc/self/runs/one, cannot be written: .*another log.directory"
    ):
        run_lock.require_writable(Path("/proc/self/runs/one"))
    (tmp_path / "file").touch()
    assert run_lock.why_not_writable(tmp_path / "file" / "cache") == f"{tmp_path / 'file'} is not a folder"
    assert run_lock.why_not_writable(tmp_path / "new" / "er") == "" and [*tmp_path.iterdir()] == [tmp_path / "file"]
