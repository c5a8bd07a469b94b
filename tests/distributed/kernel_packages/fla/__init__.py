"""A stand-in for flash-linear-attention on the CPU: its signatures, upstream's torch forms for one document at a time."""

from __future__ import annotations

import inspect
import itertools

import torch


def _by_document(form, q, k, v, g, beta, cu_seqlens, **options):
    """As the package: one row when documents are given, and tokens behind the last bound are not computed."""
    if cu_seqlens is None:
        return form(q, k, v, g=g, beta=beta, **options)
    if q.shape[0] != 1:
        raise ValueError(f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`.")
    bounds = cu_seqlens.tolist()
    parts = [
        form(*(x[:, a:b] for x in (q, k, v)), g=g[:, a:b], beta=beta[:, a:b], **options)[0]
        for a, b in itertools.pairwise(bounds)
    ]
    rest = v.new_zeros(1, v.shape[1] - bounds[-1], *v.shape[2:])
    return torch.cat([*parts, rest], dim=1), None


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    form = inspect.unwrap(torch_chunk_gated_delta_rule)
    return _by_document(
        form, q, k, v, g, beta, cu_seqlens, chunk_size=4, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )


def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    form = inspect.unwrap(chunk_kimi_delta_attention)
    return _by_document(
        form, q, k, v, g, beta, cu_seqlens, chunk_size=4, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
