"""Made-up data sets that every installation has: for tests, benches and first runs."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patchgen.runtime.data.files import TextFiles
from patchgen.runtime.data.problems import DataError

VALIDATION_EVERY = 20


def open_builtin(name: str, split: str) -> Any:
    """The made-up set `name`; of twenty samples one belongs to the split `validation`, the others to `train`."""
    if name not in BUILTINS:
        raise DataError(f"There is no made-up data set {name!r}; there are {', '.join(BUILTINS)}.")
    if split not in ("train", "validation"):
        raise DataError(f"The made-up data sets have the splits train and validation, not {split!r}.")
    return BUILTINS[name](split)


def part_of(items: Sequence[Any], split: str) -> list[Any]:
    validation = split == "validation"
    return [item for number, item in enumerate(items) if (number % VALIDATION_EVERY == 0) is validation]


def standard_library(split: str) -> TextFiles:
    """The sources of Python's standard library, a file a document, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"}
    files = [
        file for file in root.rglob("*.py") if not left_out & set(file.relative_to(root).parts) and _is_text(file)
    ]
    return TextFiles(part_of(sorted(files), split))


def _is_text(file: Path) -> bool:
    try:
        return bool(file.read_text(encoding="utf-8").strip())
    except UnicodeDecodeError:
        return False


BUILTINS: dict[str, Callable[[str], Any]] = {"stdlib": standard_library}
