"""A small MoE model of one's own: rotary attention through transformers' interface, a list of experts in each layer, a tower
for pictures, and an input that no other model has: `pixel_spacing [N, 2]`, how many pixels of picture n the tower's pixels are
high and wide."""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from .configuration_lattice_moe import LatticeMoeConfig, LatticeMoeVisionConfig


def rotate_half(x):
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(hidden_states, n_rep):
    return hidden_states.repeat_interleave(n_rep, dim=1)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class LatticeMoeRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class LatticeMoeRotaryEmbedding(nn.Module):
    def __init__(self, config: LatticeMoeConfig):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        inv_freq, self.attention_scaling = self.compute_default_rope_parameters(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config, device=None, seq_len=None):
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float, device=device) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(x.device)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class LatticeMoeAttention(nn.Module):
    def __init__(self, config: LatticeMoeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            **kwargs,
        )
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        return self.o_proj(attn_output), attn_weights


class LatticeMoeExpert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LatticeMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([LatticeMoeExpert(config) for _ in range(config.num_experts)])
        self.shared_expert = LatticeMoeExpert(config)

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
        output = output + self.shared_expert(hidden_states)
        return output.view(batch_size, sequence_length, hidden_dim)


class LatticeMoeDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: LatticeMoeConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LatticeMoeAttention(config, layer_idx)
        self.mlp = LatticeMoeBlock(config)
        self.input_layernorm = LatticeMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LatticeMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, position_embeddings, attention_mask, **kwargs)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        return residual + self.mlp(hidden_states)


class LatticeMoePreTrainedModel(PreTrainedModel):
    config: LatticeMoeConfig
    base_model_prefix = "model"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["LatticeMoeDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True


class LatticeMoeVisionModel(LatticeMoePreTrainedModel):
    config: LatticeMoeVisionConfig

    def __init__(self, config: LatticeMoeVisionConfig):
        super().__init__(config)
        size = config.patch_size
        self.patch_embed = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=size, stride=size)
        self.spacing_embed = nn.Linear(2, config.hidden_size, bias=False)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.post_init()

    def forward(self, pixel_values, pixel_spacing=None, **kwargs):
        hidden_states = self.patch_embed(pixel_values).flatten(2).transpose(1, 2)
        if pixel_spacing is not None:
            hidden_states = hidden_states + self.spacing_embed(pixel_spacing.to(hidden_states.dtype))[:, None]
        hidden_states = hidden_states + self.fc2(self.act_fn(self.fc1(hidden_states)))
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states)


class LatticeMoeTextModel(LatticeMoePreTrainedModel):
    def __init__(self, config: LatticeMoeConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LatticeMoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LatticeMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LatticeMoeRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, attention_mask=causal_mask, position_embeddings=position_embeddings, **kwargs
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class LatticeMoeModel(LatticeMoePreTrainedModel):
    def __init__(self, config: LatticeMoeConfig):
        super().__init__(config)
        self.vision_tower = LatticeMoeVisionModel(config.vision_config)
        self.projector = nn.Linear(config.vision_config.hidden_size, config.hidden_size)
        self.language_model = LatticeMoeTextModel(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.embed_tokens

    def set_input_embeddings(self, value):
        self.language_model.embed_tokens = value

    def get_image_features(self, pixel_values, pixel_spacing=None, **kwargs):
        outputs = self.vision_tower(pixel_values, pixel_spacing=pixel_spacing)
        outputs.pooler_output = self.projector(outputs.last_hidden_state).flatten(0, 1)
        return outputs

    def get_placeholder_mask(self, input_ids, inputs_embeds, image_features):
        special_image_mask = input_ids == self.config.image_token_id
        if special_image_mask.sum() != image_features.shape[0]:
            raise ValueError(f"{special_image_mask.sum()} image tokens for {image_features.shape[0]} image features.")
        return special_image_mask.unsqueeze(-1).expand_as(inputs_embeds)

    def forward(
        self,
        input_ids=None,
        pixel_values=None,
        pixel_spacing=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        **kwargs,
    ):
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            image_features = self.get_image_features(pixel_values, pixel_spacing=pixel_spacing).pooler_output
            image_features = image_features.to(inputs_embeds.device, inputs_embeds.dtype)
            special_image_mask = self.get_placeholder_mask(
                input_ids, inputs_embeds=inputs_embeds, image_features=image_features
            )
            inputs_embeds = inputs_embeds.masked_scatter(special_image_mask, image_features)
        return self.language_model(
            attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs
        )


class LatticeMoeForConditionalGeneration(LatticeMoePreTrainedModel, GenerationMixin):
    input_rules = {"pixel_spacing": {"pack_dim": 0, "example": {"of": "image", "shape": [2]}}}

    def __init__(self, config: LatticeMoeConfig):
        super().__init__(config)
        self.model = LatticeMoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values, pixel_spacing=None, **kwargs):
        return self.model.get_image_features(pixel_values, pixel_spacing=pixel_spacing, **kwargs)

    def forward(
        self,
        input_ids=None,
        pixel_values=None,
        pixel_spacing=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        **kwargs,
    ):
        outputs = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            pixel_spacing=pixel_spacing,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


__all__ = [
    "LatticeMoeForConditionalGeneration",
    "LatticeMoeModel",
    "LatticeMoePreTrainedModel",
    "LatticeMoeTextModel",
    "LatticeMoeVisionModel",
]
