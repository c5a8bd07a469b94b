"""The table of fields: packing loses nothing, and slices of all ranks joined are the padded whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchgen.runtime.document_rows import DocumentRows
from patchgen.runtime.parallel import batch_fields
from patchgen.runtime.parallel.batch import IGNORED, slice_batch
from patchgen.runtime.parallel.batch_fields import COUNTING, RULES, declare, declared_rules, pack, rule_of

PAD = 9
TENSORS = {name for name, rule in RULES.items() if not rule.listed}


def value_of(name: str, size: int) -> torch.Tensor:
    """A value whose entries tell places apart, `size` long in the dimension that is packed."""
    rule = RULES[name]
    if rule.pack_dim == 1:
        return torch.arange(size * 3.0).view(1, size, 3) + 1
    if rule.pack_dim == -1:
        return torch.arange(size).view(1, size) + 1
    return torch.arange(size * 6).view(size, 2, 3) + 1


@settings(max_examples=80)
@given(name=st.sampled_from(sorted(TENSORS)), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_packed_values_can_be_split_again(name, sizes):
    values = [value_of(name, size) for size in sizes]
    packed = pack(name, values)
    assert [torch.equal(*pair) for pair in zip(packed.split(sizes, dim=RULES[name].pack_dim), values, strict=True)]
    assert packed.shape[RULES[name].pack_dim] == sum(sizes)


def test_what_a_model_takes_as_a_list_stays_one():
    grids = [[[2, 1]], [[0, 0], [1, 3]]]
    packed = pack("patches_grid", grids)
    assert packed == [[2, 1], [0, 0], [1, 3]]
    assert RULES["patches_grid"].local_part(packed, sp=2, sp_rank=1, fill=0) == packed


def test_concatenated_patches_stay_in_one_image():
    images = [torch.ones(1, 3, 4, 8), torch.ones(1, 3, 4, 16)]
    assert pack("pixel_values", images, batch_fields=("pixel_values", "target_sizes")).shape == (1, 3, 4, 24)
    assert pack("pixel_values", images[:1] * 2, batch_fields=("pixel_values",)).shape == (2, 3, 4, 8)


def test_a_mask_of_crops_is_packed_by_item_and_one_of_tokens_along_tokens():
    masks = [torch.ones(1, 3, 2), torch.ones(1, 3, 2)]
    assert pack("image_attention_mask", masks, batch_fields=("image_pixel_values",)).shape == (2, 3, 2)
    assert pack("image_attention_mask", masks, batch_fields=("pixel_values",)).shape == (1, 6, 2)


def test_a_mask_of_crops_is_no_mask_of_tokens_in_a_batch_either():
    mask, bounds = torch.ones(2, 3, 2), torch.tensor([0, 1, 4], dtype=torch.int32)
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "image_attention_mask": mask, "image_pixel_values": mask}
    assert DocumentRows.of(bounds, 1, 4).unpack(batch)["image_attention_mask"] is mask
    assert slice_batch(batch, sp=2, sp_rank=0)["image_attention_mask"] is mask


def test_sounds_of_different_lengths_are_padded():
    packed = pack("input_features", [torch.ones(1, 4, 3), torch.ones(2, 4, 5)])
    assert packed.shape == (3, 4, 5)
    assert packed[0, :, 3:].sum() == 0
    assert packed.sum() == 12 + 40


@settings(max_examples=80)
@given(
    name=st.sampled_from(sorted(TENSORS - {"attention_mask", "real_tokens"})),
    size=st.integers(1, 9),
    sp=st.integers(1, 4),
)
def test_slice_batch_does_what_the_table_says(name, size, sp):
    rule = RULES[name]
    batch = {"input_ids": value_of("input_ids", size), "position_ids": torch.arange(size)[None]}
    if not rule.pad_scale:
        batch[name] = value_of(name, 4)
    elif name != "position_ids":
        batch[name] = value_of(name, size)
    parts = [slice_batch(dict(batch), sp=sp, sp_rank=rank, pad_token_id=PAD)[name] for rank in range(sp)]
    if not rule.pad_scale:
        assert all(torch.equal(part, batch[name]) for part in parts)
        return
    if not rule.sliced:
        assert all(torch.equal(part, parts[0]) for part in parts)
    whole = torch.cat(parts, dim=rule.pack_dim) if rule.sliced else parts[0]
    assert whole.shape[rule.pack_dim] == size + -size % sp
    assert torch.equal(whole.narrow(rule.pack_dim, 0, size), batch[name])
    tail = whole.narrow(rule.pack_dim, size, -size % sp)
    fill = PAD if name == "input_ids" else rule.pad_value
    expected = torch.arange(-size % sp)[None] if fill == COUNTING else torch.full_like(tail, fill)
    assert torch.equal(tail, expected)


def test_a_mask_is_padded_and_sliced_and_labels_are_ignored_where_it_ends():
    batch = {"input_ids": torch.ones(1, 3), "labels": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 1, 0]])}
    parts = [slice_batch(dict(batch), sp=2, sp_rank=rank) for rank in range(2)]
    assert torch.cat([part["attention_mask"] for part in parts], dim=1).tolist() == [[1, 1, 0, 0]]
    assert parts[1]["labels"][0, 1] == IGNORED


def test_padding_is_marked_for_every_rank():
    """Padding given by the caller, by the mask, and added by slicing; no mark without padding."""
    batch = {"input_ids": torch.ones(1, 5), "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    batch["real_tokens"] = torch.tensor([[True, True, True, True, False]])
    parts = [slice_batch(dict(batch), sp=2, sp_rank=rank)["real_tokens"] for rank in range(2)]
    assert torch.cat(parts, dim=1).tolist() == [[False, True, True, True, False, False]]
    assert "real_tokens" not in slice_batch({"input_ids": torch.ones(1, 4)}, sp=2, sp_rank=0)
    assert "real_tokens" in slice_batch({"input_ids": torch.ones(1, 5)}, sp=2, sp_rank=0)


def test_a_field_without_a_rule_is_refused():
    with pytest.raises(KeyError, match="No rule says how the field 'pixels'"):
        rule_of("pixels")


def test_position_ids_of_different_rows_are_refused():
    """Three rows (time, height, width) and one: counting padding is possible along the tokens only."""
    with pytest.raises(
        ValueError, match=r"Samples differ in position_ids in other dimensions than 1.*\(3, 4\).*\(1, 5\)"
    ):
        pack("position_ids", [torch.zeros(3, 4, dtype=torch.long), torch.zeros(1, 5, dtype=torch.long)])


def test_a_declared_field_has_its_rule(monkeypatch):
    monkeypatch.setattr(batch_fields, "RULES", dict(RULES))
    with pytest.raises(
        KeyError, match=r"inputs, \{heights: \{pack_dim: 0\}\}.*pack_dim .*sliced .*pad_value .*pad_scale"
    ):
        rule_of("heights")
    declare({"heights": {"pack_dim": -1, "sliced": True, "pad_value": 7, "pad_scale": 1}}, "inputs")
    declare({"heights": batch_fields.FieldRule(-1, True, 7, 1)}, "inputs")
    assert declared_rules()["heights"] == rule_of("heights") and "pixel_values" not in declared_rules()
    value = torch.arange(5)[None]
    parts = [rule_of("heights").local_part(value, sp=2, sp_rank=rank, fill=7) for rank in range(2)]
    assert torch.cat(parts, dim=-1).tolist() == [[0, 1, 2, 3, 4, 7]]
    rows = DocumentRows.of(torch.tensor([0, 2, 5]), 1, 5)
    assert rows.unpack({"heights": value})["heights"].tolist() == [[0, 1, 7], [2, 3, 4]], "a row for each document"


@pytest.mark.parametrize(
    "rule, message",
    [
        ({}, "'pack_dim'"),
        ({"pack_dim": 0, "slice": True}, "'slice'.*Attributes: pack_dim, sliced, pad_value, pad_scale"),
        ({"pack_dim": 0, "sliced": True}, "needs a pad_scale"),
        ({"pack_dim": 0, "pad_value": "zero"}, "a number or 'counting'"),
    ],
)
def test_an_invalid_rule_is_refused(monkeypatch, rule, message):
    monkeypatch.setattr(batch_fields, "RULES", dict(RULES))
    with pytest.raises(ValueError, match=f"inputs: heights: .*{message}"):
        declare({"heights": rule}, "inputs")
    with pytest.raises(ValueError, match=r"inputs: pixel_values already has the rule .*; found another"):
        declare({"pixel_values": {"pack_dim": 1}}, "inputs")
