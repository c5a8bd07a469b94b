"""The support matrix in docs/parallel.md, from the records of `patchgen sweep --sp 2`, `--ep 2` and `patchgen verify --ranks`.

python -m patchgen.commands.support_matrix      # writes it again
"""

from __future__ import annotations

import json
from pathlib import Path

from patchgen import provenance
from patchgen.commands.generation import committed
from patchgen.commands.models_page import rank_results
from patchgen.errors import PatchgenError

BEGIN, END = "<!-- support matrix: written, not edited -->\n", "<!-- end of the support matrix -->\n"
LAYOUTS = {"sp2": "sp 2", "ep2": "ep 2"}
NOT_MEASURED = "not measured"


def docs() -> Path:
    """The folder of the documentation."""
    return provenance.generated_root().resolve().parent / "docs"


def support_matrix() -> str:
    """The text between the marks. It follows from the records alone."""
    rows = json.loads((docs() / "coverage.json").read_text(encoding="utf-8"))["rows"]
    of_text = {row["model_type"]: row.get("ranks", {}) for row in rows if row.get("family", "text") == "text"}
    of_media = {name: rank_results(provenance.generated_root() / name, name) for name in committed()}
    text = {
        name: {label: _cell(ranks.get(layout)) for layout, label in LAYOUTS.items()}
        for name in committed()
        if (ranks := of_text.get(name) or of_text.get(f"{name}_text") or {}) or not of_media[name]
    }
    media = {name: found for name, found in of_media.items() if found}
    lines = ["Text:", "", *_table(text), "", "Images, video and audio:", "", *_table(media)]
    counts = []
    for layout, name in LAYOUTS.items():
        compared = [cell for ranks in of_text.values() if (cell := ranks.get(layout)) and cell.get("applies", True)]
        counts.append(f"{sum(not result['reason'] for result in compared)} of {len(compared)} with {name}")
    return "\n".join([*lines, "", f"Of all types of this release agree: {', '.join(counts)}."]) + "\n"


def _table(cells: dict[str, dict[str, str]]) -> list[str]:
    """One row per model, one column per layout."""
    columns = sorted({layout for row in cells.values() for layout in row})
    rows = [
        f"| {name} | {' | '.join(row.get(column, NOT_MEASURED) for column in columns)} |"
        for name, row in cells.items()
    ]
    return [f"| model | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}", *rows]


def _cell(result: dict | None) -> str:
    if result is None or not result.get("applies", True):
        return NOT_MEASURED
    if result["reason"]:
        return "no"
    return NOT_MEASURED if result["difference"] is None else f"{result['difference']:.0e}"


def page(text: str) -> str:
    """The page with the matrix between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise PatchgenError(f"docs/parallel.md has lost its marks: {BEGIN.strip()} ... {END.strip()}")
    return f"{before}{BEGIN}\n{support_matrix()}\n{END}{after}"


def write() -> Path | None:
    """Writes the matrix into docs/parallel.md; an installation without documentation has none."""
    path = docs() / "parallel.md"
    if not path.is_file():
        return None
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write())
