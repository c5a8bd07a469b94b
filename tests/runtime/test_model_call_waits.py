"""Whether rows are packed is known where batches are made: no mask asks the device for it."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import Qwen3MoeConfig, masking_utils

from patchgen.generated_models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM
from patchgen.runtime import attention, model_calls
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.train.feed import to_device

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
SIZES |= {"num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}


@pytest.fixture(scope="module")
def model():
    attention.register()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, use_cache=False)
    return Qwen3MoeForCausalLM._from_config(config, attn_implementation="patchgen_sdpa").train()


def packed(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def batch_of(positions: torch.Tensor) -> dict:
    ids = torch.randint(0, 64, positions.shape, generator=torch.Generator().manual_seed(1))
    whole = {"input_ids": ids, "labels": ids, "position_ids": positions}
    return to_device(slice_batch(whole, sp=1, sp_rank=0), torch.device("cpu"))


def decisions(model, batch: dict, monkeypatch) -> tuple[list[str], torch.Tensor]:
    """Who decided by what a tensor holds while masks were made; and the loss."""
    found = []
    own = torch.Tensor.__bool__

    def spy(tensor):
        frames = [sys._getframe(depth).f_code.co_name for depth in range(1, 5)]
        if {"find_packed_sequence_indices", "_restarts", "_padding"} & set(frames):
            found.append(frames[0])
        return own(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__bool__", spy)
        loss = model(**batch, use_cache=False).loss
    return found, loss


@pytest.mark.parametrize("lengths", [[12], [5, 7], [1, 1, 10]])
def test_a_batch_of_the_trainer_asks_nothing(model, lengths, monkeypatch):
    batch = batch_of(packed(lengths))
    asked, loss = decisions(model, batch, monkeypatch)
    assert asked == []
    monkeypatch.setattr(model_calls, "_is_consecutive", lambda _: False)
    with monkeypatch.context() as patch:  # as upstream searches
        patch.setattr(
            masking_utils, "find_packed_sequence_indices", masking_utils.find_packed_sequence_indices.__wrapped__
        )
        asked, expected = decisions(model, batch, monkeypatch)
    assert asked, "the spy sees upstream's search"
    assert torch.equal(loss, expected)


def test_position_ids_that_were_written_to_are_looked_at_again(model, monkeypatch):
    positions = packed([12])
    batch = {key: value for key, value in batch_of(positions).items() if not key.startswith(("cu_seq", "max_"))}
    assert decisions(model, batch, monkeypatch)[0] == []
    batch["position_ids"].copy_(packed([5, 7]))
    asked, loss = decisions(model, batch, monkeypatch)
    assert asked
    _, expected = decisions(model, batch_of(packed([5, 7])) | {"shift_labels": batch["shift_labels"]}, monkeypatch)
    torch.testing.assert_close(loss, expected)


def test_position_ids_without_lengths_are_searched_once(model, monkeypatch):
    ids = torch.randint(0, 64, (2, 12))
    positions = torch.arange(12).expand(2, 12).contiguous()
    asked = [
        decisions(model, {"input_ids": ids, "labels": ids, "position_ids": positions}, monkeypatch)[0] for _ in "12"
    ]
    assert [len(one) for one in asked] == [1, 0]


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_positions_behind_a_cache_are_no_documents(name):
    inputs = {"input_ids": torch.zeros(1, 12, dtype=torch.long), "position_ids": packed([5, 7])}
    assert model_calls._find_documents({**inputs, name: None}), "they would be, without one"
    assert model_calls._find_documents({**inputs, name: object()}) == {}
