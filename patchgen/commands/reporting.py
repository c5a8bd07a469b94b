"""report: pages for reviewers."""

from __future__ import annotations

from pathlib import Path

from rich.progress import track

from patchgen import provenance
from patchgen import upgrade as comparing
from patchgen.commands.console import console, display_path, refusing_unwritable
from patchgen.commands.generation import refuse_unknown
from patchgen.errors import PatchgenError, UpstreamNotFound
from patchgen.report import index, model, upgrade
from patchgen.runtime.verify.committed_models import committed
from patchgen.upgrade import releases

FOLDER = Path("reports")


def report(models: list[str], output: Path | None) -> None:
    """Writes the page of each named model, or of all models with an index over them.

    Raises:
        PatchgenError: the page of a named model cannot be made; without names, the index gives the reason.
    """
    names = _named_or_all(models)
    folder = output or FOLDER
    with refusing_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    pages = _pages(names, raises=bool(models))
    files = {folder / f"{name}.html": text for name, (text, _, _) in pages.items() if text}
    if not models:
        rows = [index.row(name, folder, refusal, differs) for name, (_, refusal, differs) in pages.items()]
        files[folder / "index.html"] = index.page(rows)
    with refusing_unwritable(folder):
        provenance.write_whole(files)
    for path in files:
        console.print(f"  wrote {display_path(path)}")


def report_upgrade(models: list[str], to: str | None, output: Path | None) -> None:
    """Writes the page of each model's move to another release, and the index over them.

    Raises:
        PatchgenError: a release, or the record of a model, cannot be read.
    """
    names = _named_or_all(models)
    folder = output or FOLDER
    with refusing_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    comparison = comparing.compare(names, to or releases.installed())
    files = {folder / f"upgrade_{one.model}.html": upgrade.page(one) for one in comparison.models}
    files[folder / "upgrade.html"] = upgrade.index(comparison)
    with refusing_unwritable(folder):
        provenance.write_whole(files)
    for path in files:
        console.print(f"  wrote {display_path(path)}")


def _named_or_all(models: list[str]) -> list[str]:
    """The named models, or else all."""
    refuse_unknown(models)
    names = models or committed()
    if not names:
        raise UpstreamNotFound(f"There is no generated model in {display_path(provenance.generated_root())}.")
    return names


def _pages(names: list[str], *, raises: bool) -> dict[str, tuple[str, str, list[str]]]:
    """Model -> its page, and the reason why it has none, one of them empty; and its files that differ from those generated now."""
    found: dict[str, tuple[str, str, list[str]]] = {}
    for name in track(names, "writing", console=console, disable=not console.is_terminal or len(names) == 1):
        try:
            text, differs = model.page_and_differing(name)
            found[name] = (text, "", differs)
        except PatchgenError as error:
            if raises:
                raise
            found[name] = ("", str(error), [])
    return found
