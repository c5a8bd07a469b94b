"""The page on recipes is what their types say."""

from __future__ import annotations

import re
from pathlib import Path

from patchgen.runtime import seams
from patchgen.runtime.train import recipe, reference
from patchgen.runtime.train.sections import KernelsConfig

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == reference.text(), "python -m patchgen.runtime.train.reference > docs/recipes.md"


def test_every_key_is_on_the_page():
    text = PAGE.read_text()
    for key, _ in recipe.all_keys():
        assert f"`{key.rpartition('.')[2]}`" in text or f"## {key}\n" in text or key == "name"


def test_the_implementations_of_each_seam_are_named():
    meanings = reference.descriptions(KernelsConfig)
    for seam in seams.names():
        named = set(re.findall(r"\w+", meanings[seam].partition(";")[0])) - {"or"}
        assert named == set(seams.implementations(seam)) - {seams.EAGER}
