"""Which errors are of the device or of the ranks, by their type or by what torch, Triton and gloo write."""

from __future__ import annotations

import pytest
import torch

from patchgen.runtime.failures import is_machine_failure, reraise_machine_failure


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes.",
        "Triton Error [CUDA]: out of memory",
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA driver error: out of memory",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1000ms for recv operation",
        "[../gloo/rendezvous/context.cc:30] connectFullMesh failed",
        "NCCL communicator was aborted on rank 1.",
    ],
)
def test_errors_of_the_device_and_of_the_ranks_are_told_by_their_messages(message):
    assert is_machine_failure(RuntimeError(message))
    assert not is_machine_failure(ValueError(message)), "a check of ours that quotes one is none"
    with pytest.raises(RuntimeError, match="^" if "[" in message else message[:20]):
        reraise_machine_failure(RuntimeError(message))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA driver error: operation not supported",
        "The size of tensor a (3) must match the size of tensor b (4)",
        "mat1 and mat2 shapes cannot be multiplied",
    ],
)
def test_other_errors_are_of_the_model_or_its_inputs(message):
    assert not is_machine_failure(RuntimeError(message))
    reraise_machine_failure(RuntimeError(message))


def test_a_size_that_no_machine_has_is_of_the_inputs_that_it_was_computed_from():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**16)
    assert not is_machine_failure(raised.value)
