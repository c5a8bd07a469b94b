"""Relative imports become absolute, wherever they stand."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import calls, dotted
from patchgen.errors import PassMismatch
from patchgen.passes.base import Example, Hit, Outcome, Pass
from patchgen.rewrite import LINE_LENGTH, Editor, format_code
from patchgen.source import Module
from patchgen.upstream import absolute_module

IMPORTER = "importlib.import_module"


class AbsoluteImports(Pass):
    """The generated file is outside transformers, so `from ...activations` must name its package. Modules beside a file
    on disk are copied with it, so imports from them stay relative."""

    name = "absolute_imports"
    purpose = "Relative imports become absolute, also inside functions and TYPE_CHECKING blocks."
    expects = "every relative import of the file, but for those of modules that are copied along"
    EXAMPLES = (
        Example("""one, two and three dots, and a line that becomes too long
      - from ...activations import ACT2FN
      - from ..auto import AutoModel
      - from .configuration_example import ExampleConfig
      + from transformers.activations import ACT2FN
      + from transformers.models.auto import AutoModel
      + from transformers.models.example.configuration_example import ExampleConfig


        def lazy():
      -     from ...utils import logging  # only when needed
      +     from transformers.utils import logging  # only when needed

            return logging
        """),
    )

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        base_of = anatomy.upstream.base_of
        neighbours = {name.removesuffix(".py") for name in anatomy.upstream.siblings}
        hits: list[Hit] = []
        for block in module:
            relative = [node for node in block.nodes if isinstance(node, ast.ImportFrom) and node.level]
            relative = [node for node in relative if not _is_neighbour(node, neighbours)]
            unnamed: list[ast.AST] = [node for node in relative if not base_of(node.level)]
            unnamed += (call for call in calls(*block.statements) if _is_dynamic(anatomy, call))
            if unnamed:
                raise PassMismatch(
                    f"The pass '{self.name}' cannot name what `{ast.unparse(unnamed[0])}` (upstream line "
                    f"{block.line} or below) imports: it starts from {anatomy.upstream.package}. It expects {self.expects}."
                )
            if not relative:
                continue
            editor = Editor(block)
            for node in relative:
                editor.from_module(node, absolute_module(node, base_of(node.level)))
            rewritten = editor.result
            if block.is_import:
                rewritten = rewritten.with_text(_wrap_long_import(rewritten.text))
            module = module.swap(block, rewritten)
            hits += [Hit(f"import {'.' * node.level}{node.module or ''}", block.line, "absolute") for node in relative]
        return Outcome(module, tuple(hits))


def _is_neighbour(node: ast.ImportFrom, neighbours: set[str]) -> bool:
    """Whether this imports from modules, or imports modules, that are copied along with the generated file."""
    modules = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
    return node.level == 1 and neighbours.issuperset(modules)


def _is_dynamic(anatomy: Anatomy, call: ast.Call) -> bool:
    """Whether a call is a relative import: `import_module(".name", package)`."""
    name = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    # Compared by name too: in rewritten blocks, names that functions import are not resolved.
    imports = anatomy.names.resolve(call.func) == IMPORTER or dotted(call.func).endswith("import_module")
    return imports and isinstance(name, str) and name.startswith(".")


def _wrap_long_import(text: str) -> str:
    if all(len(line) <= LINE_LENGTH for line in text.splitlines()):
        return text
    blank_lines = text[: len(text) - len(text.lstrip("\n"))]
    return blank_lines + format_code(text.lstrip("\n"))
