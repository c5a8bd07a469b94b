"""Upstream's files as maintainers change them: each is refused, or what is generated equals it.

The operators of `patchgen mutate` change one place at a time. These change a model as a release does: a formula with a learned
number, a second loss, a helper that shadows a library, a class of another module.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import pytest

from patchgen import upstream
from patchgen.mutation.edits import Mutant
from patchgen.runtime.verify.mutants import EQUAL, REFUSED, Judge

EXPERTS = "current_hidden_states = self.act_fn(gate) * up"
PAIR = "gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)"
DOWN = "current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])"
BLOCK = "final_hidden_states = self.experts(hidden_states_reshaped, selected_experts, routing_weights)"
MOE_LOSS = "            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)\n"
AUX = "loss += self.router_aux_loss_coef * aux_loss.to(loss.device)  # make sure to reside in the same device"
ACT = "self.act_fn = ACT2FN[config.hidden_act]\n\n    def forward(\n        self,\n        hidden_states: torch.Tensor,\n        top_k_index"
LOSS = "loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)"
LOGITS = "        logits = self.lm_head(hidden_states)\n"
NORM = "return self.weight * hidden_states.to(input_dtype)"
MLP = "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
RESIDUAL = "hidden_states = self.mlp(hidden_states)\n        hidden_states = residual + hidden_states"
LAYERS = "for decoder_layer in self.layers[: self.config.num_hidden_layers]:\n"
ROTATED = "q_embed = (q * cos) + (rotate_half(q) * sin)"
HEAD_INIT = "self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)\n"
SHARED = "hidden_states = hidden_states + self.shared_experts(residuals)"


@dataclass(frozen=True)
class Refactoring:
    """Edits of one model's file, and modules that it then imports from beside it."""

    model: str
    title: str
    edits: tuple[tuple[str, str], ...]
    modules: dict[str, str] = field(default_factory=dict)


def of(model: str, title: str, *edits: tuple[str, str], **modules: str) -> Refactoring:
    return Refactoring(model, title, edits, modules)


def learned(model: str, title: str, old: str, new: str, name: str, after: str) -> Refactoring:
    """`new` reads a parameter that is built `after` a line of `__init__`."""
    return of(model, title, (old, new), (after, f"{after}\n        self.{name} = nn.Parameter(torch.full((1,), 1.3))"))


OWN_LINEAR = "def linear(x, weight):\n    return nn.functional.linear(x, weight) * 1.25\n\n\ndef rotate_half(x):"
BORROWED = """
from torch import nn
from ..qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts


class BorrowedExperts(Qwen2MoeExperts):
    def __init__(self, config):
        super().__init__(config)
        nn.init.normal_(self.gate_up_proj, std=0.02)
        nn.init.normal_(self.down_proj, std=0.02)
"""
MOE_ACT = "self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))"

