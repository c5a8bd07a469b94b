"""sweep --family heads: the heads that are not language models, one row per class in records/heads.json and docs/heads.md."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import track

from patchgen import executed_code, provenance, upstream
from patchgen.commands import examination, own_process
from patchgen.commands.console import console
from patchgen.commands.examination import CAUSAL_MAP, COMPARED_IMPLEMENTATIONS, FAILED, GENERATED, PROVEN
from patchgen.errors import ConfigError
from patchgen.runtime.verify import code_sets, records, source_keys
from patchgen.runtime.verify.committed_models import page_of, records_folder
from patchgen.templates import render

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import HeadRow, HeadsRecord

FAMILY, FILE = "heads", "heads.json"
MAPPINGS = {
    "classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "answers": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "conditional": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
"""Kind -> upstream's mapping, as in `runtime/verify/head_kinds.py`, which loads torch."""


def heads_of(release: upstream.Release) -> dict[str, dict[str, str]]:
    """Model type -> kind -> class in its own file, for types that take text: with a causal head, or one of `MAPPINGS` but base."""
    found: dict[str, dict[str, str]] = {}
    text_types = {
        model_type for name in (CAUSAL_MAP, *list(MAPPINGS.values())[:-1]) for model_type in release.auto_map(name)
    }
    for kind, mapping in MAPPINGS.items():
        for model_type, name in release.auto_map(mapping).items():
            path = release.file_of(model_type) if model_type in text_types else None
            if path is not None and re.search(rf"^class {name}\b", release.read(path) or "", re.MULTILINE):
                found.setdefault(model_type, {})[kind] = name
    return dict(sorted(found.items()))


def sweep(jobs: int, version: str | None, only: Iterable[str], output: Path | None, *, fresh: bool) -> int:
    """Generates and proves each head separately; 0 if any is proven, or, with `only`, if all heads of those types are.

    Current rows are kept; an interrupted sweep resumes.

    Raises:
        ConfigError: a type has none of these heads, or a process died.
    """
    release = upstream.open_release(version)
    known = heads_of(release)
    if unknown := [model_type for model_type in only if model_type not in known]:
        raise ConfigError(
            f"--only {unknown[0]}: {release.origin} has no head of these kinds for that type: {', '.join(MAPPINGS)}."
        )
    wanted = {model_type: known[model_type] for model_type in only or known}
    path = (output or records_folder()) / FILE
    stale = {*wanted} if fresh else set(stale_types(path, release, wanted))
    rows = {  # without those of heads that upstream no longer has
        (model_type, kind): row for (model_type, kind), row in read(path).items() if kind in known.get(model_type, ())
    }
    for (model_type, _), row in rows.items():
        if model_type in wanted and model_type not in stale:  # today's generator gives the same text
            row["sources"] = source_keys.model_sources_hash(model_type, release)
    calls = {
        model_type: {"heads": heads, "version": release.version}
        for model_type, heads in wanted.items()
        if model_type in stale
    }
    done = own_process.run_each(examine, calls, jobs)
    for _, found in track(done, "sweeping", len(calls), console=console, disable=not console.is_terminal):
        if isinstance(found, own_process.ProcessDied):
            raise ConfigError(f"{found}. Finished rows are in {path}. To fix: free memory, and run it again.")
        rows |= {(row["model_type"], row["kind"]): row for row in found}
        write(path, rows)
        if not console.is_terminal:
            for row in found:
                console.print(f"{row['head']}: {row['status']} {row['reason']}", soft_wrap=True, markup=False)
    write(path, rows)
    swept = [rows[model_type, kind] for model_type, heads in wanted.items() for kind in heads]
    proven = [row for row in swept if row["status"] == PROVEN]
    console.print(f"{counts(swept)}; written: {path} and {page_of(path)}", soft_wrap=True)
    return 0 if (len(proven) == len(swept) if only else proven) else 1


