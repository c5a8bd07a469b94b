"""What upstream keeps in fp32 is stored, gathered, summed and updated in fp32 beside bf16 shards."""

from __future__ import annotations

import cases_kept_dtypes as cases
import pytest
import torch


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_a_step_on_narrow_shards(ranks, request):
    """FSDP2 refuses a unit of two dtypes; the numbers are those of one process."""
    for difference, dtypes, kept in request.getfixturevalue(ranks).run(cases.step_of_shards):
        assert difference < 1e-5
        assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == kept
        assert any(name.endswith("sinks") for name in kept)


@pytest.mark.parametrize(
    ("stored", "param_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16)],
)
def test_what_is_kept_beside_projections_is_computed_in_fp32(two_ranks, stored, param_dtype):
    for seen in two_ranks.run(cases.dtypes_in_the_forward, stored, param_dtype):
        assert seen == {torch.float32}
