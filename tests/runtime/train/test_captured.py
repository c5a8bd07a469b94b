"""What a step must be like to be replayed: forms of rows, and recipes that are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_recipe import recipe_of

from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.train import view
from patchgen.runtime.train.captured import (
    FIRST,
    LONGER_DOCUMENT,
    MORE_DOCUMENTS,
    OTHER_INPUTS,
    REASONS,
    REPLAYABLE,
    GraphShape,
    complete_text_inputs,
    require_no_tables,
    require_replayable,
    summary_of,
)
from patchgen.runtime.train.model import build_on_meta
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.train.records import Summary

TOKENS = 64


def row(lengths: list[int]) -> dict:
    ids = torch.arange(sum(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return complete_text_inputs(
        slice_batch({"input_ids": ids, "labels": ids, "position_ids": positions}, sp=1, sp_rank=0), sp=1
    )


@st.composite
def partitions(draw) -> list[int]:
    """Lengths of documents that fill a row."""
    cuts = draw(st.sets(st.integers(1, TOKENS - 1), max_size=TOKENS - 1))
    bounds = [0, *sorted(cuts), TOKENS]
    return [b - a for a, b in itertools.pairwise(bounds)]


@given(partitions(), partitions())
def test_a_form_keeps_the_documents_and_is_one_for_all_that_fit(first: list[int], second: list[int]):
    form = GraphShape.with_slack(row(first))
    assert form.compare(row(first)) == REPLAYABLE
    reason = form.compare(row(second))
    assert reason in (MORE_DOCUMENTS, LONGER_DOCUMENT, REPLAYABLE)
    assert (reason == MORE_DOCUMENTS) == (len(second) + 1 > form.num_bounds)
    if reason != REPLAYABLE:
        assert len(second) + 1 > form.num_bounds or max(second) > form.longest
        return
    brought = form.pad(row(second))
    bounds = brought["cu_seq_lens_q"]
    assert bounds.dtype == torch.int32 and len(bounds) == form.num_bounds
    lengths = bounds.diff().tolist()
    assert lengths[: len(second)] == second and not any(lengths[len(second) :])
    assert max(second) <= brought["max_length_q"] == form.longest <= TOKENS
    assert brought["cu_seq_lens_k"].equal(bounds) and brought["real_tokens"].all()


def test_rows_of_other_sizes_and_of_more_than_text_do_not_fit():
    form = GraphShape.with_slack(row([40, 24]))
    assert form.compare(row([40, 25])) == OTHER_INPUTS
    assert form.compare({**row([40, 24]), "labels": row([40, 24])["labels"].int()}) == OTHER_INPUTS
    assert (
        complete_text_inputs({"input_ids": torch.zeros(1, 4, dtype=torch.long), "pixel_values": torch.zeros(3)}, sp=1)
        is None
    )
    assert complete_text_inputs({"inputs_embeds": torch.zeros(1, 4, 2)}, sp=1) is None
    unpacked = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "shift_labels": torch.zeros(2, 4)}
    assert complete_text_inputs(unpacked, sp=1) is None, "two rows have no lengths that one would add"


@pytest.mark.parametrize(
    ("sections", "world", "told"),
    [
        ({"data": {"pad_batches": False}}, 1, "set data.pad_batches: true"),
        ({"data": {"kind": "multimodal"}}, 1, "data.kind is multimodal"),
        ({"objective": {"name": "dpo"}}, 1, "objective.name is dpo"),
        ({"train": {"batches_per_step": 4}}, 2, "2 are accumulated: set train.batches_per_step: 2"),
        ({"parallel": {"cpu_offload": True}}, 1, "remove parallel.cpu_offload"),
        ({"parallel": {"activation_checkpointing": "offload"}}, 1, "set parallel.activation_checkpointing to none"),
        (
            {"parallel": {"activation_checkpointing": "full", "offload_inputs": True}},
            1,
            "remove parallel.offload_inputs",
        ),
        ({"optim": {"name": "muon"}}, 1, "set optim.name: adamw"),
        ({"parallel": {"ep": 2, "expert_exchange": "all_to_all"}}, 2, "set parallel.expert_capacity"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_what_to_do(sections, world, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    values = {"model": {"source": "qwen3_moe"}, "data": {"pad_batches": True}, "train": {"cuda_graph": True}}
    values["train"]["batches_per_step"] = world
    layout = ParallelConfig.for_world(world, ep=sections.get("parallel", {}).get("ep", 1))
    require_replayable(from_dict(values), layout)
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    with pytest.raises(RecipeError, match=told):
        require_replayable(from_dict(values), layout)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match="needs a GPU"):
        require_replayable(from_dict(values), layout)


def test_a_run_says_how_many_steps_were_replayed_and_why_the_others_were_not():
    told = summary_of(26, {MORE_DOCUMENTS: 3, FIRST: 1})
    assert told == (
        f"26 of 30 steps were replayed as a CUDA graph; 1 was {REASONS[FIRST]}; 3 were {REASONS[MORE_DOCUMENTS]}"
    )
    assert summary_of(5, {}) == "5 of 5 steps were replayed as a CUDA graph"
    assert set(REASONS) == set(range(REPLAYABLE)), "each reason has words"
    ended = Summary(steps=30, reason="steps", directory="runs/mine", export=None, graph=told)
    assert view.ending(ended).splitlines()[-1] == f"graph: {told}"


def test_rows_of_a_table_cannot_be_replayed():
    """Refused once the model is known; without such a table, or on one rank, which has all rows, it is not."""
    recipe = recipe_of(parallel={"shard_tables_above": 1})
    with pytest.raises(RecipeError, match=r"rows of model.embed_tokens.weight .* parallel.shard_tables_above: null"):
        require_no_tables(recipe, build_on_meta(recipe), world=2)
    require_no_tables(recipe, build_on_meta(recipe), world=1)
    recipe = recipe_of()
    require_no_tables(recipe, build_on_meta(recipe), world=2)
