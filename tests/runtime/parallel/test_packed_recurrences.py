"""Layers that mix tokens, on one rank; on several: tests/distributed/test_mixers.py."""

from __future__ import annotations

import itertools

import torch
from rounding import require_equal_up_to_rounding
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from patchgen.runtime import ops


def test_the_final_states_of_packed_rows_are_those_of_each_document():
    """As the kernels return that separate documents by themselves."""
    torch.manual_seed(0)
    tensors = {
        "query": torch.randn(1, 12, 2, 6),
        "key": torch.randn(1, 12, 2, 6),
        "value": torch.randn(1, 12, 2, 5),
        "g": -torch.rand(1, 12, 2),
        "beta": torch.rand(1, 12, 2),
    }
    bounds = [0, 5, 12]
    options = {"chunk_size": 4, "initial_state": None, "output_final_state": True}
    out, states = ops.delta_rule(
        torch_chunk_gated_delta_rule, **tensors, **options, cu_seqlens=torch.tensor(bounds, dtype=torch.int32)
    )
    documents = [
        torch_chunk_gated_delta_rule(**{name: tensor[:, start:end] for name, tensor in tensors.items()}, **options)
        for start, end in itertools.pairwise(bounds)
    ]
    require_equal_up_to_rounding(out, torch.cat([out for out, _ in documents], dim=1))
    require_equal_up_to_rounding(states, torch.cat([state for _, state in documents]))
