"""How the rows of a tower and its features are divided: the parts of all ranks put together are the whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from patchgen.runtime import ops
from patchgen.runtime.parallel import media
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.media import TowerRows


def _rank(sp: int, sp_rank: int) -> SimpleNamespace:
    """What dividing needs to know of a rank."""
    return SimpleNamespace(sp=sp, sp_rank=sp_rank)


@settings(max_examples=60)
@given(groups=st.integers(1, 40), group=st.sampled_from([1, 4]), sp=st.sampled_from([2, 3, 4, 8]))
def test_slices_of_all_ranks_are_the_rows_and_padding(groups, group, sp):
    rows = torch.arange(1, groups * group + 1)[:, None].float()
    ranks = [TowerRows(_rank(sp, number), rows.shape[0], group) for number in range(sp)]
    together = torch.cat([one.shard(rows) for one in ranks])
    assert torch.equal(together[: len(rows)], rows)
    assert not together[len(rows) :].any()
    assert len({one.shard(rows).shape for one in ranks}) == 1
    assert ranks[0].per_rank % group == 0
    bounds = torch.tensor([0, rows.shape[0]], dtype=torch.int32)
    assert ranks[0].lengths(bounds)[-1] == together.shape[0]
    assert len(ranks[0].lengths(bounds)) == 2 + (together.shape[0] > rows.shape[0])
    assert ranks[0].longest(1) >= ranks[0].lengths(bounds).diff()[1:].sum()


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(1, 4), sp=st.sampled_from([2, 4]), s=st.integers(1, 6))
def test_each_rank_takes_the_features_of_its_tokens(data, rows, sp, s):
    """`masked_scatter` of the whole against `masked_scatter` of each slice with the rows that its spans name."""
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * sp * s, max_size=rows * sp * s)))
    mask = mask.view(rows, sp * s)
    features = torch.arange(1.0, int(mask.sum()) + 1)
    whole = torch.zeros(rows, sp * s).masked_scatter(mask, features)
    by_row = [[int(part.sum()) for part in row.chunk(sp)] for row in mask]
    for rank in range(sp):
        own = torch.cat([features[start:end] for start, end in media.spans_of(by_row, rank)])
        part = slice(rank * s, (rank + 1) * s)
        assert torch.equal(torch.zeros(rows, s).masked_scatter(mask[:, part], own), whole[:, part])


def test_one_process_divides_nothing():
    rows = ops.tower_rows(nn.ModuleList(), torch.ones(5, 2), group=4)
    bounds, hidden = torch.tensor([0, 5]), torch.ones(5, 2)
    assert rows.shard(hidden) is hidden
    assert rows.gather([hidden])[0] is hidden
    assert rows.lengths(bounds) is bounds
    assert rows.longest(5) == 5
    assert ops.local_features(hidden, bounds) is hidden
    ops.require_whole_sequence("nothing")


class _Attention(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads


@pytest.mark.parametrize(("heads", "sp", "divides"), [(4, 2, True), (6, 4, False), (1, 2, False), (None, 2, False)])
def test_a_tower_whose_heads_do_not_divide_is_computed_whole(heads, sp, divides):
    layers = nn.ModuleList([_Attention(heads)] if heads else [nn.Linear(2, 2)])
    rows = media.tower_rows(layers, torch.ones(8, 2), 1, _rank(sp, 1))
    assert (rows.state is not None) == divides
    assert media.is_replicated(layers[0]) != divides
    media.tower_rows(layers, torch.ones(8, 2), 1, _rank(1, 0))  # a run without slices leaves the mark as it is


def test_masks_made_inside_a_module_that_holds_whole_inputs_are_its_own():
    seen = []

    class Tower(nn.Module):
        def forward(self, hidden):
            seen.append(media.inside_replicated())
            if hidden is None:
                raise ValueError("no input")
            return hidden

    tower = Tower()
    ops.mark_replicated(tower, None)
    ops.mark_replicated(tower)  # once more is harmless
    tower(torch.ones(1))
    with pytest.raises(ValueError, match="no input"):
        tower(None)
    assert seen == [True, True]
    assert not media.inside_replicated()


def test_grids_without_position_ids_are_refused():
    batch = {"input_ids": torch.ones(1, 8).long(), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with pytest.raises(ValueError, match=r"image or video grids and no position_ids"):
        slice_batch(batch, sp=2, sp_rank=0)
    assert "position_ids" not in slice_batch(batch, sp=1, sp_rank=0)  # the model computes them


@pytest.mark.parametrize("name", ["position_ids", "stacked_position_ids"])
def test_four_rows_of_positions_tell_documents(name):
    text = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    positions = torch.stack([text, *[torch.zeros(8).long()] * 3])[:, None]
    ids = torch.ones(1, 8).long()
    rows = [positions, positions[1:]]
    four, three = (one.transpose(0, 1) for one in rows) if name.startswith("stacked") else rows
    part = slice_batch({"input_ids": ids, name: four}, sp=2, sp_rank=0)
    assert part["cu_seq_lens_q"].tolist() == [0, 3, 8]
    assert "cu_seq_lens_q" not in slice_batch({"input_ids": ids, name: three}, sp=2, sp_rank=0)


def test_token_types_stay_whole_and_a_mask_stands_for_the_padding():
    batch = {
        "input_ids": torch.ones(1, 7).long(),
        "token_type_ids": torch.ones(1, 7).long(),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]]),
    }
    part = slice_batch(batch, sp=2, sp_rank=1)
    assert part["token_type_ids"].tolist() == [[1] * 7 + [0]]
    assert part["attention_mask"].tolist() == [[1, 0, 0, 0]]
    assert "cu_seq_lens_q" not in part


def test_features_in_one_row_of_numbers_are_as_many_rows_as_placeholders(monkeypatch):
    mask = torch.tensor([[True, False, True], [False, True, False]])[..., None]
    other = torch.tensor([[0, 1]])  # placeholders of the other rank, by row of the batch
    monkeypatch.setattr(media.collectives, "all_gather", lambda counts, *_, **__: torch.cat([counts, other]))
    features = torch.arange(8.0)
    rank = SimpleNamespace(sp=2, sp_rank=0, sp_group=None)
    assert media.local_features(features, mask, rank).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert torch.equal(media.local_features(features.view(4, 2), mask, rank), features.view(4, 2)[:3])
    for wrong in (torch.arange(7.0), torch.ones(5, 2)):
        with pytest.raises(ValueError, match="feature rows for 4 placeholder tokens in the full sequence of 2 ranks"):
            media.local_features(wrong, mask, rank)


def test_levels_of_features_keep_their_form(monkeypatch):
    """A tensor stays one; the tensors of each image become a tuple of one: language models take either."""
    mask = torch.tensor([[True, False, True]])
    monkeypatch.setattr(media.collectives, "all_gather", lambda counts, *_, **__: torch.cat([counts, counts]))
    rows = torch.arange(8.0).view(4, 2)
    rank = SimpleNamespace(sp=2, sp_rank=1, sp_group=None)
    whole, by_image = media.local_levels([rows, rows.split(1)], mask, rank)
    assert torch.equal(whole, rows[2:]) and isinstance(by_image, tuple) and torch.equal(by_image[0], rows[2:])


@settings(max_examples=40)
@given(data=st.data(), rows=st.integers(1, 3), sp=st.sampled_from([2, 4]), s=st.integers(1, 5))
def test_counts_of_all_slices_are_those_of_the_row(data, rows, sp, s):
    length = sp * s
    tokens = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows))
    )
    slices = [part.cumsum(-1) for part in tokens.chunk(sp, dim=1)]
    last = torch.stack([part[:, -1] for part in slices])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media.collectives, "all_gather", lambda *_, **__: last)
        ranks = [SimpleNamespace(sp=sp, sp_rank=number, sp_group=None) for number in range(sp)]
        counted = [media.counted_from_the_start(part, rank) for part, rank in zip(slices, ranks, strict=True)]
    assert torch.equal(torch.cat(counted, dim=1), tokens.cumsum(-1))
