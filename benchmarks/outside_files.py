"""What generation and its proof make of modeling files that are no part of transformers.

    python benchmarks/outside_files.py FOLDER --output rows.csv     # a folder per file: modeling_x.py, configuration_x.py

Each is generated and compared with the file itself at small sizes: loss, logits and every gradient in eager mode, and the
kernels that run on a CPU. A file that cannot run is told with what it raises.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from patchgen import pipeline
from patchgen.commands.checkpoints import register
from patchgen.errors import PatchgenError
from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS
from patchgen.runtime.verify.verify_model import verify_model
from patchgen.upstream import load, name_of

FIELDS: tuple[str, ...] = ("file", "loss", "experts", "on ranks", "proof")
RUN = ("torch", "chunked")  # implementations of seams
SEAM, PLAN = "causal_lm_loss seam", "experts={"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("outside_files.csv"))
    parser.add_argument("--alone", action="store_true", help="the folder is that of one file; its row goes to stdout")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measured(options.folder)))
        return
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for source in sorted(path.parent for path in options.folder.glob("*/modeling_*.py")):
            command = [sys.executable, __file__, str(source), "--alone"]  # files may be called alike
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            writer.writerow(json.loads(found.stdout.splitlines()[-1]))
            file.flush()


def measured(folder: Path) -> dict[str, str]:
    """The row of one file."""
    row = dict.fromkeys(FIELDS, "") | {"file": folder.name}
    try:
        generated = pipeline.generate(load(name_of(folder), source=folder))
    except PatchgenError as refusal:
        return row | {"proof": f"not generated: {first_line(refusal)}"}
    hits = {step.name: [hit.what for hit in step.outcome.hits] for step in generated.steps}
    row["loss"] = "seam" if SEAM in hits["fused_loss"] else "its own"
    row["experts"] = ", ".join(what for what in hits["stacked_experts"] if " as " in what)
    notes = [note for step in generated.steps if step.name == "fused_loss" for note in step.outcome.notes]
    row["on ranks"] = "refused: a loss of one rank" if notes else "divided" if row["experts"] else "whole"
    with tempfile.TemporaryDirectory() as root:
        (place := Path(root) / generated.model).mkdir()
        for name, text in generated.files.items():
            (place / name).write_text(text, encoding="utf-8")
        try:
            own = register(str(folder), root)
            assert own is not None, "a folder was named"
            proof = verify_model(own.generated, implementations=RUN, training_path=False)
        except UPSTREAM_REFUSALS as error:
            row["proof"] = f"the file itself does not run: {type(error).__name__}: {first_line(error)}"
            return row
    equal = f"equal in {len(proof.cases)} cases" + (", kernels within rounding" if proof.seams else "")
    return row | {"proof": equal if proof.is_equal else "; ".join(proof.failures[:2])}


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


if __name__ == "__main__":
    main()
