"""The page over all committed models: what the reviewer of a pull request opens first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchgen.commands.models_page import rank_results
from patchgen.report import proofs
from patchgen.report.model import hues
from patchgen.report.sections import PLUMBING
from patchgen.runtime.verify.committed_models import CommittedModel
from patchgen.templates import render


@dataclass(frozen=True)
class ModelRow:
    """A row of the table.

    Attributes:
        refusal: why the model has no page; empty if it has one.
        differs: the committed files that are not what generation gives now.
        passes: the number of hits of each pass.
        notes, changed: how many notes the passes wrote, and how many lines the generated file changes.
        not_run: how many ranges of lines no proof ran.
        ranks: as `rank_results` returns it.
        files: kind -> path relative to the page.
    """

    name: str
    refusal: str
    differs: tuple[str, ...]
    verdict: str
    upstream: str
    releases: tuple[str, ...]
    passes: dict[str, int]
    edits: tuple[str, ...]
    notes: int
    not_run: int
    changed: int
    ranks: dict[str, str]
    files: dict[str, str]


def row(name: str, folder: Path, refusal: str = "", differs: Sequence[str] = ()) -> ModelRow:
    """A model's row for the page in `folder`."""
    model = CommittedModel(name)
    passes = {step["name"]: step for step in model.record["passes"]}
    hits = {kind: len(step["hits"]) for kind, step in passes.items() if step["hits"] and kind not in PLUMBING}
    edits = passes["hand_edits"]["hits"] if "hand_edits" in passes else ()
    files = {"file": f"modeling_{name}.py", "diff": f"modeling_{name}.diff", "provenance": "provenance.json"}
    return ModelRow(
        name=name,
        refusal=refusal,
        differs=tuple(differs),
        verdict=proofs.verdict(model),
        upstream=model.record["upstream"]["version"] or "a file",
        releases=tuple(proofs.releases(model)),
        passes=hits,
        edits=tuple(f"{hit['site']}: {hit['what']}" for hit in edits),
        notes=sum(len(step["notes"]) for step in passes.values()),
        not_run=len((model.current_proof or {}).get("not_run", ())),
        changed=model.changed_lines,
        ranks=rank_results(model),
        files={
            kind: os.path.relpath(model.folder / file, folder).replace(os.sep, "/") for kind, file in files.items()
        },
    )


def page(rows: list[ModelRow]) -> str:
    """The text of the page."""
    proven = sum(model.verdict == "proven" for model in rows)
    stale = sum(bool(model.differs) for model in rows)
    return render("report_index.jinja", title="patchgen", rows=rows, proven=proven, stale=stale, hues=hues())