REFACTORINGS = (
    # experts
    learned("qwen3_moe", "a learned slope in the gate", EXPERTS, "current_hidden_states = self.act_fn(gate * self.alpha) * up", "alpha", MOE_ACT),
    learned("qwen3_moe", "a learned scale of the experts", "return final_hidden_states\n\n\nclass Qwen3MoeTopKRouter", "return final_hidden_states * self.scale\n\n\nclass Qwen3MoeTopKRouter", "scale", MOE_ACT),
    of("qwen3_moe", "a linear of the file", (PAIR, PAIR.replace("nn.functional.linear", "linear")), ("def rotate_half(x):", OWN_LINEAR)),
    of("qwen3_moe", "a linear of the file, for the second product", (DOWN, DOWN.replace("nn.functional.linear", "linear")), ("def rotate_half(x):", OWN_LINEAR)),
    of("qwen3_moe", "a library function imported by its name", (DOWN, DOWN.replace("nn.functional.linear", "linear")), ("from torch import nn\n", "from torch import nn\nfrom torch.nn.functional import linear\n")),
    of("qwen3_moe", "the gate computed by a method", (EXPERTS, "current_hidden_states = self._gated(gate, up)"), ("    def forward(\n        self,\n        hidden_states: torch.Tensor,\n        top_k_index", "    def _gated(self, gate, up):\n        return self.act_fn(gate) * up\n\n    def forward(\n        self,\n        hidden_states: torch.Tensor,\n        top_k_index")),
    of("qwen3_moe", "the gate computed by a method with a limit", (EXPERTS, "current_hidden_states = self._gated(gate, up)"), ("    def forward(\n        self,\n        hidden_states: torch.Tensor,\n        top_k_index", "    def _gated(self, gate, up):\n        gate = gate.clamp(max=0.01)\n        return self.act_fn(gate) * up\n\n    def forward(\n        self,\n        hidden_states: torch.Tensor,\n        top_k_index")),
    of("qwen3_moe", "a norm inside the experts", (EXPERTS, EXPERTS + "\n            current_hidden_states = nn.functional.normalize(current_hidden_states, dim=-1)")),
    of("qwen3_moe", "gate and up interleaved", (PAIR, "gate_up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx])\n            gate, up = gate_up[..., ::2], gate_up[..., 1::2]")),
    of("qwen3_moe", "gate and up by a split of a size", (PAIR, "gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).split(self.intermediate_dim, dim=-1)")),
    of("qwen3_moe", "an activation of the file's own", ("self.act_fn = ACT2FN[config.hidden_act]\n\n    def forward(\n        self,\n        hidden_states", "self.act_fn = lambda x: ACT2FN[config.hidden_act](x) * 1.25\n\n    def forward(\n        self,\n        hidden_states")),
    of("qwen3_moe", "experts of another module", ("self.experts = Qwen3MoeExperts(config)", "self.experts = BorrowedExperts(config)"), ("from ...activations import ACT2FN", "from ...activations import ACT2FN\nfrom .borrowed import BorrowedExperts"), borrowed=BORROWED),
    of("qwen3_moe", "a second stack of experts", ("self.gate = Qwen3MoeTopKRouter(config)\n\n    def forward", "self.gate = Qwen3MoeTopKRouter(config)\n        self.more = Qwen3MoeExperts(config)\n\n    def forward"), (BLOCK, BLOCK + "\n        final_hidden_states = final_hidden_states + self.more(hidden_states_reshaped, selected_experts, routing_weights)")),
    of("qwen3_moe", "routing weights of the block scaled", (BLOCK, "routing_weights = routing_weights * 1.5\n        " + BLOCK)),
    of("qwen3_moe", "the tokens of the experts dropped out", (BLOCK, BLOCK + "\n        final_hidden_states = nn.functional.dropout(final_hidden_states, 0.0, self.training)")),
    # what is added to the loss
    of("qwen3_moe", "a z-loss of the router", (AUX, AUX + "\n                z_loss = torch.stack([torch.logsumexp(r.float(), -1).pow(2).mean() for r in outputs.router_logits]).mean()\n                loss = loss + 0.01 * z_loss")),
    of("qwen3_moe", "the router loss by a method", (AUX, "loss = self._with_router_loss(loss, aux_loss)"), ("    @can_return_tuple\n    @auto_docstring\n    def forward(\n        self,\n        input_ids: torch.LongTensor | None = None,\n        attention_mask: torch.Tensor | None = None,\n        position_ids: torch.LongTensor | None = None,\n        past_key_values: Cache | None = None,\n        inputs_embeds: torch.Tensor | None = None,\n        labels", "    def _with_router_loss(self, loss, aux_loss):\n        return loss + self.router_aux_loss_coef * aux_loss.to(loss.device)\n\n    @can_return_tuple\n    @auto_docstring\n    def forward(\n        self,\n        input_ids: torch.LongTensor | None = None,\n        attention_mask: torch.Tensor | None = None,\n        position_ids: torch.LongTensor | None = None,\n        past_key_values: Cache | None = None,\n        inputs_embeds: torch.Tensor | None = None,\n        labels")),
    of("qwen3_moe", "the number of labels not handed on", (MOE_LOSS, MOE_LOSS.replace(", **kwargs", ""))),
    of("llama", "a loss without the number of labels", (LOSS, LOSS.replace(", **kwargs", ""))),
    of("llama", "a loss with an argument of its own", (LOSS, LOSS.replace("**kwargs", "ignore_index=-100, **kwargs"))),
    of("llama", "labels that are shifted already", (LOSS, "shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()\n            " + LOSS.replace("labels=labels", "labels=labels, shift_labels=shifted"))),
    of("llama", "a loss of its own", (LOSS, "loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())")),
    of("llama", "a penalty of the logits", (LOSS, LOSS + "\n            loss = loss + 1e-2 * logits.logsumexp(-1).pow(2).mean()")),
    of("llama", "the loss of a second head", (HEAD_INIT, HEAD_INIT + "        self.second_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)\n"), (LOSS, LOSS + "\n            ahead = self.second_head(hidden_states)[:, :-1].contiguous()\n            loss = loss + 0.3 * self.loss_function(logits=ahead, labels=labels[:, 1:].contiguous(), vocab_size=self.config.vocab_size, **kwargs)")),
    # from the hidden states to the logits
    of("llama", "a soft cap of the logits", (LOGITS, LOGITS + "        logits = 3.0 * torch.tanh(logits / 3.0)\n")),
    of("llama", "a soft cap from the configuration", (LOGITS, LOGITS + "        if getattr(self.config, 'final_logit_softcapping', 2.0) is not None:\n            logits = torch.tanh(logits / 2.0) * 2.0\n")),
    of("llama", "hidden states scaled before the head", (LOGITS, "        hidden_states = hidden_states / (self.config.hidden_size / 64.0 + 1)\n" + LOGITS)),
    of("llama", "a norm before the head", (LOGITS, "        hidden_states = nn.functional.layer_norm(hidden_states, hidden_states.shape[-1:])\n" + LOGITS)),
    of("llama", "an early return of hidden states", (LOGITS, "        if not torch.is_grad_enabled():\n            return CausalLMOutputWithPast(logits=self.lm_head(hidden_states))\n" + LOGITS)),
    of("llama", "tokens mixed before the head", (LOGITS, "        hidden_states = hidden_states + 0.5 * hidden_states.roll(1, 1)\n" + LOGITS)),
    # layers
    of("llama", "a residual scale", (RESIDUAL, RESIDUAL.replace("residual + hidden_states", "residual + 0.22 * hidden_states"))),
    of("llama", "layers skipped in training", (LAYERS, LAYERS + "            if self.training and decoder_layer.self_attn.layer_idx == 1:\n                continue\n")),
    of("llama", "embeddings scaled", ("hidden_states = inputs_embeds\n", "hidden_states = inputs_embeds * self.config.hidden_size**0.5\n")),
    of("llama", "a norm with a bias", (NORM, "return self.weight * hidden_states.to(input_dtype) + self.offset"), ("self.variance_epsilon = eps\n", "self.variance_epsilon = eps\n        self.offset = nn.Parameter(torch.zeros(hidden_size))\n")),
    of("llama", "a norm without its mean in fp32", ("variance = hidden_states.pow(2).mean(-1, keepdim=True)", "variance = hidden_states.pow(2).sum(-1, keepdim=True) / hidden_states.shape[-1]")),
    of("llama", "a norm around one", (NORM, "return (1.0 + self.weight) * hidden_states.to(input_dtype)")),
    of("llama", "the norm of a shadowed function", ("hidden_states * torch.rsqrt(", "hidden_states * rsqrt("), ("@use_kernel_forward_from_hub(\"RMSNorm\")\nclass LlamaRMSNorm", "def rsqrt(x):\n    return torch.rsqrt(x) * 1.1\n\n\nclass LlamaRMSNorm")),
    of("llama", "rotation of a part of the head", (ROTATED, "half = q.shape[-1] // 2\n    q_embed = torch.cat(((q * cos + rotate_half(q) * sin)[..., :half], q[..., half:]), dim=-1)")),
    of("llama", "queries and keys normed", ("cos, sin = position_embeddings\n", "query_states = nn.functional.normalize(query_states, dim=-1)\n        cos, sin = position_embeddings\n")),
    of("llama", "a gated output of the attention", ("attn_output = self.o_proj(attn_output)", "attn_output = self.o_proj(attn_output * torch.sigmoid(query_states.transpose(1, 2).reshape(attn_output.shape)))")),
    of("llama", "torch's own attention", ("        attn_output = attn_output.reshape(*input_shape, -1).contiguous()\n", "        n = self.num_key_value_groups\n        attn_output = nn.functional.scaled_dot_product_attention(query_states, key_states.repeat_interleave(n, 1), value_states.repeat_interleave(n, 1), is_causal=True).transpose(1, 2)\n        attn_output = attn_output.reshape(*input_shape, -1).contiguous()\n")),
    of("llama", "another activation between", (MLP, "down_proj = self.down_proj(torch.tanh(self.act_fn(self.gate_proj(x))) * self.up_proj(x))")),
    of("llama", "the positions counted from one", ("position_ids = position_ids.unsqueeze(0)\n", "position_ids = position_ids.unsqueeze(0) + 1\n")),
    # shared experts, sinks and limits
    of("deepseek_v3", "shared experts behind a gate", (SHARED, "hidden_states = hidden_states + torch.sigmoid(residuals.mean(-1, keepdim=True)) * self.shared_experts(residuals)")),
    of("deepseek_v3", "shared experts of what the experts gave", (SHARED, SHARED.replace("residuals)", "hidden_states)"))),
    of("deepseek_v3", "shared experts first", (SHARED, SHARED.replace("hidden_states + self.shared_experts(residuals)", "self.shared_experts(residuals) + hidden_states"))),
    of("gpt_oss", "another limit for up", ("up = up.clamp(min=-self.limit, max=self.limit)", "up = up.clamp(min=-self.limit, max=0.5 * self.limit)")),
    of("gpt_oss", "a learned slope", ("self.alpha = config.swiglu_alpha", "self.alpha = nn.Parameter(torch.tensor(config.swiglu_alpha))")),
    of("gpt_oss", "no one added to up", ("gated_output = (up + 1) * glu", "gated_output = up * glu")),
    of("gpt_oss", "a bias added twice", ("+ self.gate_up_proj_bias[expert_idx]", "+ 2 * self.gate_up_proj_bias[expert_idx]")),
)  # fmt: skip


@functools.cache
def judge(model: str) -> Judge:
    return Judge(upstream.load(model))


@pytest.mark.parametrize("case", REFACTORINGS, ids=[f"{case.model}: {case.title}" for case in REFACTORINGS])
@pytest.mark.sampled(5)
def test_a_refactoring_is_refused_or_equal(case: Refactoring):
    text = judge(case.model).origin.text
    for old, new in case.edits:
        assert old in text, f"the edit does not apply: {old!r}"
        text = text.replace(old, new)
    verdict = judge(case.model).verdict(Mutant("refactoring", "", case.title, text, False, case.modules))
    assert verdict.kind in (REFUSED, EQUAL), f"{verdict.kind}: {verdict.detail}"
