"""The toy recipes of objectives, cut to a few steps: they learn, on two ranks as on one, from the data's own loaders."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import cases_trainer as cases
import pytest
from rounding import require_rounding

from patchgen.runtime.data.sources import open_source
from patchgen.runtime.train.recipe import load, to_dict

ROWS = 40
RECIPES = Path(__file__).parents[2] / "recipes"


def few_rows(folder: Path, name: str) -> Path:
    """The first rows of a recipe's data in a file: tokenizing all of them takes longer than the steps."""
    (source,) = load(RECIPES / f"{name}.yaml").data.sources
    rows = [record.fields() for record, _ in itertools.islice(open_source(source).read(), ROWS)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", ["dpo_toy", "reward_toy", "classification_toy"])
def test_toy_recipes_learn_alike(name, tmp_path, one_rank, two_ranks):
    found = {}
    for place, pool in {"one": one_rank, "two": two_ranks}.items():
        changes = {
            "data.sources.0.path": str(few_rows(tmp_path, name)),
            "data.cache_dir": str(tmp_path / "cache"),
            "data.tokens_per_batch": 256,
            "train.steps": 4,
            "train.batches_per_step": 2,
            "model.overrides.num_hidden_layers": 1,
            "checkpoint.export": False,
            "log.directory": str(tmp_path / place),
        }
        values = to_dict(load(RECIPES / f"{name}.yaml", changes))
        found[place] = pool.run(cases.train, values)[0][0]
    require_rounding(found["two"], found["one"])
    assert found["one"][-1] < found["one"][0] - 0.02, found
