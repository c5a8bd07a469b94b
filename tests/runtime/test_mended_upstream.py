"""A statement that fails in upstream's file is mended in a module beside it: what runs there, and what stays as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from patchgen.runtime.mended_upstream import Mend, MendError, applied_mends, mended, mends_of
from patchgen.runtime.registry import GeneratedModel

SOURCE = '''"""A model."""

import functools


class Base:
    def forward(self, x):
        return x + 1


class Head(Base):
    @functools.cache
    def forward(self, x):
        y = super().forward(x)
        return y.missing


class Twice:
    def forward(self, x):
        x += 1
        x += 1
        return x
'''
MEND = Mend("Head.forward", "return y.missing", "y *= 10\nreturn y")


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """The import path of a file whose head fails."""
    package = tmp_path / "planted_upstream"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "modeling_planted.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    mended.cache_clear()
    yield "planted_upstream.modeling_planted"
    for name in [name for name in sys.modules if name.startswith("planted_upstream")]:
        del sys.modules[name]
    mended.cache_clear()


def test_the_mended_module_computes_what_the_other_one_fails_at(upstream):
    """(3 + 1) * 10, with the decorator and `super()` of the file; upstream's own module raises as before."""
    module = mended(upstream, (MEND,))
    assert module.Head().forward(3) == 40
    assert module.Head.__module__ == module.__name__ == f"{upstream}_mended"
    assert sys.modules[module.__name__] is module
    assert hasattr(module.Head.forward, "cache_info")
    __import__(upstream)
    with pytest.raises(AttributeError, match="missing"):
        sys.modules[upstream].Head().forward(3)


def test_one_module_is_made_for_one_list_of_mends(upstream):
    assert mended(upstream, (MEND,)) is mended(upstream, (MEND,))


def test_a_statement_that_the_file_does_not_have_needs_no_mend(upstream):
    """Upstream's own module is the reference; with another mend that is needed, the mended one is."""
    absent = Mend("Head.forward", "return y.other", "return y")
    assert mended(upstream, (absent,)) is sys.modules[upstream]
    assert f"{upstream}_mended" not in sys.modules
    assert mended(upstream, (absent, MEND)).Head().forward(3) == 40
    assert applied_mends(upstream, (absent, MEND)) == (MEND,)


@pytest.mark.parametrize(
    ("mend", "problem"),
    [
        (Mend("Hea.forward", "return y.missing", "return y"), "does not exist, and was mended"),
        (Mend("Head.forwards", "return y.missing", "return y"), "does not exist, and was mended"),
        (Mend("Twice.forward", "x += 1", "x += 2"), "has `x \\+= 1 ...` 2 times, and one was mended"),
    ],
)
def test_a_method_that_is_gone_and_a_statement_that_stands_twice_are_errors(upstream, mend, problem):
    with pytest.raises(MendError, match=problem):
        mended(upstream, (mend,))


def test_a_module_that_fails_leaves_no_half_of_it(upstream):
    """As an import that fails: the next attempt runs the file again instead of finding what is left of the first."""
    failing = Mend("Head.forward", "return y.missing", "return y")
    path = Path(__import__(upstream, fromlist=["Head"]).__file__)
    path.write_text(f"{SOURCE}\n\n1 / 0\n", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            mended(upstream, (failing,))
        assert f"{upstream}_mended" not in sys.modules


@pytest.mark.parametrize(
    ("mends", "module"),
    [((MEND,), "_mended"), ((), ""), ((Mend("Head.forward", "return y.other", "return y"),), "")],
    ids=["needed", "none", "not needed"],
)
def test_what_a_generated_model_is_compared_with(upstream, tmp_path, mends, module):
    """The registry gives upstream's module, or the mended one where a mend of `provenance.json` has its statement."""
    model = GeneratedModel("planted", tmp_path, upstream, "", "5.24.0", (), ("Head",), ("Head",), mends=mends)
    assert model.upstream() is sys.modules[f"{upstream}{module}"]


def test_the_record_of_edits_says_what_is_mended():
    plain = {"verb": "edit_method", "target": "A.run", "edit": "1", "upstream": "2"}
    mend = {"verb": "mend_upstream", "target": "A.run", "edit": "1", "upstream": "2"}
    mend["mend"] = {"statement": "return x", "code": "return y"}
    assert mends_of([plain, mend]) == (Mend("A.run", "return x", "return y"),)
