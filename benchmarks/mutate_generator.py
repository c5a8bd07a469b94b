"""Mutants of the generator itself: does a test fail when `patchgen/anatomy` or `patchgen/passes` is changed?

    PYTHONPATH=. python benchmarks/mutate_generator.py --count 400            # results_mutate_generator.csv
    PYTHONPATH=. python benchmarks/mutate_generator.py --only passes/prune.py --show

A changed module is caught if one of the tests below that execute the changed function fails. Each mutant has a process of its
own, forked from one that has imported what the tests import besides patchgen. The quickest tests come first, as many as fit
into BUDGET seconds: what they let through has survived.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import black
import hypothesis
import jinja2
import libcst
import pytest
import rich.console
import typer

WARM = (black, hypothesis, jinja2, libcst, rich.console, typer)  # imported once, for all that are forked
ROOT = Path(__file__).parents[1]
PARTS = ("anatomy", "passes")
TESTS = (
    "test_examples.py",
    "test_mutations.py",
    "test_media_passes.py",
    "test_generation.py",
    "test_towers.py",
    "test_source.py",
    "test_hand_edits.py",
    "test_sequence_notes.py",
    "passes",
    "anatomy",
)
BUDGET = 12.0
MEMORY = 4 << 30
RESULTS = ROOT / "benchmarks" / "results_mutate_generator.csv"
OPERATORS = ("constant", "operator", "argument dropped", "arguments swapped", "statement dropped", "another argument")


class Recorder:
    """A plugin of pytest: which functions of which of our modules each test executes, and how long it takes."""

    def __init__(self) -> None:
        self.functions: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        self._roots = tuple(f"{ROOT}/patchgen/{part}/" for part in PARTS)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        found = self.functions[item.nodeid]

        def on_call(frame, event, _):
            if frame.f_code.co_filename.startswith(self._roots):
                found.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

        started = time.process_time()
        sys.settrace(on_call)
        yield
        sys.settrace(None)
        self.seconds[item.nodeid] = time.process_time() - started

    def pytest_sessionfinish(self) -> None:
        rows = {name: [self.seconds[name], sorted(self.functions[name])] for name in self.seconds}
        Path(os.environ["RECORD"]).write_text(json.dumps(rows))


class ChangedModule:
    """Imports one module of patchgen from a changed text."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text

    def find_spec(self, name: str, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == self._name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        file = ROOT / Path(*self._name.split(".")).with_suffix(".py")
        module.__file__ = str(file)
        exec(compile(self._text, str(file), "exec"), vars(module))


def forked(arguments: list[str], changed: ChangedModule | None, seconds: float, plugins: tuple = ()) -> int:
    """The exit status of pytest in a process of its own; of one that does not end, the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    with contextlib.suppress(BaseException):
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(ROOT)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        if changed is not None:
            sys.meta_path.insert(0, changed)
        status = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins=list(plugins)
        )
        os._exit(int(status))
    os._exit(1)


def recorded() -> dict[str, tuple[float, frozenset[tuple[str, int]]]]:
    """Test -> its seconds, and the functions `(file, first line)` that it executes."""
    os.environ["RECORD"] = record = f"/tmp/tests_of_the_generator_{os.getpid()}.json"
    folder = "tests/patchgen"
    paths = [f"{folder}/{name}" for name in TESTS if (ROOT / folder / name).exists()]
    forked([*paths, "-m", "not slow"], None, 3000, (Recorder(),))
    rows = json.loads(Path(record).read_text())
    Path(record).unlink()
    return {name: (seconds, frozenset(map(tuple, functions))) for name, (seconds, functions) in rows.items()}


def mutants(path: Path, seed: int) -> Iterator:
    """Changes of one of our modules, by the operators that change upstream's files."""
    from patchgen.mutation.draw import draw

    yield from (one for one in draw(path.read_text(), seed, operators=OPERATORS) if "raise " not in one.change)


def tests_of(path: Path, line: int, known: dict) -> tuple[list[str], float]:
    """The tests that execute the function around a line, the quickest first, as many as fit into the budget."""
    lines = sorted({first for _, functions in known.values() for file, first in functions if file == str(path)})
    around = max((first for first in lines if first <= line), default=0)
    found = [(s, name) for name, (s, functions) in known.items() if (str(path), around) in functions]
    chosen, total = [], 0.0
    for seconds, name in sorted(found):
        if chosen and total + seconds > BUDGET:
            break
        chosen.append(name)
        total += seconds
    return chosen, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--show", action="store_true", help="print the survivors, write nothing")
    options = parser.parse_args()
    modules = [
        path for part in PARTS for path in sorted((ROOT / "patchgen" / part).glob("*.py")) if path.stem != "__init__"
    ]
    modules = [path for path in modules if not options.only or f"{path.parent.name}/{path.name}" in options.only]
    known = recorded()
    print(f"{len(known)} tests, {sum(seconds for seconds, _ in known.values()):.0f} s", flush=True)
    sizes = {path: len(path.read_text().splitlines()) for path in modules}
    rows = []
    for path in modules:
        share = max(1, round(options.count * sizes[path] / sum(sizes.values())))
        rows += tried(path, share, options.seed, known, options.show)
    caught = sum(row["verdict"] != "survived" for row in rows)
    print(f"{caught} of {len(rows)} caught: {100 * caught / len(rows):.1f} %")
    if not options.show:
        with RESULTS.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def tried(path: Path, count: int, seed: int, known: dict, show: bool) -> list[dict]:
    """The rows of `count` mutants of one module; prints their number, and the survivors."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    name, rows = f"{path.parent.name}/{path.name}", []
    drawn = list(zip(range(count), mutants(path, random.Random(f"{seed}{name}").random()), strict=False))
    for _, mutant in drawn:
        line = int(mutant.where.rpartition(" ")[2])
        tests, seconds = tests_of(path, line, known)
        status = forked(tests, ChangedModule(module, mutant.text), 3 * seconds + 10) if tests else 0
        verdict = "caught" if status else "survived"
        row = {"module": name, "where": mutant.where, "operator": mutant.operator, "change": mutant.change[:160]}
        rows.append(row | {"tests": len(tests), "verdict": verdict})
        if verdict == "survived":
            print(f"  survived ({len(tests)} tests): {name} {mutant.where}: {mutant.change[:200]}", flush=True)
    print(f"{name}: {dict(Counter(row['verdict'] for row in rows))}", flush=True)
    return rows


if __name__ == "__main__":
    main()
