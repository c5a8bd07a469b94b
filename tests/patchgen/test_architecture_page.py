"""docs/architecture.md: every path that it names is there, and what it says imports what does."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = "patchgen|runtime|kernels|generated_models|templates|tests|docs|benchmarks|records"


def named_paths() -> set[str]:
    """Paths from the root, but those of the model that the walks call x."""
    found = re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./]*", PAGE.read_text(encoding="utf-8"))
    return {path.rstrip(".") for path in found} - {"generated_models/x/", "generated_models/x/modeling_x.py"}


def test_every_path_is_there():
    paths = named_paths()
    assert len(paths) > 40
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_generated_models_import_ops_alone():
    ours = re.compile(r"^[ \t]*(?:from|import) patchgen.*", re.MULTILINE)
    for file in (ROOT / "generated_models").glob("*/modeling_*.py"):
        assert ours.findall(file.read_text(encoding="utf-8")) == ["from patchgen.runtime import ops"], file
