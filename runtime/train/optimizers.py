"""Parameter groups, optimizers, and the learning rate of a step.

The schedule is a function of the step alone, so there is no scheduler state to lose: each group has its peak as `peak_lr`,
and `set_learning_rate` writes `peak_lr * lr_factor(step)` before a step.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchgen.kernels.packages import failed_import
from patchgen.runtime.train.adamw import AdamW
from patchgen.runtime.train.muon import Muon
from patchgen.runtime.train.muon_matrices import examples, muon_matrices, muon_parts
from patchgen.runtime.train.recipe import OptimConfig, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def lr_factor(step: int, config: OptimConfig, total: int) -> float:
    """The learning rate of a step (0 is the first) as a share of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    low = config.min_lr_ratio
    if config.schedule == "wsd":
        remaining = total - step
        return 1.0 if remaining > config.decay_steps else low + (1 - low) * remaining / max(1, config.decay_steps)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    if config.schedule == "linear":
        return low + (1 - low) * (1 - progress)
    if config.schedule == "cosine":
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Sets every group to its peak times `factor`; returns the rate of the first."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return optimizer.param_groups[0]["lr"]


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, with their groups concatenated and their states in one dict."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps each optimizer."""
        for part in self.parts:
            part.step()


def can_skip(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether a step can be left to a tensor on this device, which the host has not read: AdamW's, ours and torch's fused one."""
    is_fused = isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return (is_fused or isinstance(optimizer, AdamW)) and all(p.device.type == device.type for p in parameters)


def take_where(optimizer: torch.optim.Optimizer, is_taken: Tensor) -> None:
    """Lets the next step change nothing if a scalar bool tensor is False; for one that `can_skip`."""
    if isinstance(optimizer, AdamW):
        optimizer.is_taken = is_taken
    else:
        optimizer.found_inf = (~is_taken).float()  # pyright: ignore[reportAttributeAccessIssue]  # as torch's GradScaler does


def take_back(optimizer: torch.optim.Optimizer) -> None:
    """To be called when the host knows that the last step changed nothing."""
    if isinstance(optimizer, AdamW):  # torch's counts steps on the device
        optimizer.take_back()


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freezes the parameters that match; returns their names.

    Raises:
        RecipeError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    frozen = []
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise RecipeError(f"model.freeze: '{pattern}' matches no parameter. {examples(parameters)}")
        frozen += names
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise RecipeError(f"model.freeze = {list(patterns)} leaves nothing to train.")
    return frozen


def build(model: PreTrainedModel, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters: AdamW, or Muon for matrices and AdamW for the rest.

    Args:
        model: sharded, and with its weights.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    require_effective_groups(model, config)
    matrices = muon_matrices(model, trainable, config) if config.name == "muon" else {}
    others = {name: parameter for name, parameter in trainable.items() if name not in matrices}
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        groups = parameter_groups(matrices, config, peak=config.muon_lr or config.lr)
        divided = muon_parts(model, matrices, config)
        parts.append(
            Muon(groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum, parts=divided)
        )
    if others:
        groups = parameter_groups(others, config, peak=config.lr)
        adamw = adamw_for(next(iter(others.values())))
        parts.append(adamw(groups, lr=config.lr, betas=config.betas, eps=config.eps))
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def adamw_for(parameter: nn.Parameter) -> Callable[..., torch.optim.Optimizer]:
    """The AdamW for parameters on this device: our kernel on GPUs with Triton, else torch's fused one."""
    has_kernel = parameter.is_cuda and failed_import("triton") is None
    return AdamW if has_kernel else partial(torch.optim.AdamW, fused=True)


def parameter_groups(trainable: dict[str, nn.Parameter], config: OptimConfig, *, peak: float) -> list[dict]:
    """Groups of equal learning rate, weight decay and mesh.

    torch's foreach and fused optimizers update a group in one call, and DTensors of one call must share their mesh.
    """
    members_by_key: dict[tuple, list[nn.Parameter]] = {}
    for name, parameter in trainable.items():
        group = next((group for group in config.groups if fnmatch.fnmatch(name, group.pattern)), None)
        lr = group.lr if group is not None and group.lr is not None else peak
        decay = group.weight_decay if group is not None and group.weight_decay is not None else config.weight_decay
        if parameter.ndim < 2 and not config.decay_vectors:
            decay = 0.0
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        members_by_key.setdefault((lr, decay, mesh), []).append(parameter)
    return [
        {"params": members, "lr": lr, "peak_lr": lr, "weight_decay": decay}
        for (lr, decay, _), members in members_by_key.items()
    ]


def require_effective_groups(model: nn.Module, config: OptimConfig) -> None:
    """Raises RecipeError for a group that changes no trainable parameter."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    in_earlier_groups: set[str] = set()
    for group in config.groups:
        matches = fnmatch.filter(trainable, group.pattern)
        if not matches:
            raise RecipeError(f"optim.groups: '{group.pattern}' matches no trainable parameter. {examples(trainable)}")
        members = [trainable[name] for name in matches if name not in in_earlier_groups]
        if not members:
            raise RecipeError(
                f"optim.groups: earlier groups have all {len(matches)} parameters that '{group.pattern}' matches, and the "
                "first match applies. To fix: move it before them, or remove it."
            )
        if group.weight_decay and not config.decay_vectors and all(parameter.ndim < 2 for parameter in members):
            raise RecipeError(
                f"optim.groups: '{group.pattern}' has weight_decay = {group.weight_decay}, and its parameters are biases or "
                "norms, which do not decay. To fix: set optim.decay_vectors: true."
            )
        in_earlier_groups.update(matches)
