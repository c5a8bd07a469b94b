"""verify: the numerical proof. The only commands that load the runtime are here and in `sweeping`."""

from __future__ import annotations

from pathlib import Path

from patchgen import provenance
from patchgen.commands.generation import committed
from patchgen.errors import UpstreamNotFound


def verify(models: list[str], *, every: bool, directory: Path | None, head: str | None) -> int:
    """Proves models, prints a table each and writes `verify.json` beside the generated file; 0 if all are proven."""
    from patchgen.runtime.verify import report
    from patchgen.runtime.verify.verify_model import verify_model

    names = committed() if every else models
    if not names:
        raise UpstreamNotFound("No model was named. Give model types, or --all for the committed ones.")
    failed = []
    for name in names:
        proof = verify_model(name, directory=directory, head=head)
        report.print_proof(proof)
        report.write_proof(proof, directory or provenance.generated_root() / name)
        if not proof.is_proven:
            failed.append(name)
    return 1 if failed else 0
