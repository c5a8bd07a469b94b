"""Edits one block with libcst: callers pass nodes of `ast`, each of which is found in libcst's tree by its position.

Inserted code is formatted with black for its depth; existing code keeps its bytes.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import libcst as cst

from patchgen.anatomy.classes import FunctionNode, calls, is_compound, walk
from patchgen.changes import Change, Changes, Edit, visited
from patchgen.errors import Missed
from patchgen.places import PLACEHOLDER, Part, Places, Statement, around, code_of, parenthesised
from patchgen.source import Block, Module

LINE_LENGTH = 119
INDENT = "    "
BRANCHES = ("body", "orelse", "finalbody")
Placed = ast.stmt | ast.expr | ast.arg  # nodes of `ast` with a position
Found = TypeVar("Found", bound=cst.CSTNode)


def format_code(code: str, depth: int = 0) -> str:
    """`code` formatted by black for `depth` levels of indentation; the result is not indented."""
    import black  # imported late: half of the passes insert nothing
    from black.mode import TargetVersion

    mode = black.Mode(line_length=LINE_LENGTH - depth * len(INDENT), target_versions={TargetVersion.PY311})
    return black.format_str(code, mode=mode)


@functools.lru_cache(maxsize=512)
def _formatted(code: str, depth: int, mark: str | None) -> tuple[Statement, ...]:
    """Statements to insert at `depth`; the first carries the comment of the pass."""
    return _parsed(format_code(f"# {mark}\n{code}" if mark else code, depth))


def _parsed(code: str) -> tuple[Statement, ...]:
    module = cst.parse_module(code)
    leads = [[*module.header, *module.body[0].leading_lines], *(one.leading_lines for one in module.body[1:])]
    return tuple(
        one.with_changes(leading_lines=[line if line.comment else cst.EmptyLine(indent=False) for line in lead])
        for one, lead in zip(module.body, leads, strict=True)
    )


class Editor:
    """Collects changes of one block by nodes of its `ast` (`block.node` and its descendants); `result` applies them.

    What no change touches keeps its bytes; inserted statements are formatted for their depth, below the comment `mark` of
    the pass. Statements are inserted and replaced as whole lines: one that shares its line raises `Missed`.
    """

    def __init__(self, block: Block, mark: str = "") -> None:
        self.block, self._mark = block, mark
        self._bytes = block.text.encode()
        self._lines = self._bytes.split(b"\n")
        self._starts = [0, *itertools.accumulate(len(line) + 1 for line in self._lines)]
        self._read: dict[cst.CSTNode, Part] = {}  # node that was looked up -> the part that it is in
        self._changes: dict[Statement, Change] = {}
        self._edits: dict[cst.CSTNode, list[Edit]] = {}
        self._lost: set[cst.CSTNode] = set()  # expressions that are replaced
        self._members: str | None = None  # what replaces all members of the class
        self._appended: list[str] = []  # members added below them

    @property
    def result(self) -> Block:
        """The block with the changes.

        Raises:
            ValueError: two changes conflict: one changes code that the other removes.
            Missed: libcst rejects a change, such as an expression without parentheses in `if(a):`.
        """
        changed = {node: [*self._edits.get(node, ()), change.apply] for node, change in self._changes.items()}
        changes: Changes = self._edits | changed
        self._refuse_conflicts(changes)
        changed = {part: {n: change for n, change in changes.items() if self._read[n] is part} for part in self._parts}
        parts = [visited(part, own) if own else part.text for part, own in changed.items()]
        if (self._members is not None or self._appended) and len(parts) == 1:  # `class A(B): ...`
            whole = Editor(Block(parts[0]))
            start = whole._span(whole.block.members[0])[0]
            parts = [f"{whole._bytes[:start].decode().rstrip()}\n", f"{INDENT}{whole._bytes[start:].decode()}"]
        if self._members is not None:
            parts[1:] = [indented(self._members, self._indent).rstrip("\n") + "\n"]
        parts += [f"\n{indented(code, self._indent)}" for code in self._appended]
        return self.block.with_text("".join(parts))

    def _refuse_conflicts(self, changed: Changes) -> None:
        """Raises ValueError if one change would discard another one."""
        gone = {node for node, change in self._changes.items() if change.instead is not None}
        clashes = [node for node in gone if node in self._edits]
        clashes += [node for node in gone if not self._changes[node].instead and self._changes[node].mark is not None]
        clashes += [node for node in self._lost if len(self._edits.get(node, ())) > 1]
        lost = gone | self._lost
        clashes += [node for node in changed if not lost.isdisjoint(self._read[node].places.holders(node))]
        if self._members is not None:
            clashes += [node for node in changed if self._read[node].start > 0]
        if clashes:
            raise ValueError(f"two changes of one place: {code_of(clashes[0])}")

    def function(self, name: str) -> FunctionNode:
        """The method of that name, or the block's function itself; of several definitions the last one, as in Python."""
        functions = [node for node in self.block.members if isinstance(node, FunctionNode) and node.name == name]
        return functions[-1]

    def code(self, node: Placed, *, whole: bool = False, instead: tuple[Placed, str] | None = None) -> str:
        """The source of a node, dedented by its statement's indentation; of a statement with what follows on its last line.

        Args:
            whole: include the comments and blank lines above a statement.
            instead: a node within this one, and code that replaces it.
        """
        (start, end), first = self._span(node), _first_line(node)
        if first < node.lineno:  # its decorators belong to it
            start = self._starts[first - 1] + node.col_offset
        if whole and isinstance(node, ast.stmt):
            self._statement(node)
            first = self._gap(node)
            start = self._starts[first - 1]
        end = self._starts[_last_line(node)] if isinstance(node, ast.stmt) else end
        source = self._bytes[start:end]
        if instead is not None:
            place, code = self._span(instead[0]), instead[1].encode()
            source = self._bytes[start : place[0]] + code + self._bytes[place[1] : end]
        indent, inside = " " * self.statement_of(node).col_offset, inside_strings(node)
        lines = enumerate(source.decode().rstrip().split("\n"), start=first)
        return "\n".join(line if i in inside else line.removeprefix(indent) for i, line in lines)

    def instead(self, node: ast.expr, code: str) -> None:
        """Replaces an expression by code."""
        new = cst.parse_expression(code)

        def change(old: cst.BaseExpression) -> cst.BaseExpression:
            lead, end = (old.lpar, old.rpar) if not isinstance(old, cst.Tuple) else (old.lpar[:-1], old.rpar[1:])
            return new.with_changes(lpar=[*lead, *new.lpar], rpar=[*new.rpar, *end])

        self._lost.add(self._expression(node))
        self._edit(self._expression(node), change)

    def around(self, node: ast.expr, before: str, after: str = "") -> None:
        """Inserts code before and after an expression."""
        self._edit(self._expression(node), functools.partial(around, before, after))

    def from_module(self, node: ast.ImportFrom, module: str) -> None:
        """Makes a `from` import absolute: from `module`."""
        name = cst.parse_expression(module)
        found = self._find(node, lambda places, start, _: places.imports.get(start), "an import")
        space = cst.SimpleWhitespace(" ")
        self._edit(found, lambda old: old.with_changes(module=name, relative=[], whitespace_after_from=space))

    def add_arguments(self, call: ast.Call, first: str, last: str = "") -> None:
        """Inserts arguments before and after those of a call."""
        before, after = (cst.ensure_type(cst.parse_expression(f"f({args})"), cst.Call).args for args in (first, last))

        def change(old: cst.Call) -> cst.Call:
            args = list(old.args)
            if len(args) == 1 and isinstance(args[0].value, cst.GeneratorExp) and not args[0].value.lpar:
                args = [args[0].with_changes(value=parenthesised(args[0].value))]
            return old.with_changes(args=[*before, *args, *after])

        self._edit(self._expression(call), change)

    def set_bases(self, bases: Sequence[str]) -> None:
        """Replaces the bases of the class."""
        args = [cst.Arg(cst.parse_expression(base)) for base in bases]
        self._edit(self._statement(self.block.node), lambda old: old.with_changes(bases=args))

    def decorate(self, function: FunctionNode, decorator: str) -> None:
        """Adds a decorator above those of a function."""
        new = cst.Decorator(cst.parse_expression(decorator))
        self._edit(self._statement(function), lambda old: old.with_changes(decorators=[new, *old.decorators]))

    def add_parameter(self, function: FunctionNode, code: str) -> None:
        """Adds a parameter with a default after those of a function, before its `**kwargs`."""
        new = cst.ensure_type(cst.parse_statement(f"def f({code}): ..."), cst.FunctionDef).params.params[0]

        def change(old: cst.FunctionDef) -> cst.FunctionDef:
            named, star = old.params.kwonly_params, old.params.star_arg
            group = "kwonly_params" if named or isinstance(star, cst.Param) else "params"
            last = [*old.params.params, *([star] if isinstance(star, cst.Param) else []), *named][-1]
            members = [*getattr(old.params, group), new.with_changes(comma=last.comma)]
            return old.with_changes(params=old.params.with_changes(**{group: members}))

        self._edit(self._statement(function), change)

    def mark(self, *nodes: ast.AST) -> None:
        """Adds the comment of the pass above the innermost statements that contain these nodes."""
        for node in nodes:
            self._changes.setdefault(self._statement(self.statement_of(node)), Change()).mark = self._mark

    def above(self, statement: ast.stmt, code: str, *, at_top: bool = False, marked: bool = True) -> None:
        """Inserts code above a statement, between its comments and the statement; its blank lines move above the code.

        With `at_top` the code goes above the comments and blank lines.
        """
        change = self._change(statement)
        (change.top if at_top else change.above).extend(self._formatted(code, statement, marked=marked))

    def below(self, statement: ast.stmt, code: str, *, marked: bool = True, spaced: bool = False) -> None:
        """Inserts code below a statement, after a blank line if `spaced`."""
        first, *others = self._formatted(code, statement, marked=marked)
        lead = [cst.EmptyLine(indent=False)] * spaced
        first = first.with_changes(leading_lines=[*lead, *first.leading_lines])
        self._change(statement).below.extend([first, *others])

    def drop(self, statement: ast.stmt) -> None:
        """Removes a statement and the comments and blank lines above it."""
        self._take(statement, ())

    def drop_elements(self, listed: ast.List | ast.Tuple, dropped: Sequence[ast.expr]) -> None:
        """Removes elements of a list or tuple; the new last one gets the trailing comma, or none, of the old one."""
        places_left = [place for place, element in enumerate(listed.elts) if element not in dropped]

        def change(old: cst.List | cst.Tuple) -> cst.List | cst.Tuple:
            left = [old.elements[place] for place in places_left]
            if left:
                alone = isinstance(old, cst.Tuple) and len(left) == 1  # `("A",)` keeps its comma
                left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT if alone else old.elements[-1].comma)
            return old.with_changes(elements=left)

        if dropped:
            self._edit(self._expression(listed), change)

    def drop_branch(self, branch: ast.If) -> None:
        """Removes an `if` or `elif`; the next `elif`, or after an `elif` the `else`, replaces it. `if ... else` stays."""
        found = self._statement(branch)
        is_elif = found in self._read[found].places.elifs

        def change(old: cst.If) -> cst.If | cst.Else | cst.RemovalSentinel:
            if old.orelse is None:
                return cst.RemoveFromParent()
            if is_elif:
                return old.orelse
            return old.orelse.with_changes(leading_lines=old.leading_lines) if isinstance(old.orelse, cst.If) else old

        self._edit(found, change)

    def siblings(self, node: ast.stmt) -> list[ast.stmt]:
        """The list of statements, such as the body of a branch, that contains a statement."""
        holders = (holder for holder in self._holders if not isinstance(holder, ast.expr))
        parts: Iterator[list[ast.stmt]] = (getattr(holder, name, []) for holder in holders for name in BRANCHES)
        return next((part for part in parts if node in part), self.block.statements)

    def at_start(self, function: FunctionNode, code: str) -> None:
        """Inserts marked code at the top of a function, below its docstring."""
        first = function.body[0]
        if ast.get_docstring(function, clean=False) is not None:
            self.below(first, code)
        else:
            self.above(first, code, at_top=True)

    def replace(self, first: ast.stmt, code: str, last: ast.stmt | None = None, *, marked: bool = True) -> None:
        """Replaces a statement, or those up to `last`, by code; the comments and blank lines above `first` stay."""
        self._replace(first, self._formatted(code, first, marked=marked), last)

    def put(self, first: ast.stmt, code: str, last: ast.stmt) -> None:
        """Replaces statements, and the comments and blank lines above them, by code that is not formatted."""
        self._replace(first, _parsed(code), last)
        self._change(first).with_lead = False

    def _take(self, statement: ast.stmt, code: Sequence[Statement]) -> None:
        change = self._change(statement)
        if change.instead is not None:
            raise ValueError(f"two changes of one place: {self.code(statement)}")
        change.instead = code

    def _replace(self, first: ast.stmt, code: Sequence[Statement], last: ast.stmt | None) -> None:
        self._take(first, code)
        if last is not None and last is not first:
            siblings = self.siblings(first)
            for statement in siblings[siblings.index(first) + 1 : siblings.index(last) + 1]:
                self.drop(statement)

    def append(self, code: str) -> None:
        """Adds a marked member at the end of the class."""
        self._appended.append(format_code(f"# {self._mark}\n{code}" if self._mark else code, 1))

    def fill(self, code: str) -> None:
        """Replaces all members of the class."""
        self._members = code

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that contains a node, itself included."""
        return self._holders[node]

    @functools.cached_property
    def _holders(self) -> dict[ast.AST, ast.stmt]:
        found: dict[ast.AST, ast.stmt] = {statement: statement for statement in self.block.statements}
        for node in self.block.nodes:  # outer ones first
            for inner in ast.iter_child_nodes(node):
                found[inner] = inner if isinstance(inner, ast.stmt) else found[node]
        return found

    @functools.cached_property
    def _in_strings(self) -> set[int]:
        return inside_strings(*self.block.statements)

    def _span(self, node: Placed) -> tuple[int, int]:
        start, end = self._starts[node.lineno - 1], self._starts[_last_line(node) - 1]
        return start + node.col_offset, end + (node.end_col_offset or 0)

    def _gap(self, statement: ast.stmt) -> int:
        """The first line of the comments and blank lines above a statement, up to a comment with deeper indentation."""
        line = _first_line(statement)
        while line > 1 and (above := self._lines[line - 2]).strip()[:1] in (b"", b"#"):
            if line - 1 in self._in_strings:
                break
            if above.strip() and len(above) - len(above.lstrip()) > statement.col_offset:
                break
            line -= 1
        return line

    @functools.cached_property
    def _indent(self) -> str:
        """The indentation of the class's members."""
        first = self.block.members[0]
        return self._lines[first.lineno - 1][: first.col_offset].decode() if len(self._parts) > 1 else INDENT

    @functools.cached_property
    def _parts(self) -> list[Part]:
        """What is above the members of the class, and each member; else the whole block. libcst parses only changed parts."""
        members = self.block.members if isinstance(self.block.node, ast.ClassDef) else []
        first = self._lines[members[0].lineno - 1][: members[0].col_offset] if members else b""
        if not members or first.strip():  # on the line of the class
            return [Part(0, self.block.text)]
        starts, end = [0], 0
        for member in members:
            goes_on = self._lines[_first_line(member) - 2].endswith(b"\\")
            if (line := self._gap(member)) > end and not goes_on:
                starts.append(self._starts[line - 1])
            end = _last_line(member)
        texts = [self._bytes[start:end].decode() for start, end in itertools.pairwise([*starts, None])]
        parts = zip(starts, texts, ["", *["class _:\n"] * len(members)], strict=False)
        return [Part(start, text, before, f"{first.decode()}{PLACEHOLDER}\n") for start, text, before in parts]

    def _find(self, node: Placed, kind: Callable[[Places, int, int], Found | None], what: str) -> Found:
        start, end = self._span(node)
        part = next(part for part in reversed(self._parts) if part.start <= start)
        if (found := kind(part.places, *part.span(start, end))) is None:
            raise Missed(what, node)
        self._read[found] = part
        return found

    def _expression(self, node: ast.expr) -> cst.BaseExpression:
        what = "an expression that stands by itself in libcst's tree"
        return self._find(node, lambda places, start, end: places.expressions.get((start, end)), what)

    def _statement(self, statement: ast.stmt) -> Statement:
        what = "a statement on lines of its own"
        return self._find(statement, lambda places, start, _: places.statements.get(start), what)

    def _change(self, statement: ast.stmt) -> Change:
        if statement is self.block.node and len(self._parts) > 1:
            raise Missed("a member of the class, or what is below it", statement)
        if (found := self._statement(statement)) in self._read[found].places.elifs:
            raise Missed("a statement that others can stand beside, no `elif`", statement)
        return self._changes.setdefault(found, Change())

    def _edit(self, node: cst.CSTNode, change: Edit) -> None:
        self._edits.setdefault(node, []).append(change)

    def _formatted(self, code: str, beside: ast.stmt, *, marked: bool = True) -> tuple[Statement, ...]:
        return _formatted(code, beside.col_offset // len(INDENT), self._mark if marked else None)


def _first_line(node: Placed) -> int:
    """The first line of a node, its decorators included."""
    return min(one.lineno for one in (node, *getattr(node, "decorator_list", ())))


def _last_line(node: Placed) -> int:
    return node.end_lineno or node.lineno


def indented(code: str, indent: str = INDENT) -> str:
    """Indents statements; the lines inside multi-line strings are unchanged."""
    inside = inside_strings(ast.parse(code))
    lines = enumerate(code.split("\n"), start=1)
    return "\n".join(line if i in inside or not line else indent + line for i, line in lines)


def inside_strings(*code: ast.AST) -> set[int]:
    """The lines that begin inside a string, or between the pieces of a concatenated one; counted from 1."""
    strings = [node for part in code for node in walk(part) if isinstance(node, ast.Constant | ast.JoinedStr)]
    return {line for node in strings for line in range(node.lineno + 1, _last_line(node) + 1)}


def insert_first(block: Block, name: str, code: str, mark: str) -> Block:
    """The block with marked code at the top of one function."""
    editor = Editor(block, mark)
    editor.at_start(editor.function(name), code)
    return editor.result


def append_method(block: Block, code: str, mark: str) -> Block:
    """The class block with a marked member added at its end."""
    editor = Editor(block, mark)
    editor.append(code)
    return editor.result


def at_end(module: Module, code: str) -> Module:
    """The module with `code` added at its end, but above `__all__` if it has one."""
    position = next((i for i, block in enumerate(module) if "__all__" in block.binds), len(module.blocks))
    return module.with_inserted(position, f"\n\n{format_code(code)}")


def with_torch(module: Module) -> Module:
    """The module with imports of `torch` and `nn` added unless it binds these names."""
    bound = {name for block in module for name in block.binds}
    wanted = {"torch": "import torch\n", "nn": "from torch import nn\n"}
    first = next((i for i, block in enumerate(module) if block.is_import and "annotations" not in block.binds), 0)
    return module.with_inserted(first, *(line for name, line in wanted.items() if name not in bound))


def wrap_calls(editor: Editor, code: ast.AST, wanted: Mapping[str, str], more: str = "") -> list[str]:
    """Rewrites calls `f(x, ...)` in `code` to `ops.<kind>(f, x, ..., <more>)` for each f, or `self.f`, -> kind in `wanted`.

    Returns the kinds, one for each call. Simple statements are marked; headers of branches and loops are not.
    """

    def found_in(node: ast.AST) -> dict[ast.Call, str]:
        return {call: name for call in calls(node) if (name := ast.unparse(call.func)) in wanted}

    for statement in dict.fromkeys(map(editor.statement_of, found := found_in(code))):
        is_header = is_compound(statement)  # of a branch or a loop
        inside = editor if is_header else Editor(Block(text=editor.code(statement) + "\n"))
        for call, name in (found if is_header else found_in(inside.block.node)).items():
            if is_header and editor.statement_of(call) is not statement:
                continue
            inside.instead(call.func, f"ops.{wanted[name]}")
            inside.add_arguments(call, name, more)
        if not is_header:
            editor.replace(statement, inside.result.text)
    return [wanted[name] for name in found.values()]
