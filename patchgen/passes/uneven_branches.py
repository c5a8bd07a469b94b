"""Modules that run only if this rank has certain tokens run on all ranks or on none, or are refused on several ranks."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections import Counter

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import (
    ClassInfo,
    FunctionNode,
    base_name,
    calls,
    loaded,
    own_attribute,
    parameter_names,
    stored,
)
from patchgen.anatomy.known import MAKERS
from patchgen.anatomy.names import local_names
from patchgen.anatomy.tokenwise import stored_names
from patchgen.anatomy.uneven_runs import uneven_conditions
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import Editor, insert_first
from patchgen.source import Block

Run = tuple[list[str], str | None]  # the names that a call of a module assigns, and the module's attribute
FORMS = {"bool", "reshape", "view", "flatten", "unsqueeze", "expand", "expand_as"}


class UnevenBranches(SitePass):
    """A rank whose tokens take the other branch would not join the collectives of this one, in forward and backward."""

    name = "uneven_branches"
    purpose = (
        "A module that runs where this rank's tokens ask for it runs where any rank's do, or is refused on several."
    )
    expects = "any number of hits: one per class with such a branch, loop or return"
    EXAMPLES = (
        Example("""experts of one modality
        class ExampleMoeBlock(nn.Module):
            def __init__(self, config):
                self.text_moe = ExampleSparseMoe(config)
                self.vision_moe = ExampleSparseMoe(config)

            def forward(self, hidden_states, is_vision):
      +         # patchgen: uneven_branches
      +         ops.refuse_uneven_ranks("ExampleMoeBlock", "is_vision.any()")
                if is_vision.any():
                    hidden_states[is_vision] = self.vision_moe(hidden_states[is_vision])
                return self.text_moe(hidden_states)
        """),
        Example("""a test of nothing but which tokens there are, which ranks can agree on: no token is left out, or all are
        class ExampleMoeBlock(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.text_moe = ExampleSparseMoe(config)
                self.vision_moe = ExampleSparseMoe(config)

            def forward(self, hidden_states, is_vision=None):
      -         if is_vision is not None and is_vision.any():
      +         # patchgen: uneven_branches
      +         if (is_vision := ops.tokens_of_any_rank(is_vision, hidden_states)) is not None:
                    out = torch.zeros_like(hidden_states)
                    out[is_vision] = self.vision_moe(hidden_states[is_vision])
                    out[~is_vision] = self.text_moe(hidden_states[~is_vision])
                else:
                    out = self.text_moe(hidden_states)
                return out
        """),
        Example("""a condition by which some ranks may leave out experts: only what is known to be the same on all ranks may decide
        class ExampleExperts(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.size, config.hidden))
                self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden, config.size))

            def forward(self, hidden_states, selected_experts, routing_weights):
                for e in selected_experts.unique():
                    hidden_states = hidden_states @ self.gate_up_proj[e] @ self.down_proj[e]
                return hidden_states


        class ExampleMoeBlock(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.experts = ExampleExperts(config)

            def forward(self, hidden_states, selected_experts, routing_weights):
      +         # patchgen: uneven_branches
      +         ops.refuse_uneven_ranks("ExampleMoeBlock", "routing_weights.max() < 0.1")
                if routing_weights.max() < 0.1:
                    return hidden_states
                return self.experts(hidden_states, selected_experts, routing_weights)
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        decides = _deciding(info.methods.get("forward"), info, anatomy)
        return f"`{decides[0]}` decides what runs" if decides else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info, editor = anatomy.classes[site.block], Editor(block, self.mark)
        forward = editor.function("forward")  # nodes of the block's tree, which the editor needs
        decides = _deciding(forward, info, anatomy)
        branches = [one for one in _branches_of_tokens(forward, info) if decides == [ast.unparse(one.test)]]
        branch = branches[0] if len(branches) == 1 else None
        agreed = _agreed_on(forward, branch) if branch is not None else None
        if branch is not None and agreed and (states := _states(forward, branch, agreed, anatomy)):
            editor.instead(branch.test, f"({agreed} := ops.tokens_of_any_rank({agreed}, {states})) is not None")
            editor.mark(branch)
            return Rewritten(editor.result, "taken where any rank has such tokens")
        code = f"ops.refuse_uneven_ranks({site.block!r}, {decides[0]!r})"
        return Rewritten(insert_first(block, "forward", code, self.mark), "refused on several ranks")


def _deciding(forward: FunctionNode | None, info: ClassInfo, anatomy: Anatomy) -> list[str]:
    """The conditions in a class's own forward that decide on this rank alone whether modules run: of modules with experts
    each that is not known to be the same on all ranks, of others those that ask for `any()` or `all()`."""
    if forward is None:
        return []
    branches = [ast.unparse(branch.test) for branch in _branches_of_tokens(forward, info)]
    of_experts = [] if Role.EXPERTS in info.roles else uneven_conditions(anatomy, info.name)
    return list(dict.fromkeys([*branches, *map(ast.unparse, of_experts)]))


def _branches_of_tokens(forward: FunctionNode | None, info: ClassInfo) -> list[ast.If]:
    """The branches with `any()` or `all()` in their test that run other modules of the class than their `else`."""
    branches = [node for node in ast.walk(forward) if isinstance(node, ast.If)] if forward is not None else []
    return [node for node in branches if _asks(node.test) and _modules(node.body, info) ^ _modules(node.orelse, info)]


def _asks(test: ast.expr) -> bool:
    return any(getattr(call.func, "attr", "") in ("any", "all") for call in calls(test))


def _agreed_on(forward: FunctionNode, branch: ast.If) -> str | None:
    """The parameter m of a test `m is not None and m.any()`, if only this branch reads m; else None.

    None also if a rank could skip the test: it is inside another statement, or a return is above it.
    """
    above = forward.body[: forward.body.index(branch)] if branch in forward.body else [ast.Return()]
    if any(isinstance(node, ast.Return) for statement in above for node in ast.walk(statement)):
        return None
    for name in parameter_names(forward):
        if ast.unparse(branch.test) == f"{name} is not None and {name}.any()":
            inside = sum(loaded(node).count(name) for node in (branch.test, *branch.body))
            return name if inside == loaded(forward).count(name) else None
    return None


def _states(forward: FunctionNode, branch: ast.If, name: str, anatomy: Anatomy) -> str | None:
    """The parameter x whose rows a branch divides among its modules by the mask `name`, `x[m]` and `x[~m]`, while the `else`
    passes all of x to the modules of `~m`: without tokens of m both compute the same. None if either does more."""
    masks, local = _masks(branch.body, name), local_names(forward)
    allocated, filled, states = set[str](), set[str](), set[str]()
    inverted_calls, others = list[Run](), list[Run]()

    def sets_only(statement: ast.stmt, name: str) -> bool:
        calls_own = any(base_name(call.func) == "self" for call in calls(statement))
        return stored_names(statement, local) == {name} and not calls_own

    for statement in branch.body:
        match statement:
            case ast.Assign([ast.Name(to)]) if to in masks and sets_only(statement, to):
                continue
            case ast.Assign([ast.Name(to)], ast.Call(maker)) if to not in filled and sets_only(statement, to):
                if (anatomy.names.resolve(maker) or "").removesuffix("_like") not in MAKERS:
                    return None
                allocated.add(to)
            case ast.Assign([target], ast.Call(function, [given], [])) if own_attribute(function):
                part, parts = _part(given, masks), [_part(to, masks) for to in _elements(target)]
                if part is None or not all(to is not None and to[1] == part[1] for to in parts):
                    return None
                states.add(part[0])
                names = [to[0] for to in parts if to is not None]
                filled |= {*names}
                inverted_calls += [(names, own_attribute(function))] * part[1]
            case _:
                return None
    (states_name,) = states if len(states) == 1 else ("",)
    for statement in branch.orelse:
        match statement:
            case ast.Assign([target], ast.Call(function, [ast.Name(given)], [])) if given == states_name:
                others.append(([ast.unparse(to) for to in _elements(target)], own_attribute(function)))
            case ast.Assign([ast.Name(to)], ast.Call(ast.Attribute(ast.Name(of), "reshape" | "view"))) if of == to:
                if not sets_only(statement, to):
                    return None
            case _:
                return None
    elsewhere = Counter(loaded(forward)) - Counter(loaded(branch.test, *branch.body))
    above = stored(*forward.body[: forward.body.index(branch)], *branch.body)
    is_handed = states_name in parameter_names(forward) and states_name not in above
    is_same = inverted_calls == others and allocated == filled
    return states_name if is_handed and is_same and not masks & {*elsewhere} else None


def _elements(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else [target]


def _masks(body: list[ast.stmt], name: str) -> set[str]:
    """The names of a mask of tokens: `name`, and those that are only assigned the mask in another shape or dtype."""
    masks, reshaped_masks = {name}, list[str]()
    for statement in body:
        match statement:
            case ast.Assign([ast.Name(to)], value) if _reformed(value) in masks:
                masks.add(to)
                reshaped_masks.append(to)
    changed = stored(*body)
    return {mask for mask in masks if changed.count(mask) == reshaped_masks.count(mask)}


def _reformed(value: ast.expr) -> str:
    """The name m in `m.bool()`, `m[..., None].expand(...)` and other forms of the same truth values; else ""."""
    match value:
        case ast.Name(name):
            return name
        case ast.Call(ast.Attribute(inner, attr)) if attr in FORMS:
            return _reformed(inner)
        case ast.Subscript(inner, index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            return _reformed(inner) if all(ast.unparse(part) in ("...", "None", ":") for part in parts) else ""
    return ""


def _part(node: ast.expr | None, masks: set[str]) -> tuple[str, bool] | None:
    """The name x of `x[m]` or `x[~m]`, and whether the mask is inverted; None for other code."""
    match node:
        case ast.Subscript(ast.Name(name), ast.Name(mask)) if mask in masks:
            return name, False
        case ast.Subscript(ast.Name(name), ast.UnaryOp(ast.Invert(), ast.Name(mask))) if mask in masks:
            return name, True
    return None


def _modules(body: list[ast.stmt], info: ClassInfo) -> set[str]:
    """The attributes from `__init__` that statements call."""
    return {name for s in body for call in calls(s) if (name := own_attribute(call.func)) in info.attributes}
