"""Settings of a repository for all of its commands and recipes: the folders of its models, configs, passes and code.

In `patchgen.toml`, or as `[tool.patchgen]` in pyproject.toml, of the working directory or the nearest parent:

    generated = "generated"            # the folder that generate writes to, and that check, verify and train read
    configs = "configs"                # CONFIG = ModelConfig(...) in MODEL.py: they precede those of the package
    passes = ["passes/my_pass.py"]     # files with custom passes
    code = "my_architecture"           # an architecture that transformers does not know: a folder or a module
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE, SHARED_FILE, SECTION = "patchgen.toml", "pyproject.toml", "[tool.patchgen]"
STRINGS, LISTS = ("generated", "configs", "code"), ("passes",)


@dataclass(frozen=True)
class Project:
    """The settings of a project.

    Attributes:
        file: the settings file; paths in it are relative to its folder.
    """

    file: Path
    generated: str | None = None
    configs: str | None = None
    code: str | None = None
    passes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.file.parent

    def path(self, setting: str) -> Path:
        """A path in the file, resolved from the working directory; unchanged if that is the project's folder."""
        return Path(setting) if self.folder == Path.cwd() else self.folder / setting


def find(start: Path | None = None) -> Project | None:
    """The project of a folder (default: the working directory): the nearest settings file in it or a parent.

    Raises:
        ValueError: a file is not TOML or has unknown settings, or a folder has both files.
    """
    directory = (start or Path()).absolute()
    for folder in (directory, *directory.parents):
        projects = [project for name in (FILE, SHARED_FILE) if (project := _read_present(folder / name)) is not None]
        if len(projects) > 1:
            raise ValueError(f"{folder} has both {FILE} and {SECTION} in {SHARED_FILE}: keep one of them.")
        if projects:
            return projects[0]
    return None


def model_settings() -> dict[str, str]:
    """The project's defaults for a recipe's `model` section: `code` and `generated`.

    Raises:
        ValueError: see `find`.
    """
    project = find()
    if project is None:
        return {}
    settings = {} if project.generated is None else {"generated": str(project.path(project.generated))}
    if project.code is not None:  # a folder in the project, or the name of a module
        folder = project.path(project.code)
        settings["code"] = str(folder) if folder.is_dir() else project.code
    return settings


_ADDED: dict[Path, None] = {}
"""Folders of generated models that recipes and options named in this process."""


def add_models(folder: Path) -> None:
    """Adds a folder of generated models, which precedes the project's in this process."""
    _ADDED[folder.resolve()] = None


def generated_folders() -> list[Path]:
    """The user's folders of generated models: those added in this process, then the project's. The installation's comes
    last and is not included.

    Raises:
        ValueError: see `find`.
    """
    configured = model_settings().get("generated")
    folders = [folder for folder in _ADDED if folder.is_dir()]  # a temporary folder may be gone
    return list(dict.fromkeys([*folders, *([Path(configured).resolve()] if configured is not None else [])]))


def _read_present(file: Path) -> Project | None:
    try:
        stat = file.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return _read(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _read(file: Path, _changed: int, _size: int) -> Project | None:
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    if file.name == SHARED_FILE:
        settings = settings.get("tool", {}).get("patchgen")
        if settings is None:
            return None
    section = f"{SECTION} " if file.name == SHARED_FILE else ""
    lists = {name: settings[name] for name in LISTS if name in settings}
    strings = {name: value for name, value in settings.items() if name not in lists}
    are_valid = strings.keys() <= {*STRINGS} and all(isinstance(value, str) for value in strings.values())
    if not are_valid or not all(_is_string_list(value) for value in lists.values()):
        raise ValueError(
            f"{file}: {section}takes the strings {', '.join(STRINGS)} and the string list {', '.join(LISTS)}, not {settings}."
        )
    return Project(file, **strings, passes=tuple(lists.get("passes", ())))


def _is_string_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
