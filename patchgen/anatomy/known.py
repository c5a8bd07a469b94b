"""Tables of torch's operations and modules, and the buffers of a class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from patchgen.anatomy.classes import arguments, calls, own_attribute

if TYPE_CHECKING:
    from patchgen.anatomy.graph import Anatomy

CASTS = frozenset({"float", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone", "detach"})
# fmt: off
POINTWISE = CASTS | {
    "tanh", "sigmoid", "exp", "log", "abs", "sqrt", "rsqrt", "pow", "square", "mul", "div", "add", "sub", "neg", "clamp",
    "clip", "where", "masked_fill", "full_like", "zeros_like", "ones_like", "nan_to_num", "gelu", "relu", "silu",
    "softplus", "layer_norm", "minimum", "maximum",
}
# fmt: on
MAKERS = frozenset(f"torch.{name}" for name in ("empty", "zeros", "ones", "rand", "randn"))
TABLES = ("transformers.activations.ACT2FN", "transformers.activations.ACT2CLS")


def made_buffers(anatomy: Anatomy, owner: str) -> Iterator[tuple[str | None, dict[str | None, ast.expr]]]:
    """The buffers that a class and its ancestors make by `nn.Buffer` or `register_buffer`: the attribute of each, None for a
    computed name, and the arguments of the call."""
    for info in anatomy.lineage(owner):
        for attribute, call in info.built.items():
            if anatomy.is_a(call, "torch.nn.Buffer"):
                yield attribute, arguments(call, ("data",))
        for call in calls(info.node):
            if own_attribute(call.func) == "register_buffer":
                given = arguments(call, ("name", "tensor", "persistent"))
                name = given.get("name")
                yield str(name.value) if isinstance(name, ast.Constant) else None, given
