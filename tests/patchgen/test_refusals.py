"""What the record does not call proven, `patchgen train` refuses in one sentence before any rank; nothing is trained.

`make test-refusals` asks for every such row; the usual run for the first of each status.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from patchgen import provenance, upstream
from patchgen.commands import support_matrix
from patchgen.errors import PatchgenError
from patchgen.pipeline import generate
from patchgen.runtime import registry
from patchgen.runtime.train import preflight
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.verify import verdict

ROWS = [
    row
    for row in json.loads((support_matrix.docs() / "coverage.json").read_text(encoding="utf-8"))["rows"]
    if row["status"] != "proven"
]
QUICK = {row["status"]: f"{row['family']}-{row['model_type']}" for row in ROWS if row["family"] == "text"}


def name_of(row: dict) -> str:
    return f"{row['family']}-{row['model_type']}"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name_of(row), marks=() if name_of(row) in QUICK.values() else pytest.mark.slow)
        for row in ROWS
    ],
)
def test_what_is_not_proven_is_refused_in_one_sentence(row, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = generated_folder(row["model_type"], tmp_path)
    monkeypatch.setattr(registry, "find_head", functools.partial(registry.find_head, directory=root))
    recipe = {
        "model": {"source": row["model_type"]},
        "data": {"kind": "text" if row["family"] == "text" else "multimodal", "tokens_per_batch": 64},
        "train": {"steps": 1},
    }
    with pytest.raises(RecipeError) as refusal:
        preflight.require_trainable(from_dict(recipe))
    told = str(refusal.value)
    assert told.startswith(f"model.source = '{row['model_type']}': ")
    assert "\n" not in told
    if row["status"] == "failed":
        assert "make one with `patchgen generate" in told or "config class refuses its defaults" in told
    else:
        assert (
            told.removeprefix(f"model.source = '{row['model_type']}': ")
            == verdict.Verdict(row["status"], row["reason"]).words
        )


def without_figures(words: str) -> str:
    """What is measured differs between processors in its last digits."""
    return re.sub(r"\d[\d.]*(e[-+]?\d+)?", "#", words)


def generated_folder(model_type: str, place: Path) -> Path:
    """A folder of generated models with the one of that type, if it can be generated."""
    root = place / "generated"
    root.mkdir()
    try:
        made = generate(upstream.load(model_type))
    except PatchgenError:
        return root
    provenance.write(made, root / made.model, force=True)
    return root
