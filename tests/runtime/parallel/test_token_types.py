"""Token types that are not those of their tokens are refused where a batch is sliced; those of processors are not."""

from __future__ import annotations

import pytest
import torch

from patchgen.runtime import registry
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.verify.small_config import small_config

PAD, IMAGE = 0, 9
IDS = torch.tensor([[PAD, PAD, 4, IMAGE, IMAGE, 5], [6, IMAGE, IMAGE, IMAGE, 7, 8]])
TYPES = (IDS == IMAGE).long()
MASK = (IDS != PAD).long()


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("extra", [{}, {"attention_mask": MASK}], ids=["", "mask"])
def test_types_padded_on_the_other_side_are_refused(sp, extra):
    moved = TYPES.clone()
    moved[0] = moved[0].roll(-2)
    batch = {"input_ids": IDS, "position_ids": torch.arange(6)[None], **extra}
    found = slice_batch(batch | {"mm_token_type_ids": TYPES}, sp=sp, sp_rank=0)
    assert torch.equal(found["mm_token_type_ids"], TYPES)
    with pytest.raises(ValueError, match=r"mm_token_type_ids disagree with input_ids: token \d of row 0 \(id \d\)"):
        slice_batch(batch | {"mm_token_type_ids": moved}, sp=sp, sp_rank=0)


def test_types_in_padding_are_refused_where_no_token_tells():
    """Every token once: only the mask shows that the types belong to other places."""
    ids, types = torch.tensor([[1, 2, 4, IMAGE, 5]]), torch.tensor([[0, 1, 0, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1]]), "mm_token_type_ids": types}
    with pytest.raises(
        ValueError, match=r"token 1 of row 0 \(id 2\) has type 1, and attention_mask marks it as padding"
    ):
        slice_batch(batch, sp=1, sp_rank=0)


def test_types_of_another_length_are_refused():
    batch = {"input_ids": IDS, "mm_token_type_ids": TYPES[:, 1:]}
    with pytest.raises(ValueError, match=r"of shape \(2, 5\) do not belong to input_ids of shape \(2, 6\)"):
        slice_batch(batch, sp=1, sp_rank=0)


def test_one_placeholder_for_images_and_videos():
    """glm4v writes frames of videos with the token of images: type 1 in one place, 2 in another."""
    types = TYPES.clone()
    types[1] *= 2
    assert "mm_token_type_ids" in slice_batch({"input_ids": IDS, "mm_token_type_ids": types}, sp=1, sp_rank=0)


def test_segments_are_compared_by_the_placeholders_of_the_model():
    """`token_type_ids` of other models mean other things: one word is in two segments."""
    head = registry.find_head(config := small_config("gemma3").config)
    with torch.device("meta"):
        model = head._from_config(config)
    ids = torch.where(IDS == IMAGE, config.image_token_id, IDS)
    segments = torch.tensor([[0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 1, 1]])
    batch = {"input_ids": torch.where(IDS == IMAGE, IDS, 5), "token_type_ids": segments}
    slice_batch(batch, sp=1, sp_rank=0, model=model)
    with pytest.raises(ValueError, match="token_type_ids disagree with input_ids"):
        slice_batch({"input_ids": ids, "token_type_ids": TYPES.roll(1, dims=1)}, sp=1, sp_rank=0, model=model)
