"""The roles of classes, found by structure.

Each detector looks at one class and says why it has the role, or None. Detectors name tensors, calls and parameters of
transformers' common dialect; they name no model.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from patchgen.anatomy.classes import ClassInfo, called_names, calls, dotted, parameter_names, reads_name

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
    FUSION = "fusion model"
    VISION = "vision tower"
    AUDIO = "audio tower"


PIXELS = ("pixel_values", "pixel_values_videos", "pixel_values_images")
AUDIO_INPUTS = ("input_features", "input_values", "audio_values", "input_audio_embeds")
EXPERT_DIMS = 3
HAND_WRITTEN = "hand-written softmax(q k) v"  # attention that no setting of the model chooses
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # transformers'
TORCH_ATTENTION = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "flex_attention",
    "MultiheadAttention",
}
DISPATCHER = "use_experts_implementation"  # upstream's decorator of experts classes


def assign_roles(anatomy: Anatomy) -> None:
    """Fills `ClassInfo.roles` of every class."""
    for info in anatomy.classes.values():
        assign_class_roles(anatomy, info)
    for info in anatomy.classes.values():  # these look at the roles of what a class builds
        for role, detector in _COMPOSITE_DETECTORS.items():
            reason = detector(anatomy, info)
            if reason:
                info.roles[role] = reason


def assign_class_roles(anatomy: Anatomy, info: ClassInfo) -> None:
    """Fills in the roles that follow from the class by itself."""
    for role, detector in _DETECTORS.items():
        reason = detector(anatomy, info)
        if reason:
            info.roles[role] = reason


def _forward(anatomy: Anatomy, info: ClassInfo) -> ast.AST | None:
    found = anatomy.method(info.name, "forward")
    return found[1] if found else None


def _norm(anatomy: Anatomy, info: ClassInfo) -> str | None:
    forward = _forward(anatomy, info)
    if forward is None or len(parameter_names(forward)) > 2 or not _divides_by_mean_square(anatomy, info):
        return None
    return "forward divides by the root of a mean of squares"


def _divides_by_mean_square(anatomy: Anatomy, info: ClassInfo) -> bool:
    """A mean of `x.pow(2)`, `x**2`, `x.square()` or `x * x`, and `rsqrt`, `sqrt` or a power of -0.5, however written."""
    called = _called_in_lineage(anatomy, info)
    operators = [n for method in info.methods.values() for n in ast.walk(method) if isinstance(n, ast.BinOp)]
    powers = {ast.unparse(n.right) for n in operators if isinstance(n.op, ast.Pow)}
    products = any(isinstance(n.op, ast.Mult) and ast.unparse(n.left) == ast.unparse(n.right) for n in operators)
    squared = bool({"pow", "square"} & called) or "2" in powers or products
    is_root = bool({"rsqrt", "sqrt"} & called) or bool({"-0.5", "0.5", "-1 / 2", "1 / 2"} & powers)
    is_root = is_root or any(
        dotted(call.func).endswith("pow") and call.args and ast.unparse(call.args[-1]) in ("-0.5", "0.5")
        for method in info.methods.values()
        for call in calls(method)
    )
    return "mean" in called and squared and is_root and len(info.builds) == 0


def _called_in_lineage(anatomy: Anatomy, info: ClassInfo) -> set[str]:
    """What forward and the helper methods of the class call."""
    names: set[str] = set()
    for method in info.methods.values():
        names |= called_names(method)
    return names


def _rotary(anatomy: Anatomy, info: ClassInfo) -> str | None:
    forward = _forward(anatomy, info)
    if forward is None:
        return None
    names = called_names(forward)
    if {"cos", "sin"} <= names or "polar" in names:
        uses_frequencies = any(
            isinstance(node, ast.Attribute) and "inv_freq" in node.attr for node in ast.walk(info.node)
        )
        return "forward turns inverse frequencies into cos and sin" if uses_frequencies else None
    return None


def _attention(anatomy: Anatomy, info: ClassInfo) -> str | None:
    for method in info.methods.values():
        if reads_name(method, INTERFACE):
            return "calls transformers' attention interface"
    forward = info.methods.get("forward")
    if forward is None:
        return None
    names = called_names(forward)
    if own := names & TORCH_ATTENTION:
        return f"calls torch's {min(own)} itself"
    projections = [
        a for a in info.attributes if a.startswith(("q", "k", "v", "Wqkv", "c_attn", "query", "key", "value"))
    ]
    if "softmax" in names and names & {"matmul", "bmm", "baddbmm", "einsum"} and projections:
        return HAND_WRITTEN
    return None


def _mlp(anatomy: Anatomy, info: ClassInfo) -> str | None:
    forward = info.methods.get("forward")
    if forward is not None and gated_product(forward) is not None:
        return "forward is down(act(gate(x)) * up(x))"
    return None


def gated_product(forward: ast.AST) -> ast.BinOp | None:
    """The product `self.act(self.gate(x)) * self.up(x)` of a gated MLP's forward."""
    for node in ast.walk(forward):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            continue
        left, right = node.left, node.right
        if not (isinstance(left, ast.Call) and isinstance(right, ast.Call) and len(left.args) == 1):
            continue
        inner = left.args[0]
        names = (dotted(left.func), dotted(inner.func) if isinstance(inner, ast.Call) else "", dotted(right.func))
        if all(name.startswith("self.") for name in names):
            return node
    return None


