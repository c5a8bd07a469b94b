"""What each rank does in the tests of convolution and recurrence over slices; see test_mixers.py."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from cases_sequence import state_of
from rounding import require_rounding
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from patchgen.runtime import ops, parallel

BOUNDS = (0, 3, 4, 13, 16, 24, 32)  # documents of two rows of 16
ROWS, LENGTH = 2, 16


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}


def _whole_by_document(call, tensors: dict[str, Tensor], along: dict[str, int], packed: bool, out_dim: int) -> Tensor:
    """The yardstick: upstream's function on each document alone."""
    parts = []
    for row in range(ROWS):
        inner = [bound - row * LENGTH for bound in BOUNDS if row * LENGTH <= bound <= (row + 1) * LENGTH]
        spans = list(itertools.pairwise(inner)) if packed else [(0, LENGTH)]
        pieces = []
        for start, end in spans:
            sliced = {
                name: t[row : row + 1].narrow(along[name], start, end - start) if name in along else t
                for name, t in tensors.items()
            }
            pieces.append(call(**sliced))
        parts.append(torch.cat(pieces, dim=out_dim))
    return torch.cat(parts)


def _agrees(whole_call, sliced_call, tensors, along, out_dim, packed, state) -> None:
    leaves = _leaves(tensors)
    expected = _whole_by_document(whole_call, leaves, along, packed, out_dim)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * direction).sum().backward()

    size, rank = state.sp, state.sp_rank
    mine = _leaves({n: t.chunk(size, dim=along[n])[rank] if n in along else t for n, t in tensors.items()})
    lengths = {"cu_seq_lens_q": torch.tensor(BOUNDS, dtype=torch.int32)} if packed else {}
    with parallel.using(state):
        got = sliced_call(**mine, **lengths)
    (got * direction.chunk(size, dim=out_dim)[rank]).sum().backward()
    require_rounding(got, expected.chunk(size, dim=out_dim)[rank])
    for name, leaf in mine.items():
        gradient = leaf.grad.clone()
        if name in along:
            full = leaves[name].grad.chunk(size, dim=along[name])[rank]
        else:
            dist.all_reduce(gradient, group=state.sp_group)
            full = leaves[name].grad
        require_rounding(gradient, full, what=name)


def convolution_agrees(packed: bool, sp: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "hidden_states": torch.randn(ROWS, 8, LENGTH, generator=generator),
        "weight": torch.randn(8, 3, generator=generator),
        "bias": torch.randn(8, generator=generator),
    }

    def whole(hidden_states, weight, bias):
        return causal_conv1d_fn(hidden_states, weight, bias, activation="silu")

    def sliced(hidden_states, weight, bias, **lengths):
        return ops.causal_conv1d(causal_conv1d_fn, hidden_states, weight, bias, activation="silu", **lengths)

    _agrees(whole, sliced, tensors, {"hidden_states": 2}, 2, packed, state_of(sp=sp))


def recurrence_agrees(packed: bool, sp: int, key_heads: int, value_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tensors = {
        "query": normal(ROWS, LENGTH, key_heads, 6),
        "key": normal(ROWS, LENGTH, key_heads, 6),
        "value": normal(ROWS, LENGTH, value_heads, 5),
        "g": -normal(ROWS, LENGTH, value_heads).abs(),
        "beta": normal(ROWS, LENGTH, value_heads).sigmoid(),
    }

    def whole(**inputs):
        return torch_chunk_gated_delta_rule(**inputs, chunk_size=4, use_qk_l2norm_in_kernel=True)[0]

    def sliced(query, key, value, g, beta, cu_seq_lens_q=None):
        out, state = ops.delta_rule(
            torch_chunk_gated_delta_rule,
            query,
            key,
            value,
            g=g,
            beta=beta,
            chunk_size=4,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seq_lens_q,
        )
        assert state is None
        return out

    _agrees(whole, sliced, tensors, dict.fromkeys(tensors, 1), 1, packed, state_of(sp=sp))
