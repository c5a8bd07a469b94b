"""Mutants of the generator itself: does a test fail when `patchgen/anatomy` or `patchgen/passes` is changed?

    PYTHONPATH=. python benchmarks/mutate_generator.py --count 400            # results_mutate_generator.csv
    PYTHONPATH=. python benchmarks/mutate_generator.py --only passes/prune.py --show

A changed module is caught if a committed model's files are others (`patchgen check`, which a test runs), or if a test of the
files below fails: the examples, the tests of its folder, and the changed sources of a pass. Each mutant has a process of
its own, forked from one that has imported what the tests import besides patchgen, and SECONDS of it: what nothing told from the
original in that time has survived. Rows are kept as they come; a run that was broken off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
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
# The shortest files first; together every kind of model.
MODELS = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma3", "qwen3_vl", "qwen2_5_omni")
SECONDS = 60.0
MEMORY = 6 << 30
RESULTS = ROOT / "benchmarks" / "results_mutate_generator.csv"
COLUMNS = ("module", "where", "operator", "change", "verdict")
OPERATORS = ("constant", "operator", "argument dropped", "arguments swapped", "statement dropped", "another argument")
CAUGHT, SURVIVED = "caught", "survived"


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


def verdict_on(path: Path, changed: ChangedModule | None, deselected: Sequence[str]) -> str:
    """What becomes of one changed module, in a process of its own; of none, whether all passes as it stands."""
    child = os.fork()
    if child:
        return CAUGHT if os.waitpid(child, 0)[1] else SURVIVED
    status = 1  # an import that fails, a time or a memory that does not suffice: seen by whoever runs the tests
    with contextlib.suppress(BaseException):
        resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS) + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(ROOT)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        for name in [name for name in sys.modules if name.partition(".")[0] == "patchgen"]:
            del sys.modules[name]  # the operators that make mutants import some of what they change
        if changed is not None:
            sys.meta_path.insert(0, changed)
        status = int(not committed_models_are_current() or tests_fail(path, deselected))
    os._exit(status)


def committed_models_are_current() -> bool:
    from patchgen import pipeline, upstream

    for model in MODELS:
        for name, text in pipeline.generate(upstream.load(model)).files.items():
            if (ROOT / "generated_models" / model / name).read_text(encoding="utf-8") != text:
                return False
    return True


def tests_fail(path: Path, deselected: Sequence[str] = ()) -> bool:
    """The tests of a module: examples and changed sources of a pass by its name, all of them for the anatomy."""
    folder, is_pass = ROOT / "tests" / "patchgen", path.parent.name == "passes"
    named = ["-k", f"{path.stem}:"] if is_pass else []
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    options += [f"--deselect={name}" for name in deselected]
    folders = [str(one) for one in sorted((folder / path.parent.name).glob("test_*.py"))]
    runs = [[str(folder / "test_examples.py"), *named], folders]
    runs.append([str(folder / "test_mutations.py"), *named] if is_pass else [str(folder / "test_media_passes.py")])
    # 5: nothing was collected
    return any(pytest.main([*options, *one]) not in (0, 5) for one in runs)


def mutants(path: Path, seed: int) -> Iterator:
    """Changes of one of our modules, by the operators that change upstream's files; messages of errors stay."""
    from patchgen.mutation.draw import draw

    yield from (one for one in draw(path.read_text(), seed, operators=OPERATORS) if "raise " not in one.change)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--deselect", nargs="*", default=(), help="tests that fail as it stands")
    parser.add_argument("--show", action="store_true", help="write nothing")
    options = parser.parse_args()
    modules = [
        path for part in PARTS for path in sorted((ROOT / "patchgen" / part).glob("*.py")) if path.stem != "__init__"
    ]
    sizes = {path: len(path.read_text().splitlines()) for path in modules}
    rows = [] if options.show or not RESULTS.exists() else list(csv.DictReader(RESULTS.open(encoding="utf-8")))
    for path in modules:
        name = f"{path.parent.name}/{path.name}"
        if options.only and name not in options.only:
            continue
        share = max(1, round(options.count * sizes[path] / sum(sizes.values())))
        known = {(row["module"], row["where"], row["change"]) for row in rows}
        for row in tried(path, name, share, options.seed, known, options.deselect):
            rows.append(row)
            if not options.show:
                write(rows)
        # Where one survived, the tests pass as the module stands; where none did, that is to be seen.
        own = [row for row in rows if row["module"] == name]
        if all(row["verdict"] == CAUGHT for row in own) and verdict_on(path, None, options.deselect) == CAUGHT:
            print(f"{name}: left out: its tests fail as it stands, or take longer than {SECONDS:.0f} s", flush=True)
            rows = [row for row in rows if row["module"] != name]
        print(f"{name}: {dict(Counter(row['verdict'] for row in own))}", flush=True)
    caught = sum(row["verdict"] == CAUGHT for row in rows)
    print(f"{caught} of {len(rows)} caught: {100 * caught / max(1, len(rows)):.1f} %")


def tried(
    path: Path, name: str, count: int, seed: int, known: set[tuple[str, str, str]], deselected: Sequence[str]
) -> Iterator[dict]:
    """The rows of `count` mutants of one module but for those that are known; prints the survivors."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    drawn = list(zip(range(count), mutants(path, random.Random(f"{seed}{name}").random()), strict=False))
    for _, mutant in drawn:
        change = " ".join(mutant.change.split())[:160]
        if (name, mutant.where, change) in known:
            continue
        verdict = verdict_on(path, ChangedModule(module, mutant.text), deselected)
        if verdict == SURVIVED:
            print(f"  survived: {name} {mutant.where}: {change}", flush=True)
        yield dict(zip(COLUMNS, (name, mutant.where, mutant.operator, change, verdict), strict=True))


def write(rows: list[dict]) -> None:
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
