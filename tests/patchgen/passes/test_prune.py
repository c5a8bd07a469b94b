"""What is asked about a class that is dropped: it is no longer among the kinds, or the answer is False."""

from __future__ import annotations

import textwrap

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
        ("isinstance(x, Kept | Gone)", "isinstance(x, Kept)"),
        ("isinstance(x, Gone | Kept | Other)", "isinstance(x, Kept | Other)"),
        ("isinstance(x, Gone | Gone)", "False"),
        ("isinstance(x, Kept)", "isinstance(x, Kept)"),
    ],
)
def test_a_dropped_class_is_no_kind(before: str, after: str):
    text = applied(Prune(("Model",)), SOURCE.format(before)).module.text
    assert "class Gone" not in text and "class Other" in text
    assert f"        return {after}\n" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# of it\nif isinstance(x, Gone):\n    a()", ""),
        ("# of it\nif isinstance(x, Gone):\n    a()\n# other\nelif x:\n    b()", "# of it\nif x:\n    b()"),
        ("if isinstance(x, Gone):\n    a()\nelse:\n    b()", "if False:\n    a()\nelse:\n    b()"),
        ("if x:\n    a()\nelif isinstance(x, Gone):\n    b()\nelse:\n    c()", "if x:\n    a()\nelse:\n    c()"),
        ("if x:\n    a()\nelif isinstance(x, Gone):\n    b()", "if x:\n    a()"),
        (
            "if isinstance(x, Gone):\n    a()\nelif isinstance(x, (Gone,)):\n    b()\nelif x:\n    c()",
            "if x:\n    c()",
        ),
        ("if x:\n    if isinstance(x, Gone):\n        a()", "if x:\n    pass"),
    ],
)
def test_a_branch_that_asks_for_a_dropped_class_alone_goes_out_of_its_chain(before: str, after: str):
    text = SOURCE.format("x") + f"\n\ndef asked(x):\n    first()\n{textwrap.indent(before, '    ')}\n    last()\n"
    written = applied(Prune(("Model", "asked")), text).module.text
    assert written.endswith(f"    first()\n{textwrap.indent(after, '    ')}\n".rstrip(" \n") + "\n    last()\n")


def test_a_dropped_class_is_not_exported():
    text = f'{SOURCE.format("x")}\n\n__all__ = ["Model", "Gone"]\n'
    assert '\n__all__ = ["Model"]\n' in applied(Prune(("Model",)), text).module.text


def test_what_a_file_without_heads_exports_is_kept():
    text = applied(Prune(), f'{SOURCE.format("x")}\n\n__all__ = ["Model"]\n').module.text
    assert "class Kept" in text and "class Model" in text and "class Gone" not in text
