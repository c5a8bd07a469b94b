"""What a generated file imports from beside it is copied along, and is the one import that stays relative."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.passes.absolute_imports import AbsoluteImports


@pytest.mark.parametrize(
    ("statement", "rewritten"),
    [
        ("from .parts import Norm", "from .parts import Norm"),
        ("from . import parts", "from . import parts"),
        ("from .others import Norm", "from transformers.models.example.others import Norm"),
        ("from . import parts, others", "from transformers.models.example import parts, others"),
        ("from ..parts import Norm", "from transformers.models.parts import Norm"),
    ],
)
def test_imports_stay_relative_where_all_that_they_name_is_copied_along(statement: str, rewritten: str):
    text = applied(AbsoluteImports(), f"{statement}\n", siblings={"parts.py": "class Norm: ...\n"}).module.text
    assert text.strip() == rewritten
