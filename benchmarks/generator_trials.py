"""Runs the generator's tests on a changed copy of the repository, beginning with those that execute the changed code.

Tests, and the processes that they start, import modules from the copy. Each trial is forked from a process that has imported
all dependencies of the tests except patchgen, runs the tests that execute the changed statement, and ends with the first
failure. Tests that start processes are skipped: a mutant that only they would catch counts as survived.
"""

from __future__ import annotations

import ast
import compileall
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import py_compile
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("anatomy", "passes")
TESTS = "tests/patchgen"
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and (not slow or sampled)")
CAUGHT, SURVIVED = "caught", "survived"
SECONDS = 12.0
"""Default limit in CPU seconds for all tests of one mutant."""
SLOWER = 20.0  # CPU seconds of one test, as a multiple of what it takes on the unchanged code
FIRST = 8
MEMORY = 12 << 30


@dataclass
class Executed:
    """What each test of the unchanged code executes, and for how long it runs.

    Attributes:
        on_import: "passes/prune.py:12" of each statement that runs before any test.
        by_test: the same of each test by its id; a file's tests have what runs when the file is read.
        seconds: CPU seconds of each test.
        left_out: tests that fail on the unchanged code of a copy, or start processes.
        files: the files of tests that were recorded, with their digests.
    """

    on_import: list[str] = field(default_factory=list)
    by_test: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def tests_of(self, module: str, line: int, catches: Counter[str]) -> list[str]:
        """The tests that execute a statement, those most likely to catch a mutant first.

        The order is by: how few other tests execute the lines below it, such as the body of a condition; how many mutants
        the test has caught; whether it is a test of the module; and how much of the module it executes per second.
        """
        place, stem = f"{module}:{line}", Path(module).stem
        chosen = {t: set(ran) for t, ran in self.by_test.items() if place in self.on_import or place in ran}
        below = [f"{module}:{number}" for number in range(line + 1, line + 5)]
        among = {place_below: sum(place_below in ran for ran in chosen.values()) for place_below in below}
        rare = {
            test: sum(1 / among[place_below] for place_below in below if place_below in ran)
            for test, ran in chosen.items()
        }
        worth = {
            test: sum(ran_place.startswith(f"{module}:") for ran_place in ran) / (0.3 + self.seconds[test])
            for test, ran in chosen.items()
        }
        return sorted(chosen, key=lambda t: (-round(rare[t], 6), -catches[t], stem not in t, -worth[t], t))


