"""Mutants of the generator itself: does a test fail when `patchgen/anatomy` or `patchgen/passes` is changed?

    PYTHONPATH=. python benchmarks/mutate_generator.py --count 400            # results_mutate_generator.csv
    PYTHONPATH=. python benchmarks/mutate_generator.py --only passes/prune.py --show
    PYTHONPATH=. python benchmarks/mutate_generator.py --again                # the survivors, after tests were added

Modules get mutants in proportion to their lines. A mutant is caught if a test of tests/patchgen that is neither slow nor for
GPUs fails or does not end; see generator_trials.py. Rows are written as they are finished, and an interrupted run resumes: with
the same seed and the same code it draws the same mutants. The column `note` is written by people, for survivors: why the mutant
is equal, or another remark.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import hashlib
import importlib.metadata
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from generator_mutants import drawn
from generator_trials import CAUGHT, PARTS, ROOT, SECONDS, SURVIVED, Copy

RESULTS = ROOT / "benchmarks" / "results_mutate_generator.csv"
COLUMNS: tuple[str, ...] = (
    "date",
    "versions",
    "code",
    "module",
    "where",
    "operator",
    "change",
    "verdict",
    "by",
    "seconds",
    "note",
)
SAME = ("code", "module", "where", "operator", "change")
EQUAL = "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", nargs="*", default=(), help="modules, as anatomy/names.py")
    parser.add_argument("--again", action="store_true", help="tries the rows that survived again, and no others")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of CPU, for the tests of a mutant")
    parser.add_argument("--show", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = list(csv.DictReader(options.results.open(encoding="utf-8"))) if options.results.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), options.seconds)
        executed = copy.executed()
        copy.warm()
        catches: Counter[str] = Counter(row["by"] for row in rows)
        for module, line, mutant in sample_mutants(options.count, options.seed, options.only):
            row = described(module, mutant)
            known = next((other for other in rows if all(other[key] == row[key] for key in SAME)), None)
            if (known is None) == options.again or (known is not None and known["verdict"] == CAUGHT):
                continue
            tests = executed.tests_of(module, line, catches)
            verdict, by, seconds = copy.verdict(module, mutant.text, tests, executed)
            catches[by] += verdict == CAUGHT
            row |= {"verdict": verdict, "by": by, "seconds": f"{seconds:.1f}"}
            if verdict == SURVIVED:
                print(
                    f"survived: {module} {mutant.where}: {row['change']}  ({by or f'{len(tests)} tests'})", flush=True
                )
            if known is None:
                rows.append(row)
            else:
                known |= row
            if not options.show:
                write(options.results, rows)
    summarise(rows)


def sample_mutants(count: int, seed: str, only: list[str]) -> Iterator[tuple]:
    """Module, line and mutant: of each module a share of `count` in proportion to its lines, at least two."""
    paths = [path for part in PARTS for path in sorted((ROOT / "patchgen" / part).glob("*.py"))]
    texts = {f"{path.parent.name}/{path.name}": path.read_text() for path in paths if path.stem != "__init__"}
    lines = sum(text.count("\n") for text in texts.values())
    for module, text in texts.items():
        if not only or module in only:
            share = max(2, round(count * text.count("\n") / lines))
            yield from ((module, *mutant) for mutant in islice(drawn(text, f"{seed} {module}"), share))


@functools.cache
def versions() -> str:
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "libcst", "pytest")]
    return ", ".join([f"python {platform.python_version()}", *packages])


def described(module: str, mutant) -> dict[str, str]:
    text = (ROOT / "patchgen" / module).read_text(encoding="utf-8")
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "code": hashlib.sha256(text.encode()).hexdigest()[:12],
        "module": module,
        "where": mutant.where,
        "operator": mutant.operator,
        "change": " ".join(mutant.change.split())[:200],
        "note": "",
    }


def summarise(rows: list[dict[str, str]]) -> None:
    caught = sum(row["verdict"] == CAUGHT for row in rows)
    equal = sum(row["verdict"] == SURVIVED and row["note"].startswith(EQUAL) for row in rows)
    for name in ("operator", "module"):
        for value, of in sorted(Counter(row[name] for row in rows).items()):
            survived = sum(row[name] == value and row["verdict"] == SURVIVED for row in rows)
            print(f"{value:28} {of:4}  survived {survived}")
    print(f"{caught} of {len(rows)} caught: {100 * caught / max(1, len(rows)):.1f} %")
    if equal:
        print(f"{100 * caught / (len(rows) - equal):.1f} % without the {equal} that are equal by what they compute")


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
