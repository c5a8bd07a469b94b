"""One class of an upstream file: bases, methods, the attributes that its __init__ sets, the classes that it builds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Build:
    """A construction: `owner` builds `target` for its attribute."""

    owner: str
    attribute: str | None  # "layers" for `self.layers = nn.ModuleList([...])`; None for a local variable
    target: str | None  # a class of this file, or None when an Auto class decides at run time
    config: str | None = None  # the config expression handed over, for example "config.text_config"
    auto_class: str | None = None  # "AutoModel", "AutoModelForCausalLM", ... when the construction goes through one
    in_list: bool = False
    line: int = 0


@dataclass
class ClassInfo:
    """A class of the file, as written (inherited members are looked up through `Anatomy`)."""

    name: str
    node: ast.ClassDef
    bases: tuple[str, ...]
    methods: dict[str, FunctionNode] = field(default_factory=dict)
    attributes: dict[str, ast.expr] = field(default_factory=dict)  # assigned to self in __init__
    annotations: dict[str, str] = field(default_factory=dict)  # class-level annotations
    builds: list[Build] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)  # role -> why


def describe(node: ast.ClassDef, local_classes: set[str]) -> ClassInfo:
    """Reads one class; `local_classes` are the names of all classes of the file."""
    info = ClassInfo(name=node.name, node=node, bases=tuple(dotted(base) for base in node.bases))
    for statement in node.body:
        if isinstance(statement, FunctionNode):
            info.methods[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            info.annotations[statement.target.id] = ast.unparse(statement.annotation).strip("\"'")
    init = info.methods.get("__init__")
    if init is not None:
        for statement in ast.walk(init):
            for attribute, value in _self_assignments(statement):
                info.attributes.setdefault(attribute, value)
        info.builds = list(_builds(node.name, init, local_classes))
    return info


def dotted(node: ast.AST) -> str:
    """`nn.Module` for the expression nn.Module; subscripts and calls are read through; "" for anything else."""
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


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """Every call inside a node."""
    return (child for child in ast.walk(node) if isinstance(child, ast.Call))


def called_names(node: ast.AST) -> set[str]:
    """The last names of everything that is called: {"topk", "softmax", ...}."""
    return {dotted(call.func).rpartition(".")[2] for call in calls(node)}


def parameter_names(function: FunctionNode) -> list[str]:
    """The named parameters of a function, self excluded."""
    args = function.args
    return [arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs] if arg.arg != "self"]


def own_attribute(node: ast.AST) -> str | None:
    """`experts` for the expression `self.experts`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def reads_name(node: ast.AST, name: str) -> bool:
    return any(isinstance(child, ast.Name) and child.id == name for child in ast.walk(node))


def _self_assignments(statement: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets, value = [statement.target], statement.value
    else:
        return
    for target in targets:
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            yield target.attr, value


def _builds(owner: str, init: FunctionNode, local_classes: set[str]) -> Iterator[Build]:
    for statement in ast.walk(init):
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return) or statement.value is None:
            continue
        attribute = next((name for name, _ in _self_assignments(statement)), None)
        in_list = any(
            dotted(call.func).endswith(("ModuleList", "ModuleDict", "Sequential")) for call in calls(statement)
        )
        for call in calls(statement.value):
            name = dotted(call.func)
            head, _, method = name.rpartition(".")
            config = ast.unparse(call.args[0]) if call.args else None
            if config is None and call.keywords:
                config = next((ast.unparse(k.value) for k in call.keywords if k.arg == "config"), None)
            if name in local_classes:
                yield Build(owner, attribute, name, config, in_list=in_list, line=call.lineno)
            elif head in local_classes and method in ("_from_config", "from_config"):
                yield Build(owner, attribute, head, config, in_list=in_list, line=call.lineno)
            elif head.startswith("Auto") and method in ("_from_config", "from_config"):
                yield Build(owner, attribute, None, config, auto_class=head, in_list=in_list, line=call.lineno)
