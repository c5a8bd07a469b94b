"""Configs and passes that a project adds to the generator, in files that its `patchgen.toml` names."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from patchgen.errors import ConfigError, PatchgenError, nearest
from patchgen.passes.base import Pass
from patchgen.runtime import project


def current_project(start: Path | None = None) -> project.Project | None:
    """The project that a folder belongs to, by default the working directory; None if it belongs to none. Raises
    ConfigError if its patchgen.toml is not TOML, or has an invalid key or value."""
    try:
        return project.find(start)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def refuse_installed_package(folder: Path, what: str) -> None:
    """Raises ConfigError if a folder, for `what` would be written, is in the installed package, where the next
    installation would delete the files."""
    package = Path(__file__).parent
    if folder.is_relative_to(package) and not (package.parent / "pyproject.toml").is_file():
        raise ConfigError(
            f"{what} would be written into the installed package ({folder}). To fix: run `patchgen init` in the folder of your "
            "project, whose patchgen.toml then names the folders of its models and configs, or give --output."
        )


def with_project_passes(kinds: Sequence[type[Pass]]) -> tuple[type[Pass], ...]:
    """The passes with those of the project inserted, each before the one that its `before` names.

    Raises ConfigError if a file is missing, cannot be imported or defines no complete pass, or a pass's name is taken, or its
    `before` names no pass.
    """
    passes = list(kinds)
    for kind in _project_passes():
        names = [known_pass.name for known_pass in passes]
        if kind.name in names:
            raise ConfigError(
                f"{inspect.getfile(kind)}: a pass named '{kind.name}' exists already. To fix: give yours another name."
            )
        if kind.before not in names:
            raise ConfigError(
                f"{inspect.getfile(kind)}: '{kind.name}' should run before '{kind.before}', which is no earlier pass. "
                f"Nearest: {nearest([kind.before], names)}."
            )
        passes.insert(names.index(kind.before), kind)
    return tuple(passes)


def _project_passes() -> list[type[Pass]]:
    current = current_project()
    project_passes: list[type[Pass]] = []
    if current is None:
        return project_passes
    for path in current.passes:
        file = current.folder / path
        if not file.is_file():
            raise ConfigError(f"{current.file}: `passes` names {path}, but there is no file {file}.")
        module = load(file)
        kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Pass)]
        kinds = [kind for kind in kinds if kind.__module__ == module.__name__ and not inspect.isabstract(kind)]
        attributes = [(kind, name) for kind in kinds for name in ("name", "purpose", "expects")]
        missing = [f"{kind.__name__}.{name}" for kind, name in attributes if not hasattr(kind, name)]
        if not kinds or missing:
            wrong = f"does not define {', '.join(missing)}" if missing else "defines no subclass of Pass"
            raise ConfigError(
                f"{file} {wrong}. A pass has a name, a purpose and expects: see `patchgen explain fused_ops`."
            )
        project_passes += kinds
    return project_passes


def load(file: Path) -> ModuleType:
    """The module of a file outside the package; executed again only if the file has changed. Raises ConfigError if it
    cannot be imported."""
    return _load(file.resolve(), file.read_bytes())


@functools.lru_cache(maxsize=64)
def _load(file: Path, content: bytes) -> ModuleType:
    name = f"patchgen_own_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ConfigError(f"{file} is not a Python file: its name does not end in .py.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # not with the loader, whose bytecode cache misses a second change within the same second
        exec(compile(content, str(file), "exec"), vars(module))
    except PatchgenError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module