def _stacked_parameters(info: ClassInfo) -> list[str]:
    """The attributes that are `nn.Parameter(torch.empty(E, ..., ...))`: stacks of matrices."""
    return [name for name, value in info.attributes.items() if len(stack_shape(value)) == EXPERT_DIMS]


def stack_shape(value: ast.expr) -> list[ast.expr]:
    """The dimensions of `nn.Parameter(torch.empty(...))`."""
    if not (isinstance(value, ast.Call) and dotted(value.func).endswith("Parameter") and value.args):
        return []
    inner = value.args[0]
    shape = inner.args if isinstance(inner, ast.Call) else []
    if len(shape) == 1 and isinstance(shape[0], ast.Tuple | ast.List):
        shape = shape[0].elts
    return list(shape)


def _experts(anatomy: Anatomy, info: ClassInfo) -> str | None:
    """Two stacks of matrices and a forward that selects among them."""
    del anatomy
    stacks = _stacked_parameters(info)
    if len(stacks) < 2 or "forward" not in info.methods:
        return None
    forward = info.methods["forward"]
    first = [ast.unparse(stack_shape(info.attributes[name])[0]) for name in stacks]
    selected = {
        node.value.attr
        for node in ast.walk(forward)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.slice, ast.Name)
    }
    if len(parameter_names(forward)) < 3 or len(set(first)) > 1 or not set(stacks) <= selected:
        return None
    return f"stacked weights {', '.join(stacks)} and a forward that takes a routing"


def _router(anatomy: Anatomy, info: ClassInfo) -> str | None:
    del anatomy
    for method in info.methods.values():
        if "topk" in called_names(method):
            return f"{method.name} calls topk"
    return None


def _mixer(anatomy: Anatomy, info: ClassInfo) -> str | None:
    del anatomy
    forward = info.methods.get("forward")
    convolutions = depthwise_convolutions(info)
    if forward is None or not convolutions:
        return None
    return f"mixes along the sequence with the depthwise convolution self.{convolutions[0]}"


def depthwise_convolutions(info: ClassInfo) -> list[str]:
    """The attributes that are grouped `nn.Conv1d`s."""
    return [
        attribute
        for attribute, value in info.attributes.items()
        if isinstance(value, ast.Call)
        and dotted(value.func).endswith("Conv1d")
        and any(keyword.arg == "groups" for keyword in value.keywords)
    ]


_DETECTORS: dict[str, Callable[[Anatomy, ClassInfo], str | None]] = {
    Role.NORM: _norm,
    Role.ROTARY: _rotary,
    Role.ATTENTION: _attention,
    Role.MLP: _mlp,
    Role.EXPERTS: _experts,
    Role.ROUTER: _router,
    Role.MIXER: _mixer,
}


def _moe_block(anatomy: Anatomy, info: ClassInfo) -> str | None:
    for build in info.builds:
        target = anatomy.classes.get(build.target or "")
        if target is not None and Role.EXPERTS in target.roles:
            return f"builds {target.name} as self.{build.attribute}"
    return None


def _expert_list(anatomy: Anatomy, info: ClassInfo) -> str | None:
    """A ModuleList (or ModuleDict) of gated MLPs among which a method routes tokens."""
    if "forward" not in info.methods:
        return None
    routes = Role.ROUTER in info.roles or any(
        Role.ROUTER in anatomy.classes[build.target].roles for build in info.builds if build.target in anatomy.classes
    )
    # A function that chooses the experts has no class to carry the role; what follows on the choice shows it.
    routes = routes or any({"one_hot", "where"} & called_names(method) for method in info.methods.values())
    for build in info.builds:
        if build.in_list and is_gated_mlp(anatomy, build.target) and routes:
            return f"builds a list of {build.target} as self.{build.attribute} and routes among them"
    return None


def is_gated_mlp(anatomy: Anatomy, name: str | None) -> bool:
    """Whether the class runs the forward of a gated MLP, its own or an inherited one."""
    found = anatomy.method(name, "forward") if name else None
    return found is not None and Role.MLP in found[0].roles


