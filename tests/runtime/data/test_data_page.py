"""Each row of the table of formats in docs/data.md, run: its format, its kind, and what is learned of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from small_processors import byte_tokenizer, template

from patchgen.runtime.data import DataConfig, SourceConfig, build_loader
from patchgen.runtime.data.formats import FORMATS, FORMATS_OF_KIND
from patchgen.runtime.data.preview import make_preview

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
TABLE = re.findall(r"^\| `(\w+)` \| `(\{.*\})` \| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
TOKENIZER = byte_tokenizer(template(marked=False), {})


def test_every_format_is_in_the_table():
    assert {name for name, _, _, _ in TABLE} == FORMATS.keys() - {"tags"}
    assert {kind for _, _, kind, _ in TABLE} == FORMATS_OF_KIND.keys() - {
        "multimodal",
        "classification",
        "token_classes",
    }


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("name", "row", "kind", "told"), TABLE, ids=[f"{one[0]}-{one[2]}" for one in TABLE])
def test_a_row_is_learned_as_the_page_says(tmp_path, name, row, kind, told, named):
    (tmp_path / "rows.jsonl").write_text(json.dumps(json.loads(row)) + "\n")
    source = SourceConfig(str(tmp_path / "rows.jsonl"), row_format=name if named else "auto")
    config = DataConfig(sources=(source,), kind=kind, tokens_per_batch=800, epochs=1, cache_dir=str(tmp_path))
    loader = build_loader(config, tokenizer=TOKENIZER, batch_index=0, num_batches=1, agree=int)
    (found,) = make_preview(loader, config, TOKENIZER, rows=1).rows
    learned = [
        "".join(unit.text for run in document.role_runs for unit in run.units if unit.learned)
        for document in found.documents
    ]
    assert learned == [text.replace("⏹", "<|im_end|>") for text in re.findall("`([^`]+)`", told)]
