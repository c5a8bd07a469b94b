"""With imports made absolute every modeling file of the installed transformers comes out as it went in.

The syntax tree is the same but for relative imports, every comment is there, and so is the licence. All files take about
a minute; the fast suite takes every twenty-fifth.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize

import pytest
from generation_cases import with_absolute_imports

from patchgen import upstream

RELEASE = upstream.open_release()
FILES = RELEASE.all_modeling_files
SHARDS = 10
FAST = FILES[::25]


def test_the_corpus_is_the_whole_release():
    assert len(FILES) > 400
    assert all(path.startswith("models/") for path in FILES)


@pytest.mark.parametrize("shard", range(2))
def test_a_sample_comes_out_as_it_went_in(shard: int):
    check(FAST[shard::2])


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_file_comes_out_as_it_went_in(shard: int):
    check(FILES[shard::SHARDS])


def check(paths: tuple[str, ...]) -> None:
    assert paths
    problems = [problem for path in paths if (problem := difference(path))]
    assert problems == []


def difference(path: str) -> str:
    """What differs between a file and its regeneration; "" if nothing does."""
    origin = upstream.load_file(RELEASE, path)
    text = with_absolute_imports(origin)
    if tree(text, origin.package) != tree(origin.text, origin.package):
        return f"{path}: another syntax tree"
    if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(ast.parse(text))):
        return f"{path}: a relative import is left"
    if comments(text) != comments(origin.text):
        return f"{path}: other comments"
    head = licence(origin.text)
    if not text.startswith(head) or ("Copyright" in origin.text[:2000]) != ("Copyright" in text[:2000]):
        return f"{path}: another licence"
    return ""


def tree(text: str, package: str) -> str:
    """The dumped tree, each relative import written as what it means."""
    parts = package.split(".")
    parsed = ast.parse(text)
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level + 1]
            node.module, node.level = ".".join([*base, *([node.module] if node.module else [])]), 0
    return ast.dump(parsed)


def comments(text: str) -> list[str]:
    return [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]


def licence(text: str) -> str:
    lines = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join(lines[:end])


IMPORT_ALL = """
import importlib, os, sys
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
sys.path.insert(0, sys.argv[1])
for path in sorted(Path(sys.argv[1]).glob("*.py"))[int(sys.argv[2]) :: int(sys.argv[3])]:
    try:
        importlib.import_module(path.stem)
    except Exception as error:
        print(f"{path.stem}\\t{type(error).__name__}\\t{str(error).strip().splitlines()[0] if str(error) else ''}")
    else:
        print(f"{path.stem}\\tok\\t")
"""


@pytest.mark.slow
def test_every_regenerated_file_imports_where_upstream_imports(tmp_path):
    """In two processes: a file that does not import is one whose upstream does not either, and the reason is shown."""
    pytest.importorskip("torch")
    for path in FILES:
        origin = upstream.load_file(RELEASE, path)
        (tmp_path / (path.removesuffix(".py").replace("/", "__") + ".py")).write_text(
            with_absolute_imports(origin), encoding="utf-8"
        )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", IMPORT_ALL, str(tmp_path), str(i), "2"], stdout=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    rows = [line.split("\t") for run in runs for line in run.communicate()[0].splitlines() if line.count("\t") == 2]
    assert len(rows) == len(FILES)
    failed = {name: f"{kind}: {reason}" for name, kind, reason in rows if kind != "ok"}
    print(*(f"{name}: {why}" for name, why in failed.items()), sep="\n")
    fails_upstream = {name for name in failed if not imports(f"transformers.{name.replace('__', '.')}")}
    assert {name: why for name, why in failed.items() if name not in fails_upstream} == {}


def imports(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
