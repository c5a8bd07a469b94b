"""The fused experts for a plain transformers model: `experts_implementation="patchgen"`.

from patchgen.kernels import transformers_experts
transformers_experts.register()
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="patchgen")
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from patchgen.kernels.fused_moe import fused_moe

NAME = "patchgen"


def register() -> None:
    """Adds `patchgen` to transformers' experts interface; idempotent."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts class with transformers' decorator `use_experts_implementation`.

    Args:
        self: the experts module; its attributes (`has_gate`, `has_bias`, `is_transposed`, `is_concatenated`, and
            `has_post_expert_norm`, which 5.18 lacks and 5.23 has) come from the decorator.
        hidden_states: `[T, H]`.
        top_k_index, top_k_weights: `[T, K]`.
    """
    is_plain = not self.has_gate or type(self)._apply_gate is _default_apply_gate
    has_norm = "has_post_expert_norm" in vars(self) and self.has_post_expert_norm
    return fused_moe(
        hidden_states,
        top_k_index,
        top_k_weights,
        self.gate_up_proj if self.has_gate else self.up_proj,
        self.down_proj,
        num_experts=self.num_experts,
        activation=self.act_fn if is_plain else None,
        apply_gate=None if is_plain else self._apply_gate,
        gate_up_bias=(self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        is_gated=self.has_gate,
        is_transposed=self.is_transposed,
        is_interleaved=not self.is_concatenated,
        post_expert_norm=self.post_expert_norm if has_norm else None,
        backend="auto",
    )
