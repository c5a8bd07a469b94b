"""What the record of a proof beside a generated file says of that file: the releases it runs with, and its documents."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from patchgen.runtime.verify.observe.facts import from_records, reason_against
from patchgen.runtime.verify.verdict import PROVEN_IN_ONE_PROCESS

ALLOW_VARIABLE = "PATCHGEN_ALLOW_TRANSFORMERS"


class ReleaseMismatch(ImportError):
    """The installed transformers is a release that a generated file was neither made from nor verified with."""


def require_transformers(generated_file: str, made_from: str) -> None:
    """Raises unless the installed transformers is the release that `generated_file` was made from or verified with, or the
    one that PATCHGEN_ALLOW_TRANSFORMERS names.

    Nothing else detects the difference: imports keep working between releases while formulas change (once, the rotary
    embedding of a model changed from half rotation to interleaved).

    Args:
        generated_file: `__file__` of the generated module; `verify.json` in its folder lists the releases it was
            verified with.
        made_from: the release of its upstream source, for example "5.24.0".

    Raises:
        ReleaseMismatch: with three ways to fix it.
    """
    import transformers

    installed = transformers.__version__
    if installed == made_from or installed == os.environ.get(ALLOW_VARIABLE):
        return
    folder = Path(generated_file).parent
    if installed in proof_of(Path(generated_file)).get("transformers", ()):
        return
    raise ReleaseMismatch(
        f"{Path(generated_file).name} was made from transformers {made_from} and is not verified with the installed "
        f"{installed}.\nEither install transformers=={made_from}, or regenerate it with "
        f"`patchgen generate {folder.name} --transformers {installed}` and review the diff, or prove it as it is with "
        f"`patchgen verify {folder.name} --against {installed}`."
    )


@cache
def proven_separation(model_class: type) -> Any:
    """How a model keeps the documents of packed rows apart (`document_rows.DocumentSeparation`), by the proof of its file; None: no
    proof of this file says so.

    Neither releases nor the code that proved matter: a document in a row of its own is right in any case.
    """
    proof = _proof_of_class(model_class)
    is_proven = proof.get("status") in PROVEN_IN_ONE_PROCESS
    return (proof.get("training") or {}).get("separates_documents") if is_proven else None


@cache
def why_not_in_layout(model_class: type, *, ranks: int, sp: int) -> str:
    """Why a model may not run on this many ranks, of which `sp` share a sequence, in a sentence; "" if it may, or if no proof of
    its file says otherwise.

    By the facts that the proof observed in steps of this very file (`verify.observe.facts`), with whatever release and prover.
    """
    observed = (_proof_of_class(model_class).get("training") or {}).get("observed", ())
    return reason_against(from_records(observed), ranks=ranks, sp=sp)


def _proof_of_class(model_class: type) -> dict[str, Any]:
    """The record of the generated file that a class is of; {} if there is none."""
    for cls in model_class.__mro__:  # FSDP2 derives a class from the generated one
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if file is not None and (proof := proof_of(Path(file))):
            return proof
    return {}


def proof_of(generated_file: Path) -> dict[str, Any]:
    """`verify.json` in the folder of a generated file; {} if there is none, or it is of another version of the file."""
    record = generated_file.with_name("verify.json")
    if not record.is_file():
        return {}
    proof = json.loads(record.read_text(encoding="utf-8"))
    return proof if proof.get("sha256") == digest(generated_file) else {}


def digest(generated_file: Path) -> str:
    """The hash that a proof refers to: of a generated file, and of the generated language models that provenance.json lists
    under `parts`; one that is missing counts as empty."""
    combined = hashlib.sha256(generated_file.read_bytes())
    record = generated_file.with_name("provenance.json")
    parts = json.loads(record.read_text(encoding="utf-8")).get("parts", ()) if record.is_file() else ()
    for name in (part["default"]["model"] for part in parts):
        folders = (generated_file.parent.parent, Path(__file__).parents[1] / "generated_models")
        files = (folder / str(name) / f"modeling_{name}.py" for folder in folders)
        combined.update(next((file.read_bytes() for file in files if file.is_file()), b""))
    return combined.hexdigest()
