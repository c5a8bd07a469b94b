"""RMSNorm, rotary embedding and SwiGLU become seams."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.bodies import form_of, normal_form
from patchgen.anatomy.classes import (
    ClassInfo,
    FunctionNode,
    all_arguments,
    calls,
    constructed,
    is_compound,
    own_attribute,
    parameter_names,
)
from patchgen.anatomy.imported import imported_code
from patchgen.anatomy.known import TABLES
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import LINEAR, PARAMETER
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import Editor, insert_first
from patchgen.source import Block, Module


@dataclass(frozen=True)
class NormForm:
    """A known body of an RMSNorm."""

    forward: str  # its normal form
    options: str  # keyword arguments for ops.rms_norm
    helper: str | None = None  # the normal form of the method that it calls, if it calls one


_SQUARES = """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return """
NORM_FORMS = (
    NormForm(form_of(f"{_SQUARES} self.weight * hidden_states.to(input_dtype)"), ""),
    NormForm(form_of(f"{_SQUARES} (self.weight * hidden_states).to(input_dtype)"), "in_fp32=True"),
    NormForm(
        form_of("""
            def forward(self, x):
                output = self._norm(x.float())
                output = output * (1.0 + self.weight.float())
                return output.type_as(x)
        """),
        "offset=1.0, in_fp32=True",
        helper=form_of("def _norm(self, x):\n    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"),
    ),
)
ROTARY_FORM = form_of("""
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        cos = cos.unsqueeze(unsqueeze_dim)
        sin = sin.unsqueeze(unsqueeze_dim)
        q_embed = (q * cos) + (rotate_half(q) * sin)
        k_embed = (k * cos) + (rotate_half(k) * sin)
        return q_embed, k_embed
""")
HALF_ROTATION_FORM = form_of("""
    def rotate_half(x):
        x1 = x[..., : x.shape[-1] // 2]
        x2 = x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)