class Copy:
    """A copy of the repository's files, in which one module at a time is changed."""

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self.folder, self.seconds = folder, seconds
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        # Bytecode is validated by the hash of its source: a changed file may have the size and the second of the old one.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "patchgen", quiet=2, invalidation_mode=mode)

    def executed(self) -> Executed:
        """The lines that each test executes: cached, except for test files that changed since (recording takes minutes)."""
        sources = sorted(self.folder.glob("patchgen/**/*.py"))
        code = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
        record = Path(tempfile.gettempdir()) / f"patchgen-executed-{code}.json"
        known = Executed(**json.loads(record.read_text(encoding="utf-8"))) if record.is_file() else Executed()
        files = {
            str(path.relative_to(self.folder)): _digest(path) for path in self.folder.glob(f"{TESTS}/**/test_*.py")
        }
        new = [file for file, digest in sorted(files.items()) if known.files.get(file) != digest]
        for test in [test for test in known.by_test if test.partition("::")[0] not in {*files} - {*new}]:
            del known.by_test[test], known.seconds[test]
        if new:
            _forked(lambda write: self._record(new, record, known))
            known = Executed(**json.loads(record.read_text(encoding="utf-8")))
        return known

    def verdict(self, module: str, text: str | None, tests: list[str], executed: Executed) -> tuple[str, str, float]:
        """Caught or survived; the id of the failed test, or what happened; CPU seconds. Without a text, of the unchanged code."""
        path = self.folder / "patchgen" / module
        original = path.read_text(encoding="utf-8")
        try:
            path.write_text(original if text is None else text, encoding="utf-8")
            return _forked(lambda write: self._try(tests, executed, write))
        finally:
            path.write_text(original, encoding="utf-8")

    def warm(self) -> None:
        """Imports into this process what the tests import besides patchgen, once for all trials."""
        os.environ.setdefault("TRITON_INTERPRET", "1")  # as the tests ask, before Triton is imported
        listed = self.folder / "modules"
        _forked(lambda write: self._list_modules(listed))
        for name in listed.read_text(encoding="utf-8").split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)

    def _list_modules(self, listed: Path) -> None:
        before = set(sys.modules)
        self._enter()
        pytest.main([*OPTIONS, "--collect-only", TESTS])
        project_packages = {
            "patchgen",
            "__main__",
            "conftest",
            *(path.stem for path in self.folder.glob(f"{TESTS}/**/*.py")),
        }
        module_names = (
            name for name in sys.modules if name not in before and name.partition(".")[0] not in project_packages
        )
        listed.write_text("\n".join(module_names), encoding="utf-8")

    def _record(self, files: list[str], record: Path, known: Executed) -> None:
        recorder = Recorder(self.folder, known)
        sys.meta_path.insert(0, recorder)
        self._enter()
        importlib.import_module("patchgen.pipeline")
        known.on_import = recorder.taken()
        pytest.main([*OPTIONS, *files], plugins=[recorder])
        known.files |= {file: _digest(self.folder / file) for file in files}
        record.write_text(json.dumps(vars(known)), encoding="utf-8")

    def _try(self, tests: list[str], executed: Executed, write: Callable[[str, str], None]) -> None:
        self._enter()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if not tests:
            write(SURVIVED, "no test executes it")
            return
        # The first tests catch most mutants: the files of the others need not be read.
        for part in (tests[:FIRST], tests[FIRST:]):
            files = list(dict.fromkeys(test.partition("::")[0] for test in part))
            if (
                part
                and pytest.main([*OPTIONS, *files], plugins=[Chosen(part, executed.seconds, self.seconds, write)]) != 0
            ):
                write(CAUGHT, "while the tests were collected")
        write(SURVIVED, "")

    def _enter(self) -> None:
        os.chdir(self.folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "patchgen"]:
            del sys.modules[name]  # the operators that make mutants import some of what they change
        sys.path[:] = [str(self.folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"], os.environ["PYTHONDONTWRITEBYTECODE"] = str(self.folder), "1"
        sys.dont_write_bytecode = True
        importlib.invalidate_caches()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _forked(work: Callable[[Callable[[str, str], None]], None]) -> tuple[str, str, float]:
    """Runs `work` in a forked process without output; returns what it writes first, and its CPU seconds.

    A process that dies counts as caught.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:

        def write(verdict: str, by: str) -> None:
            os.write(writing, f"{verdict}\n{by}".encode())
            os._exit(0)

        try:
            nowhere = os.open(os.environ.get("TRIAL_OUTPUT", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            work(write)
        except BaseException as error:
            write(CAUGHT, f"{type(error).__name__} outside of a test")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        message = pipe.read().decode()
    usage = os.wait4(child, 0)[2]
    verdict, _, by = message.partition("\n")
    seconds = usage.ru_utime + usage.ru_stime
    return (verdict, by, seconds) if verdict else (CAUGHT, "the process died", seconds)


class Chosen:
    """A plugin of pytest: runs the chosen tests in their order, and writes the verdict when one fails or time is up."""

    def __init__(
        self, tests: list[str], each: dict[str, float], together: float, write: Callable[[str, str], None]
    ) -> None:
        self._order = {test: i for i, test in enumerate(tests)}
        self._each, self._together, self._write = each, together, write

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        gone = self._order.keys() - {item.nodeid for item in items}
        if gone:
            self._write(CAUGHT, f"{min(gone)} cannot be collected")
        items[:] = sorted((i for i in items if i.nodeid in self._order), key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        if time.process_time() > self._together:
            self._write(SURVIVED, f"{self._together:.0f} s of CPU")
        signal.signal(signal.SIGPROF, lambda *_: self._write(CAUGHT, f"{nodeid} takes {SLOWER:.0f} times as long"))
        signal.setitimer(signal.ITIMER_PROF, 5.0 + SLOWER * self._each[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(CAUGHT, report.nodeid)


class Recorder:
    """Imports the modules with a mark at each statement, and as a plugin of pytest notes what each test ran."""

    def __init__(self, folder: Path, executed: Executed) -> None:
        self.executed = executed
        self._folder, self._ran = folder, set()
        self._of_file: dict[str, list[str]] = {}
        self._usable, self._started = True, 0.0

    def find_spec(self, name: str, path: object = None, target: object = None):
        package, _, submodule = name.partition(".")
        part, _, module = submodule.partition(".")
        if package != "patchgen" or part not in PARTS or not module:
            return None
        file = str(self._folder / "patchgen" / part / f"{module}.py")
        return importlib.util.spec_from_file_location(name, file, loader=_Marking(name, file, self._ran))

    def taken(self) -> list[str]:
        ran = sorted(self._ran)
        self._ran.clear()
        return ran

    def pytest_sessionstart(self) -> None:
        for owner, name in ((subprocess.Popen, "__init__"), (BaseProcess, "start")):
            setattr(owner, name, self._noting(getattr(owner, name)))

    def _noting(self, start: Callable) -> Callable:
        def noted(*arguments, **options):
            self._usable = False
            return start(*arguments, **options)

        return noted

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._of_file[report.nodeid] = self.taken()

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self._ran.clear()
        self._usable, self._started = True, time.process_time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._usable = self._usable and not report.failed

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        if not self._usable:
            self.executed.left_out.append(nodeid)
        else:
            self.executed.seconds[nodeid] = time.process_time() - self._started
            self.executed.by_test[nodeid] = sorted({*self.taken(), *self._of_file.get(nodeid.partition("::")[0], ())})


class _Marking(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, file: str, ran: set[str]) -> None:
        super().__init__(name, file)
        self._ran = ran

    def get_code(self, fullname: str):
        tree = ast.parse(Path(self.path).read_text(encoding="utf-8"))
        place = "/".join(Path(self.path).parts[-2:])
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                _mark(function.body, place)
        return compile(ast.fix_missing_locations(tree), self.path, "exec")

    def exec_module(self, module) -> None:
        module.__dict__["__ran__"] = self._ran.add
        super().exec_module(module)


def _mark(body: list[ast.stmt], place: str) -> None:
    """Puts `__ran__("passes/prune.py:12")` above each statement, but for those of functions and classes inside."""
    for statement in list(body):
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            blocks: Iterable[ast.AST] = (
                statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())
            )  # fmt: skip
            for block in blocks:
                for name in ("body", "orelse", "finalbody"):
                    _mark(getattr(block, name, None) or [], place)
        mark = ast.parse(f"__ran__({f'{place}:{statement.lineno}'!r})").body[0]
        body.insert(body.index(statement), mark)
