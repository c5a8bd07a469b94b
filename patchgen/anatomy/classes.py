"""One class of an upstream file (bases, methods, attributes, the classes it builds), and helpers to read syntax trees."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Build:
    """A construction: `owner` builds `target` for its attribute."""

    owner: str
    attribute: str | None  # "layers" for `self.layers = nn.ModuleList([...])`; None for a local variable
    target: str | None  # a class of this file, or None when an Auto class decides at run time
    in_list: bool = False
    method: str = "__init__"
    # For constructions through an Auto class:
    auto_class: str | None = None  # "AutoModel", "AutoModelForCausalLM", ...
    config: str | None = None  # the config argument, for example "config.text_config"
    code: str = ""  # the call as source


@dataclass
class ClassInfo:
    """A class of the file, as written (inherited members are looked up through `Anatomy`)."""

    name: str
    node: ast.ClassDef
    bases: tuple[str, ...]
    methods: dict[str, FunctionNode] = field(default_factory=dict[str, FunctionNode])
    attributes: dict[str, ast.expr] = field(default_factory=dict[str, ast.expr])  # the first that __init__ assigns
    annotations: dict[str, str] = field(default_factory=dict[str, str])  # class-level annotations
    builds: list[Build] = field(default_factory=list[Build])  # of classes of this file, in __init__ and `setup_calls`
    auto_builds: list[Build] = field(default_factory=list[Build])  # through Auto classes, in any method
    roles: dict[str, str] = field(default_factory=dict[str, str])  # role -> why

    @property
    def built(self) -> dict[str, ast.Call]:
        """The attributes that __init__ sets to the result of a call, for example of a module's class."""
        return {name: value for name, value in self.attributes.items() if isinstance(value, ast.Call)}


Resolve = Callable[[ast.AST], str | None]  # `Names.resolve`


