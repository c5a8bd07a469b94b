"""Which releases of transformers the committed models generate from, with the committed patchgen/model_configs, and which of
them are proven.

    python benchmarks/bench_releases.py --proofs 5.20.0=moved_to_5.20     # into benchmarks/results_releases.csv

RELEASE=FOLDER: the folder of generated models after `patchgen upgrade --to RELEASE --apply`; default: the committed one. A
proof counts if it is of the very text that generation gives now, and of the files of its parts in that folder.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from patchgen import emit, pipeline, provenance
from patchgen.errors import PatchgenError
from patchgen.runtime.compatibility import digest
from patchgen.runtime.verify.committed_models import committed
from patchgen.upgrade import releases
from patchgen.upstream import Release, load_from

RESULTS = Path(__file__).with_name("results_releases.csv")
FIELDS: tuple[str, ...] = ("model", "release", "generation", "lines", "proof")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--releases", nargs="+", default=["5.13.0", "5.17.0", "5.20.0", "5.23.0", "5.24.0"])
    parser.add_argument("--proofs", nargs="*", default=[], metavar="RELEASE=FOLDER")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    folders = {
        release: Path(folder) for release, _, folder in (argument.partition("=") for argument in options.proofs)
    }
    rows = []
    for version in options.releases:
        release = releases.find(version).release
        rows += [row(model, release, folders.get(version, provenance.generated_root())) for model in committed()]
        rows_of_version = [candidate for candidate in rows if candidate["release"] == version]
        generate = sum(result["generation"] == "generates" for result in rows_of_version)
        proven = sum(result["proof"] == "proven" for result in rows_of_version)
        print(f"{version}: {generate} of {len(rows_of_version)} generate, {proven} proven")
        write(options.output, rows)


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def row(model: str, release: Release, proofs: Path) -> Mapping[str, object]:
    """A model's row: whether it generates, or why it is refused; and the status of its proof."""
    names = {"model": model, "release": release.version}
    try:
        generated = pipeline.generate(load_from(release, model))
    except PatchgenError as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:4])
        return names | {"generation": f"refused: {reason}", "lines": "", "proof": ""}
    return names | {
        "generation": "generates",
        "lines": emit.changed_lines(generated.diff),
        "proof": proof_of(generated.text, proofs / model / f"modeling_{model}.py"),
    }


def proof_of(text: str, generated_file: Path) -> str:
    """The status of the proof beside a file, if file and proof are of this text; otherwise that there is none."""
    path = generated_file.with_name("verify.json")
    if not path.is_file():
        return "not run"
    proof = json.loads(path.read_text(encoding="utf-8"))
    is_same_text = generated_file.is_file() and generated_file.read_text(encoding="utf-8") == text
    return proof["status"] if is_same_text and proof["sha256"] == digest(generated_file) else "no proof of this text"


if __name__ == "__main__":
    main()
