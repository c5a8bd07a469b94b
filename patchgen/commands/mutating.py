"""mutate: changed upstream sources, each refused by the generator or equal to what it makes of them."""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from patchgen import upstream
from patchgen.errors import ConfigError
from patchgen.mutation.draw import OPERATORS, draw

console = Console(highlight=False)

REFUSED, EQUAL, WRONG, NOT_RUN = "refused", "equal", "wrong", "not run"
# A process keeps what it imported: after this many mutants another one goes on.
PER_PROCESS = 100


def mutate(models: list[str], count: int, seed: int, jobs: int, output: Path | None) -> int:
    """Tries `count` mutants that run of each model; prints and writes the table; 0 if none is wrong."""
    if not models:
        raise ConfigError("No model was named: patchgen mutate qwen3_moe llama.")
    for model in models:
        upstream.load(model)  # a name that is none is told before anything runs
    rows = []
    for row in _rows(models, count, seed, jobs):
        rows.append(row)
        if row["verdict"] == WRONG:
            console.print(
                f"wrong: {row['model']}: {row['operator']}: {row['where']}: {row['change']}\n  {row['detail']}",
                soft_wrap=True,
                markup=False,
            )
    summary = summarise(rows)
    console.print(_table(summary))
    if output is not None:
        output.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {output}", soft_wrap=True)
    return 1 if summary["verdicts"].get(WRONG) else 0


def summarise(rows: list[dict]) -> dict:
    """The numbers of a run: verdicts, by operator, by refusing pass, and each mutant that was wrong."""
    ran = [row for row in rows if row["verdict"] != NOT_RUN]
    keeping = [row for row in ran if row["keeps_meaning"]]
    by_operator = {
        operator.name: collections.Counter(row["verdict"] for row in rows if row["operator"] == operator.name)
        for operator in OPERATORS
    }
    return {
        "models": sorted({row["model"] for row in rows}),
        "verdicts": dict(collections.Counter(row["verdict"] for row in rows)),
        "keeping_meaning": dict(collections.Counter(row["verdict"] for row in keeping)),
        "operators": {name: dict(counts) for name, counts in by_operator.items() if counts},
        "refused_by": dict(collections.Counter(row["by"] for row in ran if row["verdict"] == REFUSED).most_common()),
        "wrong": [row for row in ran if row["verdict"] == WRONG],
    }


def _table(summary: dict) -> Table:
    table = Table("operator", *(REFUSED, EQUAL, WRONG, NOT_RUN), title=", ".join(summary["models"]))
    for name, counts in (*summary["operators"].items(), ("all", summary["verdicts"])):
        table.add_row(name, *(str(counts.get(kind, "")) for kind in (REFUSED, EQUAL, WRONG, NOT_RUN)))
    return table


def _rows(models: list[str], count: int, seed: int, jobs: int) -> Iterator[dict]:
    parts = [
        (model, start, min(PER_PROCESS, count - start)) for model in models for start in range(0, count, PER_PROCESS)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(parts)), mp_context=context, max_tasks_per_child=1, initializer=_quiet
    ) as pool:
        for rows in pool.map(_part, *zip(*((model, seed + start, size) for model, start, size in parts), strict=True)):
            yield from rows


def _quiet() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["OMP_NUM_THREADS"] = "1"


def _part(model: str, seed: int, count: int) -> list[dict]:
    """One process: mutants by one seed until `count` of them have run."""
    return list(try_mutants(model, seed, count))


def try_mutants(model: str, seed: int, count: int) -> Iterator[dict]:
    """The mutants of a model by a seed, with the verdict on each, until `count` of them have run."""
    import warnings

    import torch

    from patchgen.runtime.verify.mutants import Judge

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    origin = upstream.load(model)
    judge = Judge(origin)
    lines = judge.executed()
    num_run = 0
    for mutant in draw(origin.text, seed, lambda first, last: any(first <= line <= last for line in lines)):
        verdict = judge.verdict(mutant)
        num_run += verdict.kind != NOT_RUN
        yield {
            "model": model,
            "operator": mutant.operator,
            "keeps_meaning": mutant.keeps_meaning,
            "where": mutant.where,
            "change": mutant.change,
            "verdict": verdict.kind,
            "by": verdict.by,
            "detail": verdict.detail,
        }
        if num_run == count:
            return
