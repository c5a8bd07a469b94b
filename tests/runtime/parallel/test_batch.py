"""A rank's slice of a batch: the slices of all ranks put together are the whole batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_facts import OF_LENGTH, OF_STATE, recorded

from patchgen.runtime.parallel.batch import IGNORED, slice_batch


def _together(parts: list[dict], key: str) -> torch.Tensor:
    return torch.cat([part[key] for part in parts], dim=-1)


def test_labels_are_shifted_before_they_are_sliced():
    ids = torch.arange(1, 9)[None]
    parts = [slice_batch({"input_ids": ids, "labels": ids}, sp=2, sp_rank=rank) for rank in range(2)]
    assert parts[0]["shift_labels"].tolist() == [[2, 3, 4, 5]]  # 5 lies in the other slice
    assert parts[1]["shift_labels"].tolist() == [[6, 7, 8, IGNORED]]


def test_padding_is_a_document_without_labels():
    ids = torch.arange(1, 6)[None]
    parts = [slice_batch({"input_ids": ids, "labels": ids}, sp=4, sp_rank=rank) for rank in range(4)]
    assert _together(parts, "input_ids").tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert _together(parts, "shift_labels").tolist() == [[2, 3, 4, 5, IGNORED, IGNORED, IGNORED, IGNORED]]
    assert _together(parts, "position_ids").tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert parts[2]["cu_seq_lens_q"].tolist() == [0, 5, 8]
    assert parts[2]["max_length_q"] == 5


def test_no_label_crosses_into_the_next_document():
    ids = torch.arange(1, 7)[None]
    packed = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    part = slice_batch(packed, sp=1, sp_rank=0)
    assert part["shift_labels"].tolist() == [[2, 3, IGNORED, 5, 6, IGNORED]]
    assert part["cu_seq_lens_q"].tolist() == [0, 3, 6]


def test_explicit_lengths_are_those_of_the_whole_batch():
    ids = torch.arange(8)[None]
    batch = {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 4, 8]), "position_ids": torch.zeros(3, 1, 8).long()}
    part = slice_batch(batch, sp=2, sp_rank=1)
    assert part["cu_seq_lens_q"].tolist() == [0, 4, 8]
    assert part["position_ids"].shape == (3, 1, 4)
    with pytest.raises(ValueError, match="ends at 4, but the batch has 1 rows of 8"):
        slice_batch({"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 4])}, sp=2, sp_rank=0)


def test_a_mask_without_padding_is_dropped_and_another_is_sliced():
    ids = torch.arange(8)[None]
    assert "attention_mask" not in slice_batch({"input_ids": ids, "attention_mask": torch.ones(1, 8)}, sp=2, sp_rank=0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    assert slice_batch({"input_ids": ids, "attention_mask": mask}, sp=2, sp_rank=0)["attention_mask"].tolist() == [
        [0, 0, 1, 1]
    ]


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    rows=st.integers(1, 2),
    sp=st.sampled_from([1, 2, 3, 4]),
)
def test_slices_are_the_whole(lengths, rows, sp):
    S = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(rows, S)
    ids = torch.randint(1, 50, (rows, S))
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    whole = slice_batch(batch, sp=1, sp_rank=0)
    parts = [slice_batch(batch, sp=sp, sp_rank=rank) for rank in range(sp)]
    assert len({part["input_ids"].shape for part in parts}) == 1
    for key in ("input_ids", "shift_labels", "position_ids"):
        assert torch.equal(_together(parts, key)[:, :S], whole[key])
    assert (_together(parts, "shift_labels") != IGNORED).sum() == rows * (S - len(lengths))
    lengths_of_all = {tuple(part["cu_seq_lens_q"].tolist()) for part in parts if "cu_seq_lens_q" in part}
    assert len(lengths_of_all) <= 1
    for bounds in lengths_of_all:
        assert bounds[-1] == rows * (S + -S % sp)


def test_a_last_document_without_tokens():
    ids = torch.arange(16)[None]
    batch = {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 5, 16, 16], dtype=torch.int32)}
    assert slice_batch(batch, sp=2, sp_rank=0)["cu_seq_lens_q"].tolist() == [0, 5, 16]


def test_three_rows_that_start_again_need_lengths():
    """Time, height and width alone do not divide documents: refused, and right with lengths or with a row of text."""
    text = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    ids = torch.arange(1, 9)[None]
    rows = torch.stack([text] * 3)[:, None]
    with pytest.raises(ValueError, match="restart at token 3 of row 0"):
        slice_batch({"input_ids": ids, "labels": ids, "position_ids": rows}, sp=1, sp_rank=0)
    for told in (
        {"position_ids": rows, "cu_seq_lens_q": torch.tensor([0, 3, 8], dtype=torch.int32)},
        {"position_ids": torch.stack([text] * 4)[:, None]},
    ):
        part = slice_batch({"input_ids": ids, "labels": ids, **told}, sp=1, sp_rank=0)
        assert part["cu_seq_lens_q"].tolist() == [0, 3, 8]
        assert part["shift_labels"].tolist() == [[2, 3, IGNORED, 5, 6, 7, 8, IGNORED]]
    padded = {"input_ids": ids, "position_ids": rows, "attention_mask": (torch.arange(8) < 3)[None].long()}
    assert "cu_seq_lens_q" not in slice_batch(padded, sp=1, sp_rank=0)


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_stacked_positions_are_told_by_their_name(samples, rows):
    ids = torch.ones(samples, 5)
    positions = torch.arange(5) + torch.arange(samples * rows).view(rows, samples, 1)
    lengths = torch.arange(0, samples * 5 + 1, 5, dtype=torch.int32)
    for told in ({"position_ids": positions}, {"stacked_position_ids": positions.transpose(0, 1)}):
        part = slice_batch({"input_ids": ids, "cu_seq_lens_q": lengths, **told}, sp=1, sp_rank=0)
        assert torch.equal(part["position_ids"], positions)
        assert "stacked_position_ids" not in part
    if samples != rows:
        with pytest.raises(ValueError, match="as stacked_position_ids"):
            slice_batch({"input_ids": ids, "position_ids": positions.transpose(0, 1)}, sp=1, sp_rank=0)


# --------------------------------------------------------------------- what the proof of a model's file rules out


def test_a_model_whose_proof_rules_out_slices_is_given_none(tmp_path):
    model = recorded(tmp_path / "model", [OF_LENGTH])()
    rows = {"input_ids": torch.ones(1, 8).long()}
    with pytest.raises(ValueError, match="^Model: line 7, .* it trains with sp=1, not with sp=2"):
        slice_batch(rows, sp=2, sp_rank=0, model=model)
    assert slice_batch(rows, sp=1, sp_rank=0, model=model)["input_ids"].shape == (1, 8)
    assert slice_batch(rows, sp=2, sp_rank=0)["input_ids"].shape == (1, 4)  # of no model


def test_the_ranks_of_a_slice_are_ranks(tmp_path):
    """A model that trains on one rank is given no slices either; how many ranks have other rows a batch does not show."""
    model = recorded(tmp_path / "model", [OF_STATE])()
    with pytest.raises(ValueError, match="it trains on one rank, not on 4"):
        slice_batch({"input_ids": torch.ones(1, 8).long()}, sp=4, sp_rank=0, model=model)


# -------------------------------------------------------------------------------------------------- built masks

BUILT = [torch.ones(2, 1, 4, 4).bool(), {"full_attention": torch.ones(2, 1, 4, 4)}, torch.ones(1, 4)]


@pytest.mark.parametrize("mask", BUILT, ids=["queries by keys", "by kind of layer", "of other rows"])
def test_a_mask_that_somebody_built_is_passed_as_it_is_and_refused_on_slices(mask):
    rows = {"input_ids": torch.arange(1, 9).view(2, 4), "attention_mask": mask}
    assert slice_batch(rows, sp=1, sp_rank=0)["attention_mask"] is mask
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 4\), .* found (one of shape|a dict of masks)"):
        slice_batch(rows, sp=2, sp_rank=0)
    assert rows["attention_mask"] is mask  # the caller's batch is not changed
