"""What is asked about a class that is dropped: it is no longer among the kinds, or the answer is False."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.passes.prune import Prune

SOURCE = """
class Kept(nn.Module):
    pass

class Other(nn.Module):
    pass

class Gone(nn.Module):
    pass

class Model(nn.Module):
    kinds = (Kept, Other)

    def asked(self, x):
        return {}
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("isinstance(x, (Kept, Gone))", "isinstance(x, Kept)"),
        ("isinstance(x, (Gone, Kept))", "isinstance(x, Kept)"),
        ("isinstance(x, (Kept, Gone, Other))", "isinstance(x, (Kept, Other))"),
        ("isinstance(x, (Kept, Other, Gone))", "isinstance(x, (Kept, Other))"),
        ("isinstance(x, (Kept, Other))", "isinstance(x, (Kept, Other))"),
        ("isinstance(x, (Gone,))", "False"),
        ("x and isinstance(x, Gone)", "x and False"),
        ("isinstance(x, Kept)", "isinstance(x, Kept)"),
    ],
)
def test_a_dropped_class_is_no_kind(before: str, after: str):
    text = applied(Prune(("Model",)), SOURCE.format(before)).module.text
    assert "class Gone" not in text and "class Other" in text
    assert f"        return {after}\n" in text
