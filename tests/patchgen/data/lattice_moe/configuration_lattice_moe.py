"""The configuration of a small MoE model that transformers does not know: a decoder, and a tower for pictures."""

from transformers import PreTrainedConfig


class LatticeMoeVisionConfig(PreTrainedConfig):
    model_type = "lattice_moe_vision"
    base_config_key = "vision_config"

    hidden_size: int = 24
    intermediate_size: int = 48
    num_channels: int = 3
    image_size: int = 16
    patch_size: int = 8
    hidden_act: str = "gelu"
    initializer_range: float = 0.05


class LatticeMoeConfig(PreTrainedConfig):
    model_type = "lattice_moe"
    sub_configs = {"vision_config": LatticeMoeVisionConfig}
    keys_to_ignore_at_inference = ["past_key_values"]

    vision_config: dict | PreTrainedConfig | None = None
    vocab_size: int = 300
    hidden_size: int = 32
    moe_intermediate_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    num_experts: int = 4
    num_experts_per_tok: int = 2
    hidden_act: str = "silu"
    max_position_embeddings: int = 128
    rope_parameters: dict | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.05
    attention_dropout: float = 0.0
    use_cache: bool = False
    tie_word_embeddings: bool = False
    image_token_id: int = 299

    def __post_init__(self, **kwargs):
        if not isinstance(self.vision_config, PreTrainedConfig):
            self.vision_config = LatticeMoeVisionConfig(**(self.vision_config or {}))
        self.rope_parameters = self.rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)