def examine(model_type: str, heads: Mapping[str, str], version: str) -> list[HeadRow]:
    """The rows of a type: each of its heads generated separately and proven."""
    from patchgen.runtime.failures import reraise_machine_failure
    from patchgen.runtime.verify.verify_model import judge

    release = upstream.open_release(version)
    sources = source_keys.model_sources_hash(model_type, release)
    found: list[HeadRow] = []
    for kind, head in heads.items():
        start = time.perf_counter()
        models, reason, digest = examination.generate(model_type, release.version, [head])
        status = FAILED
        if models:
            with tempfile.TemporaryDirectory() as folder:
                directory = examination.write(models, Path(folder))
                try:
                    outcome, _ = judge(directory, head=head, implementations=COMPARED_IMPLEMENTATIONS)
                    status, reason = outcome.status, outcome.reason
                except Exception as error:  # upstream's code runs here and may raise anything
                    reraise_machine_failure(error)
                    status, reason = GENERATED, examination.short_reason(error)
        row: HeadRow = {
            "model_type": model_type,
            "kind": kind,
            "head": head,
            "status": status,
            "reason": reason,
            "seconds": round(time.perf_counter() - start, 2),
            "sources": sources,
            "made_with": records.row_made_with(
                digest, executed_code.functions(), records.current_key() | {"transformers": version}
            ),
        }
        found.append(row)
    return found


def read(path: Path) -> dict[tuple[str, str], HeadRow]:
    """The rows of a record by type and kind; empty if there is none."""
    if not path.is_file():
        return {}
    record: HeadsRecord = code_sets.read(path)
    return {(row["model_type"], row["kind"]): row for row in record["rows"]}


def write(path: Path, rows: Mapping[tuple[str, str], HeadRow]) -> None:
    """Writes the record and its page, each atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = [rows[place] for place in sorted(rows)]
    record: HeadsRecord = {"key": records.current_key(), "rows": ordered}
    page_path = page_of(path)
    page_path.parent.mkdir(parents=True, exist_ok=True)
    provenance.write_whole({path: code_sets.dumps(record, indent=1), page_path: page(ordered)})


def page(rows: Sequence[HeadRow]) -> str:
    """The text of `heads.md`. It follows from the record alone."""
    types = {row["model_type"]: {r["kind"]: r for r in rows if r["model_type"] == row["model_type"]} for row in rows}
    return render("heads.jinja", kinds=list(MAPPINGS), types=types, counts=counts(rows), proven=PROVEN)


def counts(rows: Iterable[HeadRow]) -> str:
    """How many heads of each kind are proven, of how many, as text."""
    rows = list(rows)
    statuses = {kind: [row["status"] for row in rows if row["kind"] == kind] for kind in MAPPINGS}
    return ", ".join(f"{kind}: {found.count(PROVEN)} of {len(found)}" for kind, found in statuses.items())


def stale_types(
    path: Path, release: upstream.Release, wanted: Mapping[str, Mapping[str, str]] | None = None, jobs: int = 2
) -> list[str]:
    """The types with a head whose row is missing or stale; generates only heads whose sources have changed."""
    key = records.required_key() | {"transformers": release.version}
    rows, wanted = read(path), wanted or heads_of(release)
    valid = {
        place: row
        for place, row in rows.items()
        if wanted.get(place[0], {}).get(place[1]) == row["head"]
        and records.holds(row, key, records.recorded_digest(row))
    }
    sources = {model_type: source_keys.model_sources_hash(model_type, release) for model_type in wanted}
    changed = [place for place, row in valid.items() if row["sources"] != sources[place[0]]]
    types, heads = [model_type for model_type, _ in changed], [[valid[place]["head"]] for place in changed]
    for place, digest in zip(changed, records.digests(types, heads, release.version, jobs), strict=True):
        if records.recorded_digest(valid[place]) != digest:
            del valid[place]
    return [
        model_type for model_type, kinds in wanted.items() if any((model_type, kind) not in valid for kind in kinds)
    ]
