"""Operators that change several places of a source: renames, helpers, functions of the same name, moved classes."""

from __future__ import annotations

import ast
import copy
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from patchgen.anatomy.classes import FunctionNode, dotted, own_attribute, parameter_names
from patchgen.mutation.edits import Mutant, Place, Source, expressions, first_line, last_line, stored_names

OTHER_MODULE = "moved_parts"  # the name of the module that code is moved to
Change = tuple[str, str, dict[str, str]]  # what changed, the text, other modules


@dataclass(frozen=True)
class FileOperator:
    """A change of the file, at or around a statement."""

    name: str
    changes: Callable[[Place], Iterator[Change]]
    keeps_meaning: bool = False

    def mutants(self, place: Place) -> Iterator[Callable[[], Mutant]]:
        for change, text, modules in self.changes(place):
            yield lambda change=change, text=text, modules=modules: Mutant(
                self.name, place.where, change, text, self.keeps_meaning, modules
            )


# ------------------------------------------------------------------------------------------------ renames


def _renamed_tokens(text: str, is_meant: Callable[[list[tokenize.TokenInfo], int], bool], new: str) -> str:
    """The text with the name tokens that `is_meant` picks replaced."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = text.splitlines(keepends=True)
    for i in reversed(range(len(tokens))):
        token = tokens[i]
        if token.type == tokenize.NAME and is_meant(tokens, i):
            (row, start), (_, end) = token.start, token.end
            lines[row - 1] = lines[row - 1][:start] + new + lines[row - 1][end:]
    return "".join(lines)


def class_renamed(place: Place) -> Iterator[Change]:
    """Renames the class of the statement, unless its name has a meaning for transformers."""
    owner = place.owner
    if owner is None or any(marker in owner.name for marker in ("For", "PreTrained")) or owner.name.endswith("Model"):
        return
    new = f"{owner.name}Renamed"
    yield (
        f"class {owner.name} -> {new}",
        _renamed_tokens(place.source.text, lambda tokens, i: tokens[i].string == owner.name, new),
        {},
    )


def local_renamed(place: Place) -> Iterator[Change]:
    """Renames a local name of the function."""
    function = place.function
    stored = [n.id for n in ast.walk(place.statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    inner = any(isinstance(n, FunctionNode | ast.Lambda) and n is not function for n in ast.walk(function))
    first, last = function.lineno, last_line(function)
    for name in dict.fromkeys(stored):
        if inner or name in parameter_names(function):
            continue

        def is_meant(tokens: list[tokenize.TokenInfo], i: int, name: str = name) -> bool:
            inside = first <= tokens[i].start[0] <= last and tokens[i].string == name
            keyword = tokens[i + 1].string == "=" and tokens[i - 1].string in ("(", ",") and _depth(tokens, i) > 0
            return inside and tokens[i - 1].string != "." and not keyword

        yield f"{name} -> {name}_now", _renamed_tokens(place.source.text, is_meant, f"{name}_now"), {}


def _depth(tokens: list[tokenize.TokenInfo], i: int) -> int:
    """How many brackets are open before token i, in its logical line."""
    depth = 0
    while i > 0 and tokens[i - 1].type != tokenize.NEWLINE:
        i -= 1
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(tokens[i].string, 0)
    return depth


def _set_attributes(place: Place) -> list[str]:
    """The attributes of `self` in the statement that its class assigns."""
    assigns = [node for node in ast.walk(place.owner or ast.Pass()) if isinstance(node, ast.Assign)]
    assigned = {own_attribute(target) for node in assigns for target in node.targets} - {"config", "training"}
    return sorted(
        {
            name
            for expression in expressions(place.statement)
            if (name := own_attribute(expression)) in assigned and name
        }
    )


def attribute_renamed(place: Place) -> Iterator[Change]:
    """Renames an attribute of `self` that no other object has."""
    for name in _set_attributes(place):
        uses = re.findall(rf"(\w+)\.{name}\b", place.source.text)
        if set(uses) != {"self"}:
            continue  # another object has an attribute of that name
        text = re.sub(rf"\bself\.{name}\b", f"self.{name}_own", place.source.text)
        yield f"self.{name} -> self.{name}_own", text, {}


# ------------------------------------------------------------------------------------------------ helpers


def _free_names(node: ast.expr, place: Place) -> list[str] | None:
    """The local names that an expression reads; None if a separate function could not compute it."""
    if any(isinstance(n, ast.NamedExpr | ast.Await | ast.Yield | ast.Starred | ast.Lambda) for n in ast.walk(node)):
        return None
    if any(isinstance(n, ast.comprehension) or (isinstance(n, ast.keyword) and n.arg is None) for n in ast.walk(node)):
        return None
    if any(isinstance(n, ast.Call) and dotted(n.func) == "super" for n in ast.walk(node)):
        return None
    read = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    arguments = place.function.args
    local = stored_names(place.function) | {"self", *parameter_names(place.function)}
    local |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
    return [name for name in dict.fromkeys(read) if name in local]


def _computed(place: Place) -> Iterator[tuple[ast.expr, list[str]]]:
    """The calls and binary operations of a statement, with the local names that they read."""
    for node in expressions(place.statement):
        if isinstance(node, ast.Call | ast.BinOp):
            names = _free_names(node, place)
            if names:
                yield node, names


def _helper_function(node: ast.expr, names: list[str]) -> str:
    """The code of a function with these parameters that computes an expression."""
    parameters = ["module" if name == "self" else name for name in names]
    body = re.sub(r"\bself\b", "module", ast.unparse(node))
    return f"def computed_apart({', '.join(parameters)}):\n    return {body}"


def in_helper(place: Place) -> Iterator[Change]:
    """An expression is computed by a top-level function."""
    for node, names in _computed(place):
        call = ast.parse(f"computed_apart({', '.join(names)})", mode="eval").body
        yield (
            f"{ast.unparse(node)} -> {ast.unparse(call)}",
            place.with_expression(node, call, _helper_function(node, names)),
            {},
        )


def passed_as_argument(place: Place) -> Iterator[Change]:
    """An expression is computed by a function that is passed to another one."""
    for node, names in _computed(place):
        arguments = ", ".join(names)
        for code in (
            f"torch.utils.checkpoint.checkpoint(computed_apart, {arguments}, use_reentrant=False)",
            f"next(map(computed_apart, {', '.join(f'[{name}]' for name in names)}))",
            f"(lambda function: function({arguments}))(computed_apart)",
            f'{{"apart": computed_apart}}["apart"]({arguments})',
        ):
            call = ast.parse(code, mode="eval").body
            yield (
                f"{ast.unparse(node)} -> {code}",
                place.with_expression(node, call, _helper_function(node, names)),
                {},
            )


AUTOGRAD = """class ComputedApart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.25"""


def in_autograd_function(place: Place) -> Iterator[Change]:
    """A value goes through an autograd function whose backward scales its gradient."""
    for node, _ in _computed(place):
        call = ast.parse(f"ComputedApart.apply({ast.unparse(node)})", mode="eval").body
        yield f"{ast.unparse(node)} -> {ast.unparse(call)}", place.with_expression(node, call, AUTOGRAD), {}


def in_method(place: Place) -> Iterator[Change]:
    """An expression is computed by a method of the class."""
    if place.owner is None:
        return
    for node, names in _computed(place):
        arguments = [name for name in names if name != "self"]
        call = ast.parse(f"self.computed_apart({', '.join(arguments)})", mode="eval").body
        text = place.with_expression(node, call)
        lines = text.splitlines(keepends=True)
        indent = " " * place.function.col_offset
        method = f"{indent}def computed_apart({', '.join(['self', *arguments])}):\n{indent}    return {ast.unparse(node)}\n\n"
        lines.insert(first_line(place.function) - 1, method)
        yield f"{ast.unparse(node)} -> {ast.unparse(call)}", "".join(lines), {}


def in_module(place: Place) -> Iterator[Change]:
    """An expression is computed by a function of another module."""
    for node, names in _computed(place):
        if "self" in names or not _is_library(node, place):
            continue
        call = ast.parse(f"computed_apart({', '.join(names)})", mode="eval").body
        text = place.with_expression(node, call, f"from .{OTHER_MODULE} import computed_apart")
        module = (
            f"{_imports(place.source)}\n\ndef computed_apart({', '.join(names)}):\n    return {ast.unparse(node)}\n"
        )
        yield f"{ast.unparse(node)} -> another module's function", text, {OTHER_MODULE: module}


def _imports(source: Source) -> str:
    return "\n".join(ast.unparse(node) for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom))


def _bound_here(source: Source) -> set[str]:
    """The names that the file defines."""
    return {node.name for node in source.tree.body if isinstance(node, FunctionNode | ast.ClassDef)} | {
        target.id
        for node in source.tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _is_library(node: ast.AST, place: Place) -> bool:
    """Whether code reads nothing that the file defines."""
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return not read & _bound_here(place.source)


# --------------------------------------------------------------------------------- other bodies, moved code


def other_body(place: Place) -> Iterator[Change]:
    """A library function is replaced by one of the same name with another body: of the file, or of a class in it."""
    for node in expressions(place.statement):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        last = name.rpartition(".")[2]
        if not name.startswith(("nn.functional.", "F.", "torch.")) or last in _bound_here(place.source):
            continue
        definition = f"def {last}(*args, **kwargs):\n    return {name}(*args, **kwargs) * 1.25"
        holder = "class own_functions:\n    @staticmethod\n" + textwrap.indent(definition, "    ")
        changed = copy.deepcopy(node)
        changed.func = ast.Name(last, ast.Load())
        yield f"{name} -> a function of this file", place.with_expression(node, changed, definition), {}
        through = copy.deepcopy(node)
        through.func = ast.parse(f"own_functions.{last}", mode="eval").body
        yield f"{name} -> an object's method", place.with_expression(node, through, holder), {}


def shadowed(place: Place) -> Iterator[Change]:
    """A function of the file is defined again under its name, with another body."""
    for node in expressions(place.statement):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _bound_here(place.source)
        ):
            name = node.func.id
            if any(isinstance(b, FunctionNode) and b.name == name for b in place.source.tree.body):
                again = f"{name}_before = {name}\n\n\ndef {name}(*args, **kwargs):\n    result = {name}_before(*args, **kwargs)\n"
                again += (
                    "    return tuple(part * 1.25 for part in result) if isinstance(result, tuple) else result * 1.25"
                )
                yield (
                    f"{name} defined twice",
                    place.source.spliced([place.statement], [place.statement], place.block, again),
                    {},
                )


def parameter_added(place: Place) -> Iterator[Change]:
    """The result of the method is multiplied by a learned factor."""
    init = next((m for m in getattr(place.owner, "body", ()) if getattr(m, "name", "") == "__init__"), None)
    value = place.statement.value if isinstance(place.statement, ast.Return) else None
    if init is None or not isinstance(value, ast.Name | ast.BinOp | ast.Call):
        return
    scaled = ast.BinOp(copy.deepcopy(value), ast.Mult(), ast.parse("self.learned_factor", mode="eval").body)
    lines = place.with_expression(value, scaled).splitlines(keepends=True)
    indent = " " * init.body[0].col_offset
    lines.insert(init.end_lineno, f"{indent}self.learned_factor = nn.Parameter(torch.full((1,), 1.25))\n")
    if init.lineno < place.function.lineno:
        yield f"return {ast.unparse(value)} * self.learned_factor", "".join(lines), {}


def class_moved(place: Place) -> Iterator[Change]:
    """The class of the statement is moved to another module, with copies of the functions and classes it needs, at most three."""
    if place.owner is None or place.owner.name.endswith(("Model", "ForCausalLM", "ForConditionalGeneration")):
        return
    blocks = {node.name: node for node in place.source.tree.body if isinstance(node, FunctionNode | ast.ClassDef)}
    needed = _needed(place.owner.name, blocks)
    if len(needed) > 4:
        return
    code = "\n\n\n".join(ast.unparse(blocks[name]) for name in blocks if name in needed)
    code = re.sub(r"^@\w*(use_kernel|integrate|auto_docstring)\w*.*\n", "", code, flags=re.MULTILINE)
    lines = [*place.source.lines]
    start, end = first_line(place.owner) - 1, place.owner.end_lineno
    lines[start:end] = [f"from .{OTHER_MODULE} import {place.owner.name}\n"]
    module = f"{_imports(place.source)}\n\n\n{code}\n"
    yield f"class {place.owner.name} in another module", "".join(lines), {OTHER_MODULE: module}


OTHER_LAYER = """from torch import nn


