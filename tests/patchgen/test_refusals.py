"""What the record does not call proven, `patchgen train` refuses in one sentence before any rank; nothing is trained.

The reasons are found again, whatever a row says: one that no longer holds fails here. `make test-refusals` asks for every such
row, of language models with text and with media and of heads; the usual run for one of each status.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import transformers

from patchgen.commands import examination, head_sweep
from patchgen.runtime import registry
from patchgen.runtime.train import preflight
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.verify import records, verdict

ROWS = [
    row for row in json.loads(records.path_in(None).read_text(encoding="utf-8"))["rows"] if row["status"] != "proven"
]
MEDIA = {"kind": "multimodal", "sources": [{"path": "builtin:vision"}]}
QUICK = {row["status"]: f"{row['family']}-{row['model_type']}" for row in ROWS if row["family"] == "text"}
HEADS = [
    row
    for row in head_sweep.read(records.path_in(None).with_name(head_sweep.FILE)).values()
    if row["status"] != "proven"
]


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
    root, refusal = generated_folder(row["model_type"], tmp_path)
    assert without_figures(refusal) == (without_figures(row["reason"]) if row["status"] == "failed" else "")
    monkeypatch.setattr(registry, "find_head", functools.partial(registry.find_head, directory=root))
    recipe = {
        "model": {"source": row["model_type"]},
        "data": {"tokens_per_batch": 64} | ({} if row["family"] == "text" else MEDIA),
        "train": {"steps": 1},
    }
    with pytest.raises(RecipeError) as refusal:
        preflight.decide_trainable(from_dict(recipe))
    told = str(refusal.value)
    assert told.startswith(f"model.source = '{row['model_type']}': ")
    assert "\n" not in told
    if row["status"] == "failed":
        assert "Generate one with `patchgen generate" in told or "config class refuses its defaults" in told
    else:
        found = told.removeprefix(f"model.source = '{row['model_type']}': ")
        if found.startswith("pad_token_id = "):
            return  # what the config class has by default is refused before anything is built
        assert without_figures(found) == without_figures(verdict.Verdict(row["status"], row["reason"]).words)


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=row["head"]) for row in HEADS])
def test_a_head_that_is_not_proven_has_the_reason_of_the_record(row):
    (found,) = head_sweep.examine(row["model_type"], {row["kind"]: row["head"]}, transformers.__version__)
    assert found["status"] == row["status"]
    assert without_figures(found["reason"]) == without_figures(row["reason"])


def without_figures(words: str) -> str:
    """What is measured differs between processors in its last digits."""
    return re.sub(r"\d[\d.]*(e[-+]?\d+)?", "#", words)


def generated_folder(model_type: str, place: Path) -> tuple[Path, str]:
    """A folder of generated models with the one of that type and its parts; if it cannot be generated, why not."""
    root = place / "generated"
    root.mkdir()
    whole, refusal, _ = examination.generate(model_type, transformers.__version__)
    if whole:
        examination.write(whole, root)
    return root, refusal
