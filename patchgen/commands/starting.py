"""init: a user's project folder for configs, generated models and passes."""

from __future__ import annotations

from pathlib import Path

from patchgen import project_code, provenance
from patchgen.commands.console import console, display_path, refusing_unwritable
from patchgen.errors import ConfigError
from patchgen.runtime import project
from patchgen.templates import render

GENERATED = "generated"
FOLDERS = (GENERATED, "configs", "passes")


def init(folder: Path) -> None:
    """Writes `patchgen.toml`, the folders that it names, and `.gitattributes`.

    Raises:
        ConfigError: the folder has a project already, in patchgen.toml or in pyproject.toml.
    """
    existing = project_code.current_project(folder)
    if existing is not None and existing.folder == folder.absolute():
        raise ConfigError(f"{existing.file} configures this project already. To fix: edit that file.")
    attributes = render("gitattributes.jinja", generated=GENERATED)
    files = {folder / project.FILE: render("patchgen_toml.jinja")}
    # git keeps no empty folders, and a missing folder of models is an error
    files |= {folder / name / ".gitkeep": "" for name in FOLDERS if not (folder / name).exists()}
    with refusing_unwritable(folder, "FOLDER"):
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
    gitattributes = folder / ".gitattributes"
    before = gitattributes.read_text(encoding="utf-8") if gitattributes.is_file() else ""
    if attributes not in before:
        files[gitattributes] = before + ("\n" if before and not before.endswith("\n") else "") + attributes
    with refusing_unwritable(folder, "FOLDER"):
        provenance.write_whole(files)
    for file in files:
        console.print(f"  wrote {display_path(file)}")
    console.print("  next: patchgen generate MODEL")
