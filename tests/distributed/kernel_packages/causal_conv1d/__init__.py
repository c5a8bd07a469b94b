"""A stand-in for causal-conv1d on the CPU: its signature, upstream's torch form for one document at a time."""

from __future__ import annotations

import inspect

import torch


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn as upstream

    form = inspect.unwrap(upstream)
    if seq_idx is None:
        return form(x, weight, bias, activation=activation)
    if seq_idx.shape != (x.shape[0], x.shape[2]) or seq_idx.dtype != torch.int32:
        raise ValueError("seq_idx must be (batch, seqlen), int32")
    rows = []
    for row, document in zip(x, seq_idx, strict=True):
        lengths = torch.unique_consecutive(document, return_counts=True)[1].tolist()
        parts = [form(part[None], weight, bias, activation=activation) for part in row.split(lengths, dim=1)]
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)
