"""Conditions by which one rank runs a module with experts and another does not: the second never joins the exchange of tokens.

if mask.sum() > 0: out = self.experts(rows)      decides: it depends on this rank's tokens
if self.training: out = self.experts(rows)       does not: it is the same on all ranks (see `same_on_ranks`)
if not mask.any(): return x                      decides on all that runs below it
if mask.any(): out = self.experts(x)
else: out = self.experts(x * 2)                  does not: both run the same modules
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from patchgen.anatomy.classes import (
    Build,
    FunctionNode,
    all_arguments,
    arguments,
    defaults_of,
    own_attribute,
    parameter_names,
    stored,
    uses,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.roles import Role
from patchgen.anatomy.same_on_ranks import GETATTR, Known, SameOnRanks
from patchgen.anatomy.state_changes import flags, value_pairs

Runs = Counter[str]  # attribute -> how often its module runs
Modules = Sequence[Build]  # what one expression may hold
NOTHING: Modules = ()
EXPERTS = {Role.EXPERTS, Role.EXPERT_LIST}
CALLS_ITSELF = ("forward", "__call__")  # `layer.__call__` is what `layer(x)` runs
CONTENTS = ("values", "items", "children")
PARTIAL = "functools.partial"
GIVES_ELEMENTS = {
    f"builtins.{name}"
    for name in ("dict", "enumerate", "filter", "iter", "list", "next", "reversed", "set", "sorted", "tuple", "zip")
}


def uneven_conditions(anatomy: Anatomy, owner: str) -> list[ast.expr]:
    """The tests and iterables that decide, in the forward of a class and in what it calls on `self`, whether a module with
    experts runs, and that may differ between ranks. Also those of its subclasses that run the same forward."""
    reader, forward = _Reader(anatomy), anatomy.method(owner, "forward")
    for name in anatomy.below(owner):
        if forward is not None and anatomy.method(name, "forward") == forward and reader.modules(name):
            reader.runs_of(name, forward[1], Known(frozenset(flags(forward[1]))), {})
    return reader.found


class _Reader:
    """Reads the functions of classes, and collects the conditions that decide in them."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.found: list[ast.expr] = []
        self._running: list[FunctionNode] = []
        self._modules: dict[str, dict[str, list[Build]]] = {}

    def runs_of(self, owner: str, function: FunctionNode, known: Known, held: Mapping[str, Modules]) -> Runs:
        """What a call of a function or method runs; `held`: its parameters that hold modules with experts."""
        if function in self._running:
            return Runs()
        self._running.append(function)
        runs = _Body(self, owner, function, known, held).after(function.body, Runs())
        self._running.pop()
        return runs or Runs()

    def modules(self, owner: str) -> dict[str, list[Build]]:
        """Attribute -> what a class builds for it, of the attributes that hold modules with experts."""
        if owner not in self._modules:
            found = self._modules[owner] = dict[str, list[Build]]()
            for info in self.anatomy.lineage(owner):
                for build in (*info.builds, *info.auto_builds):
                    if build.attribute and self._has_experts(build):
                        found.setdefault(build.attribute, []).append(build)
        return self._modules[owner]

    def _has_experts(self, build: Build) -> bool:
        target = self.anatomy.target_of(build)
        if target not in self.anatomy.classes:
            return self.anatomy.is_part(build)  # a language model of another file may have some
        reached = {target} | self.anatomy.built_by([target])
        return any(EXPERTS & {*self.anatomy.classes[name].roles} for name in reached)

    def is_replaced(self, owner: str, loop: ast.AST) -> bool:
        """Whether a loop over a list of experts is what the pass stacked_experts replaces by one call."""
        lists = self.modules(owner) if Role.EXPERT_LIST in self.anatomy.classes[owner].roles else {}
        return any(uses(loop, name) for name in lists)