def describe(node: ast.ClassDef, local_classes: Container[str], resolve: Resolve) -> ClassInfo:
    """Reads one class; `local_classes` are the names of all classes of the file."""
    info = ClassInfo(name=node.name, node=node, bases=tuple(dotted(base) for base in node.bases))
    for statement in node.body:
        if isinstance(statement, FunctionNode):
            info.methods[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            info.annotations[statement.target.id] = ast.unparse(statement.annotation).strip("\"'")
    init = info.methods.get("__init__")
    if init is not None:
        for statement in walk(init):
            for attribute, value in _self_assignments(statement):
                info.attributes.setdefault(attribute, value)
        for method in (init, *(info.methods[name] for name in setup_calls(info))):
            info.builds += _builds(node.name, method, local_classes, resolve)
    return info


def setup_calls(info: ClassInfo) -> list[str]:
    """The methods that `__init__` calls for what they set: `self._setup_experts()`."""
    init = info.methods.get("__init__")
    values = [statement.value for statement in init.body if isinstance(statement, ast.Expr)] if init else []
    names = [own_attribute(value.func) for value in values if isinstance(value, ast.Call)]
    return [name for name in names if name in info.methods]


def auto_class(meaning: str | None) -> str:
    """The Auto class that a resolved name refers to, for example `AutoModel`; "" for anything else."""
    module, _, name = (meaning or "").rpartition(".")
    return name if module in AUTO_MODULES and name.startswith(("AutoModel", "AutoBackbone")) else ""


def auto_builds(info: ClassInfo, resolve: Resolve) -> list[Build]:
    """What a class constructs through Auto classes, in any of its methods."""
    builds: list[Build] = []
    for method in info.methods.values():
        for call, attribute, in_list in _constructions(method, resolve):
            auto = auto_class(resolve(constructed(call)))
            if not auto:
                continue
            config = arguments(call, ("config",)).get("config")
            base = base_name(config)
            if config is not None and base in stored(method):  # `text_config = config.get_text_config()` above it
                values = [] if base in parameter_names(method) else assigned_to(method, base) or []
                if len(values) == 1:
                    config = inlined(config, {base: values[0]})
                elif base == "config" and _is_replaced(method, base, resolve):
                    config = None  # the caller's config, or another one
            source = ast.unparse(config) if config is not None else None
            code = ast.unparse(call)
            builds.append(Build(info.name, attribute, None, in_list, method.name, auto, source, code))
    return builds


def _is_replaced(method: FunctionNode, parameter: str, resolve: Resolve) -> bool:
    """Whether a method binds a parameter to more than itself and new instances of the class in its annotation."""
    annotated = [arg for arg in walk(method.args) if isinstance(arg, ast.arg) and arg.arg == parameter]
    classes = {resolve(node) for arg in annotated for node in walk(arg) if isinstance(node, ast.Name)} - {None}

    def is_kept(value: ast.expr) -> bool:
        match value:
            case ast.IfExp(_, one, other) | ast.BoolOp(ast.Or(), [one, other]):
                return is_kept(one) and is_kept(other)
            case ast.Call(called):
                return resolve(called) in classes
            case _:
                return isinstance(value, ast.Name) and value.id == parameter

    values = assigned_to(method, parameter)
    return values is None or not all(map(is_kept, values))


CONSTRUCTORS = ("from_config", "_from_config")
AUTO_MODULES = ("transformers", "transformers.models.auto", "transformers.models.auto.modeling_auto")
LISTS = ("torch.nn.ModuleList", "torch.nn.ModuleDict", "torch.nn.Sequential")


def arguments(call: ast.Call, names: Sequence[str]) -> dict[str | None, ast.expr]:
    """Parameter -> argument, in a call of a function with these parameters; `**kwargs` is under None."""
    return dict(zip(names, call.args, strict=False)) | {keyword.arg: keyword.value for keyword in call.keywords}


def all_arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def linearised(name: str, bases: Mapping[str, Sequence[str]]) -> list[str]:
    """A class and its ancestors among those whose bases are given, in the order in which Python looks members up (C3).

    Classes of other files are left out. Where Python would refuse the order, the first remaining class comes next.
    """
    return [known for known in _linearised(name, bases, ()) if known in bases]


def _linearised(name: str, bases: Mapping[str, Sequence[str]], below: tuple[str, ...]) -> list[str]:
    direct = [base for base in bases.get(name, ()) if base not in (*below, name)]  # an earlier class of that name
    pending = [_linearised(base, bases, (*below, name)) for base in direct] + [direct]
    order = [name]
    while pending := [names for names in pending if names]:
        later = {known for names in pending for known in names[1:]}
        chosen = next((names[0] for names in pending if names[0] not in later), pending[0][0])
        order.append(chosen)
        pending = [[known for known in names if known != chosen] for names in pending]
    return order


def dotted(node: ast.AST) -> str:
    """`nn.Module` for the expression nn.Module; subscripts and calls are skipped. What has no name is left out: `c` for
    `(a + b).c`, "" for `a + b`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        prefix = dotted(node.value)
        return f"{prefix}.{node.attr}" if prefix else node.attr
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return ""


def base_name(node: ast.AST | None) -> str:
    """`x` for the expression `x.y[0].z(1)`; "" if it does not start with a name."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_list(value: object) -> TypeGuard[list[object]]:
    """Whether a field of a syntax node is a list, of nodes or of strings and None."""
    return isinstance(value, list)


@functools.lru_cache(maxsize=16384)
def walk(node: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes of `ast.walk`, in its order, cached: the same code is read many times, and edits are made on copies."""
    nodes = [node]
    for parent in nodes:  # grows during the loop
        for name in parent._fields:
            value = getattr(parent, name, None)
            if is_list(value):
                nodes += [child for child in value if isinstance(child, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return tuple(nodes)


def calls(*code: ast.AST) -> Iterator[ast.Call]:
    """Every call in pieces of code."""
    return (node for part in code for node in walk(part) if isinstance(node, ast.Call))


def called_names(node: ast.AST) -> set[str]:
    """The last names of everything that is called: {"topk", "softmax", ...}."""
    return {dotted(call.func).rpartition(".")[2] for call in calls(node)}


def parameter_names(function: FunctionNode) -> list[str]:
    """The named parameters of a function, self excluded."""
    args = function.args
    return [arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs] if arg.arg != "self"]


def parameters(function: FunctionNode) -> set[str]:
    """All parameters of a function, `*args` and `**kwargs` included, self excluded."""
    return {arg.arg for arg in walk(function.args) if isinstance(arg, ast.arg)} - {"self"}


def defaults_of(function: FunctionNode) -> dict[str, ast.expr]:
    """The default values of a function's parameters."""
    args = function.args
    plain = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    keyword_only = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return dict(zip(plain[::-1], args.defaults[::-1], strict=False)) | {arg.arg: v for arg, v in keyword_only if v}


def own_attribute(node: ast.AST) -> str | None:
    """`experts` for the expression `self.experts`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def uses(node: ast.AST, attribute: str) -> int:
    """How often code names `self.<attribute>`."""
    return sum(own_attribute(child) == attribute for child in walk(node))


def stored(*code: ast.AST) -> list[str]:
    """The names that code binds or deletes."""
    nodes = (node for part in code for node in walk(part))
    return [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store | ast.Del)]


def stored_names(node: ast.AST, among: Collection[str]) -> set[str]:
    """The names of `among` that code assigns or may change in place."""
    names: set[str] = set()
    for child in walk(node):
        if isinstance(child, ast.Attribute | ast.Subscript) and isinstance(child.ctx, ast.Store | ast.Del):
            names.add(base_name(child))
        elif isinstance(child, ast.Call) and is_in_place(child.func):
            names.add(base_name(child.func))
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):  # called for what it changes
            names |= set(loaded(child.value))
    return (names | set(stored(node))).intersection(among)


def loaded(*code: ast.AST) -> list[str]:
    """The names that code reads."""
    nodes = (node for part in code for node in walk(part))
    return [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]


def mentions(node: ast.AST, name: str) -> bool:
    """Whether code reads, binds or deletes the name."""
    return any(isinstance(child, ast.Name) and child.id == name for child in walk(node))


def plain_assignments(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """Name -> value, of the assignments `name = value` among the nodes; the last of several."""
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    return {target.id: node.value for node in assigned if isinstance(target := node.targets[0], ast.Name)}


def assigned_to(function: FunctionNode, name: str) -> list[ast.expr] | None:
    """Every value that a function assigns to a name; None if it also binds it other than by `name = value`."""
    assigned = [node for node in walk(function) if isinstance(node, ast.Assign | ast.AnnAssign)]
    pairs = [(node.value, target) for node in assigned for target in targets(node) if node.value is not None]
    values = [value for value, target in pairs if isinstance(target, ast.Name) and target.id == name]
    return values if len(values) == stored(function).count(name) else None


def inlined(node: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    """A copy of an expression in which these names are replaced by their values."""
    return _Inliner(values).visit(copy.deepcopy(node))


class _Inliner(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._values.get(node.id, node))


def targets(statement: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def is_in_place(function: ast.expr) -> bool:
    """Whether what is called is a method like `mul_`: by torch's naming, one that changes its tensor."""
    return isinstance(function, ast.Attribute) and function.attr.endswith("_") and not function.attr.endswith("__")


def is_compound(node: ast.AST) -> bool:
    """Whether a statement has statements inside: a branch, a loop, a `with`, a definition."""
    return isinstance(node, ast.Match) or (isinstance(node, ast.stmt) and hasattr(node, "body"))


def stores_of(info: ClassInfo, attribute: str) -> list[ast.expr | ast.stmt]:
    """Every value that a method of the class assigns to `self.<attribute>`: both of `a if c else b`; the statement where the
    assignment is not a plain one. Methods called `set_...`, as transformers' setters, are ignored."""
    values: list[ast.expr | ast.stmt] = []
    for method in info.methods.values():
        for statement in walk(method) if not method.name.startswith("set_") else ():
            if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) or statement.value is None:
                continue
            is_stored = any(own_attribute(node) == attribute for t in targets(statement) for node in walk(t))
            if is_stored:
                direct = next((value for name, value in _self_assignments(statement) if name == attribute), statement)
                values += [direct.body, direct.orelse] if isinstance(direct, ast.IfExp) else [direct]
    return values


def _self_assignments(statement: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        for target in targets(statement):
            if attribute := own_attribute(target):
                yield attribute, statement.value


def constructed(call: ast.Call) -> ast.expr:
    """The `X` of `X(...)` and of `X.from_config(...)`."""
    match call.func:
        case ast.Attribute(owner, name) if name in CONSTRUCTORS:
            return owner
        case _:
            return call.func


def _constructions(method: FunctionNode, resolve: Resolve) -> Iterator[tuple[ast.Call, str | None, bool]]:
    """Every call in a method, the attribute that its statement assigns, and whether it is in a value with a list of modules."""
    assigned_calls: set[ast.Call] = set()
    valued = [(node, getattr(node, "value", None)) for node in walk(method) if isinstance(node, ast.stmt)]
    for statement, value in valued:
        attribute = next((name for name, _ in _self_assignments(statement)), None)
        value_calls = list(calls(value)) if value is not None else []
        in_list = any(resolve(call.func) in LISTS for call in value_calls)
        yield from ((call, attribute, in_list) for call in value_calls)
        assigned_calls.update(value_calls)
    others = (call for call in calls(method) if call not in assigned_calls)  # in conditions, loops, defaults
    yield from ((call, None, False) for call in others)


def _builds(owner: str, init: FunctionNode, local_classes: Container[str], resolve: Resolve) -> Iterator[Build]:
    for call, attribute, in_list in _constructions(init, resolve):
        target = resolve(constructed(call)) or ""
        if target[:1] == "." and target[1:] in local_classes:
            yield Build(owner, attribute, target[1:], in_list, init.name)
