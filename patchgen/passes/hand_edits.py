"""Hand edits: changes in a model's config for single places that no pass covers. Each has a target that must exist, and a
reason, which is written into the header of the generated file."""

from __future__ import annotations

import ast
import copy
import functools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, Self, cast

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import FunctionNode, is_list
from patchgen.errors import ConfigError, PassMismatch, nearest
from patchgen.passes.base import Example, Hit, Outcome, Pass
from patchgen.passes.prune import without_mentions
from patchgen.rewrite import Editor, format_code
from patchgen.runtime.code_hash import short_hash, symbol_hash, without_docstrings
from patchgen.source import Block, Module

if TYPE_CHECKING:
    from patchgen.model_configs import ModelConfig
    from patchgen.runtime.verify.record_types import EditRecord


@dataclass(frozen=True)
class _Replacement:
    target: str
    code: str
    reason: str


class ReplaceClass(_Replacement):
    """The whole class is replaced by `code`, a class of the same name."""


class ReplaceFunction(_Replacement):
    """The module-level function is replaced by `code`, a function of the same name."""


class OverrideMethod(_Replacement):
    """`Class.method`, which upstream has, is replaced by `code`; its decorators are those of `code`."""


class AddMethod(_Replacement):
    """`Class.method`, which upstream does not have, is added at the end of the class."""


@dataclass(frozen=True)
class EditMethod:
    """Inserts `code` before, after or instead of the one statement of `Class.method` that is `match`.

    `match` is compared as a syntax tree; a name `__` in it matches any expression.
    """

    target: str
    match: str
    code: str
    reason: str
    where: Literal["before", "after", "instead"] = "before"


@dataclass(frozen=True)
class MendUpstream(EditMethod):
    """Writes `code` instead of the one statement of `Class.method` that is `match`, because upstream's own code fails there.

    The proof makes the same edit in upstream's class (`runtime/mended_upstream.py`), so that there is something to compare with.
    A release whose method has no such statement does not need the mend: it stays as it is there, and the header says so.
    """

    where: Literal["before", "after", "instead"] = "instead"

    def __post_init__(self) -> None:
        if self.where != "instead":
            raise ConfigError(f"mend_upstream of {self.target}: a statement is replaced, so `where` must be left out.")


@dataclass(frozen=True)
class Drop:
    """The class or function is removed. A remaining reference to it is an error."""

    target: str
    reason: str


@dataclass(frozen=True)
class AddImport:
    """An import statement is added."""

    code: str
    reason: str

    @property
    def target(self) -> str:
        return self.code.strip()


Edit = ReplaceClass | ReplaceFunction | OverrideMethod | AddMethod | EditMethod | Drop | AddImport


