"""A committed model: its provenance and its recorded proofs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen import emit, provenance
from patchgen.errors import UpstreamNotFound
from patchgen.runtime.compatibility import digest
from patchgen.runtime.verify import code_sets

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import LayoutRecord, ProofRecord, Provenance, RankProofRecord

IN_ONE_PROCESS = ""


@dataclass(frozen=True)
class CommittedModel:
    """The folder of a generated model in `generated_models/`."""

    name: str

    @functools.cached_property
    def folder(self) -> Path:
        return provenance.generated_root() / self.name

    @functools.cached_property
    def record(self) -> Provenance:
        """`provenance.json`."""
        return provenance.read(self.folder)

    @property
    def changed_lines(self) -> int:
        """The number of added and removed lines against upstream."""
        return emit.changed_lines((self.folder / f"modeling_{self.name}.diff").read_text(encoding="utf-8"))

    @functools.cached_property
    def proof(self) -> ProofRecord | None:
        """The recorded proof in one process: `verify.json`."""
        path = self.folder / "verify.json"
        return code_sets.read(path) if path.is_file() else None

    @functools.cached_property
    def _rank_record(self) -> RankProofRecord | None:
        path = self.folder / "verify_ranks.json"
        return code_sets.read(path) if path.is_file() else None

    @property
    def layouts(self) -> list[str]:
        """Every layout that has a recorded proof: `IN_ONE_PROCESS`, and those on ranks."""
        on_ranks = self._rank_record.get("layouts", {}) if self._rank_record else {}
        return [*([IN_ONE_PROCESS] if self.proof else []), *on_ranks]

    @property
    def current_proof(self) -> ProofRecord | None:
        """The proof in one process, if it is of the generated file as it is now."""
        return self.proof if self.proof and self.proof.get("sha256") == self._generated_sha256 else None

    @property
    def current_rank_proofs(self) -> dict[str, LayoutRecord]:
        """The proofs on ranks of the generated file as it is now, by the name of the layout."""
        ranks = self._rank_record
        return ranks.get("layouts", {}) if ranks and ranks.get("sha256") == self._generated_sha256 else {}

    @property
    def _generated_sha256(self) -> str:
        return digest(self.folder / f"modeling_{self.name}.py")


def committed() -> list[str]:
    """The names of the models in `generated_models/`."""
    return sorted(path.parent.name for path in provenance.generated_root().glob("*/provenance.json"))


def named_models(models: list[str], *, every: bool) -> list[str]:
    """The models that the user named, or every committed one.

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
