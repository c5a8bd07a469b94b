"""Drops the classes and functions that the roots do not reach."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import dotted, targets
from patchgen.anatomy.graph import references
from patchgen.errors import PassMismatch, nearest
from patchgen.passes.base import Example, Hit, Outcome, Pass
from patchgen.rewrite import Editor
from patchgen.source import Block, Module

if TYPE_CHECKING:
    from patchgen.model_configs import ModelConfig


class Prune(Pass):
    """A mention in `isinstance(x, C)` does not keep C: if nothing else reaches it, there are no instances, and the branch is
    dropped with the class."""

    name = "prune"
    purpose = "Classes and functions that the roots do not reach are dropped."
    expects = "that every root exists"
    EXAMPLES = (
        Example("""an unreached class goes, with the branch that asks for it
      - class Vocoder(nn.Module):
      -     pass
      -
      -
        class Tower(nn.Module):
            pass


        class Model(nn.Module):
            def __init__(self):
                self.tower = Tower()

            def _init_weights(self, module):
      -         if isinstance(module, Vocoder):
      -             init.zeros_(module.offset)
      -         elif isinstance(module, Tower):
      +         if isinstance(module, Tower):
                    init.ones_(module.scale)


      - __all__ = ["Model", "Vocoder"]
      + __all__ = ["Model"]
        """),
    )

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self.roots = tuple(roots)

    @classmethod
    def of_config(cls, config: ModelConfig) -> Self:
        return cls(config.kept)

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        roots = self.roots or default_roots(module, anatomy)
        defined = {name for block in module if not block.is_import for name in block.binds}
        unknown = [root for root in roots if root not in defined]
        if unknown:
            models = [name for name in anatomy.classes if anatomy.is_model(name)]
            raise PassMismatch(
                f"The pass '{self.name}' misses the root(s) {', '.join(unknown)} in {anatomy.upstream.path}. "
                f"Nearest model classes: {nearest(unknown, models)}.\n"
                "  to fix   correct `roots` or `heads` in the model's config, or leave them out: upstream's heads are the default."
            )
        kept_names = _reachable(module, roots)
        kept_blocks = [block for block in module if _stays(block, kept_names)]
        dropped = [name for block in module if not _stays(block, kept_names) for name in block.binds]
        gone = {name for name in dropped if name not in kept_names}
        blocks = [without_mentions(block, gone) for block in kept_blocks]
        if blocks and not module.header:
            blocks[0] = blocks[0].with_text(blocks[0].text.lstrip("\n"))
        known = anatomy.classes.keys() | anatomy.functions
        hits = tuple(Hit(name, 0, "dropped") for name in dropped if name in known)
        return Outcome(module.with_blocks(blocks), hits)


def default_roots(module: Module, anatomy: Anatomy) -> tuple[str, ...]:
    """The heads that upstream's auto maps name for the model; else every head; else `__all__`; else every class."""
    heads = anatomy.upstream.heads or tuple(anatomy.own_heads())
    if heads:
        return heads
    for block in module:
        if "__all__" in block.binds:
            return tuple(str(node.value) for node in ast.walk(block.node) if isinstance(node, ast.Constant))
    return tuple(anatomy.classes)


def _reachable(module: Module, roots: Sequence[str]) -> set[str]:
    """The names that the roots, and statements that bind nothing, reach through the blocks that bind them."""
    by_name: dict[str, list[Block]] = {}
    for block in module:
        for name in block.binds:
            by_name.setdefault(name, []).append(block)
    always = [block for block in module if _has_effect(block)]
    reached: set[str] = set()
    pending = [*roots, *(name for block in always for name in references(_strip_isinstance(block)))]
    while pending:
        name = pending.pop()
        if name in reached or name not in by_name:
            continue
        reached.add(name)
        for block in by_name[name]:
            if "__all__" not in block.binds:
                pending += references(_strip_isinstance(block))
    return reached


def _has_effect(block: Block) -> bool:
    """Whether a block binds nothing (calls, guards): it is kept for its side effects."""
    return not block.binds and not block.is_docstring


def _stays(block: Block, kept_names: set[str]) -> bool:
    is_kept = block.is_import or block.is_docstring or _has_effect(block) or "__all__" in block.binds
    return is_kept or not kept_names.isdisjoint(block.binds)


def _strip_isinstance(block: Block) -> ast.Module:
    """The tree of a block with `isinstance(x, C)` reduced to `isinstance(x)`."""
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            node.args = node.args[:1]
    return tree


def without_mentions(block: Block, gone: set[str]) -> Block:
    """Removes the names in `gone` from `__all__` and from isinstance checks; a branch whose check has no class left is
    removed. What is left of them in other forms, the check of the whole file finds (`emit.check_stands_alone`)."""
    if not gone or not any(name in block.text for name in gone):
        return block
    editor = Editor(block)
    always_false: list[ast.expr] = []
    for node in block.nodes:
        match node:
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() if dotted(targets(node)[0]) == "__all__":
                for listed in ast.walk(node):
                    if isinstance(listed, ast.List | ast.Tuple):
                        editor.drop_elements(listed, _named(listed, gone))
            case ast.Call(ast.Name("isinstance"), [_, ast.Tuple() as kinds]) if dropped := _named(kinds, gone):
                kept_kinds = [kind for kind in kinds.elts if kind not in dropped]
                if len(kept_kinds) > 1:
                    editor.drop_elements(kinds, dropped)
                elif kept_kinds:
                    editor.instead(kinds, editor.code(kept_kinds[0]))
                else:
                    always_false.append(node)
            case ast.Call(ast.Name("isinstance"), [_, ast.Name() | ast.BinOp() as kinds]):
                alternatives = ast.unparse(kinds).split(" | ")
                kept_kinds = [kind for kind in alternatives if kind not in gone]
                if not kept_kinds:
                    always_false.append(node)
                elif len(kept_kinds) < len(alternatives):
                    editor.instead(kinds, " | ".join(kept_kinds))
    for node in always_false:  # for example in a larger test
        editor.instead(node, "False")
    for node in block.nodes:
        if isinstance(node, ast.If) and node.test in always_false:
            editor.drop_branch(node)
    return editor.result


def _named(listed: ast.List | ast.Tuple, names: set[str]) -> list[ast.expr]:
    """The elements that are one of these names, as a name or a string."""
    return [element for element in listed.elts if getattr(element, "id", getattr(element, "value", None)) in names]
