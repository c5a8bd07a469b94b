"""`make lint` checks types where pyproject.toml says that it does, and as strictly."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYRIGHT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
EXCLUDED = set(PYRIGHT["exclude"])


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


def test_an_untyped_list_is_an_error_in_every_strict_folder_and_in_no_other(tmp_path: Path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    strict = [path.replace("*.py", "") for path in PYRIGHT["strict"]]
    for folder in (*strict, "patchgen/runtime"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "planted.py").write_text("def planted(names: list) -> None: ...\n")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    errors = json.loads(ran.stdout)["generalDiagnostics"]
    assert ran.returncode == 1
    assert {Path(error["file"]).parent for error in errors} == {tmp_path / folder for folder in strict}
    assert {error["rule"] for error in errors} >= {"reportMissingTypeArgument"}


def test_strict_files_are_excused_from_no_rule_but_exhaustive_matches():
    files = [file for path in PYRIGHT["strict"] for file in (ROOT / path).parent.glob(f"{Path(path).name}/**/*.py")]
    files += (ROOT / "patchgen").glob("*.py")
    assert len(files) > 100
    excuses = {
        f"{file.name}: {found}"
        for file in files
        for found in re.findall(
            r"# (?:pyright: ?|type: ?)(.*?)(?=  #|$)", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert {found for found in excuses if not found.endswith(": reportMatchNotExhaustive=false")} == set()
