"""Which parameters Muon takes, and which of their rows are matrices of their own."""

from __future__ import annotations

import ast
import fnmatch
import inspect
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from patchgen.runtime.objectives.heads import head_of
from patchgen.runtime.parallel.sharding import expert_paths
from patchgen.runtime.train.muon import WHOLE, Parts
from patchgen.runtime.train.recipe import OptimConfig, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def muon_matrices(
    model: PreTrainedModel, trainable: dict[str, nn.Parameter], config: OptimConfig
) -> dict[str, nn.Parameter]:
    """The parameters for Muon: the matrices of layers, without embeddings and head, whose rows are tokens; and the stacked experts
    of the model's plan, but for their biases."""
    token_matrices = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or module is head_of(model)
        for parameter in module.parameters(recurse=False)
    }
    experts = set(expert_paths(model))
    return {
        name: parameter
        for name, parameter in trainable.items()
        if id(parameter) not in token_matrices
        and (parameter.ndim == 3 and config.muon_experts if name in experts else parameter.ndim == 2)
    }


def muon_parts(model: nn.Module, matrices: dict[str, nn.Parameter], config: OptimConfig) -> dict[nn.Parameter, Parts]:
    """The matrices that are orthogonalised in parts: an expert's gate and its up; heads, where the recipe asks for it.

    Raises:
        RecipeError: a pattern of `muon_by_head` that matches no matrix of heads.
    """
    parts: dict[nn.Parameter, Parts] = {}
    for name in set(expert_paths(model)) & set(matrices):
        owner, _, attribute = name.rpartition(".")
        parts[matrices[name]] = gate_and_up(model.get_submodule(owner), attribute)
    for pattern in config.muon_by_head:
        names = [name for name in fnmatch.filter(matrices, pattern) if matrices[name].ndim == 2]
        heads = {name: _heads(model, name) for name in names}
        if not names or not all(heads.values()):
            wrong = next((name for name in names if not heads[name]), "none")
            raise RecipeError(
                f"optim.muon_by_head: expected '{pattern}' to match matrices whose rows are heads of their module's `head_dim`; "
                f"found {wrong}. {examples(matrices)}"
            )
        parts |= {matrices[name]: Parts(count) for name, count in heads.items()}
    return parts


def gate_and_up(experts: nn.Module, attribute: str) -> Parts:
    """The halves of a stack that has gate and up of each expert, by the call of `ops.fused_moe` in its generated class; of any
    other stack the whole matrices.

    Raises:
        RecipeError: its class has no such call, so that nothing says what the stack is.
    """
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(experts).forward)))
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    call = next((one for one in calls if ast.unparse(one.func) == "ops.fused_moe"), None)
    if call is None:
        raise RecipeError(
            f"optim.name: muon needs to know which rows of {type(experts).__name__}.{attribute} are an expert's gate, and its "
            "forward does not call ops.fused_moe. To fix: set optim.muon_experts: false."
        )
    flags = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if ast.unparse(call.args[3]) != f"self.{attribute}" or flags.get("is_gated") == "False":
        return WHOLE
    dim = 1 if flags.get("is_transposed") == "True" else 0
    alternating = flags.get("is_interleaved") == "True"
    if "apply_gate" in flags:
        alternating = _gates_neighbours(getattr(experts, flags["apply_gate"].removeprefix("self.")))
    return Parts(2, dim, alternating)


def _gates_neighbours(apply_gate: Callable[[Tensor], Tensor]) -> bool:
    """Whether the first value of a gate depends on the first two of its inputs, instead of the first of each half."""
    gate_up = torch.full((1, 8), 0.5, requires_grad=True, device="cpu")
    (gradient,) = torch.autograd.grad(apply_gate(gate_up)[0, 0], gate_up)
    return bool(gradient[0, 1])


def _heads(model: nn.Module, name: str) -> int:
    """The number of heads in the rows of a linear layer's weight, by the `head_dim` of the module around it; 0: none. The linear
    layer that the module registers last is its output, whose columns are heads."""
    layer = model.get_submodule(name.rpartition(".")[0])
    attention = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
    linear = [child for child in attention.children() if isinstance(child, nn.Linear)]
    head_dim, rows = getattr(attention, "head_dim", None), model.get_parameter(name).shape[0]
    if type(head_dim) is not int or head_dim <= 0 or rows % head_dim or layer in linear[-1:]:
        return 0
    return rows // head_dim


def examples(parameters: dict[str, nn.Parameter]) -> str:
    names = list(parameters)
    return f"There are {len(names)}, such as {', '.join(names[:3] + names[-2:])}."
