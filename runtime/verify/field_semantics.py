"""What the fields of a model config mean, by the names that transformers uses across models, and their small values.

A rule maps a field name to a small value, never above the declared one. The rules know dimensions (heads, groups, ranks,
windows, experts), not models: a new model with common field names needs nothing here, and a new field name needs one rule.

Sizes of a small model:

    hidden 64 = 4 heads x 16    2 key/value heads    one layer per kind, at least 2 (4 with a period of kinds)
    experts 4, 2 per token, in 2 groups               intermediate 96, per expert 32, shared expert 48
    mamba inner 128 = 8 heads x 16                    vocabulary 128, window 8 (less than a test sequence)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

VOCAB = 128
HIDDEN = 64
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD_DIM = 16
ROPE_DIM = 8
LAYERS = 4
EXPERTS = 4
TOP_K = 2
WINDOW = 8
POSITIONS = 256  # more than the longest document of `training_inputs`
SEQUENCE = 24
IMAGE = 32
PATCH = 8
IMAGE_TOKENS = (IMAGE // PATCH // 2) ** 2
"""With two by two patches of an image merged."""
MAMBA_HEADS = 8
INDEX_HEADS = 16  # with fewer, all may vote zero: keys tie, and the choice among ties is undefined
NUM_RESERVED_IDS = 32
"""The upper part of the small vocabulary is reserved for special tokens; inputs are drawn from below."""


def first_reserved_id(vocab: int) -> int:
    """The first reserved id of a small vocabulary; of less than twice `NUM_RESERVED_IDS` tokens half are reserved."""
    return vocab - min(NUM_RESERVED_IDS, vocab // 2)


@dataclass(frozen=True)
class Rule:
    """Fields whose name matches `pattern` get `small(declared value)`."""

    meaning: str
    pattern: re.Pattern[str]
    small: Callable[[int], int]


def _rule(meaning: str, pattern: str, limit: int) -> Rule:
    return Rule(meaning, re.compile(rf"(?:{pattern})$"), lambda declared: min(declared, limit))


# The first match wins, so special names come before general ones.
INTEGER_RULES: tuple[Rule, ...] = (
    _rule("vocabulary", r"(.*_)?vocab(_size)?(_.*)?|vocabulary_size|num_embeddings", VOCAB),
    _rule("hash table", r"split_.*_parts", 4),
    # how many layers, and which of them are of a special kind
    _rule("extra prediction layers", r"num_(nextn_predict|mtp)_layers", 1),
    _rule("layers that share key/value", r"num_kv_shared_layers", 1),
    _rule("leading dense layers", r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    _rule("layers before the window starts", r"max_window_layers", 1),
    _rule("period of layer kinds", r".*(_interval|_period|_step|_pattern|every_n_layers|layer_group_size)", 2),
    _rule("layers per attention residual block", r"n_layers_per_.*", 2),
    _rule("offset in a period of layer kinds", r".*_layer_offset", 1),
    _rule("layer of a tower after which it merges patches", r"insert_layer_id", 0),
    _rule(
        "layers of a stack", r"(num_|n_)?(.*_)?(layers?|depth)|num_.*_layers|num_layers_per_stack|num_blocks", LAYERS
    ),
    # experts
    _rule("experts per token", r".*(per_tok|per_token)|(moe_)?top_?k(_experts)?|moe_k|num_selected_experts", TOP_K),
    _rule("expert groups kept", r"topk_group", 1),
    _rule("expert groups", r"n_groups?|num_expert_groups?", 2),
    _rule("shared experts", r"(.*_)?shared_experts?", 2),
    _rule("experts that do nothing", r"zero_expert_num", 2),
    _rule("experts", r"(num|n)_(.*_)?experts|(.*_)?num_experts", EXPERTS),
    _rule("shared expert width", r"(.*_)?shared_(experts?_)?intermediate_size", 48),
    _rule("expert width", r"(.*_)?(moe|expert)(_.*)?_(intermediate|hidden|ffn)_?size|expert_ffn_.*", 32),
    _rule("latent expert width", r"moe_latent_size", 32),
    # indexers of sparse attention
    _rule("indexed keys", r"(.*_)?index(er)?_budget", WINDOW),
    _rule("indexed keys", r"(.*_)?index(er)?_topk", 4),
    _rule("indexed blocks", r"(.*_)?index_topk_blocks", 2),
    _rule("keys that an indexer pools", r"(.*_)?index_kpool", 2),
    _rule("index block", r"(.*_)?index_block_size", 4),
    _rule("compression of indexed keys", r"(.*_)?compress_ratio", 4),
    _rule("compression of keys", r"(.*_)?compress_rates", WINDOW),
    _rule("heads of an indexer's keys", r"indexer_kv_heads", 1),
    _rule("heads of an indexer", r"indexer_n_heads", HEADS),
    _rule("heads whose votes an indexer adds up", r"index_n_heads", INDEX_HEADS),
    # heads
    _rule("state-space heads", r"mamba_(n|num)_heads", MAMBA_HEADS),
    _rule("key/value heads", r"(.*_)?(num|n)_(.*_)?(key_value|kv|key|k)_heads|num_kv_heads", KEY_VALUE_HEADS),
    _rule("heads", r"(.*_)?((num|n)_(.*_)?heads?|attention_heads)", HEADS),
    _rule("rotary size", r"(.*_)?(rope_head_dim|rotary_dim|d_rel)", ROPE_DIM),
    _rule("head size", r"(.*_)?(head_dim|d_head|dim_head|head_size|kv_channels|d_kv|qk_head_dim)", HEAD_DIM),
    _rule("state size", r"(.*_)?(d_state|state_size)", 8),
    _rule("state-space inner size", r"mamba_d_ssm", MAMBA_HEADS * HEAD_DIM),
    _rule("low rank", r"(.*_)?(rank|lowrank)", 16),
    _rule("heads of a grouped output", r"o_groups", 2),
    # windows, chunks, positions
    _rule("half a chunk of audio frames, which upstream knows to give 13 tokens", r"n_window", 50),
    _rule("audio frames that see each other", r"n_window_infer", 200),
    _rule("window", r"(.*_)?(sliding_window|window(_size|_len)?|attention_chunk_size|local_attention)", WINDOW),
    _rule("window", r"sliding_window_size|rel_extent|attention_window_size|keep_window_size", WINDOW),
    _rule("chunk of a scan", r"(.*_)?chunk_size|block_size|max_inference_chunksize|(.*_)?chunk_length", WINDOW),
    _rule(
        "positions",
        r"(.*_)?(max_(.*_)?positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|context_length)",
        POSITIONS,
    ),
    _rule("position where attention scales", r"floor_scale|log_scaling_n_floor", WINDOW),
    _rule("positions", r"(.*_)?max_position_embeddings|mem_len", POSITIONS),
    # towers
    _rule("image", r"(.*_)?image_size", IMAGE),
    _rule("patch", r"(.*_)?patch_size", PATCH),
    _rule("tokens per image, a square", r"mm_tokens_per_image|image_seq_len(gth)?|latent_query_num", IMAGE_TOKENS),
    _rule("table of positions, a square", r"num_position_embeddings", 64),
    _rule("audio", r"num_mel_bins|conv_chunksize", 16),
    _rule("stages of a tower of convolutions", r"depths", 1),
    _rule("steps between the stages of a tower", r"downsampling_ratios", 2),
    _rule("filters of the first stage, doubled by each", r"num_filters", 4),
    # widths
    _rule(
        "width of a feed-forward layer",
        r"(.*_)?(intermediate_size(_.*)?|ffn_(hidden_size|dim)|ffn_.*|dff|dim_ff|d_inner|n_inner|d_ff|feed_forward_size|inner_dim)",
        96,
    ),
    _rule(
        "input width of a later part",
        r"(.*_)?(out_dim|in_dim|out_channel|adapter_input_size|projection_dim|downsample_channels)",
        HIDDEN,
    ),
    _rule(
        "model width",
        r"(.*_)?(hidden_sizes?(_.*)?|d_model|n_embd|emb_dim|embed_dim|embedding_size|embedding_dim|hidden_dim|width|out_hidden_size|output_dim|output_proj_dims|dim_model_base|residual_channels)",
        HIDDEN,
    ),
    _rule("centroids", r"num_centroids|.*codebook_size", 16),
    _rule("centroids kept", r"centroid_.*top_k", 4),
    _rule("other width", r"(.*_)?(dim|size|rank|channels|num_buckets)", 32),
)

# Meanings of fields that the model requires: released checkpoints always set them, even if the class's default is None.
REQUIRED = frozenset(
    {
        "experts", "experts per token", "shared experts", "expert groups", "expert groups kept", "expert width",
        "head size", "indexed keys", "compression of indexed keys", "heads of an indexer's keys",
        "heads of an indexer",
    }
)  # fmt: skip

PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")

# Fields of released configs that the class does not declare, by the name of the sub-config.
UNDECLARED_FIELDS: dict[str, dict[str, object]] = {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}}

# Values of released configs for fields whose default is None.
RELEASED_VALUES: dict[str, object] = {"downsample_rate": "1/2", "deepstack_layer_map": [[1, 0]]}

IMAGE_CODES: dict[str, Callable[[int], str]] = {
    "IMGIMG": lambda number: f"IMGIMG{chr(ord('A') + number // 10)}{chr(ord('A') + number % 10)}Z",
    "<|visual token": lambda number: f"<|visual token {number:06d}|>",
}
"""The names of an image tokenizer's codes in vocabularies, by the prefix of the names."""
NUM_IMAGE_CODES = 16

DROPOUT = re.compile(r".*(dropout|pdrop|layerdrop|jitter|drop_path|_drop)(_.*)?$|^drop.*|vae_std$")
SPECIAL_ID = re.compile(r"(.*_)?(token_id|token_index|token_ids|pad_index|unk_index|mask_index|eos_index|bos_index)$")


def rule_for(*names: str) -> Rule | None:
    """The rule of a field, given the common name that upstream's `attribute_map` gives it, then its own name."""
    return next((rule for name in names for rule in INTEGER_RULES if rule.pattern.match(name)), None)


def counts_experts(*names: str) -> bool:
    """Whether a field is a number of experts."""
    rule = rule_for(*names)
    return rule is not None and rule.meaning == "experts"


def is_dropout(name: str) -> bool:
    """Whether a field is a probability or scale of random noise in training, which comparisons set to zero."""
    return DROPOUT.match(name) is not None


def is_input_width(name: str) -> bool:
    """Whether a field is the input width of a later part of a tower, which no other field determines."""
    rule = rule_for(name)
    return rule is not None and rule.meaning == "input width of a later part"


def is_special_id(name: str) -> bool:
    """Whether a field is a special token id, or a list of them."""
    return SPECIAL_ID.match(name) is not None
