"""One micro-batch of several samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from patchgen.runtime.data.collate import collate, text_sample
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.document_rows import DocumentRows
from patchgen.runtime.parallel import batch_fields
from patchgen.runtime.parallel.batch_fields import FieldRule


def sample_of(length: int) -> dict:
    return text_sample(torch.arange(length), torch.ones(length, dtype=torch.bool))


def test_a_mask_of_tokens_and_images_has_those_of_samples_without_images():
    """mllama's: it covers the row, its padding too, and goes along into rows of one document each."""
    mask = torch.ones(1, 4, 1, 3, dtype=torch.long)
    batch = collate([sample_of(2), sample_of(4) | {"cross_attention_mask": mask}], pad_to=9, pad_token_id=0)
    assert batch["cross_attention_mask"].shape == (1, 9, 1, 3)
    assert batch["cross_attention_mask"][0, :, 0, 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0]
    apart = DocumentRows.of(batch["cu_seq_lens_q"], 1, 9).unpack(batch)["cross_attention_mask"]
    assert apart[..., 0, 0].tolist() == [[0] * 4, [1] * 4, [0] * 4]


@pytest.mark.parametrize(
    ("rule", "value", "expected"),
    [
        (FieldRule(0, pad_scale=1, pad_value=-1), torch.ones(3, 2), [1, 1, 1, -1, -1, -1, -1, -1]),
        (FieldRule(1, pad_scale=1, pad_value="counting"), torch.tensor([[5, 6, 7]]), [5, 6, 7, 0, 1, 0, 1, 2]),
        (FieldRule(-1, pad_scale=1, pad_value=-1), torch.ones(3), [1, 1, 1, -1, -1, -1, -1, -1]),
    ],
)
def test_a_declared_field_of_tokens_is_padded_by_its_rule_in_samples_without_it(monkeypatch, rule, value, expected):
    monkeypatch.setitem(batch_fields.RULES, "score", rule)
    batch = collate([sample_of(3) | {"score": value}, sample_of(2)], pad_to=8, pad_token_id=0)
    assert batch["score"].reshape(8, -1)[:, 0].tolist() == expected
    alone = collate([sample_of(3) | {"score": value}], pad_to=None, pad_token_id=0)["score"]
    assert torch.equal(alone.squeeze(), value.squeeze())


def test_a_mask_of_tokens_and_images_is_cut_with_its_tokens():
    prepare: PrepareMultimodal = SimpleNamespace(config=SimpleNamespace(length_limit=3, on_long="truncate"))
    sample = sample_of(5) | {"cross_attention_mask": torch.ones(1, 5, 1, 2), "pixel_values": torch.ones(5, 4)}
    (cut,) = PrepareMultimodal._apply_limit(prepare, "a:1", sample, torch.zeros(5, dtype=torch.bool)).samples
    assert cut["cross_attention_mask"].shape == (1, 3, 1, 2) and cut["input_ids"].tolist() == [0, 1, 2]
    assert cut["pixel_values"].shape == (5, 4)


def test_model_inputs_of_a_transform_are_skipped_because_the_places_of_their_media_are_unknown():
    """Before, the reason said that media are in the part to cut off, which nobody knows of them."""
    prepare: PrepareMultimodal = SimpleNamespace(config=SimpleNamespace(length_limit=3, on_long="truncate"))
    skipped = PrepareMultimodal._apply_limit(prepare, "a:1", sample_of(5), None)
    assert skipped.samples == [] and skipped.problem[0] == "skipped"
    assert skipped.problem[2].endswith(", and which of its tokens stand for media is unknown")
