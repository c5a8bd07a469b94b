"""Qwen3-MoE with scaled attention and a projection beside its experts."""

import torch
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeForCausalLM,
    Qwen3MoeSparseMoeBlock,
)

from .configuration_shared_moe import SharedMoeConfig


class SharedMoeAttention(Qwen3MoeAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return super().forward(hidden_states * self.scale, attention_mask=attention_mask, **kwargs)


class SharedMoeBlock(Qwen3MoeSparseMoeBlock):
    def __init__(self, config):
        super().__init__(config)
        self.shared = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        return super().forward(hidden_states) + self.shared(hidden_states)


class SharedMoeForCausalLM(Qwen3MoeForCausalLM):
    config: SharedMoeConfig

    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = SharedMoeAttention(config, i)
            layer.mlp = SharedMoeBlock(config)
        self.post_init()
