"""AdamW on GPUs: torch's optimizer and state, its update in one pass over memory (`kernels/optimizer/adamw.py`).

It takes gradients as they were computed (bf16 for an fp32 parameter, which says so by `grad_dtype` None), multiplies them by
the factor that clipping leaves in `gradient_factor`, and writes the copies that layers compute with (`undivided.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from patchgen.runtime.parallel import undivided


class AdamW(torch.optim.AdamW):
    """As `torch.optim.AdamW`; its state has the same names, so either continues from the other's checkpoint.

    Args:
        params: parameters or groups of them, of any mesh, on GPUs.

    Attributes:
        writes_copies: that a step leaves the copies of undivided parameters as new as these.
        gradient_factor: None, or a number on the device that all gradients are multiplied by in the next step.
    """

    writes_copies = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False, fused=False)
        self.gradient_factor: Tensor | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad_dtype = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        factor, self.gradient_factor = self.gradient_factor, None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, factor)
        return value

    def _update(self, parameter: nn.Parameter, group: dict, factor: Tensor | None) -> None:
        from patchgen.kernels.optimizer.adamw import adamw_  # loads Triton

        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None, "a step asks for parameters that have one"
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        values, copy = undivided.local(parameter), undivided.copy_of(parameter)
        if copy is not None:
            copy.before_writing()
        adamw_(
            values,
            undivided.local(gradient).contiguous(),
            undivided.local(state["exp_avg"]),
            undivided.local(state["exp_avg_sq"]),
            step=int(state["step"]),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            factor=factor,
            copy=copy.tensor if copy is not None else None,
        )
        if copy is not None:
            copy.mark_written(parameter)
