"""The roles of classes, found by structure.

Each detector looks at one class and returns the reason why it has the role, or None. Detectors may rely on transformers'
conventional names of tensors, calls and parameters, but on no model.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from patchgen.anatomy.classes import (
    LISTS,
    Build,
    ClassInfo,
    FunctionNode,
    calls,
    dotted,
    is_in_place,
    own_attribute,
    parameter_names,
    walk,
)
from patchgen.anatomy.convolutions import built_convolutions, convolutions
from patchgen.anatomy.flow import Attention, Embedder, Rotary
from patchgen.anatomy.known import CASTS, MAKERS
from patchgen.anatomy.names import local_names
from patchgen.anatomy.vocabulary import attributes_read, uses_projection, with_methods

if TYPE_CHECKING:
    from patchgen.anatomy.graph import Anatomy
    from patchgen.source import Module


class Role:
    """The names of the roles."""

    NORM = "norm"
    ROTARY = "rotary embedding"
    ATTENTION = "attention"
    MLP = "MLP"
    EXPERTS = "experts"
    EXPERT_LIST = "expert list"
    ROUTER = "router"
    MOE_BLOCK = "MoE block"
    MIXER = "sequence mixer"
    DECODER = "decoder"
    HEAD = "causal head"
    ASKED = "head asked for"
    FUSION = "fusion model"
    VISION = "vision tower"
    AUDIO = "audio tower"


PIXELS = ("pixel_values", "pixel_values_videos", "pixel_values_images")
AUDIO_INPUTS = ("input_features", "input_values", "audio_values", "input_audio_embeds")
TOKENS = {"input_ids", "inputs_embeds"}
EXPERT_DIMS = 3
SUMS = {"index_add", "index_add_", "index_put_", "scatter_add", "scatter_add_"}
LIST, PARAMETER, LINEAR = "torch.nn.ModuleList", "torch.nn.Parameter", "torch.nn.Linear"
HAND_WRITTEN = "hand-written softmax(q k) v"  # no setting of the model selects its backend
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # transformers' table of attention functions
TORCH_ATTENTION = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "flex_attention",
    "MultiheadAttention",
}
BY_SIZES = MAKERS | {"torch.Tensor", "torch.FloatTensor", "torch.full"}  # make a tensor of the given sizes
FILLING = CASTS | {"normal_", "uniform_", "zero_", "fill_", "mul_", "div_", "mul", "div"}
RESHAPING = ("view", "reshape", "expand")  # to the given sizes
INITIALISERS = ("torch.nn.init.", "transformers.initialization.")
DISPATCHER = "use_experts_implementation"  # upstream's decorator of experts classes


def assign_roles(anatomy: Anatomy) -> None:
    """Fills `ClassInfo.roles` of every class."""
    for info in anatomy.classes.values():
        assign_class_roles(anatomy, info)
    for info in anatomy.classes.values():  # these look at the roles of what a class builds
        _assign(info, _COMPOSITE_DETECTORS, anatomy, info)
        if anatomy.is_model(info.name) and "forward" in info.methods:
            _assign(info, _MODEL_DETECTORS, anatomy, info, info.methods["forward"])
    for name in media_models(anatomy):
        anatomy.classes[name].roles.pop(Role.DECODER, None)


def media_models(anatomy: Anatomy) -> set[str]:
    """The classes of this file that take media and no token ids, and the classes that they build."""
    media_classes = [info.name for info in anatomy.classes.values() if takes_media_alone(info)]
    return {*media_classes} | anatomy.built_by(media_classes)


def takes_media_alone(info: ClassInfo) -> bool:
    """Whether the class's own forward takes images, video or audio and no token ids, so that it embeds no tokens."""
    parameters = parameter_names(info.methods["forward"]) if "forward" in info.methods else []
    return bool({*PIXELS, *AUDIO_INPUTS} & {*parameters}) and not any(p.endswith("input_ids") for p in parameters)


def assign_class_roles(anatomy: Anatomy, info: ClassInfo) -> None:
    """Fills in the roles that do not depend on the roles of other classes."""
    inherited = anatomy.method(info.name, "forward")
    if inherited is not None:
        _assign(info, _FORWARD_DETECTORS, anatomy, info, inherited[1])
    if "forward" in info.methods:
        _assign(info, _OWN_FORWARD_DETECTORS, anatomy, info, info.methods["forward"])
    _assign(info, _DETECTORS, anatomy, info)


