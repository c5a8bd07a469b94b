"""docs/tasks: the commands of every page run as they stand, and links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchgen.cli import app

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "tasks" / "README.md"
PAGES = sorted(page for page in INDEX.parent.glob("*.md") if page != INDEX)


def commands(page: Path) -> list[str]:
    """The lines of the first block."""
    return re.search(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)[1].splitlines()


def by_page(pages: list[Path] = PAGES):
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


def shell(words: list[str], place: Path) -> str:
    """What a command prints, run in `place` by this installation."""
    programs = {"patchgen": ["-m", "patchgen.cli"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *programs[words[0]], *words[1:]]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """What a clone has; the runs of the pages lie beside each other, as a reader's do."""
    place = tmp_path_factory.mktemp("clone")
    for folder in ("recipes", "examples"):
        (place / folder).symlink_to(ROOT / folder)
    return place


@pytest.mark.slow
@by_page()
def test_the_commands_run_as_they_stand(page, clone):
    for command in commands(page):
        shell(shlex.split(command), clone)
    made = set(re.findall(r"`(runs/[\w/]+?)/?`", page.read_text(encoding="utf-8")))
    assert all((clone / path).is_dir() for path in made), made


@by_page()
def test_the_commands_are_ones_that_there_are(page, monkeypatch):
    """Recipes load with what is set of them, for a real model as well; scripts are there."""
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    for command in commands(page) + re.findall(r"^    (patchgen .*)$", text, flags=re.MULTILINE):
        words = [word for word in shlex.split(command) if word != "--dry-run"]
        if words[:2] == ["patchgen", "train"]:
            result = CliRunner().invoke(app, [*words[1:], "--print-config"])
            assert result.exit_code == 0, f"{command}: {result.output} {result.exception}"
        elif words[0] == "patchgen":
            assert CliRunner().invoke(app, [words[1], "--help"]).exit_code == 0, command
        else:
            assert words[0] in ("python", "torchrun"), command
            script = next(word for word in words if word.endswith(".py"))
            compile(Path(script).read_text(encoding="utf-8"), script, "exec")


@by_page([INDEX, *PAGES])
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_index_has_every_page():
    text = INDEX.read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"]({page.name})" not in text] == []
