"""The toy recipes of objectives, cut to a few steps: they learn, on two ranks as on one, from the data's own loaders."""

from __future__ import annotations

from pathlib import Path

import cases_trainer as cases
import pytest
from rounding import require_rounding

from patchgen.runtime.train.recipe import load, to_dict

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("name", ["dpo_toy", "reward_toy", "classification_toy"])
def test_toy_recipes_learn_alike(name, tmp_path, one_rank, two_ranks):
    found = {}
    for place, pool in {"one": one_rank, "two": two_ranks}.items():
        changes = {
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
