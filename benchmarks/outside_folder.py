"""Generation and proof of a folder of modeling files from elsewhere: the table of docs/outside_files.md.

    python benchmarks/outside_folder.py FOLDER          # FOLDER/<name>/modeling_<name>.py, mended by hand, and outside.json
    python benchmarks/outside_folder.py FOLDER --again aquila
    python benchmarks/outside_folder.py --page          # only writes the page from the record

`outside.json` beside a file says what a person did: `{"origin": "flagai 1.8.4, aquila2", "minutes": 3, "mends": "one import"}`.
The file is generated and compared with itself in one process, as a run computes (base variant), and on two ranks with FSDP; with
experts that a pass divides under EP 2. A row that records/outside_files.json has is not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch
import transformers

import patchgen
from patchgen import pipeline
from patchgen.commands import file_errors
from patchgen.commands.checkpoints import register
from patchgen.errors import PatchgenError
from patchgen.runtime.document_rows import DocumentSeparation
from patchgen.runtime.registry import GeneratedModel
from patchgen.runtime.verify import media_ranks, verdict
from patchgen.runtime.verify.ranks import RankPool
from patchgen.runtime.verify.verify_model import verify_model
from patchgen.upstream import load

RECORD, PAGE = Path("records/outside_files.json"), Path("docs/outside_files.md")
HEAD = """# Files from elsewhere, measured

Modeling files of public packages. Each was taken from its wheel, mended by hand for
transformers 5 ([from_transformers_4.md](from_transformers_4.md) has the mends), generated, and compared with the mended file at
small sizes in fp32: as a run computes, and on two ranks with FSDP, under EP 2 where a pass divides its experts. Figures are the
largest relative differences of loss and gradients; minutes of reading errors and editing are estimates. The files are not part of
this repository: `python benchmarks/outside_folder.py FOLDER` measures a folder of them and writes this page from
`records/outside_files.json`.

"""
COLUMNS = ("file", "origin", "minutes", "mends", "as a run computes", "on two ranks", "measured")


@dataclass(frozen=True)
class Row:
    """A file: where it is from, what a person did to it, and what came of it."""

    file: str
    origin: str
    minutes: int
    mends: str
    in_one_process: str
    on_two_ranks: str
    is_proven: bool
    measured: str = field(default_factory=lambda: str(date.today()))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--again", nargs="*", default=[], help="names of files to measure again")
    parser.add_argument("--page", action="store_true", help="write the page, measure nothing")
    parser.add_argument("--alone", type=Path, help="the folder of one file; its row goes to stdout")
    options = parser.parse_args()
    if options.alone is not None:
        print(json.dumps(asdict(measure(options.alone))))
        return
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = {row["file"]: row for row in record["rows"]}
    for folder in sorted(options.folder.iterdir()) if options.folder and not options.page else ():
        if not (folder / "outside.json").is_file() or (folder.name in rows and folder.name not in options.again):
            continue
        # One process per file: their modules share names.
        command = [sys.executable, __file__, "--alone", str(folder)]
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode:
            sys.exit(f"{folder.name}:\n{completed.stderr[-3000:]}")
        rows[folder.name] = json.loads(completed.stdout.splitlines()[-1])
        record |= {"rows": [rows[name] for name in sorted(rows)], "measured_with": versions()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


def page(record: dict) -> str:
    """docs/outside_files.md."""
    rows = [Row(**row) for row in record["rows"]]
    proven = [row for row in rows if row.is_proven]
    lines = [
        f"{record['measured_with']}. {len(proven)} of {len(rows)} files are proven in one process and on two ranks.",
        "",
    ]
    lines += ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    for row in sorted(rows, key=lambda one: (not one.is_proven, one.file)):
        cells = (row.file, row.origin, str(row.minutes), row.mends, row.in_one_process, row.on_two_ranks, row.measured)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


def versions() -> str:
    """The releases that a row was measured with."""
    return (
        f"Measured with patchgen {patchgen.__version__}, torch {torch.__version__.partition('+')[0]} (CPU) and "
        f"transformers {transformers.__version__}"
    )


def measure(folder: Path) -> Row:
    """The row of one file."""
    person = json.loads((folder / "outside.json").read_text(encoding="utf-8"))
    told = (folder.name, person["origin"], person["minutes"], person["mends"])
    with tempfile.TemporaryDirectory() as root:
        try:
            generated = pipeline.generate(load(folder.name, source=folder))
        except PatchgenError as refusal:
            return Row(*told, f"not generated: {first_line(refusal)}", "", is_proven=False)
        (place := Path(root) / generated.model).mkdir()
        for name, text in generated.files.items():
            (place / name).write_text(text, encoding="utf-8")
        hits = {step.name: step.outcome.hits for step in generated.steps}
        try:
            architecture = register(str(folder), root)
            assert architecture is not None, "`register` returns None only without a code folder"
            with file_errors.told(architecture.generated, None):
                proof = verify_model(architecture.generated, variants=("base",), implementations=("torch", "chunked"))
        except PatchgenError as error:
            return Row(*told, f"not compared: {reason(error)}", "", is_proven=False)
        found = verdict.of(proof)
        if found.status != verdict.PROVEN or proof.training is None:
            return Row(*told, found.words.removesuffix("."), "", is_proven=False)
        separates = proof.training.separates_documents
        words = "proven" + (", documents in rows of their own" if separates else "")
        ranks, agrees = on_ranks(architecture.generated, 2 if hits["fused_experts"] else 1, separates)
        return Row(*told, words, ranks, is_proven=agrees)


def on_ranks(model: GeneratedModel, ep: int, separates: DocumentSeparation) -> tuple[str, bool]:
    """What two ranks compute: the worst difference, or the first reason; and whether they agree."""
    pool = RankPool(2)
    try:
        results = media_ranks.verify_on_ranks(model, pool, sp=1, ep=ep, fsdp=True, separates=separates)
    finally:
        pool.close()
    layout = "ep 2, FSDP" if ep > 1 else "FSDP"
    if refused := next((f"{result.case}: {result.reason}" for result in results if result.reason), ""):
        return f"no: {refused.strip().splitlines()[-1][:200]}", False
    return (
        f"{layout}: {max(max(result.loss, result.gradient) for result in results):.0e} in {len(results)} cases",
        True,
    )


def reason(error: Exception) -> str:
    """The error that the file itself raises, of a message of `file_errors`; else its first line."""
    lines = str(error).splitlines()
    return lines[1].strip() if len(lines) > 1 else lines[0][-200:]


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


if __name__ == "__main__":
    main()
