"""The support matrix in docs/parallel.md and the counts in README.md, from the records of sweeps and of proofs on ranks.

python -m patchgen.commands.support_matrix      # writes them again
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.commands import models_page, names_page
from patchgen.commands.examination import EAGER_ONLY, PROVEN
from patchgen.commands.models_page import rank_results
from patchgen.errors import PatchgenError
from patchgen.runtime.verify import records, verdict
from patchgen.runtime.verify.committed_models import CommittedModel, committed, docs
from patchgen.runtime.verify.records import LAYOUTS
from patchgen.templates import render

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import CoverageRow, RankCell

NOT_MEASURED = "not measured"


def support_matrix() -> str:
    """The text between the markers, from the records alone."""
    ranks_by_type = {row["model_type"]: row.get("ranks", {}) for row in _text_rows()}
    results_by_model = {name: rank_results(CommittedModel(name)) for name in committed()}
    text_cells = {
        name: {label: _cell(ranks.get(layout)) for layout, label in LAYOUTS.items()}
        for name in committed()
        if (ranks := ranks_by_type.get(name) or ranks_by_type.get(f"{name}_text")) is not None
    }
    # A file that was generated again has none until it is verified on ranks again.
    media_cells = {name: results for name, results in results_by_model.items() if results}
    without = [name for name, results in results_by_model.items() if not results]
    layout_counts: list[str] = []
    for layout, label in LAYOUTS.items():
        compared = [
            cell for ranks in ranks_by_type.values() if (cell := ranks.get(layout)) and cell.get("applies", True)
        ]
        layout_counts.append(f"{sum(not result['reason'] for result in compared)} of {len(compared)} with {label}")
    return render(
        "support_matrix.jinja",
        text=text_cells,
        media=media_cells,
        without=without,
        counts=layout_counts,
        not_measured=NOT_MEASURED,
    )


def _text_rows() -> list[CoverageRow]:
    rows = records.read(records.path_in(None)).items()
    return [records.with_ranks(row) for (takes_media, _), row in rows if not takes_media]


def _cell(result: RankCell | None) -> str:
    if result is None or not result.get("applies", True):
        return NOT_MEASURED
    if result["reason"]:
        return "refused" if result["reason"].startswith("refused") else "no"
    return NOT_MEASURED if result["difference"] is None else f"{result['difference']:.0e}"


def counts() -> str:
    """The counts in the README: of proven text types, and of committed models."""
    statuses = [row["status"] for row in _text_rows()]
    equal = sum(status in (PROVEN, EAGER_ONLY, *verdict.WITHOUT.values()) for status in statuses)
    return (
        f"- **Proven.** Loss, logits and every gradient of {equal} model types are bit-identical to upstream's, and "
        f"{statuses.count(PROVEN)} of them are\n  proven as a run computes, with its attention, kernels and packed rows, "
        f"in one process and on two ranks:\n  [docs/coverage.md](docs/coverage.md).\n{_committed_models()}"
    )


def _committed_models() -> str:
    rows = models_page.rows()
    proven = [row["name"] for row in rows if row["status"] == PROVEN]
    lines = [f"- **Committed.** {len(rows)} generated models, {len(proven)} of them proven as they stand."]
    for what, takes_media in (("Text", False), ("Images, video or sound", True)):
        names = [f"`{row['name']}`" for row in rows if row["takes_media"] == takes_media]
        lines += [f"{what}: {', '.join(names)}."]
    lines += ["What each computes, was proven on and changes: [docs/models.md](docs/models.md)."]
    return textwrap.fill(" ".join(lines), 131, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def page(text: str) -> str:
    """docs/parallel.md with the matrix between its markers."""
    return _replace_section(text, "support matrix", support_matrix(), "docs/parallel.md")


def readme(text: str) -> str:
    """The README with the counts between its markers."""
    return _replace_section(text, "counts", counts(), "README.md")


def _replace_section(text: str, what: str, inside: str, file_name: str) -> str:
    begin, end = f"<!-- {what}: generated, do not edit -->\n", f"<!-- end of the {what} -->\n"
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise PatchgenError(
            f"{file_name} should contain the markers {begin.strip()} ... {end.strip()}, but does not. To fix: restore them."
        )
    return f"{before}{begin}{inside}{end}{after}"


def write() -> list[Path]:
    """Writes the matrix into docs/parallel.md, the counts into README.md and docs/names.md; files that do not exist are skipped."""
    written: list[Path] = []
    pages: dict[Path, Callable[[str], str]] = {
        docs() / "parallel.md": page,
        docs().parent / "README.md": readme,
        docs() / "names.md": lambda _: names_page.page(),
    }
    for path, render_page in pages.items():
        if path.is_file():
            path.write_text(render_page(path.read_text(encoding="utf-8")), encoding="utf-8")
            written.append(path)
    return written


if __name__ == "__main__":
    print(*write(), sep="\n")
