"""Bodies are compared without names, annotations and docstrings, and with everything else."""

from __future__ import annotations

import ast

import pytest

from patchgen.anatomy.bodies import form_of, normal_form

NORM = "def forward(self, x):\n    y = x.pow(2).mean(-1)\n    return self.weight * y + self.eps * self.weight"
SAME = {
    "other names": "def norm(self, rows):\n    mean = rows.pow(2).mean(-1)\n    return self.scale * mean + self.e * self.scale",
    "annotations": "def forward(self, x: Tensor) -> Tensor:\n    y: Tensor = x.pow(2).mean(-1)\n    return self.weight * y + self.eps * self.weight",
    "a docstring": 'def forward(self, x):\n    """The norm."""\n    y = x.pow(2).mean(-1)\n    return self.weight * y + self.eps * self.weight',
    "a default": "def forward(self, x=None):\n    y = x.pow(2).mean(-1)\n    return self.weight * y + self.eps * self.weight",
}
OTHER = {
    "another constant": NORM.replace("2", "3"),
    "another attribute": NORM.replace("self.eps * self.weight", "self.eps * self.eps"),
    "another order": NORM.replace("self.weight * y", "y * self.weight"),
    "another function": NORM.replace("mean", "sum"),
    "a parameter more": NORM.replace("x)", "x, z)", 1),
    "any number more": NORM.replace("x)", "x, **z)", 1) + " + z['z']",
    "an attribute of another object": NORM.replace("self.eps", "x.eps"),
    "a local for a global": NORM.replace("* y", "* z"),
    "only a declaration": NORM.replace("y = x.pow(2).mean(-1)", "y: Tensor"),
    "a statement less": NORM.replace("    y = x.pow(2).mean(-1)\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_names_and_words_do_not_count(case: str):
    assert form_of(SAME[case]) == form_of(NORM)


@pytest.mark.parametrize("case", OTHER)
def test_everything_else_counts(case: str):
    assert form_of(OTHER[case]) != form_of(NORM)


def test_the_real_names_are_kept_beside_the_form():
    form = normal_form(ast.parse(SAME["other names"]).body[0])
    assert form.parameters == ("rows",) and form.attributes == ("scale", "e")


def test_a_declaration_stays_a_declaration():
    assert "y: Tensor" in form_of("def f(x):\n    y: Tensor\n    return x")
