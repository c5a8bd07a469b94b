"""Errors of a model under the check of slices: a row that it does not take is named, failures of the machine are not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import CLIPVisionConfig, PreTrainedConfig

from patchgen.runtime import minimal_media
from patchgen.runtime.parallel import ParallelConfig, selfcheck, slice_media
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


class FailingTower(Failing):
    """A model whose image features raise."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.weight = nn.Parameter(torch.ones(1))
        self.config = PreTrainedConfig(vision_config=CLIPVisionConfig(image_size=32, patch_size=16))

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
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


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_failure_of_the_device_or_of_the_ranks_is_no_image_that_the_model_does_not_take(error, state):
    model = FailingTower(error)
    with pytest.raises(type(error)) as caught:
        minimal_media.minimal_inputs(model.get_image_features, sp=1, like=torch.empty(0))
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        next(slice_media.rows(model, state, vocab_size=8, tokens_per_rank=4))
    assert caught.value is error


def test_an_image_that_the_model_does_not_take_is_a_warning_with_its_error(state):
    model = FailingTower(ValueError("no image of this size"))
    with pytest.warns(UserWarning, match="no small row is known .* ValueError: no image of this size"):
        assert not list(slice_media.rows(model, state, vocab_size=8, tokens_per_rank=4))
