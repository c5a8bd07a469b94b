"""Skips what this machine cannot run, and lets Triton's interpreter run what can."""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import settings

# A property holds however busy the machine is.
settings.register_profile("patchgen", deadline=None)
settings.load_profile("patchgen")

# A process that a test starts and that a signal ends says where it was; pytest does so for its own alone.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# Triton looks once, when it is imported; torch, which could tell whether there is a GPU, is not needed by every test.
if not Path("/dev/nvidiactl").exists() and importlib.util.find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import interpreter_loops  # noqa: F401


@pytest.fixture(scope="session")
def browser():
    """One for all tests of pages; each opens its own."""
    import chromium

    page = chromium.Page()
    yield page
    page.close()


@pytest.fixture(autouse=True)
def seams_as_they_were():
    """A test that configures seams does so for itself, and leaves no implementation, unless it is the first to load seams in its
    process; a test that loads none pays nothing."""
    before = _registered()
    yield
    seams = sys.modules.get("patchgen.runtime.seams")
    if seams is not None:
        seams.configure(**dict.fromkeys(seams.names(), seams.EAGER))
    assert not before or _registered() == before, "use seams.registered"


def _registered() -> dict[str, tuple[str, ...]]:
    """The implementations of each seam; empty before seams are loaded."""
    seams = sys.modules.get("patchgen.runtime.seams")
    if seams is None:
        return {}
    return {name: seams.implementations(name) for name in seams.names()}


WHOLE_FILES = (
    "tests/runtime/doctor/test_doctor_on_vision.py",
    "tests/patchgen/upgrade/test_drift_under_edits.py",
    "tests/patchgen/upgrade/test_planted_drift.py",
)
"""One process takes a whole file: what its tests share takes long to set up."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """One of the test runner's processes takes all tests on ranks: two pools wait for each other where cores are few.

    By this hook, for `--dist loadgroup` of xdist 3.8 does nothing under pytest 9. Another `--dist` is what it was.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class RanksTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ranks" if file.startswith("tests/distributed/") else file if file in WHOLE_FILES else nodeid

    return RanksTogether(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _sample(items)
    _skip_without_cuda(items)


def _sample(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `sampled(n)` one in n is fast, at least one; the others are slow.

    They are drawn by a hash of their names: every n-th would have the same value of a parameter with n values.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        drawn = sorted(of_test, key=lambda item: zlib.crc32(item.name.encode()))
        n = of_test[0].get_closest_marker("sampled").args[0]
        for item in drawn[-(-len(drawn) // n) :]:
            item.add_marker(pytest.mark.slow)


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without a CUDA device; torch is asked only if there is such a test."""
    # By the marker: among the keywords are the names of folders, that of the checkout too.
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
