"""The table of a round: operators, verdicts, and the passes that refused, as JSON and as a page."""

from __future__ import annotations

import collections
import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from patchgen.mutation.draw import NAMES
from patchgen.mutation.rounds import EQUAL, NOT_RUN, REFUSED, TOLD, WRONG, Row
from patchgen.runtime.verify import source_keys
from patchgen.runtime.verify.committed_models import page_of
from patchgen.templates import render


def summarise(rows: Iterable[Row]) -> dict[str, Any]:
    """The counts of a round, and each wrong mutant.

    Args:
        rows: those of `rounds.run`.

    Returns:
        Counts by verdict: `verdicts` of all, `keeping_meaning` of mutants that keep the meaning, `models` and `operators` by
        name, `ranks` of mutants that were compared on ranks. Further counts: `refused_by` (pass -> operator -> mutants),
        `told_by` (what tells it -> mutants), `codes` (hash of the code -> rows). `wrong`: the rows of wrong mutants.
    """
    rows = list(rows)
    ran = [row for row in rows if row["verdict"] != NOT_RUN]
    refused = [row for row in ran if row["verdict"] == REFUSED]
    return {
        "verdicts": _verdicts(rows),
        "keeping_meaning": _verdicts(row for row in ran if row["keeps_meaning"]),
        "ranks": dict(collections.Counter(row["ranks"] for row in ran if "ranks" in row)),
        "codes": dict(collections.Counter(row["code"] for row in ran if "code" in row).most_common()),
        "models": {
            name: _verdicts(r for r in rows if r["model"] == name) for name in sorted({r["model"] for r in rows})
        },
        "operators": {
            name: counts for name in NAMES if (counts := _verdicts(row for row in rows if row["operator"] == name))
        },
        "refused_by": {
            name: dict(collections.Counter(row["operator"] for row in refused if row["by"] == name).most_common())
            for name, _ in collections.Counter(row["by"] for row in refused).most_common()
        },
        "told_by": dict(collections.Counter(row["by"] for row in ran if row["verdict"] == TOLD).most_common()),
        "wrong": [row for row in ran if row["verdict"] == WRONG],
    }


def _verdicts(rows: Iterable[Row]) -> dict[str, int]:
    return dict(collections.Counter(row["verdict"] for row in rows))


def write(summary: Mapping[str, object], path: Path) -> None:
    """Writes the record of a round with the date and the releases, and its page."""
    record = {"date": datetime.date.today().isoformat(), "versions": source_keys.versions(), **summary}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page_of(path).write_text(page(record), encoding="utf-8")


def page(record: Mapping[str, Any]) -> str:
    """The text of `mutations.md`, from the record; which operators keep the meaning is today's list."""
    keeping = {name for name, keeps_meaning in NAMES.items() if keeps_meaning}
    kinds = (REFUSED, TOLD, EQUAL, WRONG, NOT_RUN)

    def row_of(counts: Mapping[str, int]) -> str:
        return " | ".join(str(counts.get(kind, "")) for kind in kinds)

    def listed(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{name} {count}" for name, count in counts.items())

    return render(
        "mutations.jinja",
        record=record,
        kinds=kinds,
        keeping=keeping,
        num_run=num_run(record["verdicts"]),
        row_of=row_of,
        listed=listed,
    )


def num_run(verdicts: Mapping[str, int]) -> int:
    """How many of these mutants ran."""
    return sum(count for kind, count in verdicts.items() if kind != NOT_RUN)
