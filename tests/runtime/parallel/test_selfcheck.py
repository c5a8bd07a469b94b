"""Errors of a model under the check of slices: a row that it does not take is named, failures of the machine are not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from patchgen.runtime.parallel import ParallelConfig, selfcheck
from patchgen.runtime.parallel.state import ParallelState

FAILURES = [torch.OutOfMemoryError("out of memory"), dist.DistNetworkError("connection closed by peer")]
if hasattr(torch, "AcceleratorError"):
    FAILURES.append(torch.AcceleratorError("an illegal memory access was encountered", 700))


class Failing(nn.Module):
    """A model whose forward raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, **_inputs: object) -> None:
        raise self.error


@pytest.fixture
def state():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield ParallelState.create(ParallelConfig.for_world(1), "cpu")
    finally:
        dist.destroy_process_group()


def compare(error: Exception, state: ParallelState) -> None:
    selfcheck._require_equal_logits(Failing(error), state, {"input_ids": torch.ones(1, 4, dtype=torch.long)}, "")


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_failure_of_the_device_or_of_the_ranks_is_no_row_that_the_model_does_not_take(error, state):
    with pytest.raises(type(error)) as caught:
        compare(error, state)
    assert caught.value is error


def test_a_row_that_the_model_does_not_take_is_named_with_the_type_of_the_error(state):
    with pytest.raises(
        ValueError, match=r"does not take a row of 4 tokens with input_ids: KeyError: 'pixel_values'\."
    ):
        compare(KeyError("pixel_values"), state)
