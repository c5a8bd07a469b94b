"""Which releases of transformers the committed models generate from, by the same configs, and what is proven of it.

    python benchmarks/bench_releases.py --proofs 5.20.0=moved_to_5.20     # into benchmarks/results_releases.csv

A folder of proofs is one of generated models that `patchgen upgrade --to RELEASE --apply` has moved; a proof counts where it
is of the very bytes that generation gives now.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from patchgen import emit, pipeline, provenance
from patchgen.errors import PatchgenError
from patchgen.runtime.verify.committed_models import committed
from patchgen.upgrade import releases
from patchgen.upstream import Release, load_from

RESULTS = Path(__file__).with_name("results_releases.csv")
FIELDS: tuple[str, ...] = ("model", "release", "generation", "lines", "proof")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--releases", nargs="+", default=["5.13.0", "5.17.0", "5.20.0", "5.23.0"])
    parser.add_argument("--proofs", nargs="*", default=[], metavar="RELEASE=FOLDER")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    folders = {release: Path(folder) for release, _, folder in (one.partition("=") for one in options.proofs)}
    rows = []
    for version in options.releases:
        release = releases.find(version).release
        rows += [row(model, release, folders.get(version, provenance.generated_root())) for model in committed()]
        own = [one for one in rows if one["release"] == version]
        proven = sum(one["proof"] == "proven" for one in own)
        print(
            f"{version}: {sum(one['generation'] == 'generates' for one in own)} of {len(own)} generate, {proven} proven"
        )
        write(options.output, rows)


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def row(model: str, release: Release, proofs: Path) -> Mapping[str, object]:
    """What comes of a model: generated, or refused and why; and what the proof of these bytes says."""
    names = {"model": model, "release": release.version}
    try:
        generated = pipeline.generate(load_from(release, model))
    except PatchgenError as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:4])
        return names | {"generation": f"refused: {reason}", "lines": "", "proof": ""}
    return names | {
        "generation": "generates",
        "lines": emit.changed_lines(generated.diff),
        "proof": proof_of(generated.text, proofs / model / "verify.json"),
    }


def proof_of(text: str, path: Path) -> str:
    """The status of a proof of these bytes, or that there is none."""
    proof = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    is_of_these = proof.get("sha256") == hashlib.sha256(text.encode()).hexdigest()
    return proof["status"] if is_of_these else "not run"


if __name__ == "__main__":
    main()
