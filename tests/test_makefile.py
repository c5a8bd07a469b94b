"""`make` looks at the version of Python before it makes anything of it; a target of several commands runs them all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exec {real} -c "import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])" "$2"
[ "$1 $2" = "-m venv" ] && {{ for place; do :; done; mkdir -p "$place/bin"; cp "$0" "$place/bin/python"; }}
exit 0
"""


@pytest.fixture
def make(tmp_path):
    """Runs `make setup` in a folder of its own, with a Python that says it is 3.`minor`."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def run(minor: int) -> subprocess.CompletedProcess:
        python = tmp_path / f"python3.{minor}"
        python.write_text(PYTHON.format(real=sys.executable, minor=minor))
        python.chmod(0o755)
        return subprocess.run(
            ["make", "setup", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    return run


def test_an_old_python_is_refused_before_an_environment_is_made(make, tmp_path):
    done = make(10)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer, and" in done.stderr and "is 3.10. Name another: make PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()
    assert make(11).returncode == 0 and (tmp_path / ".venv" / ".setup").exists()


def test_an_environment_of_an_old_python_is_made_again(make, tmp_path):
    assert make(11).returncode == 0
    old = tmp_path / ".venv" / "bin" / "python"
    old.write_text(PYTHON.format(real=sys.executable, minor=10))
    (tmp_path / ".venv" / ".setup").unlink()
    assert make(12).returncode == 0
    assert "(3, 12, 0)" in old.read_text()


def test_every_layout_of_ranks_is_proven_and_the_target_fails_if_one_did(make, tmp_path):
    assert make(11).returncode == 0
    patchgen, log = tmp_path / ".venv" / "bin" / "patchgen", tmp_path / "log"
    patchgen.write_text(f'#!/bin/sh\necho "$*" >> {log}\ncase "$*" in *"2 --sp 2") exit $REFUSED;; esac\n')
    patchgen.chmod(0o755)
    (tmp_path / ".venv" / ".setup-test").touch()
    for refused in (0, 1):
        done = subprocess.run(["make", "verify-ranks"], cwd=tmp_path, env={**os.environ, "REFUSED": str(refused)})
        assert (done.returncode != 0) == refused
        told = log.read_text().splitlines()
        assert len(told) == 6 and told[-1] == "verify --all --outdated --ranks 4 --fsdp"
        log.unlink()


def test_another_torch_is_not_replaced_by_the_pinned_one(make, tmp_path):
    """What is installed after it must not be held to the torch of constraints.txt."""
    assert make(11).returncode == 0
    python, log = tmp_path / ".venv" / "bin" / "python", tmp_path / "log"
    # It has no torch, and writes down what it is asked to install, with the constraints that this is held to.
    python.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-c import torch" ] && exit 1\necho "$*" >> {log}\n'
        f'for word; do [ "$last" = --constraint ] && cat "$word" >> {log}; last=$word; done\nexit 0\n'
    )
    done = subprocess.run(
        ["make", "setup-test", "TORCH=torch==2.14.1"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told = log.read_text()
    assert "install torch==2.14.1" in told and "transformers==" in told
    assert "torch==2.13" not in told
