"""Small tools for editing one block: where code goes by the nodes of its syntax tree, what is there keeps its bytes.

Inserted code is formatted with black at the depth where it lands.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Mapping, Sequence

import libcst as cst

from patchgen.anatomy.classes import FunctionNode, calls, parameter_names, reads_name, targets
from patchgen.anatomy.names import local_names
from patchgen.errors import Missed
from patchgen.source import Block, Module

LINE_LENGTH = 119
INDENT = "    "


def format_code(code: str, depth: int = 0) -> str:
    """`code` formatted by black as it would be at `depth` levels of indentation; the result is not indented."""
    import black  # imported late: half of the passes insert nothing

    mode = black.Mode(line_length=LINE_LENGTH - depth * len(INDENT), target_versions={black.TargetVersion.PY311})
    return black.format_str(code, mode=mode)


class Editor:
    """Changes of one block by the nodes of its syntax tree (`block.node` and what is below it).

    What no change touches keeps its bytes; what is inserted is formatted at the depth where it lands, below the comment of
    the pass. Statements are inserted and replaced as whole lines: one that shares its line raises `Missed`.
    """

    def __init__(self, block: Block, mark: str = "") -> None:
        self.block, self._mark = block, mark
        self._bytes = block.text.encode()
        self._lines = self._bytes.split(b"\n")
        self._starts = [0, *itertools.accumulate(len(line) + 1 for line in self._lines)]
        self._changes: list[tuple[int, int, str]] = []
        self._marked: set[ast.stmt] = set()

    @property
    def result(self) -> Block:
        """The block with the changes."""
        parts, at = [], 0
        for start, end, code in sorted(self._changes, key=lambda change: change[:2]):
            if start < at:
                raise ValueError(f"two changes of one place: {self._bytes[start:at].decode()}")
            parts += [self._bytes[at:start], code.encode()]
            at = end
        return self.block.with_text(b"".join([*parts, self._bytes[at:]]).decode())

    def function(self, name: str) -> FunctionNode:
        """The method of that name, or the function itself; of several definitions the last one, which is what Python keeps."""
        members = self.block.node.body if isinstance(self.block.node, ast.ClassDef) else self.block.statements
        return next(node for node in reversed(members) if isinstance(node, FunctionNode) and node.name == name)

    def code(self, node: ast.AST, *, whole: bool = False, instead: tuple[ast.AST, str] | None = None) -> str:
        """The source of a node, a statement's with what follows on its lines; without the indentation of its statement.

        Args:
            whole: with the comments and blank lines above a statement.
            instead: a node below this one, and what stands in its place.
        """
        (start, end), first = self._span(node), node.lineno
        if whole:
            first = self._gap(node)
            start = self._starts[first - 1]
        end = self._starts[node.end_lineno] if isinstance(node, ast.stmt) else end
        source = self._bytes[start:end]
        if instead is not None:
            place, code = self._span(instead[0]), instead[1].encode()
            source = self._bytes[start : place[0]] + code + self._bytes[place[1] : end]
        indent, inside = " " * self.statement_of(node).col_offset, _inside_strings(node)
        lines = enumerate(source.decode().rstrip().split("\n"), start=first)
        return "\n".join(line if i in inside else line.removeprefix(indent) for i, line in lines)

    def segment(self, node: ast.AST) -> str:
        """The source of a node as it stands there."""
        start, end = self._span(node)
        return self._bytes[start:end].decode()

    def instead(self, node: ast.AST, code: str, last: ast.AST | None = None) -> None:
        """Other source in the place of a node's, or of those up to `last`."""
        self._change(self._span(node)[0], self._span(last or node)[1], code)

    def around(self, node: ast.AST, before: str, after: str = "") -> None:
        """Code in front of and behind an expression."""
        start, end = self._span(node)
        self._change(start, start, before)
        self._change(end, end, after)

    def add_arguments(self, call: ast.Call, first: str, last: str = "") -> None:
        """Arguments in front of those that a call has, and behind them."""
        spans = [self._span(given) for given in (*call.args, *call.keywords)]
        (start, _), (_, end), close = min(spans), max(spans), self._span(call)[1] - 1
        self._change(start, start, f"{first}, ")
        if last:
            self._change(close, close, last if b"," in self._bytes[end:close] else f", {last}")

    def mark(self, *nodes: ast.AST) -> None:
        """The comment of the pass above the statements that hold these nodes."""
        for statement in {*map(self.statement_of, nodes)} - self._marked:
            self._marked.add(statement)
            at = self._starts[self._first_line(statement) - 1]
            self._change(at, at, f"{' ' * statement.col_offset}# {self._mark}\n")

    def above(self, statement: ast.stmt, code: str, *, at_top: bool = False) -> None:
        """Marked code above a statement, which keeps its comments; a blank line above it stays above both.

        With `at_top` the code goes above those comments and blank lines.
        """
        first, line = self._first_line(statement), self._gap(statement)
        while line < first and not at_top and not self._lines[line - 1].strip():
            line += 1
        self._insert(line, code, statement.col_offset)

    def below(self, statement: ast.stmt, code: str, *, marked: bool = True, spaced: bool = False) -> None:
        """Code right below a statement, or below a blank line."""
        self._first_line(statement)
        at = self._starts[statement.end_lineno]
        self._change(at, at, "\n" * spaced)
        self._insert(statement.end_lineno + 1, code, statement.col_offset, marked=marked)

    def drop(self, statement: ast.stmt) -> None:
        """Takes a statement away, with the comments and blank lines above it."""
        self._change(self._starts[self._gap(statement) - 1], self._starts[statement.end_lineno], "")

    def at_start(self, function: FunctionNode, code: str) -> None:
        """Marked code at the top of a function, below its docstring."""
        first = function.body[0]
        if ast.get_docstring(function, clean=False) is not None:
            self.below(first, code)
        else:
            self.above(first, code, at_top=True)

    def replace(self, first: ast.stmt, code: str, last: ast.stmt | None = None, *, marked: bool = True) -> None:
        """Code in the place of a statement, or of those up to `last`; comments and blank lines above them stay."""
        start, end = self._starts[self._first_line(first) - 1], self._starts[(last or first).end_lineno]
        self._change(start, end, laid_out(code, first.col_offset, self._mark if marked else None))

    def put(self, first: ast.stmt, lines: str, last: ast.stmt) -> None:
        """Lines as they are in the place of statements and of the comments above them."""
        self._change(self._starts[self._gap(first) - 1], self._starts[last.end_lineno], lines)

    def append(self, code: str) -> None:
        """A marked method at the end of the class."""
        first = self.block.node.body[0]
        if self._is_inline(first):
            start = self._span(first)[0]
            self._change(start - 1, start, f"\n{INDENT}")
        self._change(len(self._bytes), len(self._bytes), "\n" + laid_out(code, len(INDENT), self._mark))

    def fill(self, code: str) -> None:
        """Members in the place of the class's own."""
        first = self.block.node.body[0]
        start = self._span(first)[0] - 1 if self._is_inline(first) else self._starts[self._gap(first) - 1] - 1
        self._change(start, len(self._bytes), "\n" + indented(code, len(INDENT)) + "\n")

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds a node."""
        return self._holders[node]

    @functools.cached_property
    def _holders(self) -> dict[ast.AST, ast.stmt]:
        nodes = [node for statement in self.block.statements for node in ast.walk(statement)]  # outer ones first
        return {inner: node for node in nodes if isinstance(node, ast.stmt) for inner in ast.walk(node)}

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start, end = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset

    def _first_line(self, statement: ast.stmt) -> int:
        """The line on which a statement begins, alone."""
        behind = self._lines[statement.end_lineno - 1][statement.end_col_offset :].strip()
        if self._is_inline(statement) or behind[:1] not in (b"", b"#"):
            raise Missed("a statement on lines of its own", statement)
        return min(node.lineno for node in (statement, *getattr(statement, "decorator_list", ())))

    def _is_inline(self, statement: ast.stmt) -> bool:
        """Whether something stands in front of a statement on its line, as in `class A(B): ...`."""
        return bool(self._lines[statement.lineno - 1][: statement.col_offset].strip())

    def _gap(self, statement: ast.stmt) -> int:
        """The first of the comments and blank lines above a statement; what stands deeper belongs to the one above."""
        line = self._first_line(statement)
        while line > 1 and (above := self._lines[line - 2]).strip()[:1] in (b"", b"#"):
            if above.strip() and len(above) - len(above.lstrip()) > statement.col_offset:
                break
            line -= 1
        return line

    def _insert(self, line: int, code: str, indent: int, *, marked: bool = True) -> None:
        at = self._starts[line - 1]
        self._change(at, at, laid_out(code, indent, self._mark if marked else None))

    def _change(self, start: int, end: int, code: str) -> None:
        self._changes.append((start, end, code))


@functools.lru_cache(maxsize=512)
def laid_out(code: str, indent: int, mark: str | None) -> str:
    """Statements, marked and formatted, as they stand at an indentation."""
    return indented(format_code(f"# {mark}\n{code}" if mark else code, indent // len(INDENT)), indent)


def indented(code: str, indent: int) -> str:
    """Statements as they stand at an indentation; what lies in strings of several lines is not moved."""
    inside = _inside_strings(ast.parse(code))
    lines = enumerate(code.split("\n"), start=1)
    return "\n".join(line if i in inside or not line else " " * indent + line for i, line in lines)


def _inside_strings(code: ast.AST) -> set[int]:
    """The lines that begin within a string."""
    strings = [node for node in ast.walk(code) if isinstance(node, ast.Constant | ast.JoinedStr)]
    return {line for node in strings for line in range(node.lineno + 1, node.end_lineno + 1)}


def insert_first(block: Block, name: str, code: str, mark: str) -> Block:
    """The block with marked code at the top of one function."""
    editor = Editor(block, mark)
    editor.at_start(editor.function(name), code)
    return editor.result


def append_method(block: Block, code: str, mark: str) -> Block:
    """The class block with one marked member more at its end."""
    editor = Editor(block, mark)
    editor.append(code)
    return editor.result


def at_end(module: Module, code: str) -> Module:
    """The module with one more statement below its definitions, above `__all__` if it has one."""
    position = next((i for i, block in enumerate(module) if "__all__" in block.binds), len(module.blocks))
    new = Block(text=f"\n\n{format_code(code)}")
    return module.with_blocks([*module.blocks[:position], new, *module.blocks[position:]])


def with_torch(module: Module) -> Module:
    """The module with `torch` and `nn` among its imports."""
    bound = {name for block in module for name in block.binds}
    wanted = {"torch": "import torch\n", "nn": "from torch import nn\n"}
    missing = [Block(text=line) for name, line in wanted.items() if name not in bound]
    blocks = list(module.blocks)
    first = next((i for i, block in enumerate(blocks) if block.is_import and "annotations" not in block.binds), 0)
    return module.with_blocks([*blocks[:first], *missing, *blocks[first:]])


def embeddings_above(function: FunctionNode, before: Sequence[ast.stmt]) -> str | None:
    """The name that holds the embeddings `[B, S, H]` below these statements of a model's forward."""
    for name in ("inputs_embeds", "hidden_states", "input_embeds"):
        is_handed = name in parameter_names(function)
        if any(_assigns(node, name) and (is_handed or not isinstance(node, ast.If)) for node in before):
            return name
    return None


