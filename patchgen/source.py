"""A modeling file as a sequence of top-level blocks, each with its exact text.

Passes replace the text of single blocks; everything else keeps its bytes, so the diff against upstream shows what the
passes did and nothing else. Blocks are found with `ast` (fast) and rewritten with libcst (exact), one at a time: parsing
the one member that a pass changes takes milliseconds, the whole file most of a second.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from patchgen.errors import SourceSyntaxError


@dataclass(frozen=True)
class Block:
    """One or more top-level statements that share lines, with the comments and blank lines that precede them."""

    text: str
    line: int = 0  # of the first statement in the upstream file, 1-based; 0 for blocks that a pass added

    @property
    def statements(self) -> list[ast.stmt]:
        return _parse_ast(self.text).body

    @property
    def node(self) -> ast.stmt:
        return self.statements[0]

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The statements and all nodes in them."""
        return tuple(node for statement in self.statements for node in ast.walk(statement))

    @functools.cached_property
    def binds(self) -> tuple[str, ...]:
        """The module-level names that this block defines, imports included."""
        return tuple(dict.fromkeys(name for statement in self.statements for name in bound_names(statement)))

    @property
    def members(self) -> list[ast.stmt]:
        """The statements in the class body if the block is a class; otherwise the block's statements."""
        return self.node.body if isinstance(self.node, ast.ClassDef) else self.statements

    @property
    def name(self) -> str | None:
        """The name of the class or function; None if the block is neither."""
        node = self.node
        return node.name if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else None

    @property
    def where(self) -> str:
        """The block in words, for a message."""
        return self.name or f"line {self.line}"

    @property
    def is_import(self) -> bool:
        return all(isinstance(statement, ast.Import | ast.ImportFrom) for statement in self.statements)

    @property
    def is_docstring(self) -> bool:
        node = self.node
        return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)

    def with_text(self, text: str) -> Block:
        return replace(self, text=text)


@dataclass(frozen=True)
class Module:
    """A modeling file: `header + blocks + footer` is the text that `parse` read, byte for byte but for line endings."""

    header: str  # the comments above the first statement: the licence
    blocks: tuple[Block, ...]
    footer: str
    path: str = "<source>"

    @property
    def text(self) -> str:
        return self.header + "".join(block.text for block in self.blocks) + self.footer

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    @property
    def statements(self) -> list[ast.stmt]:
        return [statement for block in self.blocks for statement in block.statements]

    def block(self, name: str) -> Block:
        """The class or function block of that name; of several the last one, as in Python. Raises KeyError if there is
        none."""
        return self._named[name]

    def has(self, name: str) -> bool:
        return name in self._named

    @functools.cached_property
    def _named(self) -> dict[str, Block]:
        return {block.name: block for block in self.blocks if block.name}

    def swap(self, old: Block, *new: Block) -> Module:
        """This module with `old` replaced by any number of blocks."""
        position = next(i for i, block in enumerate(self.blocks) if block is old)
        return replace(self, blocks=(*self.blocks[:position], *new, *self.blocks[position + 1 :]))

    def with_inserted(self, position: int, *texts: str) -> Module:
        """This module with blocks of these texts before the one at a position."""
        new = (Block(text) for text in texts)
        return self.with_blocks([*self.blocks[:position], *new, *self.blocks[position:]])

    def with_blocks(self, blocks: Iterable[Block]) -> Module:
        return replace(self, blocks=tuple(blocks))


def parse(text: str, path: str = "<source>") -> Module:
    """Divides a source text into blocks. Line endings become LF, the last line gets one, a byte order mark is dropped.
    Raises SourceSyntaxError, with file, line and column, if it is not Python."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if text and not text.endswith("\n"):
        text += "\n"
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        line = error.lineno or text[: text.find("\0")].count("\n") + 1  # for a null byte Python names no line
        raise SourceSyntaxError(
            f"{path}:{line}:{error.offset or 1}: this is not valid Python: {error.msg}.\n    {(error.text or '').rstrip()}"
        ) from error

    lines = [line + "\n" for line in text.split("\n")][:-1]
    spans = _statement_spans(tree)
    if not spans:
        return Module(header=text, blocks=(), footer="", path=path)

    first_line = spans[0][0]
    header_end = _header_end(lines, first_line - 1)
    blocks: list[Block] = []
    cursor = header_end
    for start, end in spans:
        blocks.append(Block(text="".join(lines[cursor:end]), line=start))
        cursor = end
    return Module(header="".join(lines[:header_end]), blocks=tuple(blocks), footer="".join(lines[cursor:]), path=path)


def bound_names(statement: ast.AST) -> list[str]:
    """The names that a statement binds in its scope, also inside `if`, `try`, `for` and `with`.

    Names that a comprehension or a lambda binds are local to it, but for `:=` in a comprehension. The name of
    `except ... as` does not count: Python deletes it after the handler.
    """
    match statement:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [statement.name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name.split(".")[0] for alias in statement.names]
        case ast.Name(ctx=ast.Store()):
            return [statement.id]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return _names_of_walruses(statement)
        case ast.Lambda():
            return bound_names(statement.args)  # its defaults are evaluated outside
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return [*(n for child in ast.iter_child_nodes(statement) for n in bound_names(child)), name]
        case _:
            return [name for child in ast.iter_child_nodes(statement) for name in bound_names(child)]


def _names_of_walruses(node: ast.AST) -> list[str]:
    """The names that `:=` in a comprehension, or in a part of one, binds in the enclosing scope."""
    if isinstance(node, ast.Lambda):
        return _names_of_walruses(node.args)
    names = [node.target.id] if isinstance(node, ast.NamedExpr) else []
    return [*names, *(name for child in ast.iter_child_nodes(node) for name in _names_of_walruses(child))]


def _statement_spans(tree: ast.Module) -> list[tuple[int, int]]:
    """First and last line of each group of statements that share lines, decorators included."""
    spans: list[tuple[int, int]] = []
    for statement in tree.body:
        decorators = getattr(statement, "decorator_list", [])
        start = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], statement.end_lineno or 0))
        else:
            spans.append((start, statement.end_lineno or 0))
    return spans


def _header_end(lines: list[str], first_statement: int) -> int:
    """The number of header lines: those above the comments directly above the first statement; if these begin the file, all."""
    end = first_statement
    while end > 0 and lines[end - 1].startswith("#"):
        end -= 1
    return end if end > 0 and end < first_statement else first_statement


# A pass asks for the tree of a block more often than it changes one.
_parse_ast = functools.lru_cache(maxsize=4096)(ast.parse)
