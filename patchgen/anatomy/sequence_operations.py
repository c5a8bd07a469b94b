"""The functions of a file that run along the sequence (convolutions, delta rules, scans), and the classes of its language
model."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Collection

from patchgen.anatomy.classes import FunctionNode, arguments, base_name, calls, loaded, parameter_names, stored, walk
from patchgen.anatomy.convolutions import convolutions
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.known import POINTWISE
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import TOKENS, Role, takes_media_alone

CONVOLUTION, DELTA_RULE, UNKNOWN = "causal_conv1d", "delta_rule", "unread_scan"
BY_HEADS, BY_CHANNELS, FUSED = "state_space_scan", "selective_scan", "fused_scan"
CONV1D_PARAMETERS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")  # torch's
# transformers': replaces the function by a kernel that is installed.
KERNEL_DECORATOR = "use_kernel_func_from_hub_with_fallback"
COUNTED = "builtins.range"
SIGNATURES = ({"A", "B", "C"}, {"beta", "chunk_size"})  # parameters of upstream's scans, of its delta rules


def sequence_operations(anatomy: Anatomy) -> dict[str, str]:
    """Name -> kind, for the module-level functions that run along the whole sequence.

    Which parameters span the sequence is left to the runtime: it refuses to divide a tensor whose name it does not know.
    """
    kinds = {name: _kind(anatomy, function) for name, function in anatomy.functions.items()}
    return {name: kind for name, kind in kinds.items() if kind}


def _kind(anatomy: Anatomy, function: FunctionNode) -> str:
    """The kind of one function; "" if it does not run along the sequence, or updates a cache."""
    parameters, code = parameter_names(function), calls(function)
    body = function.body[ast.get_docstring(function) is not None :]
    if [ast.unparse(statement) for statement in body] == ["return None"]:
        has_kernel = any(anatomy.names.is_upstream(one, KERNEL_DECORATOR) for one in function.decorator_list)
        return FUSED if has_kernel else ""
    if any(_copies_into(call.func, parameters) for call in code):
        return ""  # updates the state of an earlier call by one token
    if any(convolutions(anatomy, function)):
        return CONVOLUTION if _is_depthwise(anatomy, function) else UNKNOWN
    operations = [node for node in walk(function) if isinstance(node, ast.BinOp)]
    padded_to = {base_name(node.right) for node in operations if isinstance(node.op, ast.Mod)}
    in_chunks, steps = bool(padded_to & set(parameters)), bool(stepping_loops(anatomy, function))
    factors = [{base_name(node.left), base_name(node.right)} for node in operations if isinstance(node.op, ast.Mult)]
    if len(parameters) > 4 and set(parameters[1:3]) in factors and (in_chunks or steps):
        return _scan_kind(function)  # it multiplies step sizes by decays
    if len(parameters) > 4 and in_chunks and steps:
        return DELTA_RULE if _takes_tokens_first(function) else UNKNOWN
    # With the parameters of a scan or delta rule, but in a form that is not read: the runtime refuses slices for it.
    looks = any(names <= set(parameters) for names in SIGNATURES)
    return UNKNOWN if looks and any(_may_join_tokens(anatomy, node) for node in walk(function)) else ""


def _may_join_tokens(anatomy: Anatomy, node: ast.AST) -> bool:
    """Whether a node may combine several tokens: a loop, a matrix product, or a call that is not known as elementwise."""
    match node:
        case ast.For() | ast.While() | ast.comprehension() | ast.BinOp(op=ast.MatMult()):
            return True
        case ast.Call():
            return anatomy.names.operation(node) not in POINTWISE
    return False


def _copies_into(function: ast.expr, parameters: Collection[str]) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "copy_" and base_name(function) in parameters


def _is_depthwise(anatomy: Anatomy, function: FunctionNode) -> bool:
    """Whether each convolution in a function is depthwise, with the first three parameters as input, weight and bias."""
    taken = parameter_names(function)[:3]
    first = next(iter(taken), "")
    channels = {f"{first}.shape[1]", f"{first}.size(1)"}
    for node in walk(function):
        match node:
            case ast.Assign([ast.Tuple([_, ast.Name(size), _])], ast.Attribute(ast.Name(of), "shape")) if of == first:
                channels.add(size)
    for node in convolutions(anatomy, function):
        given = arguments(node, CONV1D_PARAMETERS) if isinstance(node, ast.Call) else {}
        is_direct = [base_name(given.get(name)) for name in CONV1D_PARAMETERS[:3]] == taken
        if not is_direct or "groups" not in given or ast.unparse(given["groups"]) not in channels:
            return False
    return True


def stepping_loops(anatomy: Anatomy, function: FunctionNode) -> list[ast.For]:
    """The `for` loops of a function over a `range`."""
    loops = [node for node in walk(function) if isinstance(node, ast.For) and isinstance(node.iter, ast.Call)]
    local = local_names(function)
    return [loop for loop in loops if anatomy.names.resolve(getattr(loop.iter, "func", None), local) == COUNTED]


def _takes_tokens_first(function: FunctionNode) -> bool:
    """Whether a delta rule takes `(B, S, N, D)`: it transposes its first three parameters to `(B, N, S, D)` itself."""
    code = [(call.func, ast.unparse(call)) for call in calls(function)]
    turned = {base_name(method) for method, source in code if source.endswith(".transpose(1, 2)")}
    loops = [node for node in walk(function) if isinstance(node, ast.comprehension)]
    turned |= {name for loop in loops if set(stored(loop.target)) & turned for name in loaded(loop.iter)}
    return turned >= {*parameter_names(function)[:3]}


def _scan_kind(function: FunctionNode) -> str:
    """The kind of a state-space scan: by heads if its first parameter is `(B, S, N, D)`, by channels if `(B, C, S)`."""
    first = parameter_names(function)[0]
    for statement in function.body:
        match statement:
            case ast.Assign([ast.Tuple(sizes)], ast.Attribute(ast.Name(name), "shape")) if name == first:
                return {4: BY_HEADS, 3: BY_CHANNELS}.get(len(sizes), UNKNOWN)
    return UNKNOWN


def functions_below(anatomy: Anatomy, *code: ast.AST, without: Collection[str] = ()) -> list[str]:
    """The functions of the file that code uses, directly or through others; `without` some, and what only these use."""
    names, pending = list[str](), list(code)
    while pending:
        new = {*loaded(pending.pop(0))} & anatomy.functions.keys() - {*names, *without}
        names += sorted(new)
        pending += [anatomy.functions[name] for name in sorted(new)]
    return names


def language_model_classes(anatomy: Anatomy) -> set[str]:
    """The classes of the language model: what the decoders use, without a decoder what the heads use, or else all.

    Empty if the language model is in another file. Towers and inner models that take no tokens are left out: they run along
    another sequence.
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