class _Body:
    """Reads one function from its last statement to the first: what runs from each statement on, until it returns."""

    def __init__(
        self, reader: _Reader, owner: str, function: FunctionNode, known: Known, held: Mapping[str, Modules]
    ) -> None:
        self._reader, self._owner, self._function, self._anatomy = reader, owner, function, reader.anatomy
        self._same = SameOnRanks(reader.anatomy, owner, function, known)
        self._loops: list[tuple[Runs | None, Runs | None]] = []  # of the loops around: after `continue`, after `break`
        self._names = dict(held)  # the names of modules with experts, of lists of them and of functions that run them
        for _ in range(2):
            for node in walk(function):
                pairs = [(node.target, node.iter)] if isinstance(node, ast.comprehension) else value_pairs(node)
                for target, value in pairs:
                    if modules := self._held(value):
                        self._names |= dict.fromkeys(stored(target), modules)
                if isinstance(node, FunctionNode) and node is not function:
                    self._names |= {node.name: modules} if (modules := self._first_held(*walk(node))) else {}

    def after(self, body: Sequence[ast.stmt], runs: Runs | None) -> Runs | None:
        """What statements and those that follow them run; None if they raise."""
        for statement in reversed(body):
            runs = self._statement(statement, runs)
        return runs

    def _statement(self, node: ast.stmt, runs: Runs | None) -> Runs | None:
        match node:
            case ast.If(test, body, orelse):
                return _sum(self._decide([test], self.after(body, runs), self.after(orelse, runs)), self._value(test))
            case ast.For(iter=condition) | ast.AsyncFor(iter=condition) | ast.While(test=condition):
                return self._loop(node, condition, runs)
            case ast.Return(value):
                return self._value(value)
            case ast.Raise():
                return None
            case ast.Continue():
                return self._loops[-1][0]
            case ast.Break():
                return self._loops[-1][1]
            case ast.With(items, body) | ast.AsyncWith(items, body):
                return _sum(self.after(body, runs), *map(self._value, items))
            case ast.Try(body, handlers, orelse, finalbody):
                for handler in handlers:
                    self.after(handler.body, runs)
                return self.after([*body, *orelse, *finalbody], runs)
            case ast.Match(subject, cases):
                conditions = [subject, *(case.guard for case in cases if case.guard is not None)]
                result, *others = [self.after(case.body, runs) for case in cases]
                for way in others if _takes_all(cases[-1]) else (*others, runs):
                    result = self._decide(conditions, result, way)
                return _sum(result, self._value(subject))
            case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
                self.after(body, Runs())
                return runs
        return _sum(runs, *map(self._value, ast.iter_child_nodes(node)))

    def _loop(self, loop: ast.For | ast.AsyncFor | ast.While, condition: ast.expr, runs: Runs | None) -> Runs | None:
        if self._reader.is_replaced(self._owner, loop):
            return _sum(runs, Runs(["experts"]))
        otherwise = again = self.after(loop.orelse, runs)
        for _ in range(2):  # the second time with what a further step would run
            self._loops.append((again, runs))
            again = self.after(loop.body, again)
            self._loops.pop()
        return _sum(self._decide([condition], again, otherwise), self._value(condition))

    def _decide(self, conditions: Iterable[ast.expr], one: Runs | None, other: Runs | None) -> Runs | None:
        """What runs where conditions choose between two ways."""
        if one is None or other is None:
            return other if one is None else one
        if one != other:
            self._reader.found += [condition for condition in conditions if not self._same.contains(condition)]
        return one | other

    def _value(self, node: ast.AST | None) -> Runs:
        """What an expression runs."""
        match node:
            case None:
                return Runs()
            case ast.IfExp(test, body, orelse):
                return _total(self._value(test), self._decide([test], self._value(body), self._value(orelse)))
            case ast.BoolOp(_, [*others, last]):
                runs = self._value(last)
                for part in reversed(others):
                    runs = _total(self._value(part), self._decide([part], runs, Runs()))
                return runs
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                if self._reader.is_replaced(self._owner, node):
                    return Runs(["experts"])
                first, *others = [one for part in node.generators for one in (part.iter, *part.ifs)]
                parts = [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.comprehension)]
                runs = _total(*map(self._value, (*parts, *others)))
                return _total(self._value(first), self._decide([first, *others], runs, Runs()))
            case ast.Lambda(body=body):
                self._value(body)
                return Runs()
            case ast.Call():
                return _total(self._call(node), *map(self._value, ast.iter_child_nodes(node)))
        return _total(*map(self._value, ast.iter_child_nodes(node)))

    def _call(self, call: ast.Call) -> Runs:
        """What a call runs, apart from its arguments."""
        if modules := self._held(call.func):
            return _once(modules)
        match call.func:
            case ast.Attribute(value, member) if modules := self._held(value):
                return self._of_member(modules, member, call)
            case ast.Attribute(ast.Call(ast.Name("super")), member):
                lineage = list(self._anatomy.lineage(self._owner))
                place = next((n for n, info in enumerate(lineage) if self._function in info.methods.values()), 0)
                found = next((info.methods[member] for info in lineage[place + 1 :] if member in info.methods), None)
                return self._of_function(self._owner, found, call) if found is not None else Runs()
        meaning = self._anatomy.names.resolve(call.func) or ""
        if function := self._anatomy.called(self._owner, call):
            return self._of_function(self._owner, function, call)
        if (meaning.startswith("builtins.") and meaning != "builtins.map") or meaning == PARTIAL:
            return Runs()
        return _total(*(_once(self._held(part)) for part in all_arguments(call)))  # `checkpoint(self.experts, rows)`

    def _of_member(self, modules: Modules, member: str, call: ast.Call) -> Runs:
        """What a call of a method of a module runs: `self.model.encode(...)`."""
        methods = [(target, self._anatomy.method(target, member)) for target in self._classes(modules)]
        runs = [self._of_function(target, method[1], call) for target, method in methods if method is not None]
        return _once(modules) if any(runs) else Runs()

    def _classes(self, modules: Modules) -> list[str]:
        targets = dict.fromkeys(self._anatomy.target_of(build) for build in modules)
        return [target for target in targets if target in self._anatomy.classes]

    def _of_function(self, owner: str, function: FunctionNode, call: ast.Call) -> Runs:
        given = arguments(call, parameter_names(function))
        defaults = {name for name, value in defaults_of(function).items() if isinstance(value, ast.Constant)} - {
            *given
        }
        is_told = None not in given and not any(isinstance(part, ast.Starred) for part in all_arguments(call))
        if not is_told:  # which parameter gets which argument
            given, defaults = dict[str | None, ast.expr](), set[str]()
        named = {name: value for name, value in given.items() if name is not None}
        same = frozenset(name for name, value in named.items() if self._same.contains(value)) | defaults
        uncertain = frozenset(name for name, value in named.items() if not self._same.is_none_alike(value))
        if not is_told and not all(map(self._same.contains, all_arguments(call))):
            uncertain = frozenset(parameter_names(function))
        held = {name: modules for name, value in named.items() if (modules := self._held(value))}
        return self._reader.runs_of(owner, function, Known(same, uncertain), held)

    def _held(self, node: ast.AST) -> Modules:
        """The modules with experts that an expression is one of, a list of, or a function that runs them."""
        match node:
            case ast.Name(name):
                return self._names.get(name, NOTHING)
            case ast.Attribute(value, name) if name in CALLS_ITSELF:
                return self._held(value)
            case ast.Attribute(attr=name) if own_attribute(node):
                return self._reader.modules(self._owner).get(name, NOTHING)
            case ast.Attribute(value, name):  # `self.mlp.experts`
                inside = [self._reader.modules(target) for target in self._classes(self._held(value))]
                return [build for modules in inside for build in modules.get(name, ())]
            case ast.Call(ast.Attribute(value, name)) if name in CONTENTS:
                return self._held(value)
            case ast.Subscript(value) | ast.Starred(value):
                return self._held(value)
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.BinOp(op=ast.Add()):
                return self._first_held(*ast.iter_child_nodes(node))
            case ast.IfExp(_, body, orelse):
                return self._held(body) or self._held(orelse)
            case ast.Lambda(body=body):
                return self._first_held(*walk(body))
            case ast.Call(function, args):
                meaning = self._anatomy.names.resolve(function) or ""
                match args:
                    case [of, ast.Constant(str(name)), *_] if meaning == GETATTR:
                        of_list = self._held(of) if name.isdigit() else NOTHING
                        return of_list or self._held(ast.Attribute(of, name, ast.Load()))
                    case [ast.Name("self"), *_] if meaning == GETATTR:
                        return [one for modules in self._reader.modules(self._owner).values() for one in modules]
                if meaning in GIVES_ELEMENTS or meaning == PARTIAL:
                    return self._first_held(*all_arguments(node))
        return NOTHING

    def _first_held(self, *parts: ast.AST) -> Modules:
        """The modules that the first of several expressions with experts holds."""
        return next((modules for part in parts if (modules := self._held(part))), NOTHING)


def _takes_all(case: ast.match_case) -> bool:
    """Whether it is `case _:` or `case name:`."""
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def _once(modules: Modules) -> Runs:
    return Runs([modules[0].attribute or ""]) if modules else Runs()


def _sum(first: Runs | None, *others: Runs) -> Runs | None:
    return None if first is None else _total(first, *others)


def _total(*parts: Runs | None) -> Runs:
    return sum((part for part in parts if part), Runs())
