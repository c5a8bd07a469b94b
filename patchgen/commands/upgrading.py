"""upgrade: what a move to another release changes, and the move itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from patchgen import provenance
from patchgen import upgrade as upgrading
from patchgen.commands.console import console
from patchgen.errors import UpstreamNotFound
from patchgen.runtime.verify.committed_models import committed
from patchgen.upgrade import releases, words


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
    """Compares committed models with what a release makes of them; with `apply` moves those that can be moved.

    Returns:
        The worst verdict (0, 10 or 20); after `apply` 0, or 20 if a model stays behind.
    """
    refuse_unknown(models)
    names = models or committed()
    to = to or releases.installed()
    out = Console(highlight=False, stderr=True) if as_json else console
    shown = (lambda found: None) if as_json or apply else (lambda one: words.show_model(one, out, verbose=verbose))
    found = upgrading.compare(names, to, jobs=jobs, reviewed=reviewed, done=shown)
    if as_json:
        json.dump(found.to_json(), sys.stdout, indent=2, ensure_ascii=False)
        print()
    if not apply:
        for line in words.summary(found) if len(names) > 1 else ():
            out.print(line, markup=False, soft_wrap=True)
        return found.verdict

    from patchgen.upgrade.applying import move

    result = move(found, to, provenance.generated_root(), reviewed=reviewed, python=python, jobs=jobs, say=out.print)
    for line in words.summary(found):
        out.print(line, markup=False, soft_wrap=True)
    if result.moved:
        out.print("\nThe message of the commit:\n", markup=False)
        print(
            words.commit_message(found, result.moved, reviewed, result.held_back), file=sys.stderr if as_json else None
        )
    return 20 if result.held_back else 0


def refuse_unknown(models: list[str]) -> None:
    """Raises where a model is none of the committed ones."""
    known = committed()
    missing = [name for name in models if name not in known]
    if missing:
        there_are = ", ".join(known) or "none"
        raise UpstreamNotFound(f"Not among the committed models: {', '.join(missing)}. There are: {there_are}.")
