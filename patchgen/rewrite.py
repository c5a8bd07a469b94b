"""Small tools for editing one block with libcst: find a function, insert statements, replace a statement.

Inserted code is formatted with black at the depth where it lands; what was there keeps its bytes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy.classes import reads_name
from patchgen.anatomy.names import local_names
from patchgen.source import Block, Module

LINE_LENGTH = 119
INDENT = "    "

FunctionEdit = Callable[[cst.FunctionDef], cst.FunctionDef]


def format_code(code: str, depth: int = 0) -> str:
    """`code` formatted by black as it would be at `depth` levels of indentation; the result is not indented."""
    import black  # imported late: half of the passes insert nothing

    mode = black.Mode(line_length=LINE_LENGTH - depth * len(INDENT), target_versions={black.TargetVersion.PY311})
    return black.format_str(code, mode=mode)


@functools.lru_cache(maxsize=512)
def statements(code: str, depth: int, comment: str | None = None) -> tuple[cst.BaseStatement, ...]:
    """Parses `code` into statements to insert at `depth`; the first carries `# comment`."""
    if comment:
        code = f"# {comment}\n{code}"
    parsed = cst.parse_module(format_code(code, depth))
    body = list(parsed.body)
    body[0] = body[0].with_changes(leading_lines=[*parsed.header, *body[0].leading_lines])
    return tuple(body)


def edit_function(block: Block, name: str, edit: FunctionEdit) -> Block:
    """The block with one function edited: the method `name` of the class in it, or the function `name` itself.

    Of several definitions of the name the last one is edited, which is what Python keeps.
    """

    def edited(members: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
        found = [i for i, node in enumerate(members) if isinstance(node, cst.FunctionDef) and node.name.value == name]
        if not found:
            raise LookupError(f"no function '{name}' in the block")
        members[found[-1]] = edit(members[found[-1]])
        return members

    return _with_members(block, edited)


def _with_members(block: Block, change: Callable[[list[cst.BaseStatement]], list[cst.BaseStatement]]) -> Block:
    """The block with the members of its class changed, or its statements if it holds no class."""
    tree = block.cst
    owner = next((node for node in tree.body if isinstance(node, cst.ClassDef)), None)
    if owner is None:
        return block.with_text(tree.with_changes(body=change(list(tree.body))).code)
    is_line = isinstance(owner.body, cst.SimpleStatementSuite)  # `class A(B): ...`
    body = cst.IndentedBlock([cst.SimpleStatementLine(owner.body.body)]) if is_line else owner.body
    changed = owner.with_changes(body=body.with_changes(body=change(list(body.body))))
    return block.with_text(tree.with_changes(body=[changed if n is owner else n for n in tree.body]).code)


def transform(block: Block, transformer: cst.CSTTransformer) -> Block:
    """The block after a libcst transformer."""
    return block.with_text(block.cst.visit(transformer).code)


def replace(block: Block, pattern: m.BaseMatcherNode, change: Callable[[cst.CSTNode], cst.CSTNode]) -> Block:
    """The block with every node that matches changed."""
    return block.with_text(m.replace(block.cst, pattern, lambda node, _: change(node)).code)


def function_body(function: cst.FunctionDef) -> list[cst.BaseStatement]:
    """The statements of a function; a one-line body is refused by name, for nothing can be inserted into it."""
    if not isinstance(function.body, cst.IndentedBlock):
        raise ValueError(f"the body of {function.name.value} stands on the line of its header")
    return list(function.body.body)


def with_body(function: cst.FunctionDef, body: Sequence[cst.BaseStatement]) -> cst.FunctionDef:
    return function.with_changes(body=function.body.with_changes(body=list(body)))


def edit_body(
    block: Block, name: str, edit: Callable[[list[cst.BaseStatement]], Sequence[cst.BaseStatement]]
) -> Block:
    """The block with the statements of one function edited."""
    return edit_function(block, name, lambda function: with_body(function, edit(function_body(function))))


def edit_branch(
    body: Sequence[cst.BaseStatement],
    place: Sequence[int | str],
    edit: Callable[[list[cst.BaseStatement]], Sequence[cst.BaseStatement]],
) -> list[cst.BaseStatement]:
    """The statements with those edited among which the one at `place` stands: (position,), or (position of an `if`,
    "body" or "orelse", ...)."""
    if len(place) == 1:
        return list(edit(list(body)))
    position, branch, *rest = place
    statement = body[position]
    holder = statement if branch == "body" else statement.orelse
    if isinstance(holder, cst.If) and branch == "orelse":
        raise LookupError("the branch is an elif")
    changed = holder.with_changes(body=holder.body.with_changes(body=edit_branch(holder.body.body, rest, edit)))
    statement = changed if branch == "body" else statement.with_changes(orelse=changed)
    return [*body[:position], statement, *body[position + 1 :]]


def insert_first(block: Block, name: str, code: str, mark: str) -> Block:
    """The block with marked code at the top of one function."""
    new = statements(code, 2 if isinstance(block.node, ast.ClassDef) else 1, mark)
    return edit_function(block, name, lambda function: insert_at_start(function, new))


def insert_at_start(function: cst.FunctionDef, new: Sequence[cst.BaseStatement]) -> cst.FunctionDef:
    """Inserts statements at the top of a function, below its docstring."""
    body = function_body(function)
    position = 0 if function.get_docstring(clean=False) is None else 1
    return with_body(function, [*body[:position], *new, *body[position:]])


def insert_before(
    body: Sequence[cst.BaseStatement], position: int, new: Sequence[cst.BaseStatement]
) -> list[cst.BaseStatement]:
    """Inserts statements before `body[position]`, which keeps its comments; a blank line above it stands above both."""
    first, after = new[0], body[position]
    blank = list(takewhile(lambda line: line.comment is None, after.leading_lines))
    first = first.with_changes(leading_lines=[*blank, *first.leading_lines])
    after = after.with_changes(leading_lines=after.leading_lines[len(blank) :])
    return [*body[:position], first, *new[1:], after, *body[position + 1 :]]


def insert_at(function: cst.FunctionDef, position: int, code: str, mark: str) -> cst.FunctionDef:
    """Inserts marked code before a statement of a method."""
    return with_body(function, insert_before(function_body(function), position, statements(code, 2, mark)))


def append_method(block: Block, code: str, comment: str) -> Block:
    """The class block with one method added at its end."""
    method = statements(code, 1, comment)[0]
    method = method.with_changes(leading_lines=[cst.EmptyLine(indent=False), *method.leading_lines])
    return _with_members(block, lambda members: [*members, method])


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


def replace_statement(old: cst.BaseStatement, new: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """`new` in the place of `old`, below the comments and blank lines that `old` had."""
    first, *rest = new
    return [first.with_changes(leading_lines=[*old.leading_lines, *first.leading_lines]), *rest]


def code_of(node: cst.CSTNode) -> str:
    """The source text of a node, without the comments above it."""
    if isinstance(node, cst.BaseStatement | cst.SimpleStatementLine) and getattr(node, "leading_lines", ()):
        node = node.with_changes(leading_lines=[])
    return cst.Module(body=[]).code_for_node(node).strip()


def parameters(function: cst.FunctionDef) -> list[str]:
    """The names of a function's parameters but for self, `*args` and `**kwargs`."""
    params = function.params
    named = [*params.posonly_params, *params.params, *params.kwonly_params]
    return [param.name.value for param in named if param.name.value != "self"]


