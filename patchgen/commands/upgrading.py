"""upgrade: the changes of a move to another release, and the move itself."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path

from rich.console import Console

from patchgen import provenance
from patchgen import upgrade as upgrading
from patchgen.commands.console import console
from patchgen.commands.generation import refuse_unknown
from patchgen.runtime.verify.committed_models import committed, named_models
from patchgen.upgrade import messages, releases
from patchgen.upgrade.findings import ModelUpgrade

INDEX_SECONDS = 8
"""How long the package index that has a release's wheel may be silent."""


@contextlib.contextmanager
def _impatient() -> Generator[None, None, None]:
    """Within the block an index that is not there is told at once: pip reads its options from these variables. Environments,
    with packages of gigabytes, are installed with its own patience."""
    before = dict(os.environ)
    os.environ |= {"PIP_TIMEOUT": str(INDEX_SECONDS), "PIP_RETRIES": "0"}
    try:
        yield
    finally:
        for name in ("PIP_TIMEOUT", "PIP_RETRIES"):
            os.environ.pop(name)
        os.environ |= before


def upgrade(
    models: list[str],
    to: str | None,
    *,
    apply: bool,
    reviewed: list[str],
    as_json: bool,
    verbose: bool,
    python: Path | None,
    jobs: int,
) -> int:
    """Compares committed models with those generated from another release; with `apply` moves the models that need no person.

    Returns:
        The worst verdict (0, 10 or 20); with `apply` 0, or 20 if a model was not moved.
    """
    refuse_unknown(models)
    names = models or committed()
    to = to or releases.installed()
    with _impatient():
        releases.find(to)
    out = Console(highlight=False, stderr=True) if as_json else console

    def show(model: ModelUpgrade) -> None:
        if not (as_json or apply):
            messages.show_model(model, out, verbose=verbose)

    found = upgrading.compare(names, to, jobs=jobs, reviewed=reviewed, on_model=show)
    if as_json:
        json.dump(found.to_json(), sys.stdout, indent=2, ensure_ascii=False)
        print()
    if not apply:
        for line in messages.summary(found) if len(names) > 1 else ():
            out.print(line, markup=False, soft_wrap=True)
        return found.verdict

    from patchgen.upgrade.applying import move

    result = move(
        found,
        to,
        provenance.generated_root(),
        reviewed=reviewed,
        python=python,
        jobs=jobs,
        report=partial(out.print, markup=False, soft_wrap=True),
    )
    for line in messages.summary(found):
        out.print(line, markup=False, soft_wrap=True)
    if result.moved:
        out.print("\nCommit message:\n", markup=False)
        message = messages.commit_message(found, result.moved, reviewed, result.held_back)
        print(message, file=sys.stderr if as_json else None)
    return 20 if result.held_back else 0


def verify_against(models: list[str], to: str, *, every: bool, python: Path | None) -> int:
    """Proves committed files, unchanged, with another release, and records in `verify.json` whether each is; 0 if all are."""
    from patchgen.upgrade.applying import prove_against

    names = named_models(models, every=every)
    refuse_unknown(names)
    failed = False
    for name in names:
        is_proven, outcome = prove_against(name, to, provenance.generated_root(), python)
        failed |= not is_proven
        style = "green" if is_proven else "red"
        console.print(f"{name} with transformers {to}: {outcome}", style=style, markup=False, soft_wrap=True)
    return 1 if failed else 0
