"""The classes and functions on the path from a head's inputs to its loss, and why each may stay as it is.

A class is on the path if code on the path reads the attribute that holds it, a function if code on the path names it. Those
that no pass rewrote are listed with the reason, which is `UNREAD` where nothing is known of them.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Container, Iterable, Iterator, Mapping

from patchgen.anatomy.classes import (
    LISTS,
    ClassInfo,
    FunctionNode,
    assigned_to,
    is_list,
    is_setter,
    own_attribute,
    parameter_names,
    stored,
    targets,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import INTERFACE, Role, left_alone_experts
from patchgen.anatomy.tokenwise import mixing

COVERED = "passes"
UNREAD = "not read"
TOKENWISE = "each token by itself"
PARTS = "runs what is listed here"
ELSEWHERE = "another file's, which no pass reads"
PART = "a generated file of its own, which the config chooses"
EXPERTS = "experts left alone"
EAGER = "attention: upstream's eager form"
INHERITED = "its forward is torch's"
CALLED_PARTS = ("func", "value", "elt", "elts", "values", "body", "orelse")
ALL_PARTS = ("children", "named_children", "modules", "named_modules", "_modules", "get_submodule", "__dict__")
OPAQUE_CALLS = ("builtins.eval", "builtins.exec", "builtins.globals", "builtins.__import__", "importlib.import_module")
ROLES = {Role.ROTARY: "positions", Role.ROUTER: "a router", Role.ATTENTION: "attention"}


def census(anatomy: Anatomy, heads: Iterable[str], hits: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Name -> the passes that rewrote it, or why it is left alone, in the order in which the names are reached from the heads.
    `hits`: class or function -> the passes that rewrote it, or found that upstream already does their work there."""
    walk = _Walk(anatomy)
    for head in heads:
        walk.enter(head)
    chosen = set(walk.reached)
    for code, argument in walk.eager:
        code.visit(argument)
    towers = anatomy.reached_from(i.name for role in (Role.VISION, Role.AUDIO) for i in anatomy.with_role(role))
    reasons: dict[str, str] = {}
    for name in walk.reached:
        names = [info.name for info in anatomy.lineage(name)] or [name]  # a function has no lineage
        passes = dict.fromkeys(pass_name for part in names for pass_name in hits.get(part, ()))
        reason = _reason(name, anatomy, towers, walk.reached) if name in chosen else EAGER
        reasons[name] = f"{COVERED}: {', '.join(passes)}" if passes else reason
    return reasons | dict.fromkeys(walk.outside, ELSEWHERE) | dict.fromkeys(walk.parts, PART) | walk.unread


