"""Models on real ranks against upstream's own class in one process: loss, every gradient, norm, three AdamW steps.

The full matrix (models x layouts x packing x accumulation on 4 ranks, and 8 ranks) is slow: `make test-parallel`. Each
run takes every layout with every other model, with packing and accumulation alternating so that all pairs occur.
"""

from __future__ import annotations

import cases_models as cases
import cases_one_backward
import pytest

from patchgen.runtime.verify import media_ranks

DENSE = ["qwen3", "llama"]
EXPERTS = ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"]
LAYOUTS = {  # of 4 ranks
    "FSDP": {},
    "HSDP": {"dp_replicate": 2},
    "EP2": {"ep": 2},
    "EP4": {"ep": 4},
    "SP2": {"sp": 2},
    "SP4": {"sp": 4},
    "EP2 x SP2": {"ep": 2, "sp": 2},
    "EP4 over SP2": {"ep": 4, "sp": 2},
    "EP4 over SP4": {"ep": 4, "sp": 4},
    "HSDP x EP2": {"dp_replicate": 2, "ep": 2},
    "HSDP x SP2": {"dp_replicate": 2, "sp": 2, "ep": 2},
}


def _has_experts(name: str) -> bool:
    return name not in DENSE


def _matrix(models: list[str], thin: bool):
    for row, name in enumerate(models):
        for column, (label, layout) in enumerate(LAYOUTS.items()):
            if "ep" in layout and not _has_experts(name):
                continue
            for packed in (False, True):
                for micro_batches in (1, 4):
                    place = 2 * packed + (micro_batches == 4)
                    if thin and ((row + column) % 2 or place != (row + column) // 2 % 4):
                        continue
                    words = (name, label, "packed" if packed else "rows", f"{micro_batches} micro-batches")
                    yield pytest.param(
                        name, layout | {"packed": packed, "micro_batches": micro_batches}, id=", ".join(words)
                    )


@pytest.mark.parametrize(("name", "options"), _matrix(["qwen3", *EXPERTS, "qwen3_moe_router_loss"], thin=True))
@pytest.mark.sampled(3)
def test_four_ranks_agree_with_one(name, options, four_ranks):
    four_ranks.run(cases.agrees, name, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), _matrix([*DENSE, *EXPERTS, "qwen3_moe_router_loss", "mixtral"], thin=False)
)
def test_four_ranks_agree_with_one_in_the_full_matrix(name, options, four_ranks):
    four_ranks.run(cases.agrees, name, **options)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"ep": 4, "sp": 2},
        {"ep": 2, "sp": 4},
        {"ep": 8, "sp": 2},
        {"dp_replicate": 2, "ep": 2, "sp": 2},
        {"dp_replicate": 2, "ep": 4, "sp": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_moe_router_loss"])
def test_eight_ranks_agree_with_one(name, layout, packed, eight_ranks):
    eight_ranks.run(cases.agrees, name, packed=packed, **layout)


@pytest.mark.slow
def test_fewer_experts_than_shards_are_cut_inside(eight_ranks):
    """Two experts per rank in four shards: FSDP cuts them along another dimension."""
    eight_ranks.run(cases.agrees, "gpt_oss", ep=2, sp=2)
    eight_ranks.run(cases.agrees, "mixtral", ep=2, meta=True)


OPTIONS = {
    "checkpointing": {"checkpoint": "full"},
    "selective checkpointing": {"checkpoint": "selective"},
    "activations in host memory": {"checkpoint": "offload"},
    "parameters kept after forward": {"reshard_after_forward": False},
    "two layers gathered ahead": {"prefetch": 2},
    "built on meta": {"meta": True},
    "host memory": {"cpu_offload": True},
    "bounded exchange": {"expert_capacity": 200},
    "peer memory": {"expert_exchange": "peer_memory"},
    "peer memory, checkpointing": {"expert_exchange": "peer_memory", "checkpoint": "full"},
    "peer memory, selective checkpointing": {"expert_exchange": "peer_memory", "checkpoint": "selective"},
    "sdpa": {"attention_name": "patchgen_sdpa"},
}


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(name, option, marks=pytest.mark.slow if name == "qwen3_next" and number % 2 else ())
        for name in ("qwen3_moe", "qwen3_next")
        for number, option in enumerate(OPTIONS)
    ],
)
@pytest.mark.sampled(3)
def test_options_change_no_number(name, option, two_ranks):
    two_ranks.run(cases.agrees, name, sp=2, ep=2, packed=True, **OPTIONS[option])


