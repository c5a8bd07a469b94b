"""Shared experts are computed while tokens are sent to the ranks of their routed experts."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import (
    ClassInfo,
    calls,
    is_compound,
    loaded,
    own_attribute,
    parameter_names,
    stored_names,
    walk,
)
from patchgen.anatomy.names import local_names, uses_name
from patchgen.anatomy.roles import LINEAR
from patchgen.passes.base import Example, LeftAlone, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor
from patchgen.source import Block

HANDLE = "shared_beside"
RESHAPES = ("view", "reshape")


class SharedExperts(SitePass):
    """Upstream computes routed and shared experts one after the other, so the device would idle during the exchange."""

    name = "shared_experts"
    purpose = "Shared experts run while tokens travel to the ranks of their routed experts."
    expects = (
        "one hit per MoE block that builds an MLP beside its experts; those under a condition are listed as notes"
    )
    EXAMPLES = (
        Example("""shared experts after the routed ones, and before them
        class ExampleMLP(nn.Module):
            def forward(self, x):
                return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


        class ExampleExperts(nn.Module):
            def __init__(self, config):
                self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.size, config.hidden_size))
                self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.size))

            def forward(self, hidden_states, top_k_index, top_k_weights):
                for expert in top_k_index.unique():
                    gate, up = F.linear(hidden_states, self.gate_up_proj[expert]).chunk(2, dim=-1)
                    hidden_states = F.linear(F.silu(gate) * up, self.down_proj[expert]) * top_k_weights
                return hidden_states


        class ExampleMoE(nn.Module):
            def __init__(self, config):
                self.experts = ExampleExperts(config)
                self.shared_experts = ExampleMLP(config)

            def forward(self, hidden_states, weights, indices):
                residuals = hidden_states
      +         # patchgen: shared_experts
      +         shared_beside = ops.beside_experts(self.shared_experts, residuals)
                hidden_states = self.experts(hidden_states, indices, weights)
      -         return hidden_states + self.shared_experts(residuals)
      +         return hidden_states + shared_beside()


        class ExampleEarlyMoE(ExampleMoE):
            def forward(self, hidden_states, weights, indices):
      -         shared_output = self.shared_experts(hidden_states)
      +         # patchgen: shared_experts
      +         shared_beside = ops.beside_experts(self.shared_experts, hidden_states, at_once=True)
                hidden_states = self.experts(hidden_states, indices, weights)
      +         shared_output = shared_beside()
                return hidden_states + shared_output
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        routed, shared = _routed_and_shared(anatomy, info.name)
        return f"builds self.{shared[0]} beside it" if routed and shared and "forward" in info.methods else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        (routed, *_), (shared, *_) = _routed_and_shared(anatomy, site.block)

        editor = Editor(block, self.mark)
        found = _find(editor, routed, shared)
        if isinstance(found, str):
            raise LeftAlone(f"{site.name}: {found}; shared and routed experts run one after the other")
        at_routed, at_shared, call = found
        before = at_shared.lineno < at_routed.lineno
        arguments = [editor.code(node) for node in (call.func, *call.args)]
        by_position = not call.keywords and not any(isinstance(given, ast.Starred) for given in call.args)
        if not by_position or (not before and not all(isinstance(given, ast.Name) for given in call.args)):
            # Deferred, so that the arguments are computed where they were: this keeps the order of sums in the backward.
            arguments = [f"lambda: {editor.code(call)}"]
        handle = f"{HANDLE} = ops.beside_experts({', '.join([*arguments, *['at_once=True'] * before])})"
        if before:
            editor.below(at_routed, editor.code(at_shared).replace(editor.code(call), f"{HANDLE}()"), marked=False)
            editor.replace(at_shared, handle)
        else:
            editor.instead(call, f"{HANDLE}()")
            editor.above(at_routed, handle)
        return Rewritten(editor.result, f"self.{shared} beside self.{routed}")


def _routed_and_shared(anatomy: Anatomy, name: str) -> tuple[list[str], list[str]]:
    """The attributes that are routed experts, and those that are MLPs for all tokens: gated ones, and other dense ones."""
    found = [(build.attribute, anatomy.classes.get(build.target or "")) for build in anatomy.builds(name)]
    built = [(attribute, info) for attribute, info in found if attribute and info]
    routed = [attribute for attribute, info in built if Role.EXPERTS in info.roles]
    return routed, [attribute for attribute, info in built if Role.MLP in info.roles or _is_dense(anatomy, info)]


def _is_dense(anatomy: Anatomy, info: ClassInfo) -> bool:
    linear = [value for value in info.attributes.values() if anatomy.is_a(value, LINEAR)]
    forward = info.methods.get("forward")
    return not info.roles and len(linear) > 1 and forward is not None and len(parameter_names(forward)) == 1


def _is_conditional(statement: ast.stmt, call: ast.Call) -> bool:
    """Whether an expression of the statement decides if, or how often, the call runs."""
    deciding = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    return any(call in walk(node) for node in walk(statement) if isinstance(node, deciding))


def _find(editor: Editor, routed: str, shared: str) -> tuple[ast.stmt, ast.stmt, ast.Call] | str:
    """The statement that calls the routed experts, the one that calls the shared ones, and the latter call; or the reason,
    in words, why they cannot overlap."""
    forward, places = editor.function("forward"), dict[str, tuple[int, ast.Call]]()
    body = forward.body
    called = [(i, call) for i, statement in enumerate(body) for call in calls(statement)]
    for attribute in (routed, shared):
        found = [(i, call) for i, call in called if own_attribute(call.func) == attribute]
        if not found:
            raise Missed(f"a call of self.{attribute}(...) in forward", editor.code(forward))
        if len(found) > 1:
            return f"self.{attribute} is called {len(found)} times"
        places[attribute] = found[0]
    (at_routed, _), (at_shared, call) = places[routed], places[shared]
    if any(is_compound(body[at]) or _is_conditional(body[at], one) for at, one in places.values()):
        return "one of the two is called under a condition"
    if at_routed == at_shared:
        return "both are called in one statement"
    if uses_name(forward, HANDLE):
        return f"the name {HANDLE} is taken"
    first, last = sorted((at_shared, at_routed))
    read, local = set(loaded(call)), local_names(forward)
    if at_shared < at_routed:
        if not _is_reshaped(body[at_shared], call):
            return f"self.{shared} is computed with before self.{routed} is called"
        result = stored_names(body[at_shared], local)
        if any(uses_name(node, name) for node in body[first + 1 : last + 1] for name in result):
            return f"the result of self.{shared} is read before self.{routed} is called"
        # The call stays where it is, and reads its arguments there; only the reshape of its result is evaluated later.
        read = set(loaded(body[at_shared])) - read - result
        first, last = first + 1, last + 1
    if any(stored_names(node, read) for node in body[first:last]):
        return f"what self.{shared} reads is written between it and self.{routed}"
    return body[at_routed], body[at_shared], call


def _is_reshaped(statement: ast.stmt, call: ast.Call) -> bool:
    """Whether a statement assigns the call, at most reshaped: it can be moved without changing any computation."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value is not call:
        if value.func.attr not in RESHAPES:
            return False
        value = value.func.value
    return value is call
