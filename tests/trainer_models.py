"""What trainers of other libraries are given in tests: a toy mixture of experts, upstream's and ours, and seams that count."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from patchgen.runtime import registry, seams

WORDS = ("red", "green", "blue", "one", "two", "three", "sea", "tree", "sun", "cat", "dog", "house")
SPECIAL = ("<pad>", "<eos>", "<unk>")
LAYERS = 2
KERNELS = {"fused_moe": "torch", "causal_lm_loss": "chunked"}


def tokenizer() -> PreTrainedTokenizerFast:
    """A token per word."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build(generated: bool, seed: int = 0) -> PreTrainedModel:
    """The generated class, or upstream's, with the same weights and upstream's attention."""
    config = Qwen3MoeConfig(
        vocab_size=len(SPECIAL + WORDS), hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=64, initializer_range=0.3,
        pad_token_id=0, eos_token_id=1, use_cache=False, router_aux_loss_coef=0.0,
    )  # fmt: skip
    options = {"attn_implementation": "sdpa", "dtype": torch.float32}
    torch.manual_seed(seed)
    upstream = Qwen3MoeForCausalLM._from_config(config, **options)
    if not generated:
        return upstream
    model = registry.build_model(config, **options)
    model.load_state_dict(upstream.state_dict())
    return model


def rows(count: int = 12, length: int = 10) -> Dataset:
    """Packed rows of made-up tokens."""
    shape = (count, length)
    ids = torch.randint(len(SPECIAL), len(SPECIAL + WORDS), shape, generator=torch.Generator().manual_seed(0))
    return Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch")


@contextlib.contextmanager
def counting_seams() -> Iterator[Counter]:
    """Within the block the experts and the loss are fused; yields how often each was called."""
    calls = Counter()

    def counted(seam: str) -> Callable:
        with seams.using(**{seam: KERNELS[seam]}):
            serve = seams.implementation(seam)

        def call(*args, **kwargs):
            calls[seam] += 1
            return serve(*args, **kwargs)

        return call

    functions = {seam: counted(seam) for seam in KERNELS}
    with seams.registered(functions, "counted"), seams.using(**dict.fromkeys(KERNELS, "counted")):
        yield calls
