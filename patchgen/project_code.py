"""Configs and passes that a project adds to the generator, in files that its `patchgen.toml` names."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from patchgen.errors import ConfigError, PatchgenError
from patchgen.passes.base import Pass
from patchgen.runtime import project


def current_project(start: Path | None = None) -> project.Project | None:
    """The project of a folder, by default of the working directory.

    Raises:
        ConfigError: its file is not TOML, or has a key or a value that projects do not have.
    """
    try:
        return project.find(start)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def refuse_installed_package(folder: Path, what: str) -> None:
    """Refuses to write into an installed package: the next installation would lose it.

    Raises:
        ConfigError: with what to do.
    """
    package = Path(__file__).parent
    if folder.is_relative_to(package) and not (package.parent / "pyproject.toml").is_file():
        raise ConfigError(
            f"{what} would be written into the installed package ({folder}). To fix: run `patchgen init` in the folder of your "
            "project, whose patchgen.toml then names the folders of its models and configs, or give --output."
        )


def with_project_passes(kinds: Sequence[type[Pass]]) -> tuple[type[Pass], ...]:
    """The passes with those of the project inserted, each before the one that its `before` names.

    Raises:
        ConfigError: a file is missing, cannot be imported or defines no complete pass; a name is taken, or `before` names none.
    """
    passes = list(kinds)
    for kind in _project_passes():
        names = [known_pass.name for known_pass in passes]
        if kind.name in names:
            raise ConfigError(
                f"{inspect.getfile(kind)}: a pass named '{kind.name}' exists already. To fix: give yours another name."
            )
        if kind.before not in names:
            near = ", ".join(difflib.get_close_matches(kind.before, names, n=3, cutoff=0.2)) or "none"
            raise ConfigError(
                f"{inspect.getfile(kind)}: '{kind.name}' should run before '{kind.before}', which is no earlier pass. "
                f"Nearest: {near}."
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
        kinds = [
            candidate
            for candidate in kinds
            if candidate.__module__ == module.__name__ and not inspect.isabstract(candidate)
        ]
        attributes = ("name", "purpose", "expects")
        missing = [
            f"{pass_class.__name__}.{name}"
            for pass_class in kinds
            for name in attributes
            if not hasattr(pass_class, name)
        ]
        if not kinds or missing:
            wrong = f"does not define {', '.join(missing)}" if missing else "defines no subclass of Pass"
            raise ConfigError(
                f"{file} {wrong}. A pass has a name, a purpose and expects: see `patchgen explain fused_ops`."
            )
        project_passes += kinds
    return project_passes


def load(file: Path) -> ModuleType:
    """The module of a file outside the package, executed again after the file has changed.

    Raises:
        ConfigError: it cannot be imported.
    """
    return _load(file.resolve(), file.read_bytes())


@functools.lru_cache(maxsize=64)
def _load(file: Path, content: bytes) -> ModuleType:
    name = f"patchgen_own_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ConfigError(f"{file} is not a Python file: its name does not end in .py.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # not by the loader: its bytecode cache misses a second change within the same second
        exec(compile(content, str(file), "exec"), vars(module))
    except PatchgenError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module
