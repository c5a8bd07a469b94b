"""The loss of routers: upstream's number on each row without its padding, in every layout."""

from __future__ import annotations

import cases_router_loss as cases
import cases_trainer
import pytest
import torch

from patchgen import pipeline, provenance, upstream
from patchgen.runtime.train.feed import micro_batches_per_step
from patchgen.runtime.train.recipe import RecipeError
from patchgen.runtime.verify.layout import Layout
from patchgen.runtime.verify.two_ranks import compare


@pytest.mark.parametrize("told_by", ["real_tokens", "attention_mask"])
@pytest.mark.parametrize(
    ("sp", "scope", "micro_batches"),
    [(1, "row", 1), (2, "row", 1), (2, "row", 2), (4, "row", 1), (4, "row", 4), (1, "global", 1), (4, "global", 1)],
)
def test_it_is_upstreams_on_what_is_no_padding(sp, scope, micro_batches, told_by, four_ranks):
    four_ranks.run(cases.layouts_agree, sp, scope, micro_batches, told_by)


@pytest.mark.parametrize("scope", ["row", "global"])
def test_one_rank_with_all_rows(scope, one_rank):
    one_rank.run(cases.layouts_agree, 1, scope, 1, "real_tokens")


def test_what_cannot_be_computed_is_refused(one_rank):
    uncounted, accumulated, mask, tokens, direct = one_rank.run(cases.refusals)[0]
    assert "num_tokens=loss.count_tokens" in uncounted
    assert "cannot be accumulated over 2 micro-batches" in accumulated
    assert "real_tokens (2, 3) does not mark the padding of 2 rows of 4 tokens" in mask
    assert "do not match 2 rows of 3 tokens" in tokens
    assert "ops.router_loss" in direct


def test_loads_of_the_whole_step_are_not_accumulated():
    assert micro_batches_per_step(4, 2) == 2
    assert micro_batches_per_step(4, 4, router_loss="global") == 1
    with pytest.raises(RecipeError, match="router_loss = global .* Make batches_per_step 2"):
        micro_batches_per_step(4, 2, router_loss="global")


def test_documents_computed_apart_are_one_packed_row(tmp_path, one_rank):
    """Jamba's recurrence is not told where documents end: each has a row of its own, and the loads are the packed row's."""
    provenance.write(pipeline.generate(upstream.load("jamba")), tmp_path)
    row = one_rank.run(compare, tmp_path, "JambaForCausalLM", Layout(1, fsdp=True), separates=True)[0]
    assert not row.get("reason") and row["packed_gradients"] < 1e-5, row


# ------------------------------------------------------------------------------------------- one recipe

ON = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
LAYOUTS = {  # name: ranks, sizes
    "one rank": (1, {}),
    "two ranks, FSDP": (2, {}),
    "two ranks, SP2": (2, {"sp": 2}),
    "FSDP": (4, {}),
    "EP4": (4, {"ep": 4}),
    "SP4": (4, {"sp": 4}),
    "EP2 x SP2": (4, {"ep": 2, "sp": 2}),
    "EP4 over SP2": (4, {"ep": 4, "sp": 2}),
    "replicas, EP2": (4, {"dp_replicate": 2, "ep": 2}),
}


def curve(folder, directory, layout, pools, *, pad, scope="row", steps=10) -> list[float]:
    """The losses of a recipe: 4 rows a step, accumulated where there are fewer batch groups, of unlike lengths."""
    ranks, sizes = LAYOUTS[layout]
    values = cases_trainer.recipe_of(
        folder,
        model={"overrides": ON},
        data={"pad_batches": pad},
        parallel=sizes,
        train={"steps": steps, "batches_per_step": 4, "router_loss": scope},
        log={"directory": str(directory / f"{layout}, {pad}, {scope}")},
    )
    return pools[ranks].run(cases_trainer.train, values, timeout=900)[0][0]


def require_equal(curves: dict[tuple[str, bool], list[float]]) -> None:
    expected = curves["one rank", False]
    assert expected[-1] < expected[0]
    for name, losses in curves.items():
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.fixture
def pools(one_rank, two_ranks, four_ranks):
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


def test_ten_steps_of_a_recipe_are_the_same_in_every_layout_with_and_without_padding(trainer_folder, tmp_path, pools):
    runs = [("one rank", False), ("one rank", True), ("two ranks, SP2", False), ("FSDP", False), ("EP2 x SP2", True)]
    require_equal({(name, pad): curve(trainer_folder, tmp_path, name, pools, pad=pad) for name, pad in runs})


@pytest.mark.slow
def test_ten_steps_of_a_recipe_in_all_layouts(trainer_folder, tmp_path, pools):
    runs = [(name, pad) for name in LAYOUTS for pad in (False, True)]
    require_equal({(name, pad): curve(trainer_folder, tmp_path, name, pools, pad=pad) for name, pad in runs})


def test_loads_of_the_whole_step_are_another_loss_and_the_same_with_padding(trainer_folder, tmp_path, pools):
    plain, padded = (
        curve(trainer_folder, tmp_path, "FSDP", pools, pad=pad, scope="global", steps=3) for pad in (False, True)
    )
    torch.testing.assert_close(plain, padded, rtol=1e-6, atol=0)
    rows = curve(trainer_folder, tmp_path, "FSDP", pools, pad=False, steps=3)
    assert abs(rows[0] - plain[0]) > 1e-4
