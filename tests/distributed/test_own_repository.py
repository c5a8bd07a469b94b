"""docs/own_repository.md as it stands, with an installed wheel in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_repository.md").read_text(encoding="utf-8")
EDIT, PASS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add_model.md").read_text(), flags=re.DOTALL)
COMMANDS = re.findall(r"^    patchgen (.*)$", PAGE, flags=re.MULTILINE)
BUILD = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
LEFT_OUT = (
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*",
    "tests",
    "runs",
    "reports",
    "docs",
    "records",
    "benchmarks",
)


def block(language: str, holding: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return next(one for one in found if holding in one)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """What `pip install --target` of a wheel of this package leaves; its dependencies are those of this environment."""
    source, site = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    built = subprocess.run(
        [sys.executable, "-c", BUILD, site], cwd=source, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr[-3000:]
    wheel = site / built.stdout.splitlines()[-1]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True, timeout=300)
    return site


@pytest.fixture
def patchgen(site, tmp_path):
    """Runs a command of the installed package in an empty folder."""
    place = tmp_path / "mine"
    place.mkdir()
    ours = ("PYTHONPATH", "TRITON_INTERPRET")  # what tests of this package set for themselves
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}

    def run(words: str, code: int = 0) -> str:
        command = [sys.executable, "-P", "-m", "patchgen.cli", *shlex.split(words)]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    run.place = place
    return run


def files(folder: Path) -> dict[str, int]:
    there = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): path.stat().st_mtime_ns for path in there}


def test_an_installed_package_writes_into_the_project_and_nowhere_else(patchgen, site):
    before = files(site)
    refused = patchgen("generate llama", code=1)
    assert (
        "would be written into the installed package" in refused
        and "patchgen init" in refused
        and str(site) in refused
    )
    patchgen("init")
    assert "wrote generated/llama/modeling_llama.py" in patchgen("generate llama")
    assert "1 of 1 generated models are current" in patchgen("check", code=1), "and it has no proof yet"
    assert files(site) == before
    assert sorted(path.name for path in patchgen.place.iterdir()) == [
        ".gitattributes",
        "configs",
        "generated",
        "passes",
        "patchgen.toml",
    ]


@pytest.mark.slow
def test_the_page_works_as_written(patchgen, site):
    place, before = patchgen.place, files(site)
    assert [words.split()[0] for words in COMMANDS] == [
        *("init", "generate", "verify", "check"),
        *("generate", "verify"),
        *("train", "report"),
    ]
    init, generate, verify, check, again, verify_again, train, report = COMMANDS
    for words in (init, generate):
        patchgen(words)
    first = (place / "generated" / "qwen3_moe" / "modeling_qwen3_moe.py").read_text()
    assert "proven" in patchgen(verify)
    patchgen(check)

    (place / "passes" / "trace_attention.py").write_text(PASS)
    toml = (place / "patchgen.toml").read_text()
    assert "passes = []" in toml and block("toml", "passes = []") in toml
    (place / "patchgen.toml").write_text(re.sub(r"passes = \[\].*\n", block("toml", "trace_attention"), toml))
    assert "a forward gets a decorator" in patchgen("explain trace_attention")
    patchgen(check, code=1)  # what stands there was made without the pass
    patchgen(again)
    text = (place / "generated" / "qwen3_moe" / "modeling_qwen3_moe.py").read_text()
    assert "record_function" in text and "record_function" not in first
    (place / "configs" / "olmo2.py").write_text(EDIT)
    patchgen("generate olmo2")
    assert "proven" in patchgen(f"{verify_again} olmo2")
    assert "Every recorded proof is current" in patchgen(check)

    patchgen("upgrade")  # to the installed release: nothing that needs a person
    (place / "toy.yaml").write_text(block("yaml", "model:"))
    patchgen(train)
    steps = [json.loads(line) for line in (place / "runs" / "toy" / "steps.jsonl").read_text().splitlines()]
    assert sum("loss" in step for step in steps) == 3
    patchgen(report)
    assert {path.name for path in (place / "reports").iterdir()} == {"index.html", "qwen3_moe.html", "olmo2.html"}
    assert "trace_attention" in (place / "reports" / "qwen3_moe.html").read_text()
    assert files(site) == before
