"""Functions are compared without names, annotations, docstrings and defaults, and with everything else."""

from __future__ import annotations

import ast

import pytest

from patchgen.anatomy.bodies import form_of, normal_form

SOURCE = "def forward(self, x):\n    y = x.pow(2).mean(-1)\n    return self.weight * y + self.eps * self.weight"
EQUAL_FORMS = {
    "other names": "def norm(self, rows):\n    mean = rows.pow(2).mean(-1)\n    return self.scale * mean + self.e * self.scale",
    "annotations": "def forward(self, x: Tensor) -> Tensor:\n    y: Tensor = x.pow(2).mean(-1)\n    return self.weight * y + self.eps * self.weight",
    "a docstring": 'def forward(self, x):\n    """The norm."""\n    y = x.pow(2).mean(-1)\n    return self.weight * y + self.eps * self.weight',
    "a default": "def forward(self, x=None):\n    y = x.pow(2).mean(-1)\n    return self.weight * y + self.eps * self.weight",
}
DIFFERENT_FORMS = {
    "another constant": SOURCE.replace("2", "3"),
    "another attribute": SOURCE.replace("self.eps * self.weight", "self.eps * self.eps"),
    "another order": SOURCE.replace("self.weight * y", "y * self.weight"),
    "another function": SOURCE.replace("mean", "sum"),
    "one parameter more": SOURCE.replace("x)", "x, z)", 1),
    "**kwargs more": SOURCE.replace("x)", "x, **z)", 1) + " + z['z']",
    "an attribute of another object": SOURCE.replace("self.eps", "x.eps"),
    "a global instead of a local": SOURCE.replace("* y", "* z"),
    "only a declaration": SOURCE.replace("y = x.pow(2).mean(-1)", "y: Tensor"),
    "one statement fewer": SOURCE.replace("    y = x.pow(2).mean(-1)\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", EQUAL_FORMS)
def test_names_annotations_docstrings_and_defaults_do_not_count(case: str):
    assert form_of(EQUAL_FORMS[case]) == form_of(SOURCE)


@pytest.mark.parametrize("case", DIFFERENT_FORMS)
def test_everything_else_counts(case: str):
    assert form_of(DIFFERENT_FORMS[case]) != form_of(SOURCE)


def test_the_real_names_are_kept_beside_the_form():
    form = normal_form(ast.parse(EQUAL_FORMS["other names"]).body[0])
    assert form.parameters == ("rows",) and form.attributes == ("scale", "e")


def test_a_declaration_stays_a_declaration():
    assert "y: Tensor" in form_of("def f(x):\n    y: Tensor\n    return x")
