"""Attention classes that are looked up by a key computed from the implementation's name are found under our names too."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy, ClassInfo
from patchgen.anatomy.classes import FunctionNode, walk
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import Editor
from patchgen.source import Block

NAME, EAGER = "_attn_implementation", "eager"


class AttentionTables(SitePass):
    """A table with the key "eager" gets our names when the model is built (`runtime/attention.py`). The keys of other tables are
    not known there: with our names such a class is the one that attends eagerly, with the mask that it is given."""

    name = "attention_tables"
    purpose = "A table of attention classes with computed keys gives the eager class for our attention."
    expects = "one hit per class that looks up such a table"
    member = ""
    EXAMPLES = (
        Example("""keys with a prefix
        ATTENTION = {"mla_eager": EagerAttention, "mla_flash_attention_2": FlashAttention}


        class ExampleLayer(nn.Module):
            def __init__(self, config):
                super().__init__()
      -         name = config._attn_implementation
      +         # patchgen: attention_tables
      +         name = ("eager" if "patchgen_" in config._attn_implementation else config._attn_implementation)
                self.attention = ATTENTION["mla_" + name](config)
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        tables = sorted(table for method in info.methods.values() for table in _looked_up(method, anatomy))
        return f"looks up {tables[0]}, whose keys are computed from {NAME}" if tables else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        editor = Editor(block, self.mark)
        methods = [node for node in block.members if isinstance(node, FunctionNode) and _looked_up(node, anatomy)]
        for node in (node for method in methods for node in _reads(method)):
            read = editor.code(node)
            editor.instead(node, f'("{EAGER}" if "patchgen_" in {read} else {read})')
            editor.mark(node)
        return Rewritten(editor.result, "the eager class for our attention")


def _looked_up(method: FunctionNode, anatomy: Anatomy) -> set[str]:
    """The tables with keys like `mla_eager` that a method looks up, if it reads the name of the implementation."""
    tables = {
        node.value.id for node in walk(method) if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    }
    return {table for table in tables if _has_longer_keys(anatomy.tables.get(table))} if _reads(method) else set()


def _reads(method: FunctionNode) -> list[ast.Attribute]:
    found = [node for node in walk(method) if isinstance(node, ast.Attribute) and node.attr == NAME]
    return [node for node in found if isinstance(node.ctx, ast.Load)]


def _has_longer_keys(table: ast.expr | None) -> bool:
    keys = [getattr(key, "value", None) for key in table.keys] if isinstance(table, ast.Dict) else []
    return any(isinstance(key, str) and key.endswith(EAGER) and key != EAGER for key in keys)