@pytest.mark.parametrize("reduce_last", ["replicas", "shards too"])
def test_gradients_may_be_reduced_in_the_last_micro_batch_only(reduce_last, four_ranks):
    four_ranks.run(cases.agrees, "qwen3_moe", dp_replicate=2, ep=2, micro_batches=4, reduce_last=reduce_last)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_compiled_layers_change_no_number(name, two_ranks):
    layout = {"sp": 2} if name in DENSE else {"sp": 2, "ep": 2}
    two_ranks.run(cases.agrees, name, compile_layers=True, attention_name="patchgen_sdpa", packed=True, **layout)


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize(
    ("name", "attention_name"),
    [
        ("qwen3", "patchgen_eager"),
        ("qwen3", "patchgen_sdpa"),
        ("qwen3", "patchgen_flex_attention"),
        ("gpt_oss", "patchgen_eager"),
        ("qwen3_next", "patchgen_sdpa"),
        ("deepseek_v3", "patchgen_sdpa"),
    ],
)
@pytest.mark.sampled(3)
def test_documents_stay_apart(name, attention_name, sp, two_ranks):
    two_ranks.run(cases.documents_stay_apart, name, attention_name, sp)


def test_frozen_parameters_stay(two_ranks):
    two_ranks.run(cases.frozen_parameters_stay, "qwen3_moe")


def test_half_precision_is_near(two_ranks):
    loss_error, norm_error = two_ranks.run(cases_one_backward.half_precision_is_near, "qwen3_moe")[0]
    assert loss_error < 5e-3
    assert norm_error < 2e-2


@pytest.mark.parametrize("accumulate_unsharded", [False, True])
@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"ep": 4}, {"dp_replicate": 2}], ids=str)
@pytest.mark.sampled(3)
def test_an_exchange_sums_what_a_reduce_scatter_sums(layout, accumulate_unsharded, four_ranks):
    """In fp32 both, in the same or another order."""
    assert (
        max(
            four_ranks.run(
                cases_one_backward.an_exchange_sums_what_a_reduce_scatter_sums, accumulate_unsharded, **layout
            )
        )
        < 1e-6
    )


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
def test_every_token_goes_to_the_same_experts(checkpoint, two_ranks):
    two_ranks.run(cases_one_backward.every_token_goes_to_the_same_experts, "qwen3_moe", checkpoint)


def test_every_token_goes_to_the_same_experts_of_four_ranks(four_ranks):
    four_ranks.run(cases_one_backward.every_token_goes_to_the_same_experts, "qwen3_moe", "full")


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_padded_rows(name, sp, two_ranks):
    two_ranks.run(cases_one_backward.padded_rows_agree, name, sp)


def test_documents_that_a_run_computes_in_rows_of_their_own_are_compared_so(two_ranks):
    """As the proof in one process found of this model; its attention to compressed keys takes no bounds of documents."""
    packed: dict = {"fsdp": True, "cases": ("packed",), "separates": True}
    (equal,) = media_ranks.verify_on_ranks("deepseek_v4", two_ranks, sp=1, **packed)
    assert equal.reason == ""
    (sliced,) = media_ranks.verify_on_ranks("deepseek_v4", two_ranks, sp=2, **packed)
    assert sliced.reason == ""
    (joined,) = media_ranks.verify_on_ranks("deepseek_v4", two_ranks, sp=1, **packed | {"separates": False})
    assert joined.reason
