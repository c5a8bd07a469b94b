"""Token types that are not those of their tokens are refused where a batch is sliced; those of processors are not."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from patchgen.runtime import registry
from patchgen.runtime.parallel import token_types
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.verify.small_config import small_config

PAD, IMAGE = 0, 9
IDS = torch.tensor([[PAD, PAD, 4, IMAGE, IMAGE, 5], [6, IMAGE, IMAGE, IMAGE, 7, 8]])
TYPES = (IDS == IMAGE).long()
MASK = (IDS != PAD).long()


def _gemma3():
    head = registry.find_head(config := small_config("gemma3").config)
    with torch.device("meta"):
        return head._from_config(config)


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
    with pytest.raises(ValueError, match=r"token 1 of row 0 \(id 2\) has type 1, and a mask marks it as padding"):
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
    model = _gemma3()
    ids = torch.where(IDS == IMAGE, model.config.image_token_id, IDS)
    segments = torch.tensor([[0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 1, 1]])
    batch = {"input_ids": torch.where(IDS == IMAGE, IDS, 5), "token_type_ids": segments}
    slice_batch(batch, sp=1, sp_rank=0, model=model)
    with pytest.raises(ValueError, match="token_type_ids disagree with input_ids"):
        slice_batch({"input_ids": ids, "token_type_ids": TYPES.roll(1, dims=1)}, sp=1, sp_rank=0, model=model)


@pytest.mark.parametrize("mask", ["attention_mask", "real_tokens"])
def test_padding_with_the_id_of_a_placeholder_is_not_compared(mask):
    """Some tokenizers pad with the token of images."""
    ids, types = torch.tensor([[IMAGE, IMAGE, 4, IMAGE, 5]]), torch.tensor([[0, 0, 0, 1, 0]])
    batch = {"input_ids": ids, mask: torch.tensor([[0, 0, 1, 1, 1]]), "mm_token_type_ids": types}
    assert torch.equal(slice_batch(batch, sp=1, sp_rank=0)["mm_token_type_ids"], types)


@pytest.mark.parametrize("field", ["mm_token_type_ids", "token_type_ids"])
def test_a_sampled_placeholder_outside_an_image_is_text(field):
    """A rollout: the model wrote the id of images after two images, and in a row without any."""
    model = _gemma3()
    image = model.config.image_token_id
    ids = torch.tensor([[4, image, image, image, 5, image, 7], [6, 5, image, image, image, 7, 8]])
    types = torch.tensor([[0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    slice_batch({"input_ids": ids, field: types}, sp=1, sp_rank=0, model=model)
    slice_batch({"input_ids": ids[:1], field: types[:1]}, sp=1, sp_rank=0)
    moved = types.roll(-1, dims=1)
    with pytest.raises(
        ValueError, match=r"token 0 of row 0 \(id 4\) has type 1, and is text, while placeholders of its row"
    ):
        slice_batch({"input_ids": ids, field: moved}, sp=1, sp_rank=0, model=model)


def test_ids_are_compared_on_their_own_device():
    with FakeTensorMode():  # has the devices of tensors without their memory
        ids = torch.empty(2, 3, dtype=torch.int32, device="cuda")
        assert token_types.is_one_of(ids, {IMAGE, 3}).device.type == "cuda"


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 1, 6, 6), {"full_attention": torch.ones(2, 1, 6, 6)}], ids=["4d", "by_kind"]
)
def test_masks_that_a_model_would_build_stay_whole_or_are_refused(mask):
    batch = {"input_ids": IDS, "mm_token_type_ids": TYPES, "attention_mask": mask}
    assert slice_batch(batch, sp=1, sp_rank=0)["attention_mask"] is mask
    with pytest.raises(
        ValueError, match=r"attention_mask must be \(2, 6\).*found (one of shape \(2, 1, 6, 6\)|a dict of masks)"
    ):
        slice_batch(batch, sp=2, sp_rank=0)
