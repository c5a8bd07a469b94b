"""A committed model: its provenance and its recorded proofs."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from patchgen import emit, provenance
from patchgen.errors import UpstreamNotFound
from patchgen.runtime.compatibility import digest

IN_ONE_PROCESS = ""


@dataclass(frozen=True)
class Committed:
    """The folder of a generated model in `generated_models/`."""

    name: str

    @functools.cached_property
    def folder(self) -> Path:
        return provenance.generated_root() / self.name

    @functools.cached_property
    def record(self) -> dict:
        """`provenance.json`."""
        return provenance.read(self.folder)

    @property
    def changed_lines(self) -> int:
        """Against upstream."""
        return emit.changed_lines((self.folder / f"modeling_{self.name}.diff").read_text(encoding="utf-8"))

    @functools.cached_property
    def proofs(self) -> dict[str, dict]:
        """Every recorded proof: `IN_ONE_PROCESS` as in `verify.json`, and by the name of a layout on ranks."""
        paths = (self.folder / "verify.json", self.folder / "verify_ranks.json")
        in_one_process, ranks = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {} for path in paths
        )
        proofs = {IN_ONE_PROCESS: in_one_process} if in_one_process else {}
        return proofs | {
            name: {"sha256": ranks["sha256"], **layout} for name, layout in ranks.get("layouts", {}).items()
        }

    @property
    def present_proofs(self) -> dict[str, dict]:
        """The proofs of the present generated file."""
        present = digest(self.folder / f"modeling_{self.name}.py")
        return {layout: proof for layout, proof in self.proofs.items() if proof.get("sha256") == present}


def committed() -> list[str]:
    """The models in `generated_models/`."""
    return sorted(path.parent.name for path in provenance.generated_root().glob("*/provenance.json"))


def named(models: list[str], *, every: bool) -> list[str]:
    """The models that a command was given, or every committed one.

    Raises:
        UpstreamNotFound: there are none.
    """
    names = committed() if every else models
    if not names:
        raise UpstreamNotFound("No model was named. To fix: give model types, or --all for the committed ones.")
    return names


def docs() -> Path:
    """The folder of the documentation, next to that of the generated models."""
    return provenance.generated_root().resolve().parent / "docs"


def records_folder() -> Path:
    """The folder of the records of sweeps and mutation rounds, next to that of the generated models."""
    return docs().with_name("records")


def page_of(record: Path) -> Path:
    """The page written from a record: in the documentation for one in `records/`, else next to it."""
    folder = docs() if record.parent.resolve() == records_folder() else record.parent
    return folder / f"{record.stem}.md"