class HandEdits(Pass):
    """A missing target is an error that names the nearest one, so `override_method` never adds a method that nothing calls.

    The one exception is a statement that `mend_upstream` replaces: where only that is missing, upstream has mended it.
    """

    name = "hand_edits"
    purpose = "Applies the hand edits of the model's config."
    expects = "every edit's target, exactly once"
    EXAMPLES = (
        Example("""without edits, nothing
        class A:
            pass
        """),
    )

    def __init__(self, edits: tuple[Edit, ...] = ()) -> None:
        self.edits = edits

    @classmethod
    def of_config(cls, config: ModelConfig) -> Self:
        return cls(config.edits)

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        hits: list[Hit] = []
        not_needed: list[Hit] = []
        for edit in self.edits:
            if not edit.reason.strip():
                raise ConfigError(f"The edit of {edit.target} has no reason. Say why it is needed.")
            _check_code(edit)
            owner = anatomy.classes.get(edit.target.split(".")[0])
            site = "; ".join(edit.target.split("\n"))  # imports may have several lines, the header has one per hit
            line, reason = owner.node.lineno if owner else 0, " ".join(edit.reason.split())
            if is_not_needed(edit, target_of(edit, module)):
                not_needed.append(Hit(site, line, f"{_verb(edit)}, not needed in this release: {reason}"))
                continue
            module = self._apply(edit, module)
            hits.append(Hit(site, line, f"{_verb(edit)}: {reason}"))
        return Outcome(module, tuple(hits), upstream=tuple(not_needed))

    def _apply(self, edit: Edit, module: Module) -> Module:
        if isinstance(edit, AddImport):
            position = max((i + 1 for i, block in enumerate(module.blocks) if block.is_import), default=0)
            return module.with_inserted(position, f"# {self.mark}\n{edit.code.strip()}\n")
        block = self._block(edit, module)
        if isinstance(edit, Drop):
            remaining_blocks = module.swap(block)
            exported = [without_mentions(b, {edit.target}) if "__all__" in b.binds else b for b in remaining_blocks]
            return remaining_blocks.with_blocks(exported)
        if isinstance(edit, ReplaceClass | ReplaceFunction):
            return module.swap(block, self._replaced(edit, block))
        return module.swap(block, self._with_method(edit, block))

    def _block(self, edit: Edit, module: Module) -> Block:
        name = edit.target.split(".")[0]
        wants_class = isinstance(edit, ReplaceClass) or "." in edit.target
        if module.has(name):
            block = module.block(name)
            is_class = isinstance(block.node, ast.ClassDef)
            if isinstance(edit, Drop) or is_class == wants_class:
                return block
        kind = "class" if wants_class else "function"
        names = [b.name for b in module if b.name and isinstance(b.node, ast.ClassDef) == wants_class]
        raise PassMismatch(
            f"{_verb(edit)} wants the {kind} '{name}', which {module.path} does not have. "
            f"Nearest: {nearest([name], names)}."
        )

    def _replaced(self, edit: ReplaceClass | ReplaceFunction, block: Block) -> Block:
        code = format_code(edit.code)
        node = ast.parse(code).body[0]
        if getattr(node, "name", None) != block.name:
            raise ConfigError(f"{_verb(edit)} of {block.name}: the code defines '{getattr(node, 'name', '?')}'.")
        leading = block.text[: len(block.text) - len(block.text.lstrip("\n"))]
        return block.with_text(f"{leading}# {self.mark}\n{code}")

    def _with_method(self, edit: OverrideMethod | AddMethod | EditMethod, block: Block) -> Block:
        class_name, _, method = edit.target.partition(".")
        methods = [node.name for node in block.members if isinstance(node, FunctionNode)]
        times, editor = methods.count(method), Editor(block, self.mark)
        if isinstance(edit, AddMethod):
            if times:
                raise PassMismatch(f"add_method: {edit.target} exists upstream; use override_method.")
            _require_method(edit, method)
            editor.append(edit.code)
            return editor.result
        if not times:
            raise PassMismatch(
                f"{_verb(edit)} wants {edit.target}, which upstream does not have. Methods of {class_name} near it: "
                f"{nearest([method], methods)}. To add a method, use add_method."
            )
        if isinstance(edit, EditMethod):
            self._edit(edit, editor, editor.function(method))
            return editor.result
        if times > 1:
            raise PassMismatch(
                f"override_method: {class_name} defines '{method}' {times} times (a property and its setter?); "
                "use replace_class."
            )
        _require_method(edit, method)
        editor.replace(editor.function(method), edit.code)
        return editor.result

    def _edit(self, edit: EditMethod, editor: Editor, function: FunctionNode) -> None:
        hits = _statements(edit, function)
        if len(hits) != 1:
            lines = [editor.code(statement).splitlines()[0] for statement in function.body]
            raise PassMismatch(
                f"{_verb(edit)} of {edit.target}: `{edit.match.strip()}` should stand there once and was found "
                f"{len(hits)} times. Nearest: {nearest([edit.match.strip()], lines, 2, 0.1, ' | ')}."
            )
        before = functools.partial(editor.above, at_top=True)
        {"before": before, "after": editor.below, "instead": editor.replace}[edit.where](hits[0], edit.code)


def _require_method(edit: OverrideMethod | AddMethod, method: str) -> None:
    code = ast.parse(edit.code).body
    if len(code) != 1 or not isinstance(code[0], FunctionNode) or code[0].name != method:
        raise ConfigError(f"{_verb(edit)} of {edit.target}: the code must be the one function '{method}'.")


def lost_edits(edits: tuple[Edit, ...], module: Module) -> list[str]:
    """The targets of edits whose class or function a later pass removed from the module."""
    stay = [edit.target for edit in edits if not isinstance(edit, Drop | AddImport)]
    return [target for target in stay if not module.has(target.split(".")[0])]


