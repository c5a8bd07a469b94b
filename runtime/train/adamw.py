"""AdamW on GPUs: torch's optimizer and state, its update in one pass over memory (`kernels/optimizer/adamw.py`).

Gradients keep the dtype they were computed in (bf16 for an fp32 parameter, allowed by `grad_dtype = None`). They are multiplied
by the clipping factor in `gradient_factor`. Compute copies of unsharded parameters (`parallel/undivided.py`) are written too, and
what the experts keep of them in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from patchgen.runtime.parallel import undivided


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` for GPU parameters; the state has the same names, so either resumes from the other's checkpoint.

    Attributes:
        writes_copies: a step also updates the compute copies of unsharded parameters.
        gradient_factor: None, or a scalar tensor that the next step multiplies all gradients by.
        is_taken: None, or a scalar bool tensor: where it is False the next step changes nothing. The host counts that step; once
            it knows better it calls `take_back`.
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
        self.is_taken: Tensor | None = None
        self._stepped: list[dict] = []  # the states of the last step
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad_dtype = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, self.gradient_factor = self.gradient_factor, None
        taken, self.is_taken = self.is_taken, None
        self._stepped = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, factor, taken)
        return loss

    def take_back(self) -> None:
        """Takes the last step back from the count of steps: `is_taken` was False."""
        for state in self._stepped:
            state["step"] -= 1
        self._stepped = []

    def _update(self, parameter: nn.Parameter, group: dict, factor: Tensor | None, taken: Tensor | None) -> None:
        from patchgen.kernels.optimizer.adamw import adamw_  # loads Triton

        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None, "`step` only updates parameters with a gradient"
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        self._stepped.append(state)
        values, copy = undivided.local(parameter), undivided.copy_of(parameter)
        rows = None
        if copy is not None:
            copy.before_writing()
            rows = copy.forms and copy.forms.to_write(values.shape)
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
            taken=taken,
            copy=copy.tensor if copy is not None else None,
            rows=rows,
        )
        if copy is not None:
            copy.mark_written(parameter)
