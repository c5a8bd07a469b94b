"""Errors of a model under the check of slices: a row that it does not take is named, failures of the machine are not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import CLIPVisionConfig, PreTrainedConfig

from patchgen.runtime import minimal_media
from patchgen.runtime.parallel import ParallelConfig, peer_memory, selfcheck, slice_media
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.media import MediaMaker
from patchgen.runtime.verify.reference_model import ReferenceModel

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp"
FAILURES = [
    torch.OutOfMemoryError("out of memory"),
    dist.DistNetworkError("connection closed by peer"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."
    ),
    RuntimeError(f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"),
    RuntimeError(f"{GLOO}/pair.cc:537] Read error [127.0.0.1]:52944: Connection reset by peer."),
    RuntimeError(f"{GLOO}/pair.cc:547] Connection closed by peer [127.0.0.1]:52944."),
    RuntimeError("Application timeout caused pair closure"),
]
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


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: f"{type(error).__name__}: {str(error)[-30:]}")
def test_a_failure_of_the_device_or_of_the_ranks_is_no_row_that_the_model_does_not_take(error, state):
    with pytest.raises(type(error)) as caught:
        compare(error, state)
    assert caught.value is error


def test_a_row_that_the_model_does_not_take_is_named_with_the_type_of_the_error(state):
    with pytest.raises(
        ValueError, match=r"does not take a row of 4 tokens with input_ids: KeyError: 'pixel_values'\."
    ):
        compare(KeyError("pixel_values"), state)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: f"{type(error).__name__}: {str(error)[-30:]}")
def test_a_failure_of_the_device_or_of_the_ranks_is_no_image_that_the_model_does_not_take(error, state):
    model = FailingTower(error)
    with pytest.raises(type(error)) as caught:
        minimal_media.minimal_inputs(model.get_image_features, sp=1, like=torch.empty(0))
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        next(slice_media.media_rows(model, state, vocab_size=8, tokens_per_rank=4))
    assert caught.value is error


def test_an_image_that_the_model_does_not_take_is_a_warning_with_its_error(state):
    model = FailingTower(ValueError("no image of this size"))
    with pytest.warns(UserWarning, match="no small row is known .* ValueError: no image of this size"):
        assert not list(slice_media.media_rows(model, state, vocab_size=8, tokens_per_rank=4))


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: f"{type(error).__name__}: {str(error)[-30:]}")
def test_a_failure_of_the_device_or_of_the_ranks_is_no_batch_that_upstream_refuses(error):
    def fails(*_arguments: object) -> None:
        raise error

    maker = SimpleNamespace(count=fails)
    with pytest.raises(type(error)) as caught:
        MediaMaker._is_taken(maker, None)
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        ReferenceModel.refusal(SimpleNamespace(builder=SimpleNamespace(case=fails, run_upstream=fails)), "text", [])
    assert caught.value is error


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: f"{type(error).__name__}: {str(error)[-30:]}")
def test_a_failure_of_the_device_or_of_the_ranks_is_no_machine_on_which_ranks_share_no_memory(
    error, state, monkeypatch
):
    def fails(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(peer_memory, "allocate_shared", fails)
    with pytest.raises(type(error)) as caught:
        peer_memory.shards_use_collectives(state.dense_mesh["fsdp"], "peer_memory")
    assert caught.value is error
