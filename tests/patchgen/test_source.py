"""Shapes of upstream files that a generator may lose: each is kept, byte for byte, but for relative imports."""

from __future__ import annotations

import ast
import textwrap

import pytest
from generation_cases import applied, with_absolute_imports, written

from patchgen import emit, pipeline, source
from patchgen.errors import EmissionError, PassMismatch, SourceSyntaxError
from patchgen.model_configs import ModelConfig
from patchgen.passes.absolute_imports import AbsoluteImports
from patchgen.passes.prune import Prune

SHAPES = {
    "guarded import": """
        try:
            from ...kernels import fast
        except ImportError:
            fast = None
        """,
    "conditional import": """
        if is_flash_attn_available():
            from ...integrations import flash as attend
        else:
            attend = None
        """,
    "type-checking import": """
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from .configuration_example import ExampleConfig
        """,
    "import in a function": """
        def lazy():
            from ..auto import AutoTokenizer
            from . import sibling

            return AutoTokenizer, sibling
        """,
    "import in a method, in a branch": """
        class Lazy:
            def forward(self, x):
                if x:
                    from ...utils import logging as log

                    return log
        """,
    "star import": "from ...activations import *\n",
    "for, with, while at module level": """
        for name in ("a", "b"):
            globals()[name] = 1
        with open("/dev/null") as handle:
            size = handle.read()
        while False:
            pass
        else:
            done = True
        """,
    "annotated and augmented assignments": """
        LIMIT: int = 3
        LIMIT += 1
        BARE: "int"
        first = second = 3
        (left, right), *rest = ((1, 2), 3)
        """,
    "bare calls, del, assert, raise in if": """
        register("example")
        assert register is not None, "there"
        scratch = 1
        del scratch
        if not register:
            raise ImportError("no")
        """,
    "several statements on one line": "a = 1; b = 2; import os; from ...utils import logging\nc = 3\n",
    "decorators": """
        @first
        @second(
            argument="(",  # an unbalanced parenthesis in a string
        )
        # between decorators
        @third.fourth
        class Decorated:
            @property
            def width(self):
                return 1

            @width.setter
            def width(self, value):
                pass

            @width.deleter
            def width(self):
                pass
        """,
    "nested classes and functions": """
        class Outer:
            class Inner:
                class Innermost:
                    from ...utils import logging

                    def method(self):
                        def nested():
                            class Local:
                                pass

                            return Local

                        return nested
        """,
    "a class defined under a condition": """
        try:
            from ...fast import Layer
        except ImportError:

            class Layer:
                pass
        """,
    "new syntax": """
        async def stream(source):
            async for item in source:
                async with item as opened:
                    yield await opened

        def choose(x):
            match x:
                case {"kind": kind, **rest} if (size := len(rest)) > 1:
                    return kind, size
                case [_, *_] | None:
                    return None
        """,
    "string annotations and unicode": '''
        Änderung = "übergroß — 🚨 not a banner"

        def annotate(x: "Optional[Later]", *, y: "list['Later']" = None) -> "Later":
            """Größe."""
            return x


        class Later: ...
        ''',
    "lambda, comprehension, conditional": """
        f = lambda x, *a, k=1, **kw: [y for y in a if y]
        g = {k: v for k, v in kw.items()} if (kw := {}) else {*()}
        """,
    "docstrings and comments between": '''
        """A module docstring.

        from . import not_an_import
        """
        # a comment
        # of two lines

        x = 1  # behind


        # above nothing
        ''',
    "exports as tuple, added to": '__all__ = ("A",)\n__all__ += ("B",)\n__all__.extend(["C"])\n',
    "form feed and tabs": "if True:\n\tx = 1\n\x0c\ny = 2\n",
    "line continuation": "x = 1 + \\\n    2\nfrom ...utils \\\n    import logging\n",
}


def without_imports(text: str) -> str:
    """The syntax tree, with every relative import as the absolute one that it means."""
    tree = ast.parse(text)
    package = ["transformers", "models", "example"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            node.module, node.level = ".".join([*base, *([node.module] if node.module else [])]), 0
    return ast.dump(tree)


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_absolute_imports_keep_it(text: str):
    text = textwrap.dedent(text).lstrip("\n")
    generated = with_absolute_imports(written(text))
    assert without_imports(generated) == without_imports(text)
    assert [n for n in ast.walk(ast.parse(generated)) if isinstance(n, ast.ImportFrom) and n.level] == []
    kept = [line for line in text.splitlines() if "from ." not in line and "import" not in line]
    assert [line for line in generated.splitlines() if line in kept] == kept


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_blocks_are_the_file(text: str):
    text = textwrap.dedent(text).lstrip("\n")
    module = source.parse(text)
    assert module.text == text
    assert [node for block in module for node in map(ast.dump, block.statements)] == [
        ast.dump(node) for node in ast.parse(text).body
    ]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("x = 1\r\ny = 2\r\n", "x = 1\ny = 2\n"),
        ("x = 1\ry = 2", "x = 1\ny = 2\n"),
        ("x = 1", "x = 1\n"),
        ("", ""),
        ("# only a comment", "# only a comment\n"),
        ("\n\n\n", "\n\n\n"),
        ("\ufeffx = 1\n", "x = 1\n"),
    ],
)
def test_line_ends_and_empty_files(text: str, normal: str):
    assert source.parse(text).text == normal


def test_the_licence_is_the_header_and_stays():
    licence = "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n# Copyright 2026.\n#\n# Apache.\n"
    module = source.parse(f"{licence}\n# about x\nx = 1\n")
    assert module.header.startswith(licence)
    assert "# about x" in module.blocks[0].text
    generated = with_absolute_imports(written(f'{licence}"""Doc."""\n\nclass Model(PreTrainedModel): ...\n'))
    assert generated.startswith(licence)


