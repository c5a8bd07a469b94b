"""The configuration of a small MoE model whose experts are a list of modules."""

from transformers import PreTrainedConfig


class ListMoeConfig(PreTrainedConfig):
    model_type = "list_moe"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 64
    hidden_size: int = 32
    moe_intermediate_size: int = 24
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_experts: int = 6
    num_experts_per_tok: int = 2
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.05
    tie_word_embeddings: bool = False
