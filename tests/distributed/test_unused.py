"""Rows that leave parameters out on some ranks: the gradients and updates of one rank with all rows."""

from __future__ import annotations

import cases_unused as cases
import pytest
import torch

from patchgen.runtime.parallel import peer_units

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
EPSILON = {torch.float32: 2**-23, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("accumulate_unsharded", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        BF16 | {"shard_exchange": "collectives", "exchange_gradients": True},
        pytest.param(
            BF16 | {"shard_exchange": "peer_memory"},
            marks=pytest.mark.skipif(
                peer_units.IS_REBUILT, reason="torch rebuilt what units in peer memory read of FSDP2"
            ),
        ),
    ],
    ids=["fp32", "exchange", "peers"],
)
def test_updates_are_those_of_one_rank(accumulate_unsharded, options, two_ranks):
    dtype = options.get("param_dtype", torch.float32)
    for difference, counts in two_ranks.run(cases.updates_are_those_of_one_rank, accumulate_unsharded, **options):
        assert difference <= 8 * EPSILON[dtype]
        # Of 20: three are never used, and nine by no row of the last step, whose values and moments stay as they are.
        assert counts == [17, 17, 17, 8]


def test_adapters_that_a_row_leaves_out_are_summed(two_ranks):
    for difference, alike in two_ranks.run(cases.whole_parameters_are_summed):
        assert difference <= 8 * EPSILON[torch.float32]
        assert all(alike)


def test_a_row_without_a_window_leaves_nobody_waiting(two_ranks):
    for left_out, difference in two_ranks.run(cases.compressors_of_short_rows):
        assert left_out > 0
        assert difference <= 64 * EPSILON[torch.float32]


def test_ranks_that_run_different_modules_are_told_which(two_ranks):
    for message in two_ranks.run(cases.ranks_that_run_different_units):
        assert "number 2 of the step: rank 0: gather layers.0; rank 1: gather layers.1" in message