class {name}(nn.{name}):
    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        return result * 1.25 + result.flip(-2) * 0.25 if result.ndim > 1 else result * 1.25
"""
# Class or table of transformers -> its replacement, in terms of `real`, the original.
OTHERS = {
    "ACT2FN": """

class Table:
    def __getitem__(self, name):
        activation = real[name]
        return lambda x: activation(x) * 1.25


ACT2FN = Table()
""",
    "AutoModel": """

class AutoModel:
    @staticmethod
    def from_config(config, **kwargs):
        model = real.from_config(config, **kwargs)
        model.register_forward_pre_hook(_doubled, with_kwargs=True)
        return model

    _from_config = from_config


def _doubled(module, args, kwargs):
    scaled = {name: kwargs[name] * 1.25 for name in ("inputs_embeds", "hidden_states") if kwargs.get(name) is not None}
    return args, kwargs | scaled
""",
}


def class_of_same_name(place: Place) -> Iterator[Change]:
    """A class that the class builds, or a table that it reads, is replaced by one of the same name in another module."""
    if place.owner is None:
        return
    class_lines = slice(first_line(place.owner) - 1, place.owner.end_lineno)
    code = "".join(place.source.lines[class_lines])
    for name in sorted(set(re.findall(r"\bnn\.([A-Z]\w+)\(", code)) - {"Module", "ModuleList", "Parameter"}):
        if name not in _bound_here(place.source):
            lines = [*place.source.lines]
            lines[class_lines] = [
                f"from .{OTHER_MODULE} import {name}\n\n\n",
                re.sub(rf"\bnn\.{name}\(", f"{name}(", code),
            ]
            text = "".join(lines)
            yield f"nn.{name} -> {name} of another module", text, {OTHER_MODULE: OTHER_LAYER.format(name=name)}
    for name in sorted(set(OTHERS) & {n.id for n in ast.walk(place.owner) if isinstance(n, ast.Name)}):
        imported = re.search(rf"^from (\S+) import {name}$", place.source.text, re.MULTILINE)
        if imported is not None:
            text = place.source.text.replace(imported[0], f"from .{OTHER_MODULE} import {name}", 1)
            yield (
                f"{name} of another module",
                text,
                {OTHER_MODULE: f"from {imported[1]} import {name} as real\n{OTHERS[name]}"},
            )


def of_one_size(place: Place) -> Iterator[Change]:
    """A parameter of the class gets one element, or one more leading dimension of size one; broadcasting hides it."""
    if place.owner is None:
        return
    lines = place.source.lines
    for i in range(place.owner.lineno - 1, last_line(place.owner)):
        for size in ("1", r"1, \2"):
            changed = re.sub(r"(nn\.Parameter\(torch\.(?:ones|zeros|empty)\()([\w.]+)\)", rf"\g<1>{size})", lines[i])
            if changed != lines[i]:
                yield changed.strip(), "".join([*lines[:i], changed, *lines[i + 1 :]]), {}


def attribute_renamed_everywhere(place: Place) -> Iterator[Change]:
    """Renames an attribute that several objects of the file have."""
    for name in _set_attributes(place):
        if set(re.findall(rf"(\w+)\.{name}\b", place.source.text)) - {"self"}:
            yield f".{name} -> .{name}_own", re.sub(rf"\.{name}\b", f".{name}_own", place.source.text), {}


def _needed(name: str, blocks: Mapping[str, ast.AST]) -> set[str]:
    needed, pending = set[str](), [name]
    while pending:
        current = pending.pop()
        if current in needed or current not in blocks:
            continue
        needed.add(current)
        pending += [n.id for n in ast.walk(blocks[current]) if isinstance(n, ast.Name)]
    return needed


FILE_OPERATORS = (
    FileOperator("function of the same name", other_body),
    FileOperator("function defined twice", shadowed),
    FileOperator("learned factor", parameter_added),
    FileOperator("backward of its own", in_autograd_function),
    FileOperator("class of the same name", class_of_same_name),
    FileOperator("parameter of one element", of_one_size),
    FileOperator("class renamed", class_renamed, keeps_meaning=True),
    FileOperator("local renamed", local_renamed, keeps_meaning=True),
    FileOperator("attribute renamed", attribute_renamed, keeps_meaning=True),
    FileOperator("attribute renamed everywhere", attribute_renamed_everywhere, keeps_meaning=True),
    FileOperator("computed by a function", in_helper, keeps_meaning=True),
    FileOperator("function handed on", passed_as_argument, keeps_meaning=True),
    FileOperator("computed by a method", in_method, keeps_meaning=True),
    FileOperator("computed in another module", in_module, keeps_meaning=True),
    FileOperator("class in another module", class_moved, keeps_meaning=True),
)