def _decoder(anatomy: Anatomy, info: ClassInfo) -> str | None:
    if not anatomy.is_model(info.name) or "forward" not in info.methods:
        return None
    forward = info.methods["forward"]
    takes_tokens = "input_ids" in parameter_names(forward) or "inputs_embeds" in parameter_names(forward)
    lists = {build.attribute for build in anatomy.builds(info.name) if build.in_list}
    lists |= {a for a, v in info.attributes.items() if dotted(v).endswith(("ModuleList", "ModuleDict"))}
    looped = {
        node.attr
        for loop in ast.walk(forward)
        if isinstance(loop, ast.For | ast.While)
        for node in ast.walk(loop)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    layers = sorted(lists & looped)
    if takes_tokens and layers:
        return f"takes token ids or embeddings and runs them through self.{layers[0]}"
    return None


def _head(anatomy: Anatomy, info: ClassInfo) -> str | None:
    if not anatomy.is_model(info.name) or "forward" not in info.methods:
        return None
    forward = info.methods["forward"]
    if "labels" not in parameter_names(forward):
        return None
    computes_loss = called_names(forward) & {"loss_function", "CrossEntropyLoss", "cross_entropy"}
    generates = anatomy.inherits(info.name, "GenerationMixin")
    if generates:
        return "generates and takes labels"
    to_vocabulary = any(
        "vocab" in ast.unparse(value) and "Linear" in dotted(value) for value in info.attributes.values()
    )
    return "projects to the vocabulary and computes a loss" if computes_loss and to_vocabulary else None


def _fusion(anatomy: Anatomy, info: ClassInfo) -> str | None:
    if not anatomy.is_model(info.name) or "forward" not in info.methods:
        return None
    forward = info.methods["forward"]
    params = set(parameter_names(forward))
    if params & {*PIXELS, *AUDIO_INPUTS} and "masked_scatter" in called_names(forward):
        return "scatters modality features into the token embeddings"
    return None


def _vision(anatomy: Anatomy, info: ClassInfo) -> str | None:
    return _tower(anatomy, info, (*PIXELS, "grid_thw"), ("patch_embed", "patch_embedding", "embeddings"))


def _audio(anatomy: Anatomy, info: ClassInfo) -> str | None:
    return _tower(anatomy, info, AUDIO_INPUTS, ("conv1", "conv2d1"))


def _tower(anatomy: Anatomy, info: ClassInfo, inputs: tuple[str, ...], embeddings: tuple[str, ...]) -> str | None:
    if not anatomy.is_model(info.name) or "forward" not in info.methods or Role.DECODER in info.roles:
        return None
    params = parameter_names(info.methods["forward"])
    if "input_ids" in params or "labels" in params:
        return None
    hit = [name for name in inputs if name in params]
    built = [name for name in embeddings if name in info.attributes]
    loops = any(isinstance(node, ast.For) for node in ast.walk(info.methods["forward"]))
    if hit and built and loops:
        return f"takes {hit[0]}, embeds it with self.{built[0]} and runs layers"
    return None


_COMPOSITE_DETECTORS: dict[str, Callable[[Anatomy, ClassInfo], str | None]] = {
    Role.MOE_BLOCK: _moe_block,
    Role.EXPERT_LIST: _expert_list,
    Role.DECODER: _decoder,
    Role.HEAD: _head,
    Role.FUSION: _fusion,
    Role.VISION: _vision,
    Role.AUDIO: _audio,
}


def unread_experts(anatomy: Anatomy) -> list[str]:
    """Signs of experts that no role names, each beginning with the class that it is about.

    A file with such a sign has experts that no pass would see.
    """
    found = {Role.EXPERTS, Role.EXPERT_LIST}
    signs = []
    for info in anatomy.classes.values():
        if found & set(info.roles):
            continue
        counts = {name: ast.unparse(stack_shape(info.attributes[name])[0]) for name in _stacked_parameters(info)}
        stacks = [name for name, count in counts.items() if "expert" in count and "shared" not in count]
        if len(stacks) > 1:
            signs.append(
                f"{info.name} has the stacked weights {', '.join(stacks)}, and its forward is no loop over them"
            )
        if any(dotted(decorator).endswith(DISPATCHER) for decorator in info.node.decorator_list):
            signs.append(f"{info.name} is decorated with {DISPATCHER}")
        for attribute in ("experts", "local_experts"):
            targets = [anatomy.classes.get(b.target or "") for b in info.builds if b.attribute == attribute]
            named = any(target is not None and found & set(target.roles) for target in targets)
            if attribute in info.attributes and not named:
                signs.append(f"{info.name} sets self.{attribute}")
    if not any(found & set(info.roles) for info in anatomy.classes.values()):
        signs += [
            f"{info.name} reads {dotted(node)}"
            for info in anatomy.classes.values()
            for node in ast.walk(info.node)
            if isinstance(node, ast.Attribute) and "expert" in node.attr and dotted(node.value).endswith("config")
        ]
    return list(dict.fromkeys(signs))


def unread_heads(module: Module, anatomy: Anatomy) -> list[str]:
    """The heads that upstream's auto maps name for the model, and that have no such role."""
    return [
        f"upstream lists {name} as a head, and it takes no labels, or neither generates nor computes a loss"
        for name in anatomy.upstream.heads
        if module.has(name) and Role.HEAD not in anatomy.classes[name].roles
    ]
