"""The functions of a file that run along the sequence: convolutions, delta rules, state-space scans; and where it is the text's."""

from __future__ import annotations

import ast
from collections.abc import Collection

from patchgen.anatomy.classes import ClassInfo, FunctionNode, base_name, calls, dotted, loaded, parameter_names, stored
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import TOKENS, Role, convolutions, takes_media_alone

CONVOLUTION, DELTA_RULE, UNKNOWN = "causal_conv1d", "delta_rule", "unread_scan"
BY_HEADS, BY_CHANNELS, FUSED = "state_space_scan", "selective_scan", "fused_scan"
ALONG = {"cumsum", "cumprod", "logcumsumexp", "roll", "associative_scan"}  # of torch, along a dimension


def sequence_operations(anatomy: Anatomy) -> dict[str, str]:
    """The module-level functions that run along the sequence, with their kind, told by their signatures."""
    found = {}
    for name, function in anatomy.functions.items():
        parameters = parameter_names(function)
        if parameters[1:3] == ["weight", "bias"] and any(convolutions(anatomy, function)):
            found[name] = CONVOLUTION  # over a whole sequence; the update of a single token takes a state second
        elif "beta" in parameters and "chunk_size" in parameters and len(parameters) > 4:
            found[name] = DELTA_RULE if _takes_tokens_first(function) else UNKNOWN
        elif "A" in parameters and parameters[:1] != ["state"]:  # the update of a single token takes a state first
            found[name] = _scan_kind(function)
    return found


def _takes_tokens_first(function: FunctionNode) -> bool:
    """Whether a delta rule is handed `(B, S, N, D)`: it transposes its first three itself, to `(B, N, S, D)`."""
    code = [(call.func, ast.unparse(call)) for call in calls(function)]
    turned = {base_name(method) for method, source in code if source.endswith(".transpose(1, 2)")}
    loops = [node for node in ast.walk(function) if isinstance(node, ast.comprehension)]
    turned |= {name for loop in loops if set(stored(loop.target)) & turned for name in loaded(loop.iter)}
    return turned >= {*parameter_names(function)[:3]}


def _scan_kind(function: FunctionNode) -> str:
    """What a function does that takes a decay `A`; by heads its tokens are `(B, S, N, D)`, by channels `(B, C, S)`."""
    body = function.body[ast.get_docstring(function) is not None :]
    if [ast.unparse(statement) for statement in body] == ["return None"]:
        return FUSED  # for a kernel that may take its place
    first, *others = parameter_names(function)
    for statement in body if others[:4] == ["dt", "A", "B", "C"] else ():
        match statement:
            case ast.Assign([ast.Tuple(sizes)], ast.Attribute(ast.Name(name), "shape")) if name == first:
                return {4: BY_HEADS, 3: BY_CHANNELS}.get(len(sizes), UNKNOWN)
    return UNKNOWN


def unwrapped(info: ClassInfo, operations: Collection[str], anatomy: Anatomy) -> ast.AST | None:
    """What runs along the sequence below a mixer's methods, in no call that this pass wraps: an operation behind another
    name, one of another file, or torch's own."""
    for method in [method for name, method in info.methods.items() if name != "__init__"]:
        pending, seen = [method], set(operations)
        while pending:
            code = pending.pop()
            named = set(loaded(code)) - (local_names(code) if isinstance(code, FunctionNode) else set())
            if code is not method and named & set(operations):
                return code
            for call in calls(code):
                meaning, name = anatomy.names.resolve(call.func) or "", dotted(call.func).rpartition(".")[2]
                is_another_models = meaning.startswith("transformers.models.") and name not in anatomy.functions
                if name in ALONG or (is_another_models and name.islower()):
                    return call
            pending += [anatomy.functions[name] for name in sorted(named & set(anatomy.functions) - seen)]
            pending += [one for name in sorted(named - seen) for one in _aliases(name, anatomy)]
            seen |= named
    return None


def _aliases(name: str, anatomy: Anatomy) -> list[ast.AST]:
    """The statements of the file that bind a name to another one."""
    found = anatomy.names.statements.get(name, ())
    return [one for one in found if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name)]


def of_the_language_model(anatomy: Anatomy) -> set[str]:
    """The classes below a decoder; in a file without one below its heads, or all; none if it is built from another file.

    Models inside that take no tokens, and towers, run along another sequence.
    """
    towers = [info.name for role in (Role.AUDIO, Role.VISION) for info in anatomy.with_role(role)]
    towers += [name for name in anatomy.classes if anatomy.is_model(name) and _takes_no_tokens(anatomy, name)]
    decoders = anatomy.with_role(Role.DECODER)
    built = [] if decoders else [build for name in anatomy.classes for build in anatomy.auto_builds(name)]
    if any("text_config" in (b.config or "") and anatomy.target_of(b) not in anatomy.classes for b in built):
        return set()
    roots = [one.name for one in decoders or anatomy.with_role(Role.HEAD)]
    inside = anatomy.built_by(towers) - anatomy.built_by(roots, without=towers)
    return anatomy.reached_from(roots, without={*towers, *inside}) if roots else set(anatomy.classes)


def _takes_no_tokens(anatomy: Anatomy, name: str) -> bool:
    found = anatomy.method(name, "forward")
    return found is not None and (not TOKENS & {*parameter_names(found[1])} or takes_media_alone(found[0]))