def summary(reasons: Mapping[str, str]) -> str:
    """The census as one line: how many classes and functions passes rewrote, and the names of the others by reason."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason.split(":")[0], []).append(name)
    covered = groups.pop(COVERED, [])
    listed = "".join(f"; {reason}: {', '.join(names)}" for reason, names in sorted(groups.items()))
    return f"{len(covered)} of {len(reasons)} classes and functions on the way to the loss in passes{listed}"


class _Walk:
    """Collects what code reaches: classes and functions of the file, and names of other files that are not a library's.

    Names are followed rather than calls: a function that is passed as an argument is called elsewhere.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy, self.names = anatomy, anatomy.names
        self._stores = {name: _stores(info) for name, info in anatomy.classes.items()}
        self._seen: set[tuple[str, ...]] = set()
        self._entered: dict[str, None] = {}
        self._read: dict[str, None] = {}  # attributes of other objects than self
        self.eager: list[tuple[_Code, ast.AST]] = []  # the attention that a run replaces by the one it chooses
        self.reached: dict[str, None] = {}
        self.outside: dict[str, None] = {}
        self.parts: dict[str, None] = {}
        self.unread: dict[str, str] = {}

    def _is_new(self, *what: str) -> bool:
        known = what in self._seen
        self._seen.add(what)
        return not known

    def enter(self, name: str) -> None:
        """Visits what runs when an instance of the class is called, and what `__init__` does besides assigning attributes."""
        if name in self._entered:
            return
        self._entered[name] = None
        infos = list(self.anatomy.lineage(name))
        methods = dict.fromkeys(method for info in infos for method in info.methods)
        runs = {"forward", "__call__"} & methods.keys() or self._assigned(name, "forward")
        if runs or _inherited(self.anatomy, name):
            self.reached.setdefault(name)
        for method in ("forward", "backward", "__call__", *(m for m in methods if m.startswith("__")), *self._read):
            self.member(name, method)
        for info in infos:
            for base in info.node.bases:
                self.add_outside(self.names.resolve(base))
            for keyword in info.node.keywords:  # a metaclass
                _Code(self, "", info.node).visit(keyword)
            _Code(self, name, info.node).decorators(info.node)
            if init := info.methods.get("__init__"):
                _Code(self, name, init, makes=True).visit(init)

    def member(self, owner: str, name: str, *, inherited: bool = False) -> None:
        """Visits `.name` of an instance: its method, with `inherited` every ancestor's too, and all values assigned to it."""
        if name == "__init__" or not self._is_new(owner, name, str(inherited)):
            return
        for build in self.anatomy.auto_builds(owner):
            if build.attribute == name and (target := self.anatomy.target_of(build)):
                others = self.parts if self.anatomy.is_part(build) else self.outside
                self.enter(target) if target in self.anatomy.classes else others.setdefault(target)
        methods = [info.methods[name] for info in self.anatomy.lineage(owner) if name in info.methods]
        for method in methods if inherited else methods[:1]:
            self.reached.setdefault(owner)
            _Code(self, owner, method).visit(method)
        for value, where in self._assigned(owner, name):
            _Code(self, owner, where).visit(value)
        for info in self.anatomy.lineage(owner) if name in ALL_PARTS else ():
            for attribute in self._stores[info.name]:
                self.member(owner, attribute)

    def read_of_any(self, name: str) -> None:
        """Visits `.name` of an object other than self, which may be of any class on the path."""
        if name not in self._read:
            self._read[name] = None
            for owner in [*self._entered]:
                self.member(owner, name)

    def _assigned(self, owner: str, attribute: str) -> list[tuple[ast.expr, ast.AST]]:
        """Each value assigned to an attribute, with the method or statement that contains it."""
        return [pair for i in self.anatomy.lineage(owner) for pair in self._stores[i.name].get(attribute, ())]

    def called(self, owner: str, attribute: str) -> None:
        """Records a called attribute as unread if names do not tell what one of its values is."""
        if self.anatomy.method(owner, attribute) is not None or not self._is_new(owner, attribute, "called"):
            return
        values = self._assigned(owner, attribute)
        # `config.act` beside `TABLE[config.act]`: a caller may put a function into the config
        keys = {ast.unparse(n.slice) for value, _ in values for n in walk(value) if isinstance(n, ast.Subscript)}
        for value, where in values:
            if ast.unparse(value) not in keys and not self._is_known(value, owner, where):
                self.unread.setdefault(f"{owner}.{attribute}", f"{UNREAD}: {ast.unparse(value)}")

    def _is_known(self, value: ast.AST, owner: str, where: ast.AST, open_names: frozenset[str] = frozenset()) -> bool:
        """Whether names tell what a call of the value runs; `open_names` are being resolved, as for `act = wrap(act)`."""
        if attribute := own_attribute(value):
            self.called(owner, attribute)
        if attribute or isinstance(value, ast.Constant | ast.Lambda):
            return True
        if isinstance(value, ast.Name) and isinstance(where, FunctionNode) and value.id in _local(where):
            if value.id in open_names:
                return True
            bound = assigned_to(where, value.id)
            if bound is None or not all(self._is_known(part, owner, where, open_names | {value.id}) for part in bound):
                return False
            if bound and value.id not in parameter_names(where):
                return True
            # What is handed stands in another class.
            handed = [part for part in self.anatomy.handed(owner, value) if part not in bound]
            return bool(handed) and not any(
                isinstance(part, ast.Starred) or not self._is_known(part, owner, ast.Pass()) for part in handed
            )
        if isinstance(value, ast.Name | ast.Attribute):
            return self.names.resolve(value, _local(where)) is not None
        # Of a list of modules, the elements are called.
        holds = isinstance(value, ast.Call) and self.names.resolve(value.func, _local(where)) in LISTS
        operands = [getattr(value, name, []) for name in (("args",) if holds else CALLED_PARTS)]
        parts = (part for operand in operands for part in (operand if is_list(operand) else [operand]))
        return all(self._is_known(part, owner, where, open_names) for part in parts if isinstance(part, ast.AST))

    def name(self, name: str) -> None:
        """Visits a module-level name: what imports bind to it, and the statements that define or change it."""
        if not self._is_new(name):
            return
        if name in self.anatomy.classes:
            self.enter(name)
        for meaning in self.names.origins.get(name, ()):
            self.add_outside(meaning)
        statements = self.names.statements.get(name, ())
        if "*" in self.names.origins and not (statements or name in self.names.origins or hasattr(builtins, name)):
            self.unread[name] = f"{UNREAD}: from {' or '.join(self.names.origins['*'])}"
        read = {name} & self.anatomy.classes.keys() if sum(isinstance(s, ast.ClassDef) for s in statements) < 2 else ()
        for statement in statements:
            defined = getattr(statement, "name", name)
            if defined != name:  # a definition that `name` decorates, or that changes what it holds
                self.name(defined)
            elif defined not in read or not isinstance(statement, ast.ClassDef):
                if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr):
                    self.reached.setdefault(name)
                _Code(self, "", statement).visit(statement)

    def add_outside(self, meaning: str | None) -> None:
        """Records what an import, or a dotted name from one, refers to, if it is neither of this file nor of a library."""
        if meaning and not meaning.startswith(".") and not _is_library(meaning):
            self.outside.setdefault(meaning)


