"""What `make lint` leaves out of the check of types is what pyproject.toml says that it leaves out."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXCLUDED = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["exclude"])


def imports_triton(file: Path) -> bool:
    """Whether a module cannot be read as plain Python: it imports Triton, of which Gluon is a part, at its top."""
    imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    return any(module.partition(".")[0] == "triton" for module in modules)


def test_of_the_kernels_those_in_triton_are_left_out_and_no_others():
    kernels = {
        f"patchgen/{file.relative_to(ROOT)}" for file in (ROOT / "kernels").rglob("*.py") if imports_triton(file)
    }
    assert len(kernels) > 10
    assert {path for path in EXCLUDED if path.startswith("patchgen/kernels")} == kernels


def test_what_is_left_out_is_there():
    assert not [path for path in EXCLUDED if not (ROOT / path).exists()]
