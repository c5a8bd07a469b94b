"""The hash of what was run changes with the code that it needs, and with nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from patchgen.runtime.verify import source_units

OTHER = '''"""Another module."""

SCALE = 2
UNUSED = 1
IN_FUNCTION = 5
RENAMED = 7


def given():
    return 2


@kernel.register
def _(x):
    return 1


@kernel.register
def _(x):
    return 2


@register
def one(): ...


@register
def two(): ...


def helper(x):
    return x * SCALE


@functools.cache
def cached():
    return 0
'''
MODULE = '''"""A module."""

from patchgen.runtime.other import SCALE as FACTOR
from patchgen.runtime.other import RENAMED as FOR_OTHERS
from patchgen.runtime.other import given
from patchgen.runtime.other import helper

LIMIT = FACTOR + 1


class Base:
    size = 1

    def method(self):
        return LIMIT

    def other(self):
        return 0


def called(x):
    """What it does."""
    from patchgen.runtime.other import IN_FUNCTION as local

    return helper(x) + local + module.FOR_OTHERS


def not_called(x):
    return 3
'''
RAN = frozenset(
    {
        "patchgen.runtime.module:",
        "patchgen.runtime.module:called",
        "patchgen.runtime.module:Base.method",
        "patchgen.runtime.other:",
        "patchgen.runtime.other:helper",
        "patchgen.runtime.other:_",
    }
)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with these two modules, from which hashes are computed."""
    folder = tmp_path / "patchgen" / "runtime"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text(MODULE)
    (folder / "other.py").write_text(OTHER)
    (folder / "newer.py").write_text("def helper(x): ...\n")
    monkeypatch.setattr(source_units, "ROOT", tmp_path / "patchgen")
    forget()
    yield folder
    forget()


def forget() -> None:
    source_units._module.cache_clear()
    source_units._named.cache_clear()
    source_units._aliases.cache_clear()
    source_units._imported_by.cache_clear()


def hash_now(ran: frozenset[str] = RAN) -> str:
    forget()
    return source_units.hash_of(ran)


CHANGES_IT = {
    "a function that was called": ("module", "return helper(x)", "return 1 + helper(x)"),
    "its arguments": ("module", "def called(x)", "def called(x=1)"),
    "a method that was called": ("module", "return LIMIT", "return LIMIT + 1"),
    "a field of its class": ("module", "size = 1", "size = 2"),
    "a base of its class": ("module", "class Base:", "class Base(dict):"),
    "a new method of its class, which may replace an inherited one": (
        "module",
        "def other",
        "def __call__(self): ...\n\n    def other",
    ),
    "a constant that a method names": ("module", "LIMIT = FACTOR + 1", "LIMIT = FACTOR + 2"),
    "a constant of another module under another name": ("other", "SCALE = 2", "SCALE = 3"),
    "where a name comes from": (
        "module",
        "from patchgen.runtime.other import helper",
        "from patchgen.runtime.newer import helper",
    ),
    "a statement of the module": ("module", "LIMIT =", "print()\nLIMIT ="),
    "a decorator, which is called when the module is": ("module", "def not_called", "@register\ndef not_called"),
    "a function that is gone": ("other", "def helper", "def renamed"),
    "where a name comes from that the module imports for others": (
        "module",
        "import given",
        "import helper as given",
    ),
    "a function in place of one that was imported for others": ("module", "LIMIT =", "def given(): ...\n\n\nLIMIT ="),
    "an import of a module that was none": ("module", "LIMIT =", "from patchgen.runtime import newer\n\nLIMIT ="),
    "the first of two functions of one name": ("other", "def _(x):\n    return 1", "def _(x):\n    return 9"),
    "a constant that a function imports under another name": ("other", "IN_FUNCTION = 5", "IN_FUNCTION = 6"),
    "a constant that a module imports for others under another name": ("other", "RENAMED = 7", "RENAMED = 8"),
    "the order in which functions are registered": (
        "other",
        "@register\ndef one(): ...\n\n\n@register\ndef two(): ...",
        "@register\ndef two(): ...\n\n\n@register\ndef one(): ...",
    ),
}
CHANGES_NOTHING = {
    "a function that was not called": ("module", "return 3", "return 4"),
    "a method that was not called": ("module", "return 0", "return 5"),
    "a new function": ("module", "def not_called", "def new(): ...\n\n\ndef not_called"),
    "a new import": ("module", "LIMIT =", "import os\nLIMIT ="),
    "a constant that nothing names": ("other", "UNUSED = 1", "UNUSED = 2"),
    "a docstring": ("module", '"""What it does."""', '"""Other words."""'),
    "the docstring of a module with decorators": (
        "other",
        '"""Another module."""',
        '"""Other words."""',
    ),
    "a comment": ("module", "LIMIT =", "# Why.\nLIMIT ="),
    "for a type checker alone": ("module", "LIMIT =", "if TYPE_CHECKING:\n    import json\nLIMIT ="),
}


@pytest.mark.parametrize("what", CHANGES_IT)
def test_what_was_run_is_in_the_hash(sources: Path, what: str):
    before = hash_now()
    edit(sources, *CHANGES_IT[what])
    assert hash_now() != before


@pytest.mark.parametrize("what", CHANGES_NOTHING)
def test_what_was_not_run_is_not(sources: Path, what: str):
    before = hash_now()
    edit(sources, *CHANGES_NOTHING[what])
    assert hash_now() == before


def edit(sources: Path, file: str, old: str, new: str) -> None:
    path = sources / f"{file}.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_module_as_a_whole_is_each_of_its_functions(sources: Path):
    whole = frozenset({"patchgen.runtime.module:*"})
    each = {f"patchgen.runtime.module:{name}" for name in ("", "called", "not_called", "Base.method", "Base.other")}
    assert hash_now(whole) == hash_now(frozenset(each))
    before = hash_now(whole)
    edit(sources, *CHANGES_NOTHING["a function that was not called"])
    assert hash_now(whole) != before


def test_functions_that_triton_compiles_are_found_by_their_names(sources: Path):
    kernel = "\n\n@triton.jit\ndef _kernel(x):\n    return x + 1\n\n\ndef launch(x):\n    return _kernel[1](x)\n"
    path = sources / "other.py"
    path.write_text(OTHER + kernel)
    ran = RAN | {"patchgen.runtime.other:launch"}
    before, without = hash_now(ran), hash_now()
    path.write_text(OTHER + kernel.replace("x + 1", "x + 2"))
    assert hash_now(ran) != before
    assert hash_now() == without, "launch was not called there"


def test_a_module_that_is_gone_changes_it(sources: Path):
    before = hash_now()
    (sources / "other.py").unlink()
    assert hash_now() != before
