"""Objectives on one rank and on several: the same curve."""

from __future__ import annotations

import cases_objectives as cases
import pytest
from rounding import require_rounding

OBJECTIVES = {
    "dpo": ({"name": "dpo"}, 2),
    "reward": ({"name": "reward"}, 2),
    "classification": ({"name": "classification", "options": {"num_labels": 3}}, 1),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_ranks_learn_as_one_does(name, trainer_folder, tmp_path, one_rank, two_ranks):
    objective, together = OBJECTIVES[name]
    found = {}
    for layout, pool in {"one": one_rank, "fsdp": two_ranks, "sp": two_ranks, "ep": two_ranks}.items():
        parallel = {layout: 2} if layout in ("sp", "ep") else {}
        values = cases.recipe_of(trainer_folder, tmp_path / layout, objective, parallel=parallel)
        found[layout] = pool.run(cases.curve, values, together)[0]
        print(layout, found[layout])
    for layout in ("fsdp", "sp", "ep"):
        require_rounding(found[layout], found["one"], what=layout)
