"""report: pages for reviewers."""

from __future__ import annotations

from pathlib import Path

from rich.progress import track

from patchgen import provenance
from patchgen.commands.console import console, shown
from patchgen.errors import PatchgenError, UpstreamNotFound
from patchgen.report import index, model
from patchgen.runtime.verify.committed_models import committed

FOLDER = Path("reports")


def report(models: list[str], output: Path | None) -> None:
    """Writes the page of each model and the index over all of them, or those of the models that are named.

    Raises:
        PatchgenError: a model that was named has no page; without names, the index says why.
    """
    known = committed()
    unknown = [name for name in models if name not in known]
    if unknown or not known:
        there_are = ", ".join(known) or "none"
        raise UpstreamNotFound(
            f"Not among the generated models: {', '.join(unknown) or 'any'}. There are: {there_are}."
        )
    folder = output or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    pages = _pages(models or known, named=bool(models))
    files = {folder / f"{name}.html": text for name, (text, _) in pages.items() if text}
    if not models:
        lines = [index.line(name, folder, why) for name, (_, why) in pages.items()]
        files[folder / "index.html"] = index.page(lines)
    provenance.write_whole(files)
    for path in files:
        console.print(f"  wrote {shown(path)}")


def _pages(names: list[str], *, named: bool) -> dict[str, tuple[str, str]]:
    """Model -> its page, and why it has none."""
    found = {}
    for name in track(names, "writing", console=console, disable=not console.is_terminal or len(names) == 1):
        try:
            found[name] = (model.page(name), "")
        except PatchgenError as error:
            if named:
                raise
            found[name] = ("", str(error))
    return found
