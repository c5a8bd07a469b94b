"""Scans by heads: as in the package, `seq_idx` says which document each token belongs to."""

from __future__ import annotations

import inspect

import torch


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
):
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    if cu_seqlens is not None:
        raise ValueError("cu_seqlens is for the states of a decoding cache")
    if seq_idx is not None and (seq_idx.shape != x.shape[:2] or seq_idx.dtype != torch.int32):
        raise ValueError("seq_idx must be (batch, seqlen), int32")
    form = inspect.unwrap(mamba2_chunk_scan)
    more = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    rows = []
    for row in range(x.shape[0]):
        lengths = [x.shape[1]]
        if seq_idx is not None:
            lengths = torch.unique_consecutive(seq_idx[row], return_counts=True)[1].tolist()
        pieces = [t[row : row + 1].split(lengths, dim=1) for t in (x, dt, B, C)]
        rows.append(
            torch.cat(
                [form(x_, dt_, A, B_, C_, chunk_size, **more) for x_, dt_, B_, C_ in zip(*pieces, strict=True)], 1
            )
        )
    return torch.cat(rows)
