"""Tokens whose embeddings were never trained, by their ids alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedConfig

from patchgen.runtime.doctor import weights

CONFIG = {"hidden_size": 5, "num_hidden_layers": 6, "eos_token_id": 7, "pad_token_id": 7, "image_token_id": 8}


@pytest.mark.parametrize(
    ("token", "is_found"),
    [(5, True), (6, True), (7, True), (8, False), (4, True)],
    ids=["a size of the config", "a number of the config", "the end of a text", "a placeholder", "any other"],
)
def test_only_placeholders_need_no_trained_embedding(token, is_found):
    config = PreTrainedConfig(**CONFIG)
    embeddings = torch.nn.Embedding(10, 5)
    embeddings.weight.data[token] = 0
    patient = SimpleNamespace(
        samples=[SimpleNamespace(ids=[1, 4, 5, 6, 7, 8])],
        config=config,
        tokenizer=SimpleNamespace(convert_ids_to_tokens=str),
    )
    model = SimpleNamespace(get_input_embeddings=lambda: embeddings)
    found = [problem for problem, _ in weights._untrained_tokens(patient, model, {})]
    assert bool(found) is is_found
    assert all(f"embeddings of zeros ('{token}' = {token})" in problem for problem in found)
