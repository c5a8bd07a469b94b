"""`train.precision: fp8`: what of a run computes in FP8, decided on the meta device, before anything is sharded.

    attention     the linear layers inside of a module that calls the attention            q, k, v, o; both factors of MLA
    dense MLPs    of the linear layers of one module those that lead from one size to another, and those that lead back
    experts       `kernels.fused_moe`: fp8, unless the recipe names another

Embeddings, heads, norms, routers and what upstream keeps in fp32 compute as without it. Parameters, their names, optimizer
state, checkpoints and exports are the same.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from patchgen.kernels.linear import fp8_linear
from patchgen.runtime import kept_dtypes
from patchgen.runtime.parallel import ParallelConfig, report
from patchgen.runtime.train.recipe import Recipe, RecipeError

FP8_EXPERTS = ("fp8", "fp8_wide_gradients")
"""Implementations of `fused_moe` that read weights in FP8."""
CAPABILITY = 9, 0
"""From Hopper on: what the kernels of the experts need, and where the products of linear layers were measured."""


def require_available(recipe: Recipe, compute_dtype: torch.dtype) -> None:
    """Refuses FP8 where it cannot run: before any rank starts.

    Raises:
        RecipeError: this machine's GPU has no FP8, layers compute in another dtype than bfloat16 there, or adapters are trained.
    """
    if recipe.train.precision is None:
        return
    if recipe.lora is not None:
        raise RecipeError(
            "train.precision = fp8 computes layers whose weights are trained, and lora trains adapters beside them. Remove one."
        )
    if not torch.cuda.is_available():
        return  # the reference, which has no limits
    if torch.cuda.get_device_capability() < CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        raise RecipeError(
            f"train.precision = fp8 cannot run here: {torch.cuda.get_device_name()} has compute capability {major}.{minor}, and "
            f"products in FP8 need {'.'.join(map(str, CAPABILITY))} or newer (H100, H200, B200). To fix: remove the key."
        )
    if compute_dtype != torch.bfloat16:
        raise RecipeError(
            f"train.precision = fp8 with layers in {str(compute_dtype).removeprefix('torch.')}: products in FP8 return bfloat16. "
            "To fix: set parallel.param_dtype: bfloat16."
        )


def experts_kernel(recipe: Recipe) -> str | None:
    """The implementation of `fused_moe` that a recipe asks for; None: automatic. Without a GPU FP8 implies none: experts in it are
    kernels."""
    named = recipe.kernels.fused_moe
    is_implied = recipe.train.precision is not None and torch.cuda.is_available()
    return "fp8" if named is None and is_implied else named


def kept_fp8_forms(recipe: Recipe, layout: ParallelConfig) -> int:
    """How many forms of the experts' weights stay in FP8, of one byte per element: those that a step reads more than once.

    With several micro-batches both orientations, for a layer that is computed again that of its forward. None where ranks
    gather the weights anew for each layer.
    """
    if experts_kernel(recipe) not in FP8_EXPERTS or layout.ep_shard * layout.dp_replicate > 1:
        return 0
    if recipe.train.batches_per_step > layout.num_batches:
        return 2
    return int(recipe.parallel.activation_checkpointing != "none")


# --------------------------------------------------------------------------------------------- linear layers


def convert(model: nn.Module, recipe: Recipe) -> None:
    """Lets the linear layers of a run in FP8 compute so; others' stay as they are."""
    for linear in layers_of(model, recipe).values():
        fp8_linear.convert(linear, narrow_gradient=recipe.train.fp8.weight_gradients == "fp8")


def layers_of(model: nn.Module, recipe: Recipe) -> dict[str, nn.Linear]:
    """The linear layers that compute in FP8, by path; none without `train.precision`.

    Raises:
        RecipeError: a pattern of `train.fp8.exclude` that matches none.
    """
    everything = find(model) if recipe.train.precision is not None else {}
    found = dict(everything)
    for pattern in recipe.train.fp8.exclude:
        excluded = fnmatch.filter(everything, pattern)
        if not excluded:
            raise RecipeError(
                f"train.fp8.exclude: {pattern!r} matches no linear layer that would compute in FP8. Those are "
                f"{', '.join([*everything][:8])}{', ...' if len(everything) > 8 else ''}."
            )
        found = {path: linear for path, linear in found.items() if path not in excluded}
    return found


def find(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of attention and of dense MLPs whose sizes FP8 supports, by path."""
    is_kept = kept_dtypes.keeps_in_fp32(model, torch.bfloat16)
    found: dict[str, nn.Linear] = {}
    for path, module in model.named_modules():
        inner = module.named_modules() if report.attends(module) else _there_and_back(module).items()
        found |= {f"{path}.{name}".lstrip("."): one for name, one in inner if isinstance(one, nn.Linear)}
    return {
        path: linear
        for path, linear in found.items()
        if fp8_linear.unsupported(linear) is None and not is_kept(f"{path}.weight")
    }


def _there_and_back(module: nn.Module) -> dict[str, nn.Linear]:
    """A module's own linear layers for which another leads back from their outputs to their inputs; no router has one."""
    own = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    sizes = Counter((child.in_features, child.out_features) for child in own.values())

    def is_led_back(child: nn.Linear) -> bool:
        there, back = (child.in_features, child.out_features), (child.out_features, child.in_features)
        return sizes[back] > (there == back)

    return {name: child for name, child in own.items() if is_led_back(child)}


def summary(model: nn.Module, recipe: Recipe) -> str:
    """What computes in FP8, in a line; "" if nothing does."""
    if recipe.train.precision is None:
        return ""
    converted = [path for path, module in model.named_modules() if isinstance(module, fp8_linear.Fp8Linear)]
    names = Counter(path.rpartition(".")[2] for path in converted or layers_of(model, recipe))
    layers = ", ".join(f"{count} {name}" for name, count in names.items()) or "no linear layer"
    by = "" if torch.cuda.is_available() else "; on a CPU by a reference in torch, and experts by theirs"
    return f"fp8: {layers}; gradients of their weights in {recipe.train.fp8.weight_gradients}{by}"


@contextlib.contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """Within the block linear layers compute as without FP8: for checks whose bars are of the dtype of the layers."""
    linears = [module for module in model.modules() if isinstance(module, fp8_linear.Fp8Linear)]
    for linear in linears:
        linear.is_exact = True
    try:
        yield
    finally:
        for linear in linears:
            linear.is_exact = False
