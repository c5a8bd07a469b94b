"""Random experts and routings that the tests of the fused experts share.

T tokens   H hidden size   E experts   I expert intermediate size   K experts per token
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from patchgen.kernels.fused_moe import fused_moe

GRADIENTS = ("hidden_states", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


class ClampedSwiglu(nn.Module):
    """gpt_oss' gate: `(clamp(up) + 1) * gate * sigmoid(alpha * gate)`, interleaved or not."""

    def __init__(self, is_interleaved: bool, alpha: float = 1.702, limit: float = 1.5):
        super().__init__()
        self.is_interleaved, self.alpha, self.limit = is_interleaved, alpha, limit

    def forward(self, gate_up: Tensor) -> Tensor:
        pairs = (gate_up[..., ::2], gate_up[..., 1::2]) if self.is_interleaved else gate_up.chunk(2, dim=-1)
        gate, up = pairs[0].clamp(max=self.limit), pairs[1].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class ReluSquared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


@dataclass(frozen=True)
class Case:
    name: str
    num_tokens: int = 37
    num_experts: int = 8
    hidden_size: int = 48
    intermediate_size: int = 24
    top_k: int = 2
    routing: str = "random"  # random | one_expert | few_experts | left_out | all_left_out
    activation: str | None = "silu"  # silu | gelu | gelu_tanh | relu2 | None: clamped swiglu
    is_gated: bool = True
    is_transposed: bool = False
    is_interleaved: bool = False
    has_bias: bool = False
    has_post_norm: bool = False

    def options(self) -> dict:
        options: dict = {
            "num_experts": self.num_experts,
            "is_gated": self.is_gated,
            "is_transposed": self.is_transposed,
            "is_interleaved": self.is_interleaved,
        }
        if self.activation is None:
            options["apply_gate"] = ClampedSwiglu(self.is_interleaved)
        else:
            modules = {
                "silu": nn.SiLU(),
                "gelu": nn.GELU(),
                "gelu_tanh": nn.GELU(approximate="tanh"),
                "relu2": ReluSquared(),
            }
            options["activation"] = modules[self.activation]
        if self.has_post_norm:
            options["post_expert_norm"] = lambda rows: nn.functional.rms_norm(rows, rows.shape[-1:])
        return options

    def tensors(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        """Random inputs; the routing weights of slots that are left out are random too: nothing may read them."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

        E, H, inner = self.num_experts, self.hidden_size, self.intermediate_size
        width = 2 * inner if self.is_gated else inner
        first = (E, H, width) if self.is_transposed else (E, width, H)
        second = (E, inner, H) if self.is_transposed else (E, H, inner)
        tensors = {
            "hidden_states": random(self.num_tokens, H),
            "top_k_index": self._index(generator).to(device),
            "top_k_weights": random(self.num_tokens, self.top_k).softmax(-1),
            "gate_up_proj": random(*first, scale=H**-0.5),
            "down_proj": random(*second, scale=inner**-0.5),
        }
        if self.has_bias:
            tensors |= {"gate_up_bias": random(E, width), "down_bias": random(E, H)}
        return tensors

    def _index(self, generator: torch.Generator) -> Tensor:
        scores = torch.rand(self.num_tokens, self.num_experts, generator=generator)
        if self.routing == "few_experts":
            scores[:, self.num_experts // 2 :] -= 1
        index = scores.topk(self.top_k, dim=-1).indices
        if self.routing == "one_expert":
            index = torch.full_like(index, self.num_experts - 1)
        if self.routing == "left_out":
            drop = torch.rand(index.shape, generator=generator) < 0.4
            index = index.masked_fill(drop, self.num_experts)
        if self.routing == "all_left_out":
            index = torch.full_like(index, self.num_experts)
        return index

    def at(self, **changes) -> Case:
        return replace(self, **changes)


CASES = [
    Case("plain"),
    Case("gelu", activation="gelu"),
    Case("gelu_tanh", activation="gelu_tanh"),
    Case("no_gate", activation="relu2", is_gated=False),
    Case("no_gate_transposed_bias", activation="gelu", is_gated=False, is_transposed=True, has_bias=True),
    Case("gpt_oss", activation=None, is_transposed=True, is_interleaved=True, has_bias=True),
    Case("clamped_concatenated", activation=None, has_bias=True),
    Case("transposed", is_transposed=True),
    Case("interleaved", is_interleaved=True),
    Case("bias", has_bias=True),
    Case("one_token", num_tokens=1),
    Case("one_expert", num_experts=1, top_k=1),
    Case("all_to_one", routing="one_expert", top_k=1),
    Case("empty_experts", routing="few_experts", num_experts=60, top_k=8),
    Case("many_experts", num_experts=256, top_k=8, num_tokens=64),
    Case("left_out", routing="left_out"),
    Case("left_out_bias", routing="left_out", has_bias=True, activation=None),
    Case("all_left_out", routing="all_left_out"),
    Case("odd_sizes", hidden_size=136, intermediate_size=72, num_tokens=201),
]


def run(case: Case, tensors: dict[str, Tensor], backend: str, grad_seed: int = 1, **more: object) -> dict[str, Tensor]:
    """The output and the gradient of every floating-point input, for a random output gradient."""
    leaves = {
        name: tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    out = fused_moe(**leaves, **case.options(), **more, backend=backend)
    generator = torch.Generator().manual_seed(grad_seed)
    out.backward(torch.randn(out.shape, generator=generator).to(out))
    gradients = {f"d_{name}": leaves[name].grad for name in GRADIENTS if name in leaves}
    return {"out": out.detach(), **gradients}
