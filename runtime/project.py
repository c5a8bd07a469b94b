"""What a repository says once for all of its commands and recipes: where its models, configs and passes lie, and its code.

In `patchgen.toml`, or as `[tool.patchgen]` in pyproject.toml, of the folder that a command runs in or of one above it:

    generated = "generated"            # the folder that generate writes to, and that check, verify and train read
    configs = "configs"                # CONFIG = ModelConfig(...) in MODEL.py: before those of the package
    passes = ["passes/my_pass.py"]     # files with passes of one's own
    code = "my_architecture"           # an architecture that transformers does not know: a folder or a module
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE, SHARED_FILE, SECTION = "patchgen.toml", "pyproject.toml", "[tool.patchgen]"
TEXTS, LISTS = ("generated", "configs", "code"), ("passes",)


@dataclass(frozen=True)
class Project:
    """What the file of a project says.

    Attributes:
        file: the file; the paths in it start from its folder.
    """

    file: Path
    generated: str | None = None
    configs: str | None = None
    code: str | None = None
    passes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.file.parent

    def path(self, said: str) -> Path:
        """A path that the file says, as it is found from where the command runs: shown and recorded as it is said there."""
        return Path(said) if self.folder == Path.cwd() else self.folder / said


def find(start: Path | None = None) -> Project | None:
    """The project of a folder, by default of the one that the command runs in: the nearest file, upwards, that says one.

    Raises:
        ValueError: a file is not TOML, says something that no project says, or two files of a folder both speak.
    """
    here = (start or Path()).absolute()
    for folder in (here, *here.parents):
        found = [one for name in (FILE, SHARED_FILE) if (one := _read_present(folder / name)) is not None]
        if len(found) > 1:
            raise ValueError(f"{folder} holds {FILE} and {SECTION} in {SHARED_FILE}: say it in one of them.")
        if found:
            return found[0]
    return None


def code() -> dict[str, str]:
    """What the project says of models, as a recipe's `model` section does: `code` and `generated`.

    Raises:
        ValueError: see `find`.
    """
    project = find()
    if project is None:
        return {}
    found = {} if project.generated is None else {"generated": str(project.path(project.generated))}
    if project.code is not None:  # a folder of the project's, or the name of a module
        folder = project.path(project.code)
        found["code"] = str(folder) if folder.is_dir() else project.code
    return found


_KNOWN: dict[Path, None] = {}
"""Folders of generated models that recipes and options have named in this process."""


def know(folder: Path) -> None:
    """A folder of generated models that goes before the project's in this process: a recipe or an option names it."""
    _KNOWN[folder.resolve()] = None


def generated_folders() -> list[Path]:
    """Where generated models of one's own lie: those that were named in this process, then the project's. The
    installation's, which come last, are not among them.

    Raises:
        ValueError: see `find`.
    """
    said = code().get("generated")
    named = [folder for folder in _KNOWN if folder.is_dir()]  # a folder for one run may be gone
    return list(dict.fromkeys([*named, *([Path(said).resolve()] if said is not None else [])]))


def _read_present(file: Path) -> Project | None:
    try:
        stat = file.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return _read(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _read(file: Path, _changed: int, _size: int) -> Project | None:
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    if file.name == SHARED_FILE:
        said = said.get("tool", {}).get("patchgen")
        if said is None:
            return None
    section = f"{SECTION} " if file.name == SHARED_FILE else ""
    lists = {name: said[name] for name in LISTS if name in said}
    texts = {name: value for name, value in said.items() if name not in lists}
    all_right = texts.keys() <= {*TEXTS} and all(isinstance(one, str) for one in texts.values())
    if not all_right or not all(_is_texts(one) for one in lists.values()):
        raise ValueError(
            f"{file}: {section}takes the texts {', '.join(TEXTS)} and the list of texts {', '.join(LISTS)}, not {said}."
        )
    return Project(file, **texts, passes=tuple(lists.get("passes", ())))


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
