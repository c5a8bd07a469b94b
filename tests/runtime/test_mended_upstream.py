"""A statement that fails in upstream's file is mended in a module beside it: what runs there, and what stays as it was."""

from __future__ import annotations

import sys

import pytest

from patchgen.runtime.mended_upstream import Mend, MendError, mended, mends_of

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


@pytest.mark.parametrize(
    "mend", [Mend("Head.forward", "return y.other", "return y"), Mend("Hea.forward", "return y.missing", "return y")]
)
def test_other_code_than_was_mended_is_an_error(upstream, mend):
    with pytest.raises(MendError, match=r"should have `return y\.\w+ \.\.\.` once and has it 0 times"):
        mended(upstream, (mend,))


def test_the_record_of_edits_says_what_is_mended():
    plain = {"verb": "edit_method", "target": "A.run", "edit": "1", "upstream": "2"}
    mend = {"verb": "mend_upstream", "target": "A.run", "edit": "1", "upstream": "2"}
    mend["mend"] = {"statement": "return x", "code": "return y"}
    assert mends_of([plain, mend]) == (Mend("A.run", "return x", "return y"),)