@pytest.mark.parametrize("text", ["def f(:\n    pass\n", "x = (\n", "class A:\npass\n", "  x = 1\n", "x = 1\n\0"])
def test_what_does_not_parse_is_named_by_file_line_and_column(text: str):
    with pytest.raises(SourceSyntaxError, match=r"modeling_x\.py:\d+:\d+: "):
        source.parse(text, "modeling_x.py")


MODEL = """
from torch import nn

from ...modeling_utils import PreTrainedModel

try:
    from ...fast import run
except ImportError:
    run = None

if run is None:

    def run(x):
        return offset(x)


def offset(x):
    return x + STEP


STEP: int = 1
STEP += 1


class Unused(nn.Module):
    pass


class Quoted(nn.Module):
    pass


class Model(PreTrainedModel):
    layer: "Quoted"

    def forward(self, x):
        return run(x)
"""


def test_pruning_keeps_what_conditions_define_and_quotes_name():
    outcome = applied(Prune(("Model",)), MODEL)
    names = {name for block in outcome.module for name in block.binds}
    assert {"run", "offset", "STEP", "Quoted", "Model"} <= names
    assert "Unused" not in names
    assert "STEP: int = 1\nSTEP += 1\n" in outcome.module.text
    assert [hit.site for hit in outcome.hits] == ["Unused"]


@pytest.mark.parametrize(
    "export",
    [
        '__all__ = ["Model", "Unused"]\n',
        '__all__ = ("Model", "Unused")\n',
        '__all__ = ["Model"]\n__all__ += ["Unused"]\n',
        '__all__ = ["Model", "Unused"] + ["Unused"]\n',
        '__all__: list = ["Model", "Unused"]\n',
        "",
    ],
)
def test_exports_name_what_is_there(export: str):
    module = applied(Prune(("Model",)), f"{MODEL}\n\n{export}").module
    namespace: dict = {}
    statements = [s for block in module if "__all__" in block.binds for s in block.statements]
    exec(compile(ast.Module(statements, []), "<exports>", "exec"), namespace)
    assert list(namespace.get("__all__", ["Model"])) == ["Model"]


@pytest.mark.parametrize(
    ("export", "names"),
    [
        ('__all__ = ["A"]\n__all__ += ("B",)\n', "AB"),
        ('__all__ = ["A"] + ["B"] + ["C"]\n', "ABC"),
        ('__all__: list = ["A"]\n__all__.extend(["B"])\n__all__.append("C")\n', "ABC"),
        ('__all__ = ["A"] + other.__all__ + [f"{x}y", "z" + y]\nother.extend(["B"])\n', "A"),
    ],
)
def test_exports_are_read_where_they_are_written_out(export: str, names: str):
    assert emit.exported_names(source.parse(export)) == list(names)


def test_a_dropped_name_that_is_still_referred_to_is_an_error_with_its_place():
    text = (
        "from ...modeling_utils import PreTrainedModel\n\n\n"
        "class Model(PreTrainedModel):\n    def forward(self):\n        return gone()\n"
    )
    with pytest.raises(EmissionError, match=r"gone in Model"):
        pipeline.generate(written(text), ModelConfig("example", roots=("Model",)))


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("ALL = [i for i in range(3)]", ["ALL"]),
        ("ALL = {k: v for k, (v, w) in TABLE}; SOME = {s for s in ALL}, (g for g in ALL)", ["ALL", "SOME"]),
        ("ALL = [last := i for i in range(3)]", ["ALL", "last"]),
        ("ALL = [lambda: (own := i) for i in range(3)]", ["ALL"]),
        ("f = lambda x=(seen := 1): (own := x)", ["f", "seen"]),
        ("match P:\n    case [first, *rest] | {'a': first, **rest}:\n        pass", ["first", "rest"] * 2),
        (
            "match P:\n    case Point(x=x) as point:\n        found = x\n    case _:\n        pass",
            ["x", "point", "found"],
        ),
        ("try:\n    import a\nexcept ImportError as error:\n    a = None", ["a", "a"]),
        ("for i in range(3):\n    with f() as (g, h):\n        j: int = 1", ["i", "g", "h", "j"]),
    ],
)
def test_names_are_bound_in_the_scope_that_python_binds_them_in(statement: str, names: list[str]):
    assert [name for node in ast.parse(statement).body for name in source.bound_names(node)] == names


def test_what_only_a_comprehension_binds_is_not_there_for_others():
    text = "ALL = [i for i in range(3)]\n\n\ndef f():\n    return i\n"
    with pytest.raises(EmissionError, match="i in f"):
        emit.check_stands_alone(source.parse(text))
    emit.check_stands_alone(source.parse("match 1:\n    case one:\n        pass\n\n\ndef f():\n    return one\n"))


def test_relative_imports_become_absolute_in_place_and_only_there():
    text = "def f():\n    from ...utils import logging  # why\n    return '''from . import x'''\n"
    assert applied(AbsoluteImports(), text).module.text == text.replace("from ...utils", "from transformers.utils")


def test_an_import_by_a_call_is_known_by_what_is_called():
    text = "from importlib import import_module as load\n\n\nParts = load('.parts', __package__)\n"
    with pytest.raises(PassMismatch, match="cannot name what `load\\('.parts', __package__\\)` "):
        applied(AbsoluteImports(), text)
    applied(AbsoluteImports(), text.replace("from importlib import import_module as", "from elsewhere import"))
