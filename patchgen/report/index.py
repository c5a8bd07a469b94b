"""The page over all committed models: what the reviewer of a pull request opens first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchgen.anatomy.census import UNREAD
from patchgen.commands.models_page import rank_results
from patchgen.report import proofs
from patchgen.report.model import hues
from patchgen.report.sections import PLUMBING
from patchgen.runtime.verify.committed_models import Committed
from patchgen.templates import render


@dataclass(frozen=True)
class Line:
    """A model in the table."""

    name: str
    refusal: str  # why it has no page; empty where it has one
    verdict: str
    upstream: str
    releases: tuple[str, ...]
    passes: dict[str, int]
    edits: tuple[str, ...]
    notes: int
    unread: int
    changed: int
    ranks: dict[str, str]
    files: dict[str, str]  # what it is -> its place, from the page


def line(name: str, folder: Path, refusal: str = "") -> Line:
    """A model's line for the page in `folder`."""
    model = Committed(name)
    passes = {step["name"]: step for step in model.record["passes"]}
    hits = {kind: len(step["hits"]) for kind, step in passes.items() if step["hits"] and kind not in PLUMBING}
    edits = passes.get("hand_edits", {}).get("hits", ())
    files = {"file": f"modeling_{name}.py", "diff": f"modeling_{name}.diff", "provenance": "provenance.json"}
    return Line(
        name=name,
        refusal=refusal,
        verdict=proofs.verdict(model),
        upstream=model.record["upstream"]["version"] or "a file",
        releases=tuple(proofs.releases(model)),
        passes=hits,
        edits=tuple(f"{hit['site']}: {hit['what']}" for hit in edits),
        notes=sum(len(step["notes"]) for step in passes.values()),
        unread=sum(reason.startswith(UNREAD) for reason in model.record.get("census", {}).values()),
        changed=model.changed_lines,
        ranks=rank_results(model),
        files={
            kind: os.path.relpath(model.folder / file, folder).replace(os.sep, "/") for kind, file in files.items()
        },
    )


def page(lines: list[Line], beside: Sequence[tuple[str, str]] = ()) -> str:
    """The page.

    Args:
        beside: text and file of other pages in its folder.
    """
    proven = sum(one.verdict == "proven" for one in lines)
    return render("report_index.jinja", title="patchgen", lines=lines, proven=proven, hues=hues(), beside=beside)
