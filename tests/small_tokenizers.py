"""Tokenizers of a few tokens with the ids 0, 1, ..., of which the first is special."""

from __future__ import annotations

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_mistral_common import MistralCommonBackend


def of_words(*tokens: str) -> PreTrainedTokenizerFast:
    """A token per word."""
    words = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=tokens[0])


def of_mistral(*tokens: str) -> MistralCommonBackend:
    """The one that transformers loads with the package mistral_common; made without it, so it only knows its tokens."""
    tokenizer = object.__new__(MistralCommonBackend)
    tokenizer._all_special_ids = {0}
    tokenizer._cache_get_vocab = {token: index for index, token in enumerate(tokens)}
    return tokenizer