def content_hash(*nodes: ast.AST) -> str:
    """A hash of code, independent of comments, docstrings and formatting."""
    body = cast("list[ast.stmt]", list(nodes))  # may be expressions: the tree is hashed, never compiled
    return symbol_hash(without_docstrings(copy.deepcopy(ast.Module(body, []))))


def target_of(edit: Edit, module: Module) -> list[ast.stmt]:
    """The upstream code that an edit changes: a class, a function, or all definitions of a method. Empty if it only adds."""
    name, _, method = edit.target.partition(".")
    if isinstance(edit, AddImport | AddMethod) or not module.has(name):
        return []
    block = module.block(name)
    if not method:
        return [block.node]
    return [member for member in block.members if isinstance(member, FunctionNode) and member.name == method]


def is_not_needed(edit: Edit, target: list[ast.stmt]) -> bool:
    """Whether an edit mends a statement that its target, which is there, does not have."""
    return isinstance(edit, MendUpstream) and bool(target) and not _statements(edit, *target)


def mended_methods(edits: tuple[Edit, ...], module: Module) -> list[str]:
    """What a proof with this file mends in upstream: "Class.method", each once."""
    mends = [edit for edit in edits if isinstance(edit, MendUpstream)]
    return list(dict.fromkeys(edit.target for edit in mends if _statements(edit, *target_of(edit, module))))


def targets_record(edits: tuple[Edit, ...], module: Module) -> list[EditRecord]:
    """For each edit that has a target in upstream: its verb, target, hash, and the hash of the target in upstream; for one that
    the proof also makes in upstream, what it replaces."""
    return [_target_record(edit, target) for edit in edits if (target := target_of(edit, module))]


def _target_record(edit: Edit, target: list[ast.stmt]) -> EditRecord:
    record: EditRecord = {
        "verb": _verb(edit),
        "target": edit.target,
        "edit": short_hash(*map(str, asdict(edit).values())),
        "upstream": content_hash(*target),
    }
    # None in a release without the fault: there upstream's class is the reference as it is.
    if isinstance(edit, MendUpstream) and (found := _statements(edit, *target)):
        record["mend"] = {"statement": ast.unparse(found[0]), "code": edit.code}
    return record


def _statements(edit: EditMethod, *functions: ast.stmt) -> list[ast.stmt]:
    """The statements of a method that an edit's `match` is."""
    pattern = ast.parse(edit.match.strip()).body
    if len(pattern) != 1:
        raise ConfigError(f"{_verb(edit)} of {edit.target}: `match` must be one statement.")
    nodes = (node for function in functions for node in ast.walk(function))
    return [node for node in nodes if isinstance(node, ast.stmt) and same_structure(pattern[0], node)]


def same_structure(pattern: object, node: object) -> bool:
    """Whether two nodes of `ast`, or lists of them, are equal; the name `__` in the pattern matches any expression."""
    if isinstance(pattern, ast.Name) and pattern.id == "__":
        return isinstance(node, ast.expr)
    if is_list(pattern):
        return is_list(node) and len(pattern) == len(node) and all(map(same_structure, pattern, node))
    if not isinstance(pattern, ast.AST):
        return pattern == node
    pairs = [(getattr(pattern, name, None), getattr(node, name, None)) for name in pattern._fields]
    return type(pattern) is type(node) and all(same_structure(*pair) for pair in pairs)


def _check_code(edit: Edit) -> None:
    """Raises ConfigError if an edit's `code` or `match` is empty or not Python, or an AddImport has other statements."""
    for field in ("code", "match"):
        if field in edit.__dataclass_fields__:
            try:
                tree = ast.parse(getattr(edit, field).strip())
            except SyntaxError as error:
                raise ConfigError(
                    f"{_verb(edit)} of {edit.target}: `{field}` is not Python, line {error.lineno}: {error.msg}.\n"
                    f"    {(error.text or '').rstrip()}"
                ) from error
            if not tree.body:
                raise ConfigError(f"{_verb(edit)} of {edit.target}: `{field}` is empty.")
            if isinstance(edit, AddImport) and not all(isinstance(s, ast.Import | ast.ImportFrom) for s in tree.body):
                raise ConfigError(f"add_import wants import statements and nothing else, found: {edit.target}")


def _verb(edit: Edit) -> str:
    name = type(edit).__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