""")
FILLED = ("torch.ones", "torch.zeros", "torch.empty")
COMPLEX = {"torch.view_as_complex", "torch.view_as_real"}


class FusedOps(SitePass):
    """Upstream uses the same name for dozens of bodies (37 of `apply_rotary_pos_emb`), so bodies are compared, not names."""

    name = "fused_ops"
    purpose = "RMSNorm, half-rotation rotary embedding and SwiGLU become seams, with upstream's code as eager path."
    expects = "one hit per norm, rotary function and gated MLP of a known formula; other formulas are listed as notes"
    EXAMPLES = (
        Example("""a norm
        class ExampleRMSNorm(nn.Module):
            def __init__(self, hidden_size, eps=1e-6):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(hidden_size))
                self.eps = eps

            def forward(self, hidden_states):
      +         # patchgen: fused_ops
      +         if ops.serves("rms_norm"):
      +             return ops.rms_norm(hidden_states, self.weight, self.eps)
                input_dtype = hidden_states.dtype
                hidden_states = hidden_states.to(torch.float32)
                variance = hidden_states.pow(2).mean(-1, keepdim=True)
                hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
                return self.weight * hidden_states.to(input_dtype)
        """),
        Example("""a gated MLP
        class ExampleMLP(nn.Module):
            def __init__(self, config):
                self.act_fn = nn.SiLU()

            def forward(self, x):
      -         return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
      +         # patchgen: fused_ops
      +         return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x), self.act_fn))
        """),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        sites: list[Site] = []
        for info in (info for info in anatomy.still_in(module) if "forward" in info.methods):
            is_norm = Role.NORM in info.roles and _norm_call(anatomy, info.name) is not None
            role = Role.NORM if is_norm else Role.MLP
            if role in info.roles:
                sites.append(site_of(info, f"{role}: {info.roles[role]}", "forward"))
        for name, node in anatomy.functions.items():
            if module.has(name) and _is_half_rotation(anatomy, node):
                sites.append(Site(name, name, node.lineno, "rotary embedding of the half-rotation form"))
        return sites

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        if site.name == site.block:
            names = normal_form(anatomy.functions[site.name]).parameters
            return self._first(block, site.name, "rotary", f"ops.rotary({', '.join(names)})")
        call = _norm_call(anatomy, site.block) if Role.NORM in anatomy.classes[site.block].roles else None
        return self._first(block, "forward", "rms_norm", call) if call else self._swiglu(block, site, anatomy)

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        classes = anatomy.still_in(module)
        norms = [info.name for info in classes if Role.NORM in info.roles and "forward" in info.methods]
        wrapped = [info.name for info in classes if _is_gated_norm(anatomy, info)]
        functions = {name: node for name, node in anatomy.functions.items() if module.has(name)}
        rotations = {name: node for name, node in functions.items() if _is_rotation(anatomy, node)}
        gated = [info.name for info in classes if Role.MLP not in info.roles and _is_like_mlp(anatomy, info)]
        unknown = [name for name, node in rotations.items() if not _is_half_rotation(anatomy, node)]
        return [
            *(f"{n}: a norm of another formula, left as it is" for n in norms if _norm_call(anatomy, n) is None),
            *(f"{name}: a gate around a norm, left as it is; only the norm is a seam" for name in wrapped),
            *(f"{name}: a rotary embedding of another formula, left as it is" for name in unknown),
            *(f"{name}: a gated MLP of another formula, left as it is" for name in gated),
            *_elsewhere(anatomy, module),
        ]

    def _first(self, block: Block, function: str, seam: str, call: str) -> Rewritten:
        """Inserts a seam at the top of a function, which stays below it as the eager path."""
        code = f'if ops.serves("{seam}"):\n    return {call}\n'
        return Rewritten(insert_first(block, function, code, self.mark), f"{seam} seam")

    def _swiglu(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        editor = Editor(block, self.mark)
        product = _product(editor.function("forward").body)
        if product is None:
            code = anatomy.classes[site.block].methods["forward"]
            raise Missed("self.<act>(self.<gate>(x)) * self.<up>(x) in one statement", code)
        product, activated = product
        editor.mark(product)
        gate, up = editor.code(activated.args[0]), editor.code(product.right)
        editor.instead(product, f"ops.swiglu({gate}, {up}, {editor.code(activated.func)})")
        return Rewritten(editor.result, "swiglu seam")


def _product(body: Sequence[ast.stmt]) -> tuple[ast.BinOp, ast.Call] | None:
    """The first `self.<act>(self.<gate>(x)) * self.<up>(x)` of a body, and its left factor.

    Bodies of branches, loops and functions are not searched, but for the `else` of an `if` without `elif`.
    """
    for statement in body:
        if isinstance(statement, ast.If):
            other = statement.orelse
            is_elif = bool(other) and isinstance(other[0], ast.If) and other[0].col_offset == statement.col_offset
            if not is_elif and (product := _product(other)) is not None:
                return product
        if is_compound(statement):  # does not run exactly once
            continue
        for node in ast.walk(statement):
            match node:
                case ast.BinOp(ast.Call(act, [ast.Call(gate)], []) as activated, ast.Mult(), ast.Call(up)):
                    if all(map(own_attribute, (act, gate, up))):
                        return node, activated
    return None


def _norm_call(anatomy: Anatomy, name: str) -> str | None:
    """The `ops.rms_norm(...)` call that computes what the class computes; None for an unknown formula."""
    info = anatomy.classes[name]
    forward = normal_form(info.methods["forward"])
    for form in NORM_FORMS:
        if forward.text != form.forward:
            continue
        attributes = list(forward.attributes)
        if form.helper is not None:
            helper = info.methods.get(attributes[0])
            if helper is None or normal_form(helper).text != form.helper or helper.decorator_list:
                continue
            if len(anatomy.held(name, helper.name)) != 1:
                continue
            attributes = [*normal_form(helper).attributes, attributes[1]]
        epsilon, weight = attributes[0], attributes[1]
        if not _is_vector(anatomy, name, weight) or not _is_built_plainly(anatomy, name):
            continue
        options = f", {form.options}" if form.options else ""
        return f"ops.rms_norm({forward.parameters[0]}, self.{weight}, self.{epsilon}{options})"
    return None


def _is_vector(anatomy: Anatomy, name: str, attribute: str) -> bool:
    """Whether `self.<attribute>` is a parameter of one dimension, whose size is handed in."""
    match anatomy.held(name, attribute):
        case [ast.Call(_, [ast.Call(initialiser, [ast.Name() | ast.Attribute()]), *_]) as made]:
            return anatomy.is_a(made, PARAMETER) and anatomy.names.resolve(initialiser) in FILLED
    return False


def _is_built_plainly(anatomy: Anatomy, name: str) -> bool:
    """Whether no construction hands in several sizes, a fixed one (1 would broadcast) or a learned epsilon: not for kernels."""
    for call in (call for info in anatomy.classes.values() for call in calls(info.node)):
        if anatomy.names.here(constructed(call)) == name:
            if isinstance(next(iter(call.args), None), ast.Tuple | ast.List | ast.Constant):
                return False
            if any(anatomy.is_a(value, PARAMETER) for value in all_arguments(call)):
                return False
    return True


def _is_like_mlp(anatomy: Anatomy, info: ClassInfo) -> bool:
    """Whether a class has three projections and an activation, whatever its forward computes."""
    held = info.attributes.values()
    projections = [value for value in held if anatomy.is_a(value, LINEAR)]
    tables = [value.value for value in held if isinstance(value, ast.Subscript)]
    activations = [table for table in tables if anatomy.names.resolve(table) in TABLES]
    return len(projections) == 3 and len(activations) == 1 and "forward" in info.methods


def _is_half_rotation(anatomy: Anatomy, function: FunctionNode) -> bool:
    form = normal_form(function).text
    for helper in dict.fromkeys(call.func.id for call in calls(function) if isinstance(call.func, ast.Name)):
        known = anatomy.names.functions.get(helper)
        if known is not None and not known.decorator_list and form == ROTARY_FORM.replace("rotate_half", helper):
            return normal_form(known).text == HALF_ROTATION_FORM
    return False


def _is_rotation(anatomy: Anatomy, function: FunctionNode) -> bool:
    """Whether a function takes cos and sin, or converts pairs to complex numbers and back."""
    resolved = {anatomy.names.resolve(call.func, local_names(function)) for call in calls(function)}
    return {"cos", "sin"} <= set(parameter_names(function)) or resolved >= COMPLEX


def _is_gated_norm(anatomy: Anatomy, info: ClassInfo) -> bool:
    """Whether a class multiplies a norm that it builds by a sigmoid: one input, no parameters of its own."""
    forward = info.methods.get("forward")
    targets = [anatomy.classes.get(build.target or "") for build in info.builds]
    builds_norm = any(target is not None and Role.NORM in target.roles for target in targets)
    parameters = [call for call in info.built.values() if anatomy.names.resolve(call.func) == PARAMETER]
    if forward is None or not builds_norm or parameters or len(parameter_names(forward)) != 1:
        return False
    products = [n for n in ast.walk(forward) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
    return "sigmoid" in anatomy.names.operations(*products)


def _elsewhere(anatomy: Anatomy, module: Module) -> list[str]:
    """Notes on imported code that no seam is put into: norms, MLPs, rotary functions, and code without source."""
    remarks: list[str] = []
    for part in imported_code(anatomy, module):
        if part.anatomy is None:
            remarks.append(f"{part.use}, whose source is not here: what it computes is left as it is")
            continue
        reached = [part.anatomy.classes[name] for name in part.anatomy.reached_from([part.name])]
        seams = any({Role.NORM, Role.MLP} & set(info.roles) for info in reached)
        function = part.anatomy.functions.get(part.name)
        if seams or (function is not None and _is_rotation(part.anatomy, function)):
            remarks.append(f"{part.use}: seams are put into this file alone, it is left as it is")
    return remarks
