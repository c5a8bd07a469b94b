"""mutate: mutants of upstream sources; the generator must refuse each, the proof tell it, or its file compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from patchgen import upstream
from patchgen.commands.console import console, refusing_unwritable
from patchgen.errors import ConfigError
from patchgen.mutation import rounds, table


def mutate(
    models: list[str], count: int, seed: int, jobs: int, *, ranks: bool, records: Path | None, output: Path | None
) -> int:
    """Tries mutants of each model until `count` of each have run; prints and writes the table; 0 if none is wrong."""
    if not models:
        raise ConfigError("No model was named. To fix: name one or more, as in `patchgen mutate qwen3_moe llama`.")
    for model in models:
        upstream.load(model)  # an unknown name fails before anything runs
    rows: list[rounds.Row] = []
    for row in rounds.run(models, count, seed, jobs, ranks=ranks, records=records):
        rows.append(row)
        if row["verdict"] == rounds.WRONG:
            where = f"{row['model']}, seed {row['seed']}, mutant {row['mutant']}: {row['operator']}: {row['where']}"
            console.print(f"wrong: {where}: {row['change']}\n  {row['detail']}", soft_wrap=True, markup=False)
    summary = table.summarise(rows)
    console.print(_table(summary))
    if output is not None:
        with refusing_unwritable(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            table.write(summary, output)
        console.print(f"written: {output}", soft_wrap=True)
    return 1 if summary["wrong"] else 0


def _table(summary: dict[str, Any]) -> Table:
    kinds = (rounds.REFUSED, rounds.TOLD, rounds.EQUAL, rounds.WRONG, rounds.NOT_RUN)
    printed = Table("operator", *kinds, title=", ".join(summary["models"]))
    for name, counts in (*summary["operators"].items(), ("all", summary["verdicts"])):
        printed.add_row(name, *(str(counts.get(kind, "")) for kind in kinds))
    return printed