class _Code(ast.NodeVisitor):
    """Tells the walk what code reads. With `makes`, assignments to attributes are skipped: they count when one is read."""

    def __init__(self, walk: _Walk, owner: str, where: ast.AST, *, makes: bool = False) -> None:
        self._walk, self._owner, self._where, self._makes = walk, owner, where, makes
        self._local = _local(where)

    def _resolved(self, node: ast.AST) -> str | None:
        return self._walk.names.resolve(node, self._local)

    def decorators(self, node: ast.ClassDef | FunctionNode) -> None:
        """Visits decorators; of transformers' own, which replace nothing unless a run asks for it, only the arguments."""
        for decorator in node.decorator_list:
            is_theirs = (self._resolved(getattr(decorator, "func", decorator)) or "").startswith("transformers.")
            for part in getattr(decorator, "args", ()) if is_theirs else (decorator,):
                self.visit(part)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, FunctionNode | ast.ClassDef):
            self.decorators(node)
        for field, value in ast.iter_fields(node):
            for child in value if is_list(value) else [value]:
                if isinstance(child, ast.AST) and field not in ("annotation", "returns", "decorator_list"):
                    self.visit(child)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        if not self._makes or not any(own_attribute(target) for target in targets(node)):
            self.generic_visit(node)

    visit_AnnAssign = visit_Assign

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for _, meaning in self._walk.names.imports(node):
            self._walk.add_outside(meaning)

    visit_ImportFrom = visit_Import

    def visit_Call(self, node: ast.Call) -> None:
        meaning = self._resolved(node.func) or ""
        if meaning in ("builtins.isinstance", "builtins.hasattr"):
            return self.visit(node.args[0])
        if meaning.endswith(f".{INTERFACE}.get_interface"):
            self._walk.eager += [(self, argument) for argument in node.args]
            return None
        if meaning in OPAQUE_CALLS:
            self._walk.unread[f"{self._owner}.{meaning}".strip(".")] = f"{UNREAD}: {ast.unparse(node)}"
        if (got := self._as_attribute(node)) is not node:
            self.visit(got)
        if meaning in ("operator.attrgetter", "operator.methodcaller"):
            self._walk.read_of_any(str(getattr(node.args[0], "value", "")))
        if meaning == "builtins.vars":
            self.visit(ast.Attribute(node.args[0], "__dict__", ast.Load()))
        for called in map(self._as_attribute, self._bound(node.func)):
            if attribute := own_attribute(called):
                self._walk.called(self._owner, attribute)
            elif isinstance(called, ast.Call) and self._resolved(called.func) == "builtins.getattr":
                self._walk.unread[f"{self._owner}.getattr".strip(".")] = f"{UNREAD}: {ast.unparse(called)}"
        return self.generic_visit(node)

    def _as_attribute(self, node: ast.AST) -> ast.AST:
        """`owner.name` for `getattr(owner, "name")`; any other code, also with a computed name, as it is."""
        match node:
            case ast.Call(called, [owner, ast.Constant(str(name)), *_]):
                return ast.Attribute(owner, name, ast.Load()) if self._resolved(called) == "builtins.getattr" else node
            case _:
                return node

    def _bound(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a call may run: the called expression, without its subscripts; of a local name also all that it is bound to."""
        while isinstance(node, ast.Subscript):
            node = node.value
        yield node
        if isinstance(node, ast.Name) and node.id in self._local:
            for bind in walk(self._where):
                if isinstance(bind, ast.Assign | ast.For | ast.comprehension):
                    bound_value = bind.value if isinstance(bind, ast.Assign) else bind.iter
                    if any(node.id in stored(part) for part in ast.iter_child_nodes(bind) if part is not bound_value):
                        inside = "args" if isinstance(bound_value, ast.Call) else "elts"
                        yield from (bound_value, *getattr(bound_value, inside, ()))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        meaning, attribute = self._resolved(node), own_attribute(node)
        if meaning and not meaning.startswith(".") and not _is_library(meaning):
            return self._walk.add_outside(meaning)
        if meaning is None and isinstance(node.ctx, ast.Load) and self._resolved(node.value):
            self._walk.unread[ast.unparse(node)] = f"{UNREAD}: replaced in this file"
        if attribute is not None and self._owner:
            return self._walk.member(self._owner, attribute)
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super":
            return self._walk.member(self._owner, node.attr, inherited=True)
        self._walk.read_of_any(node.attr)
        return self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in self._local:
            self._walk.name(node.id)


def _local(where: ast.AST) -> frozenset[str]:
    """The names that a function binds; none for other code."""
    return local_names(where) if isinstance(where, FunctionNode) else frozenset()


def _stores(info: ClassInfo) -> dict[str, list[tuple[ast.expr, ast.AST]]]:
    """Attribute -> what the class's body and methods other than setters assign to it, each with the code around it."""
    stores_by_attribute: dict[str, list[tuple[ast.expr, ast.AST]]] = {}
    for where in info.node.body:
        is_function = isinstance(where, FunctionNode)
        for node in walk(where) if not is_function or not is_setter(where) else ():
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                parts = [part for target in targets(node) for part in walk(target)]
                stores = [part for part in parts if isinstance(getattr(part, "ctx", None), ast.Store)]
                held = [part.value if isinstance(part, ast.Subscript) else part for part in stores]
                for name in {(own_attribute(part) if is_function else getattr(part, "id", "")) or "" for part in held}:
                    stores_by_attribute.setdefault(name, []).append((node.value, where))
    return stores_by_attribute


def _inherited(anatomy: Anatomy, name: str) -> str | None:
    """The torch module that a class inherits from, other than `nn.Module`; None without one."""
    bases = [anatomy.names.resolve(base) or "" for info in anatomy.lineage(name) for base in info.node.bases]
    return next((base for base in bases if base.startswith("torch.nn.") and base != "torch.nn.Module"), None)


def _is_library(meaning: str) -> bool:
    """Whether a name is of torch, numpy, Python or the code that models share in transformers, and not of an extension."""
    package, *parts = meaning.split(".")
    if package == "transformers" and parts:
        return parts[0] != "integrations" and (parts[0] != "models" or parts[1:2] == ["auto"])
    if package == "torch" and parts[:1] == ["ops"]:
        return parts[1:2] in ([], ["aten"])
    return package in ("torch", "numpy", "transformers") or package in sys.stdlib_module_names


def _reason(name: str, anatomy: Anatomy, towers: Container[str], reached: Container[str | None]) -> str:
    info = anatomy.classes.get(name)
    for role, reason in ROLES.items():
        if info is not None and role in info.roles:
            return f"{reason}: {info.roles[role]}" if role == Role.ATTENTION else reason
    methods = [method[1] for run in ("forward", "__call__") if info and (method := anatomy.method(name, run))]
    functions = methods or [node for node in anatomy.names.statements.get(name, ()) if isinstance(node, FunctionNode)]
    if sign := left_alone_experts(anatomy).get(name):
        return f"{EXPERTS}: {sign}"
    tower = ", in a tower" if name in towers else ""
    if not functions:
        base = info and _inherited(anatomy, name)
        return f"{INHERITED}: {base}" if base else f"{UNREAD}{tower}: its methods"
    if info and anatomy.method(name, "backward"):
        return f"{UNREAD}{tower}: a backward of its own"
    found = (mixing(f.body, dict.fromkeys(parameter_names(f), "*."), name, anatomy) for f in functions)
    mixed = next(filter(None, found), None)
    if mixed is None:
        return TOKENWISE
    if any(build.target in reached for build in anatomy.builds(name)):
        return PARTS
    return f"{UNREAD}{tower}: {ast.unparse(mixed).splitlines()[0]}"
