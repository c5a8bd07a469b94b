"""Only what the roots reach stays."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.graph import references
from patchgen.errors import PassMismatch
from patchgen.passes.base import Example, Hit, Outcome, Pass
from patchgen.rewrite import transform
from patchgen.source import Block, Module


class Prune(Pass):
    """A mention in `isinstance(x, C)` does not keep C: if nothing else reaches it, no instance can exist, and the branch
    goes with the class."""

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

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        roots = self.roots or default_roots(module, anatomy)
        defined = {name for block in module if not block.is_import for name in block.binds}
        unknown = [root for root in roots if root not in defined]
        if unknown:
            models = [name for name in anatomy.classes if anatomy.is_model(name)]
            nearest = [n for root in unknown for n in difflib.get_close_matches(root, models, n=3, cutoff=0.2)]
            raise PassMismatch(
                f"The pass '{self.name}' misses the root(s) {', '.join(unknown)} in {anatomy.upstream.path}. "
                f"Nearest model classes: {', '.join(nearest) or 'none'}.\n"
                "  to fix   correct `roots` or `heads` in the model's config, or leave them out: upstream's heads are the default."
            )
        kept_names = _reachable(module, roots)
        kept = [block for block in module if _stays(block, kept_names)]
        dropped = [name for block in module if not _stays(block, kept_names) for name in block.binds]
        gone = {name for name in dropped if name not in kept_names}
        blocks = [without_mentions(block, gone) for block in kept]
        if blocks and not module.header:
            blocks[0] = blocks[0].with_text(blocks[0].text.lstrip("\n"))
        hits = tuple(
            Hit(name, 0, "dropped") for name in dropped if name in anatomy.classes or name in anatomy.functions
        )
        return Outcome(module.with_blocks(blocks), hits, notes=tuple(_unseen_references(blocks, bool(hits))))


def default_roots(module: Module, anatomy: Anatomy) -> tuple[str, ...]:
    """The heads that upstream's auto maps name for the model; else every head; else what the file exports."""
    heads = anatomy.upstream.heads or tuple(info.name for info in anatomy.with_role(Role.HEAD))
    if heads:
        return heads
    for block in module:
        if "__all__" in block.binds:
            value = block.node.value
            return tuple(element.value for element in value.elts) if isinstance(value, ast.List | ast.Tuple) else ()
    return tuple(anatomy.classes)


def _reachable(module: Module, roots: Sequence[str]) -> set[str]:
    """The names that the roots reach, over every block that binds a reached name."""
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
    """Statements that bind nothing (calls, guards) are kept: they were written for what they do."""
    return not block.binds and not block.is_docstring


def _stays(block: Block, kept_names: set[str]) -> bool:
    if block.is_import or block.is_docstring or _has_effect(block) or "__all__" in block.binds:
        return True
    return any(name in kept_names for name in block.binds)


def _strip_isinstance(block: Block) -> ast.Module:
    """The block with `isinstance(x, C)` read as `isinstance(x)`."""
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            node.args = node.args[:1]
    return tree


def _unseen_references(kept: Sequence[Block], has_dropped: bool) -> list[str]:
    """Remarks on names that are read in ways that the source does not show."""
    notes = []
    for block in kept:
        where = block.name or f"line {block.line}"
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                notes.append(f"{where}: `{ast.unparse(node)}` hides what it brings; unknown names are not looked for")
            elif has_dropped and _looks_up_by_string(node):
                notes.append(
                    f"{where} looks names up with `{ast.unparse(node)}`; one that was dropped is not seen here"
                )
    return list(dict.fromkeys(notes))


def _looks_up_by_string(node: ast.AST) -> bool:
    """`globals()[...]`, `globals().get(...)` or `sys.modules[__name__]`."""
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Name) and node.value.func.id == "globals"
    return isinstance(node, ast.Subscript) and ast.unparse(node) == "sys.modules[__name__]"


def without_mentions(block: Block, gone: set[str]) -> Block:
    """Removes names that are gone from `__all__` and from isinstance checks."""
    if not gone or not any(name in block.text for name in gone):
        return block
    return transform(block, _DropMentions(gone))


class _DropMentions(cst.CSTTransformer):
    def __init__(self, gone: set[str]) -> None:
        self._gone = gone

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        is_exports = m.matches(updated_node, m.Assign(targets=[m.AssignTarget(m.Name("__all__"))]))
        return self._without_gone(updated_node) if is_exports else updated_node

    def leave_AugAssign(self, original_node: cst.AugAssign, updated_node: cst.AugAssign) -> cst.AugAssign:
        return self._without_gone(updated_node) if m.matches(updated_node.target, m.Name("__all__")) else updated_node

    def _without_gone(self, node: cst.Assign | cst.AugAssign) -> cst.Assign | cst.AugAssign:
        if not isinstance(node.value, cst.List | cst.Tuple):
            return node
        return node.with_changes(value=node.value.with_changes(elements=self._left(node.value)))

    def _left(self, listed: cst.List | cst.Tuple) -> list[cst.BaseElement]:
        """The elements that name nothing that is gone; the last one ends as the last one did."""
        named = [(e, getattr(e.value, "evaluated_value", getattr(e.value, "value", None))) for e in listed.elements]
        left = [element for element, name in named if name not in self._gone]
        if left and len(left) < len(listed.elements):
            alone = isinstance(listed, cst.Tuple) and len(left) == 1  # `("A",)` keeps its comma
            left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT if alone else listed.elements[-1].comma)
        return left

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.BaseStatement | cst.RemovalSentinel:
        orelse = updated_node.orelse
        if isinstance(orelse, cst.If) and m.matches(orelse, _DEAD):
            updated_node = updated_node.with_changes(orelse=orelse.orelse)
        if not m.matches(updated_node, _DEAD):
            return updated_node
        rest = updated_node.orelse
        if rest is None:
            return cst.RemoveFromParent()
        if isinstance(rest, cst.If):
            return rest.with_changes(leading_lines=updated_node.leading_lines)
        return updated_node  # `if False: ... else: ...` keeps its else branch

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """`isinstance(x, (A, Gone))` loses the element; `isinstance(x, Gone)` inside a larger test becomes False."""
        if not m.matches(updated_node, m.Call(func=m.Name("isinstance"), args=[m.Arg(), m.Arg()])):
            return updated_node
        first, second = updated_node.args
        kinds = second.value
        if isinstance(kinds, cst.Tuple):
            left = self._left(kinds)
            if left:
                alone = len(left) == 1 < len(kinds.elements)
                value = left[0].value if alone else kinds.with_changes(elements=left)
                return updated_node.with_changes(args=[first, second.with_changes(value=value)])
        elif not (isinstance(kinds, cst.Name) and kinds.value in self._gone):
            return updated_node
        return cst.Name("False")


_DEAD = m.If(test=m.Name("False"))
