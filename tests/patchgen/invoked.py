"""Commands as a user types them, run in the process of a test; and the record of a proof, for tests of what reads it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from typer.testing import CliRunner, Result

from patchgen.cli import app
from patchgen.runtime.verify import code_sets, records
from patchgen.runtime.verify.layout import TWO_RANKS


def invoke(*arguments: str) -> Result:
    """Runs a command; an error for the user is raised."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def record_proof(folder: Path, **releases: str) -> None:
    """Records that the model in a folder is proven, in one process and on two ranks, as it stands there: proving it takes
    minutes, and other tests do.

    Args:
        releases: those that it was proven with, instead of the installed ones.
    """
    key = records.current_key() | releases
    digest = hashlib.sha256((folder / f"modeling_{folder.name}.py").read_bytes()).hexdigest()
    agrees = {"difference": "0", "reason": "", "applies": True}
    proof = {
        "status": "proven",
        "sha256": digest,
        "made_with": code_sets.made_with({"patchgen.runtime.ops:"}, key),
        "two_ranks": {
            "layouts": dict.fromkeys(TWO_RANKS, agrees),
            "made_with": code_sets.made_with({"patchgen.runtime.ops:"}, key),
        },
    }
    (folder / "verify.json").write_text(code_sets.dumps(proof, indent=2))
