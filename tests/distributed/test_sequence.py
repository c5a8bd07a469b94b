"""Sequence parallelism on real ranks: slices of a sequence against the whole sequence on one."""

from __future__ import annotations

import cases_sequence as cases
import pytest

from patchgen import pipeline, provenance, upstream
from patchgen.runtime.verify import given_config
from patchgen.runtime.verify.layout import Layout
from patchgen.runtime.verify.two_ranks import compare

ATTENTION = [
    # name, (query heads, key heads), (head size, value head size), packed, options
    pytest.param("patchgen_eager", (4, 4), (8, 8), False, {}, id="eager"),
    pytest.param("patchgen_eager", (8, 2), (8, 8), True, {}, id="eager-packed-few-keys"),
    pytest.param("patchgen_eager", (4, 1), (8, 8), True, {"sliding_window": 3, "with_sinks": True}, id="eager-sinks"),
    pytest.param("patchgen_eager", (4, 2), (8, 8), True, {"softcap": 2.0, "is_causal": False}, id="eager-cap-full"),
    pytest.param("patchgen_sdpa", (4, 2), (8, 8), False, {}, id="sdpa"),
    pytest.param("patchgen_sdpa", (12, 6), (8, 8), True, {"scaling": 0.3}, id="sdpa-six-keys"),
    pytest.param("patchgen_sdpa", (4, 4), (12, 8), True, {"sliding_window": 4}, id="sdpa-latent-window"),
    pytest.param("patchgen_flex_attention", (4, 2), (8, 8), True, {"softcap": 2.0}, id="flex-cap"),
    pytest.param("patchgen_flex_attention", (4, 1), (8, 8), True, {"sliding_window": 3}, id="flex-window"),
]


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
            "factor": 4.0,
            "original_max_position_embeddings": 12,
        },
        {"rope_type": "dynamic", "factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_angles_of_slices_are_chosen_by_the_length_of_the_row(rope, two_ranks):
    two_ranks.run(cases.frequencies_are_those_of_the_rows_length, {**rope, "rope_theta": 10000.0})


@pytest.mark.parametrize("world", [2, 4])
def test_exchange_round_trip(world, two_ranks, four_ranks):
    (two_ranks if world == 2 else four_ranks).run(cases.exchange_round_trip)


def test_slices_are_told_from_wholes(two_ranks):
    two_ranks.run(cases.slices_are_told_from_wholes)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("name", "heads", "head_sizes", "packed", "options"), ATTENTION)
@pytest.mark.sampled(3)
def test_attention_over_slices_equals_attention_over_the_whole(
    name, heads, head_sizes, packed, options, world, two_ranks, four_ranks
):
    pool = two_ranks if world == 2 else four_ranks
    pool.run(cases.attention_agrees, name, heads, head_sizes, packed, **options)


@pytest.mark.parametrize(
    ("heads", "groups", "used"),
    [
        pytest.param((8, 4), 2, 2, id="two-groups"),
        pytest.param((16, 8), 4, 4, id="four-groups"),
        pytest.param((8, 4), 3, 2, id="as-many-as-divide"),
        pytest.param((8, 1), 2, 1, id="one-key-head"),
    ],
)
def test_heads_that_travel_in_groups_give_the_same(heads, groups, used, two_ranks):
    """Packed, sinks, window, grouped-query heads; outputs and gradients against one rank."""
    two_ranks.run(
        cases.attention_agrees,
        *("patchgen_eager", heads, (8, 8), True, groups, used),
        sliding_window=7,
        with_sinks=True,
    )


FEWER_HEADS = [
    # name, (query heads, key heads), (head size, value head size), packed, options
    pytest.param("patchgen_eager", (1, 1), (8, 8), False, {}, id="one-head"),
    pytest.param("patchgen_sdpa", (1, 1), (8, 8), False, {}, id="one-head-sdpa"),
    pytest.param("patchgen_sdpa", (3, 1), (12, 8), True, {"sliding_window": 4}, id="three-heads-window"),
    pytest.param("patchgen_sdpa", (3, 3), (8, 8), False, {"padded": 5}, id="three-heads-padding"),
    pytest.param("patchgen_eager", (6, 2), (8, 8), True, {"with_sinks": True, "softcap": 2.0}, id="six-heads-sinks"),
    pytest.param("patchgen_eager", (2, 1), (8, 8), False, {"padded": 3, "with_sinks": True}, id="two-heads-padding"),
    pytest.param(
        "patchgen_eager", (6, 3), (8, 8), True, {"is_causal": False, "sliding_window": 6}, id="six-heads-full"
    ),
    pytest.param("patchgen_sdpa", (3, 1), (8, 8), False, {"overlay": True}, id="three-heads-mask"),
    pytest.param("patchgen_sdpa", (1, 1), (8, 8), True, {"overlay": True}, id="one-head-mask-packed"),
    pytest.param("patchgen_flex_attention", (3, 1), (8, 8), True, {"softcap": 2.0}, id="three-heads-flex"),
    pytest.param("patchgen_flex_attention", (6, 2), (8, 8), False, {"overlay": True}, id="six-heads-flex-mask"),
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("name", "heads", "head_sizes", "packed", "options"), FEWER_HEADS)
@pytest.mark.sampled(3)
def test_heads_that_ranks_do_not_divide_share_queries(
    name, heads, head_sizes, packed, options, world, two_ranks, four_ranks
):
    """Outputs and gradients against one rank; documents cross chunks."""
    pool = two_ranks if world == 2 else four_ranks
    pool.run(cases.attention_agrees, name, heads, head_sizes, packed, **options)


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_heads_shares_a_sequence(world, two_ranks, four_ranks):
    (two_ranks if world == 2 else four_ranks).run(cases.fewer_heads_agree)


def test_slices_of_one_token_have_empty_chunks(four_ranks):
    four_ranks.run(cases.one_token_of_each_rank)


def test_lengths_of_a_slice_are_refused(two_ranks):
    two_ranks.run(cases.lengths_of_a_slice_are_refused)


def test_towers_that_were_not_sliced_are_refused(two_ranks):
    two_ranks.run(cases.towers_that_were_not_sliced_are_refused)


@pytest.mark.parametrize(("world", "heads", "key_heads"), [(2, 1, 1), (2, 3, 1), (4, 6, 2)])
def test_a_model_whose_heads_ranks_do_not_divide_agrees_with_upstream(
    world, heads, key_heads, two_ranks, four_ranks, tmp_path
):
    """Loss and every gathered gradient, plain and packed, against upstream on one rank."""
    provenance.write(pipeline.generate(upstream.load("qwen3")), tmp_path)
    given_config.write(tmp_path, None, [f"num_attention_heads={heads}", f"num_key_value_heads={key_heads}"])
    pool = two_ranks if world == 2 else four_ranks
    row, *_ = pool.run(compare, tmp_path, "Qwen3ForCausalLM", Layout(world, sp=world, fsdp=True))
    assert row.get("reason", "") == "" and max(row["gradients"], row["packed_gradients"]) < 1e-4, row