def _assigns(statement: ast.stmt, name: str) -> bool:
    made = (node for node in ast.walk(statement) if isinstance(node, ast.Assign | ast.AnnAssign))
    return any(isinstance(target, ast.Name) and target.id == name for node in made for target in targets(node))


def uses_name(node: ast.AST, name: str) -> bool:
    """Whether the name is read or written anywhere in the node (attributes and keywords of that name do not count)."""
    return reads_name(node, name) or name in local_names(node)


def wrap_calls(editor: Editor, code: ast.AST, wanted: Mapping[str, str], more: str = "") -> list[str]:
    """`f(x, ...)` becomes `ops.<kind>(f, x, ..., <more>)` for each f -> kind in `wanted`, its statement marked.

    Returns:
        the kinds, one for each call.
    """

    def found_in(node: ast.AST) -> list[ast.Call]:
        return [call for call in calls(node) if isinstance(call.func, ast.Name) and call.func.id in wanted]

    for statement in dict.fromkeys(map(editor.statement_of, found := found_in(code))):
        is_header = hasattr(statement, "body")  # of a branch or a loop
        inside = editor if is_header else Editor(Block(text=editor.code(statement) + "\n"))
        for call in found_in(inside.block.node) if not is_header else found:
            if is_header and editor.statement_of(call) is not statement:
                continue
            inside.instead(call.func, f"ops.{wanted[call.func.id]}")
            inside.add_arguments(call, call.func.id, more)
        if not is_header:
            editor.replace(statement, inside.result.text)
    return [wanted[call.func.id] for call in found]


def transform(block: Block, transformer: cst.CSTTransformer) -> Block:
    """The block after a libcst transformer."""
    return block.with_text(block.cst.visit(transformer).code)
