"""Qwen2 with a gate on its attention and a norm on its MLP."""

import logging

import torch
from torch import nn
from transformers import Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer as Layer

from .configuration_gated_qwen2 import GatedQwen2Config

logger = logging.getLogger(__name__)


class GatedQwen2Attention(Qwen2Attention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gate = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        mixed, weights = super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        return mixed * torch.sigmoid(self.gate(hidden_states)), weights


class Qwen2MLP(modeling_qwen2.Qwen2MLP):
    def __init__(self, config):
        super().__init__(config)
        self.norm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x):
        return self.norm(super().forward(x))


class GatedQwen2DecoderLayer(Layer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = GatedQwen2Attention(config, layer_idx)
        self.mlp = Qwen2MLP(config)


class GatedQwen2Model(Qwen2Model):
    def __init__(self, config: GatedQwen2Config):
        super().__init__(config)
        self.layers = nn.ModuleList([GatedQwen2DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.post_init()


class GatedQwen2ForCausalLM(Qwen2ForCausalLM):
    config_class = GatedQwen2Config

    def __init__(self, config: GatedQwen2Config):
        super().__init__(config)
        self.model = GatedQwen2Model(config)
        self.post_init()
