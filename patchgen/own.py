"""What a project adds to the generator: configs and passes of its own, which stand in files that its `patchgen.toml` names."""

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


def present(start: Path | None = None) -> project.Project | None:
    """The project of a folder, by default of the one that the command runs in.

    Raises:
        ConfigError: its file is not TOML, or says something that no project says.
    """
    try:
        return project.find(start)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def require_place(folder: Path, what: str) -> None:
    """Refuses to write into an installed package: the next installation would lose it.

    Raises:
        ConfigError: with what to do.
    """
    package = Path(__file__).parent
    if folder.is_relative_to(package) and not (package.parent / "pyproject.toml").is_file():
        raise ConfigError(
            f"{what} would go into the installed package ({folder}). Run `patchgen init` in the folder of your project, "
            "which then says where its models and configs lie, or give --output."
        )


def with_own(kinds: Sequence[type[Pass]]) -> tuple[type[Pass], ...]:
    """The passes with those of the project, each before the one that its `before` names.

    Raises:
        ConfigError: a file is not there, cannot be imported or holds no pass; a name is taken, or `before` names none.
    """
    found = list(kinds)
    for kind in _passes():
        names = [one.name for one in found]
        if kind.name in names:
            raise ConfigError(
                f"{inspect.getfile(kind)}: there is a pass '{kind.name}' already. Give yours another name."
            )
        if kind.before not in names:
            near = ", ".join(difflib.get_close_matches(kind.before, names, n=3, cutoff=0.2)) or "none"
            raise ConfigError(
                f"{inspect.getfile(kind)}: '{kind.name}' runs before '{kind.before}', and there is no such pass before it. "
                f"Nearest: {near}."
            )
        found.insert(names.index(kind.before), kind)
    return tuple(found)


def _passes() -> list[type[Pass]]:
    own, found = present(), []
    if own is None:
        return found
    for said in own.passes:
        file = own.folder / said
        if not file.is_file():
            raise ConfigError(f"{own.file}: passes names {said}, and there is no file {file}.")
        module = load(file)
        kinds = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Pass)]
        kinds = [one for one in kinds if one.__module__ == module.__name__ and not inspect.isabstract(one)]
        unsaid = [
            f"{one.__name__}.{what}"
            for one in kinds
            for what in ("name", "purpose", "expects")
            if not hasattr(one, what)
        ]
        if not kinds or unsaid:
            wrong = f"does not say {', '.join(unsaid)}" if unsaid else "holds no class that is a Pass"
            raise ConfigError(
                f"{file} {wrong}. A pass says its name, purpose and expects: `patchgen explain fused_ops`."
            )
        found += kinds
    return found


def load(file: Path) -> ModuleType:
    """The module of a file outside the package, read anew when it has changed.

    Raises:
        ConfigError: it cannot be imported.
    """
    return _load(file.resolve(), file.read_bytes())


@functools.lru_cache(maxsize=64)
def _load(file: Path, _content: bytes) -> ModuleType:
    name = f"patchgen_own_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ConfigError(f"{file} is not a Python file: its name does not end with .py.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # not by the loader, whose cache of bytecode takes a file that changed twice in a second for the first one
        exec(compile(_content, str(file), "exec"), vars(module))
    except PatchgenError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module
