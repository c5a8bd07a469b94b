"""`patchgen verify MODEL --ranks N --directory D`: the file in D is what is proven, and nothing outside D is written."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchgen import provenance
from patchgen.cli import app
from patchgen.errors import ConfigError
from patchgen.runtime.verify.rank_report import FILE_NAME


def verify(*arguments: str) -> int:
    """The exit code of the command; an error for the user is raised."""
    result = CliRunner().invoke(app, ["verify", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code


def copy_of(model: str, place: Path) -> Path:
    """A clean copy of a committed model, without its proofs."""
    return shutil.copytree(
        provenance.generated_root() / model, place / "mine", ignore=shutil.ignore_patterns("verify*", "__pycache__")
    )


def checkout() -> dict[str, str]:
    """A hash of every file that a proof might write: the committed models, the records and the documentation."""
    root = provenance.generated_root().resolve()
    beside = (root.parent / "docs", root.parent / "records")
    files = [path for folder in (root, *beside) for path in folder.rglob("*.*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.suffix != ".pyc"}


def test_a_text_model_in_a_folder_is_proven_and_nothing_outside_is_written(tmp_path: Path):
    folder, before = copy_of("llama", tmp_path), checkout()
    assert verify("llama", "--ranks", "2", "--directory", str(folder)) == 0
    assert checkout() == before
    layouts = json.loads((folder / FILE_NAME).read_text())["layouts"]
    assert set(layouts["2 ranks, sp 1, whole parameters"]["cases"]) == {"text", "plain", "three", "packed"}


def test_a_defect_in_the_file_of_the_folder_is_found(tmp_path: Path):
    folder = copy_of("llama", tmp_path)
    file = folder / "modeling_llama.py"
    text = file.read_text()
    old = "hidden_states = residual + hidden_states"
    assert old in text
    file.write_text(text.replace(old, "hidden_states = residual + 1.01 * hidden_states"))
    before = checkout()
    assert verify("--ranks", "2", "--sp", "2", "--directory", str(folder)) == 1
    assert checkout() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [("qwen3_vl", ("--sp", "2")), ("qwen3_moe", ("--sp", "2", "--ep", "2", "--fsdp")), ("qwen3_moe", ())],
)
def test_models_with_media_and_with_experts(model: str, options: tuple[str, ...], tmp_path: Path):
    folder, before = copy_of(model, tmp_path), checkout()
    assert verify(model, "--ranks", "2", *options, "--directory", str(folder)) == 0
    assert checkout() == before


def test_what_cannot_be_is_said_before_ranks_start(tmp_path: Path):
    folder = str(copy_of("llama", tmp_path))
    for arguments, message in (
        (("qwen3", "--directory", folder), "contains 'llama', but 'qwen3' was named"),
        (("--all", "--directory", folder), "is one model"),
        (("llama", "--directory", folder, "--outdated"), "--outdated selects committed models"),
        (("llama", "--ranks", "2", "--sp", "3"), "--sp 3 does not divide --ranks 2"),
        (("llama", "--ranks", "2", "--ep", "2"), "add --fsdp"),
        (("llama", "--ep", "2"), "lay out several ranks. To fix: give their number"),
    ):
        with pytest.raises(ConfigError, match=message):
            verify(*arguments)