def embeddings_above(function: cst.FunctionDef, before: Sequence[cst.BaseStatement]) -> str | None:
    """The name that holds the embeddings `[B, S, H]` below these statements of a model's forward."""
    for name in ("inputs_embeds", "hidden_states", "input_embeds"):
        is_handed = name in parameters(function)
        if any(_assigns(node, name) and (is_handed or not isinstance(node, cst.If)) for node in before):
            return name
    return None


def _assigns(node: cst.BaseStatement, name: str) -> bool:
    if name not in code_of(node):  # printing is much faster than matching
        return False
    return bool(m.findall(node, m.AssignTarget(target=m.Name(name)) | m.AnnAssign(target=m.Name(name))))


def uses_name(node: cst.CSTNode, name: str) -> bool:
    """Whether the name is read or written anywhere in the node (attributes and keywords of that name do not count)."""
    code = code_of(node)
    return name in code and (reads_name(tree := ast.parse(code), name) or name in local_names(tree))


def marked(node: cst.BaseStatement, mark: str) -> cst.BaseStatement:
    """The statement below the comment of a pass."""
    comment = cst.EmptyLine(comment=cst.Comment(f"# {mark}"))
    return node.with_changes(leading_lines=[*node.leading_lines, comment])


class MarkStatements(cst.CSTTransformer):
    """Marks the statements of one line in which a subclass has set `changed`."""

    def __init__(self, mark: str) -> None:
        self.mark, self.changed = mark, False

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self.changed = False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        return marked(updated_node, self.mark) if self.changed else updated_node


class WrapCalls(MarkStatements):
    """`f(x, ...)` becomes `ops.<kind>(f, x, ..., <more>)` for each f -> kind in `wanted`, its statement marked.

    `depth` is that of the node which is visited: 0 for a block, 1 for a method.
    """

    def __init__(self, wanted: Mapping[str, str], mark: str, more: Sequence[cst.Arg] = (), depth: int = 0) -> None:
        super().__init__(mark)
        self._wanted, self._more, self._depth = wanted, more, depth
        self.kinds: list[str] = []

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if not m.matches(original_node.func, m.Name()) or original_node.func.value not in self._wanted:
            return updated_node
        name = original_node.func.value
        self.kinds.append(self._wanted[name])
        self.changed = True
        return updated_node.with_changes(
            func=cst.Attribute(value=cst.Name("ops"), attr=cst.Name(self._wanted[name])),
            args=[cst.Arg(cst.Name(name)), *updated_node.args, *self._more],
        )

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._depth += 1

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        self._depth -= 1
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        if not self.changed:
            return updated_node
        (formatted,) = statements(code_of(updated_node), self._depth, comment=self.mark)
        return formatted.with_changes(leading_lines=[*original_node.leading_lines, *formatted.leading_lines])