def _assign(info: ClassInfo, detectors: dict[str, Callable[..., str | None]], *of: object) -> None:
    for role, detector in detectors.items():
        if reason := detector(*of):
            info.roles[role] = reason


def _norm(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> str | None:
    """A mean, a square (`x.pow(2)`, `x**2`, `x.square()`, `x * x`), and a root (`rsqrt`, `sqrt`, a power of 0.5 or -0.5)."""
    nodes = [node for method in info.methods.values() for node in walk(method)]
    called = anatomy.names.operations(*info.methods.values())
    operators = [node for node in nodes if isinstance(node, ast.BinOp)]
    powers = {ast.unparse(n.right) for n in operators if isinstance(n.op, ast.Pow)}
    raised = [node for node in nodes if isinstance(node, ast.Call) and anatomy.names.operation(node) == "pow"]
    powers |= {ast.unparse(call.args[-1]) for call in raised if call.args}
    products = any(isinstance(n.op, ast.Mult) and ast.unparse(n.left) == ast.unparse(n.right) for n in operators)
    squared = {"pow", "square"} & called or "2" in powers or products
    is_root = {"rsqrt", "sqrt"} & called or {"-0.5", "0.5", "-1 / 2", "1 / 2"} & powers
    if len(parameter_names(forward)) > 2 or info.builds or not ("mean" in called and squared and is_root):
        return None
    return "forward divides by the root of a mean of squares"


def _rotary(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> str | None:
    names = anatomy.names.operations(info.node)
    if not ({"cos", "sin"} <= names or "polar" in names):
        return None
    flow = Rotary(anatomy, info.name)
    flow.run(forward)
    return "forward turns inverse frequencies into cos and sin" if flow.found else None


def _attention(anatomy: Anatomy, info: ClassInfo) -> str | None:
    if any(reads_interface(anatomy, method) for method in info.methods.values()):
        return "calls transformers' attention interface"
    forward = info.methods.get("forward")
    if forward is None:
        return None
    if torch_attentions := {dotted(node).rpartition(".")[2] for node in attention_of_torch(anatomy, forward)}:
        return f"calls torch's {min(torch_attentions)} itself"
    flow = Attention(anatomy, info.name)
    flow.run(forward)
    return HAND_WRITTEN if flow.found else None


def _mlp(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> str | None:
    """The product `self.act(self.gate(x)) * self.up(x)`."""
    for node in walk(forward):
        match node:
            case ast.BinOp(ast.Call(act, [ast.Call(gate)]), ast.Mult(), ast.Call(up)):
                if all(dotted(function).startswith("self.") for function in (act, gate, up)):
                    return "forward is down(act(gate(x)) * up(x))"
    return None


def stack_shapes(anatomy: Anatomy, info: ClassInfo) -> dict[str, list[str]]:
    """The dimensions, as source, of every `nn.Parameter(torch.empty(E, ..., ...))` of the class: stacks of matrices."""
    parameters = {name: call for name, call in info.built.items() if anatomy.is_a(call, PARAMETER) and call.args}
    shapes = {name: _shape(anatomy, call.args[0]) for name, call in parameters.items()}
    return {name: shape for name, shape in shapes.items() if len(shape) == EXPERT_DIMS}


def _shape(anatomy: Anatomy, value: ast.expr) -> list[str]:
    """The sizes, as source, of a stack of matrices; empty for anything else.

    Filling, scaling or casting a stack keeps its sizes. After any other operation they are `<expression>.shape[i]`.
    """
    if isinstance(value, ast.BinOp):
        return _shape(anatomy, value.left) or _shape(anatomy, value.right)
    if not isinstance(value, ast.Call):
        return []
    sizes = [ast.unparse(size) for size in _sizes(anatomy, value)]
    owner = value.func.value if isinstance(value.func, ast.Attribute) else None
    is_method, name = isinstance(owner, ast.Call | ast.BinOp), dotted(value.func).rpartition(".")[2]
    if name in RESHAPING or (len(sizes) == EXPERT_DIMS and not is_method):
        return sizes
    made = [_shape(anatomy, part) for part in (owner, *value.args[:1]) if part is not None]
    known = next((shape for shape in made if shape), list[str]())
    if name in FILLING or (anatomy.names.resolve(value.func) or "").startswith(INITIALISERS):
        return known
    is_stack = bool(known) or len(sizes) == EXPERT_DIMS
    return [f"{ast.unparse(value)}.shape[{axis}]" for axis in range(EXPERT_DIMS * is_stack)]


def _sizes(anatomy: Anatomy, maker: ast.Call) -> list[ast.expr]:
    """The sizes in the arguments of a call that makes a tensor; empty for calls in place and torch functions without sizes."""
    meaning = anatomy.names.resolve(maker.func) or ""
    if is_in_place(maker.func) or (meaning.startswith("torch.") and meaning not in BY_SIZES):
        return []
    shape = maker.args[:1] if meaning == "torch.full" else maker.args
    shape = shape or [keyword.value for keyword in maker.keywords if keyword.arg == "size"]
    return shape[0].elts if len(shape) == 1 and isinstance(shape[0], ast.Tuple | ast.List) else shape


def _experts(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> str | None:
    """Several stacks of equally many matrices, and a forward that indexes them by a name or multiplies all by `torch.bmm`."""
    stacks = stack_shapes(anatomy, info)
    subscripts = [node for node in walk(forward) if isinstance(node, ast.Subscript)]
    selected = {own_attribute(node.value) for node in subscripts if isinstance(node.slice, ast.Name)}
    is_alike = len(stacks) > 1 and len({shape[0] for shape in stacks.values()}) == 1
    batched = [call for call in walk(forward) if isinstance(call, ast.Call) and anatomy.is_a(call, "torch.bmm")]
    if is_alike and set(stacks) == {own_attribute(arg) for call in batched for arg in call.args} - {None}:
        return f"stacked weights {', '.join(stacks)} in batched products of all experts"
    if not is_alike or len(parameter_names(forward)) < 3 or not set(stacks) <= selected:
        return None
    return f"stacked weights {', '.join(stacks)} and a forward that takes a routing"


def _router(anatomy: Anatomy, info: ClassInfo) -> str | None:
    routing = (m.name for m in info.methods.values() if "topk" in anatomy.names.operations(m))
    return next((f"{name} calls topk" for name in routing), None)


def _mixer(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> str | None:
    built = [f"self.{name}" if name else ast.unparse(call) for call, name in built_convolutions(anatomy, info).items()]
    called = [ast.unparse(node) for method in info.methods.values() for node in convolutions(anatomy, method)]
    return next((f"mixes along the sequence with the convolution {one}" for one in (*built, *called)), None)


_FORWARD_DETECTORS = {Role.NORM: _norm, Role.ROTARY: _rotary}  # given the forward that runs, which may be inherited
_OWN_FORWARD_DETECTORS = {Role.MLP: _mlp, Role.EXPERTS: _experts, Role.MIXER: _mixer}
_DETECTORS = {Role.ROUTER: _router, Role.ATTENTION: _attention}


def _moe_block(anatomy: Anatomy, info: ClassInfo) -> str | None:
    for build in info.builds:
        if Role.EXPERTS in _roles_of(anatomy, build):
            return f"builds {build.target} as self.{build.attribute}"
    return None


def _expert_list(anatomy: Anatomy, info: ClassInfo) -> str | None:
    """A ModuleList (or ModuleDict) of gated MLPs to which a method routes tokens."""
    routes = Role.ROUTER in info.roles or any(Role.ROUTER in _roles_of(anatomy, build) for build in info.builds)
    # Where a function chooses the experts, no class has the role of a router; the use of the choice shows the routing.
    routes = routes or bool({"one_hot", "where"} & anatomy.names.operations(*info.methods.values()))
    for build in info.builds if routes and "forward" in info.methods else ():
        if build.in_list and is_gated_mlp(anatomy, build.target):
            return f"builds a list of {build.target} as self.{build.attribute} and routes among them"
    return None


def _roles_of(anatomy: Anatomy, build: Build) -> dict[str, str]:
    return anatomy.classes[build.target].roles if build.target in anatomy.classes else {}


def is_gated_mlp(anatomy: Anatomy, name: str | None) -> bool:
    """Whether the class runs the forward of a gated MLP, its own or an inherited one."""
    forward = anatomy.method(name, "forward") if name else None
    return forward is not None and Role.MLP in forward[0].roles


def _decoder(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> str | None:
    if not TOKENS & {*parameter_names(forward)}:
        return None
    layers = _looped_lists(anatomy, info, forward)
    if not layers and any(Role.ROTARY in _roles_of(anatomy, build) for build in anatomy.builds(info.name)):
        called = {own_attribute(call.func) for call in calls(forward)}
        held = [b for b in anatomy.builds(info.name) if b.attribute in called and _is_stack(anatomy, b)]
        layers = sorted(b.attribute or "" for b in held)
    return f"takes token ids or embeddings and runs them through self.{layers[0]}" if layers else None


def _looped_lists(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> list[str]:
    """The attributes with lists of modules that the loops of a forward name."""
    lists = {build.attribute for build in anatomy.builds(info.name) if build.in_list}
    lists |= {a for a, value in info.attributes.items() if anatomy.is_a(_made(anatomy, info, value), *LISTS)}
    loops = [node for node in walk(forward) if isinstance(node, ast.For | ast.While)]
    return sorted(filter(None, lists & {own_attribute(node) for loop in loops for node in walk(loop)}))


def _made(anatomy: Anatomy, info: ClassInfo, value: ast.expr) -> ast.AST:
    """A value; for `self.helper()` what that method returns, if it has one `return`."""
    helper = anatomy.method(info.name, own_attribute(value.func) or "") if isinstance(value, ast.Call) else None
    returned = [node.value for node in walk(helper[1]) if isinstance(node, ast.Return)] if helper else []
    return returned[0] if len(returned) == 1 and returned[0] is not None else value


def _is_stack(anatomy: Anatomy, build: Build) -> bool:
    """Whether what is built is a module of this file, not a model, whose forward loops over its own list of layers."""
    info = anatomy.classes.get(build.target or "")
    if info is None or anatomy.is_model(info.name) or "forward" not in info.methods:
        return False
    return bool(_looped_lists(anatomy, info, info.methods["forward"]))


def _head(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> str | None:
    if "labels" not in parameter_names(forward):
        return None
    if anatomy.inherits(info.name, "GenerationMixin"):
        return "generates and takes labels"
    code: list[ast.AST] = [forward]
    if anatomy.upstream.version is None:  # no auto map names its heads: the loss may be in a helper
        code = with_methods(anatomy, info.name, forward)
        code += [
            function for call in calls(*code) if (function := anatomy.called(info.name, call)) not in (None, *code)
        ]
    computes_loss = anatomy.names.operations(*code) & {"CrossEntropyLoss", "cross_entropy"}
    computes_loss |= attributes_read(*code) & {"loss_function"}  # transformers'
    is_head = computes_loss and uses_projection(anatomy, info.name, forward)
    return "projects to the vocabulary and computes a loss" if is_head else None


def own_methods(info: ClassInfo, forward: FunctionNode) -> dict[str, FunctionNode]:
    """The methods of a class that its forward calls, by name."""
    called = {dotted(call.func).removeprefix("self.") for call in calls(forward)}
    return {name: method for name, method in info.methods.items() if name in called}


def _fusion(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> str | None:
    takes_media = {*parameter_names(forward)} & {*PIXELS, *AUDIO_INPUTS}
    code = (forward, *own_methods(info, forward).values())
    scatters = takes_media and "masked_scatter" in anatomy.names.operations(*code)
    return "scatters modality features into the token embeddings" if scatters else None


def _tower(inputs: Sequence[str], anatomy: Anatomy, info: ClassInfo, forward: FunctionNode) -> str | None:
    params = parameter_names(forward)
    if Role.DECODER in info.roles or "input_ids" in params or "labels" in params:
        return None
    hit = [name for name in inputs if name in params]
    if not hit or not any(isinstance(node, ast.For) for node in walk(forward)):
        return None
    flow = Embedder(anatomy, info.name)
    flow.run(forward)
    # An audio tower must hold its convolutions itself: `audio_sp` divides the chunks that its forward convolves.
    embeds = flow.own if inputs == AUDIO_INPUTS else flow.found
    return f"takes {hit[0]}, embeds it with self.{embeds[0]} and runs layers" if embeds else None


_COMPOSITE_DETECTORS = {Role.MOE_BLOCK: _moe_block, Role.EXPERT_LIST: _expert_list}
_MODEL_DETECTORS = {  # for a PreTrainedModel that defines a forward
    Role.DECODER: _decoder,
    Role.HEAD: _head,
    Role.FUSION: _fusion,
    Role.VISION: partial(_tower, (*PIXELS, "grid_thw")),
    Role.AUDIO: partial(_tower, AUDIO_INPUTS),
}


def unread_experts(anatomy: Anatomy) -> list[str]:
    """Signs of experts in classes without a role for them, each beginning with the name of the class.

    A file with such a sign has experts that no pass would see.
    """
    expert_roles = {Role.EXPERTS, Role.EXPERT_LIST}
    unnamed = [info for info in anatomy.classes.values() if not expert_roles & set(info.roles)]
    signs = [f"{info.name} {sign}" for info in unnamed for sign in _signs(anatomy, info, expert_roles)]
    if len(unnamed) == len(anatomy.classes):
        read = [(i.name, node) for i in unnamed for node in walk(i.node) if isinstance(node, ast.Attribute)]
        options = [(name, node) for name, node in read if dotted(node.value).endswith("config")]
        signs += [f"{name} reads {dotted(node)}" for name, node in options if "expert" in node.attr]
    return list(dict.fromkeys(signs))


def left_alone_experts(anatomy: Anatomy) -> dict[str, str]:
    """Class -> a sign of its experts, which are of another kind than the seam's: these compute as upstream wrote them, and no
    rank divides them."""
    signs = [sign.split(maxsplit=1) for sign in unread_experts(anatomy)]
    held = [sign for sign in signs if not sign[1].startswith("reads ")]
    other = [s for s in signs if not {Role.ROUTER, Role.HEAD, Role.DECODER} & set(anatomy.classes[s[0]].roles)]
    return dict(
        reversed(held or other or signs)
    )  # a config option that a class reads counts where there is no other sign


def _signs(anatomy: Anatomy, info: ClassInfo, expert_roles: set[str]) -> Iterator[str]:
    counts = {name: shape[0] for name, shape in stack_shapes(anatomy, info).items()}
    stacks = [name for name, count in counts.items() if "expert" in count and "shared" not in count]
    if len(stacks) > 1:
        yield f"has the stacked weights {', '.join(stacks)}, and its forward is no loop over them"
    yield from _choices(anatomy, info)
    if any(anatomy.names.is_upstream(decorator, DISPATCHER) for decorator in info.node.decorator_list):
        yield f"is decorated with {DISPATCHER}"
    for attribute in ("experts", "local_experts"):
        named = any(expert_roles & set(_roles_of(anatomy, b)) for b in info.builds if b.attribute == attribute)
        if attribute in info.attributes and not named:
            yield f"sets self.{attribute}"


def _choices(anatomy: Anatomy, info: ClassInfo) -> Iterator[str]:
    """Signs that a class indexes a stack of matrices by a computed value, or sums outputs of listed modules into rows."""
    lists = {name for name, call in info.built.items() if anatomy.names.resolve(call.func) == LIST}
    for method in info.methods.values():
        subscripts = [node for node in walk(method) if isinstance(node, ast.Subscript)]
        fixed = ast.Constant | ast.Slice | ast.Tuple
        chosen = {own_attribute(node.value) for node in subscripts if not isinstance(node.slice, fixed)}
        stacks = (name for name in stack_shapes(anatomy, info) if name in chosen)
        yield from (f"chooses among the slices of self.{name}" for name in stacks)
        for loop in (node for node in walk(method) if isinstance(node, ast.For)):
            looped = lists.intersection(map(own_attribute, walk(loop)))
            if looped and SUMS & anatomy.names.operations(loop):
                yield f"adds up what modules of self.{min(looped)} make of chosen rows"


def attention_of_torch(anatomy: Anatomy, code: ast.AST) -> Iterator[ast.expr]:
    """The expressions in code that refer to one of `TORCH_ATTENTION`, under any name."""
    local = local_names(code)
    for node in (node for node in walk(code) if isinstance(node, ast.Name | ast.Attribute)):
        package, _, name = (anatomy.names.resolve(node, local) or "").rpartition(".")
        if name in TORCH_ATTENTION and package.startswith("torch"):
            yield node


def reads_interface(anatomy: Anatomy, code: ast.AST) -> bool:
    """Whether code refers to transformers' table of attention functions, under any name."""
    return any(anatomy.names.is_upstream(node, INTERFACE) for node in walk(code))


def unread_heads(module: Module, anatomy: Anatomy) -> list[str]:
    """Why heads that upstream's auto maps list for the model do not have that role here, one sentence each."""
    return [
        f"upstream lists {name} as a head, and it takes no labels, or neither generates nor computes a loss"
        for name in anatomy.upstream.heads
        if module.has(name) and Role.HEAD not in anatomy.classes[name].roles
    ]
