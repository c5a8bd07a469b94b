"""A small MoE model as people publish it beside their weights: one module per expert, a loop over them."""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_list_moe import ListMoeConfig


class ListMoeRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class ListMoeAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        heads = (*hidden_states.shape[:-1], 3 * self.num_heads, -1)
        query, key, value = self.qkv(hidden_states).view(heads).transpose(1, 2).chunk(3, dim=1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ListMoeExpert(nn.Module):
    def __init__(self, config, width=None):
        super().__init__()
        width = width or config.moe_intermediate_size
        self.wi = nn.Linear(config.hidden_size, width, bias=False)
        self.wu = nn.Linear(config.hidden_size, width, bias=False)
        self.wo = nn.Linear(width, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.wo(self.act(self.wi(x)) * self.wu(x))


class ListMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([ListMoeExpert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states):
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        routing = torch.softmax(self.router(hidden_states), dim=-1, dtype=torch.float)
        routing, selected = torch.topk(routing, self.top_k, dim=-1)
        routing = (routing / routing.sum(dim=-1, keepdim=True)).to(hidden_states.dtype)
        output = torch.zeros_like(hidden_states)
        mask = nn.functional.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            slot, token = torch.where(mask[index])
            if token.numel() == 0:
                continue
            update = expert(hidden_states[token]) * routing[token, slot, None]
            output.index_add_(0, token, update.to(hidden_states.dtype))
        return output.view(batch_size, sequence_length, hidden_dim)


class ListMoeLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = ListMoeAttention(config)
        self.moe = ListMoeBlock(config)
        self.attention_norm = ListMoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.moe_norm = ListMoeRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attention(self.attention_norm(hidden_states))
        return hidden_states + self.moe(self.moe_norm(hidden_states))


class ListMoePreTrainedModel(PreTrainedModel):
    config: ListMoeConfig
    base_model_prefix = "model"
    _no_split_modules = ["ListMoeLayer"]

    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=std)


class ListMoeModel(ListMoePreTrainedModel):
    def __init__(self, config: ListMoeConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([ListMoeLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = ListMoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None):
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)


class ListMoeForCausalLM(ListMoePreTrainedModel, GenerationMixin):
    def __init__(self, config: ListMoeConfig):
        super().__init__(config)
        self.model = ListMoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, labels=None, **kwargs):
        hidden_states = self.model(input_ids, inputs_embeds)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


__all__ = ["ListMoeForCausalLM", "ListMoeModel", "ListMoePreTrainedModel"]
