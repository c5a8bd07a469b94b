"""`make` looks at the version of Python before it makes anything of it."""

from __future__ import annotations

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
