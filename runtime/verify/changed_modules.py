"""Changed sources as modules of upstream's own package, so that their relative imports work; and which lines run."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import linecache
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType

_numbers = itertools.count(1)


class ChangedModule:
    """A changed form of an upstream module.

    Attributes:
        name: its import path.
        folder: for files generated from it; deleted when the block ends.
    """

    def __init__(self, name: str, folder: Path, package: ModuleType) -> None:
        self.name, self.folder = name, folder
        self._package, self._replaced = package, {}

    def load(self) -> ModuleType:
        """Imports the changed module; until the block ends, upstream's auto classes build its classes."""
        module = importlib.import_module(self.name)
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == self.name and hasattr(self._package, name):
                self._replaced.setdefault(name, getattr(self._package, name))
                setattr(self._package, name, value)
        return module

    def restore(self) -> None:
        for name, value in self._replaced.items():
            setattr(self._package, name, value)


@contextlib.contextmanager
def changed_module(module: str, text: str, siblings: Mapping[str, str]) -> Iterator[ChangedModule]:
    """A changed form of `module` that can be imported inside the block.

    Args:
        module: the import path of upstream's file.
        text: the changed source.
        siblings: sources of new modules of its package, by the last part of their import path.
    """
    package = importlib.import_module(module.rpartition(".")[0])
    name = f"{module}_changed_{next(_numbers)}"
    sources = {name: text} | {f"{package.__name__}.{last}": code for last, code in siblings.items()}
    with tempfile.TemporaryDirectory() as folder:
        for source, code in sources.items():
            (Path(folder) / f"{source.rpartition('.')[2]}.py").write_text(code, encoding="utf-8")
        changed = ChangedModule(name, Path(folder), package)
        sys.meta_path.insert(0, finder := _Finder(frozenset(sources), Path(folder)))
        try:
            yield changed
        finally:
            changed.restore()
            sys.meta_path.remove(finder)
            for source in sources:
                sys.modules.pop(source, None)
            linecache.checkcache()


class _Finder:
    """Finds modules of given names in a folder."""

    def __init__(self, names: frozenset[str], folder: Path) -> None:
        self._names, self._folder = names, folder

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None):
        if name not in self._names:
            return None
        return importlib.util.spec_from_file_location(name, self._folder / f"{name.rpartition('.')[2]}.py")


@contextlib.contextmanager
def executed_lines(file: str) -> Iterator[set[int]]:
    """Collects the lines of a file that run inside the block."""
    lines: set[int] = set()

    def on_line(frame: FrameType, event: str, _: object):
        if event == "line":
            lines.add(frame.f_lineno)
        return on_line

    def on_call(frame: FrameType, event: str, _: object):
        return on_line if frame.f_code.co_filename == file else None

    sys.settrace(on_call)
    try:
        yield lines
    finally:
        sys.settrace(None)
