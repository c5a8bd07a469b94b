"""Calls with some of the queries: their outputs and gradients are those rows of the call with all of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import require_equal_up_to_rounding
from torch.nn.attention.flex_attention import create_block_mask

from patchgen.runtime import attention_backends
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.attention_calls import Attention, Documents, dense_mask, parts_of_documents, visible
from patchgen.runtime.parallel import gathered_keys

B, S, N_Q, N_K, D = 2, 12, 4, 2, 8
CHUNKS = [(0, 5), (3, 8), (8, 12), (11, 12), (0, 12)]
DOCUMENTS = Documents(torch.tensor([0, 4, 9, 12, 13, 24], dtype=torch.int32), 11)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


PADDING = torch.ones(B, S, dtype=torch.bool)
PADDING[0, :3] = PADDING[1, 9:] = False
TRIANGLE = torch.ones(S, S, dtype=torch.bool).tril()
OVERLAY = TRIANGLE | (_normal(B, 1, S, S) > 1)  # some keys that are later

CALLS = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": 3},
    "window of both sides": {"window": 3, "causal": False, "documents": DOCUMENTS},
    "documents": {"documents": DOCUMENTS},
    "documents, full": {"documents": DOCUMENTS, "causal": False},
    "padding": {"padding": PADDING, "window": 7},
    "soft cap": {"softcap": 2.0, "documents": DOCUMENTS},
    "sinks": {"sinks": _normal(N_Q), "window": 5},
    "mask": {"overlay": OVERLAY},
    "bias": {"overlay": _normal(1, N_Q, S, S)},
}
SUPPORTED = [
    (name, what)
    for name in ("patchgen_eager", "patchgen_sdpa", "patchgen_flex_attention")
    for what, options in CALLS.items()
    if {*Attention(**{"causal": True, "scaling": 0.3, **options}).features} <= BACKENDS[name].features
]


def _compare(backend, call: Attention, chunk: tuple[int, int], *, differentiable: bool = True, rows: int = B) -> None:
    """One chunk of queries against all queries: outputs, and gradients if only that chunk's outputs count."""
    first, end = chunk
    states = [_normal(rows, S, heads, size) for heads, size in ((N_Q, D), (N_K, D), (N_K, D))]
    direction = _normal(rows, end - first, N_Q, D)
    found = []
    for queries in (None, chunk):
        q, k, v = (tensor.clone().requires_grad_(differentiable) for tensor in states)
        if queries is None:
            out = backend(q, k, v, call)[:, first:end]
        else:
            out = backend(q[:, first:end], k, v, replace(call, queries=queries))
        if differentiable:
            (out * direction).sum().backward()
        found.append([out.detach(), *(tensor.grad for tensor in (q, k, v) if differentiable)])
    for expected, actual in zip(*found, strict=True):
        require_equal_up_to_rounding(actual, expected)


@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
@pytest.mark.parametrize(("name", "what"), SUPPORTED)
def test_some_queries_get_the_rows_of_all(name, what, chunk):
    call = Attention(**{"causal": True, "scaling": 0.3, **CALLS[what]})
    # Torch has no backward of flex attention on the CPU.
    _compare(BACKENDS[name].function, call, chunk, differentiable=name != "patchgen_flex_attention")


def test_rows_of_a_block_mask_are_made_once():
    mask = create_block_mask(lambda b, h, q, k: OVERLAY[b, 0, q, k], B, None, S, S, device="cpu")
    call = Attention(causal=True, scaling=0.3, overlay=mask)
    _compare(BACKENDS["patchgen_flex_attention"].function, call, (3, 8), differentiable=False)
    rows = attention_backends._rows_of_blocks(mask, 3, 8)
    assert rows is attention_backends._rows_of_blocks(mask, 3, 8)


def test_causal_queries_read_no_keys_after_them():
    """Not even masked ones: a NaN in them would reach the sum."""
    states = [_normal(B, S, heads, D) for heads in (N_Q, N_K, N_K)]
    for tensor in states[1:]:
        tensor[:, 8:] = torch.nan
    call = Attention(causal=True, scaling=0.3, queries=(3, 8))
    for name in ("patchgen_eager", "patchgen_sdpa", "patchgen_flex_attention"):
        assert BACKENDS[name].function(states[0][:, 3:8], *states[1:], call).isfinite().all()


# ------------------------------------------------------------------------------------------- varlen kernels


def kernel(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
):
    """What flash-attn computes: in each document the last query is aligned with the last key."""
    assert int(cu_seqlens_q[-1]) == q.shape[0] and int(cu_seqlens_k[-1]) == k.shape[0]
    out = []
    for (q0, q1), (k0, k1) in zip(
        *(bounds.unfold(0, 2, 1).tolist() for bounds in (cu_seqlens_q, cu_seqlens_k)), strict=True
    ):
        assert 0 <= q1 - q0 <= max_seqlen_q and 0 <= k1 - k0 <= max_seqlen_k
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)[None]
        left, right = window_size
        sees = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            sees &= distance >= 0
        if left >= 0:
            sees &= distance <= left
        if right >= 0:
            sees &= distance >= -right
        repeats = q.shape[1] // k.shape[1]
        keys, values = (t[k0:k1].repeat_interleave(repeats, dim=1).transpose(0, 1) for t in (k, v))
        scores = q[q0:q1].transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
        out.append((scores.masked_fill(~sees, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


def varlen(q, k, v, call: Attention):
    """The path of `flash_2` to `flash_4`, with the kernel above."""
    return attention_backends._flattened(attention_backends._flash(kernel, call), q, k, v, call, pad_values=True)


@st.composite
def varlen_calls(draw):
    rows = draw(st.integers(1, 3))
    cuts = draw(st.none() | st.sets(st.integers(1, rows * S - 1), max_size=6))
    documents = None
    if cuts is not None:
        bounds = sorted({*cuts, *range(0, rows * S + 1, S)})
        # An empty document: the padding entry of a full tower, for one.
        bounds += bounds[-1:] if draw(st.booleans()) else []
        longest = max(b - a for a, b in itertools.pairwise(bounds))
        documents = Documents(torch.tensor(bounds, dtype=torch.int32), longest)
    first = draw(st.integers(0, S - 1))
    call = Attention(
        causal=draw(st.booleans()),
        scaling=0.3,
        window=draw(st.none() | st.integers(1, S + 1)),
        documents=documents,
    )
    return rows, (first, draw(st.integers(first + 1, S))), call


@settings(max_examples=150)
@given(varlen_calls())
def test_kernels_that_align_last_tokens_get_bounds_of_some_queries(case):
    """Outputs and gradients, through the path of the flash kernels, against dense masks."""
    rows, (first, end), call = case
    states = [_normal(rows, S, heads, D) for heads in (N_Q, N_K, N_K)]
    direction = _normal(rows, end - first, N_Q, D)
    found = []
    for compute in (attention_backends.eager, varlen):
        q, k, v = (tensor.clone().requires_grad_() for tensor in states)
        out = compute(q[:, first:end], k, v, replace(call, queries=(first, end)))
        (out * direction).sum().backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for expected, actual in zip(*found, strict=True):
        # Gradients of scores cancel where a query sees one key.
        require_equal_up_to_rounding(actual, expected, floor=1.0)


@settings(max_examples=150)
@given(varlen_calls())
def test_bounds_give_each_query_the_keys_of_the_dense_mask(case):
    """Row by row of the mask of all queries, without a window, which kernels apply themselves."""
    rows, (first, end), call = case
    call = replace(call, window=None)
    documents = call.documents or attention_backends.rows_as_documents(rows, S, torch.device("cpu"))
    chunk = replace(call, queries=(first, end))
    of_queries, of_keys = parts_of_documents(documents, S, chunk)
    seen = torch.zeros(rows * (end - first), rows * chunk.keys_seen(S), dtype=torch.bool)
    pairs = zip(*(part.bounds.unfold(0, 2, 1).tolist() for part in (of_queries, of_keys)), strict=True)
    for (q0, q1), (k0, k1) in pairs:
        for query in range(q0, q1):
            seen[query, k0 : k1 - (q1 - 1 - query) if call.causal else k1] = True
    by_row = torch.stack(
        [block.chunk(rows, dim=1)[row] for row, block in enumerate(seen.chunk(rows))]
    )  # what a row sees of its own
    expected = visible(call, rows, S, torch.device("cpu")).expand(rows, 1, S, S)[:, 0, first:end]
    assert int(seen.sum()) == int(expected.sum())
    assert torch.equal(by_row, expected[..., : chunk.keys_seen(S)])
    mask = dense_mask(chunk, rows, S, torch.device("cpu"))
    assert mask is None or torch.equal(mask.expand(rows, 1, -1, -1)[:, 0], by_row)


# ---------------------------------------------------------------------------------------- parts of the queries


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 5))
def test_parts_divide_the_queries_and_the_work_of_causal_attention(g, u, s):
    """Every token is in one part, the parts are of one size, and each slice's tokens are found; keys seen differ by no more than
    the rounding of chunks."""
    n = u * g
    S = n * s
    parts = [gathered_keys.chunks_of(part, g, S) for part in range(g)]
    tokens = [[t for first, end in chunks for t in range(first, end)] for chunks in parts]
    assert sorted(itertools.chain(*tokens)) == list(range(S))
    assert {len(part) for part in tokens} == {u * s} and all(part == sorted(part) for part in tokens)
    work = [sum(t + 1 for t in part) for part in tokens]
    assert max(work) - min(work) <= S
    for rank in range(n):
        for chunks, part in zip(parts, tokens, strict=True):
            local = [t + rank * s for f, e in gathered_keys.spans_within(chunks, rank, s) for t in range(f, e)]
            assert local == [t for t in part if rank * s <= t < (rank + 1) * s]


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["plain", "full", "window", "window of both sides", "documents", "documents, full"])
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "patchgen_eager"])
def test_kernels_give_some_queries_the_rows_of_all(name, what):
    """In bf16, no further from eager attention in fp32 than the kernel with all queries is; gradients too."""
    if BACKENDS[name].unavailable() is not None:
        pytest.skip(BACKENDS[name].unavailable())
    rows, length, heads, size = 2, 512, (4, 2, 2), 64
    bounds = torch.tensor([0, 100, 350, 512, 513, 1024], dtype=torch.int32, device="cuda")
    options = dict(CALLS[what])
    if "documents" in options:
        options["documents"] = Documents(bounds, 511)
    if "window" in options:
        options["window"] = 60
    call = Attention(**{"causal": True, "scaling": size**-0.5, **options})
    states = [_normal(rows, length, count, size).cuda().bfloat16() for count in heads]
    for chunk in ((0, 200), (200, 400), (330, 512)):
        first, end = chunk
        direction = _normal(rows, end - first, heads[0], size).cuda()
        runs = [
            (attention_backends.eager, torch.float32, None),
            *((BACKENDS[name].function, torch.bfloat16, c) for c in (None, chunk)),
        ]
        found = []
        for compute, dtype, queries in runs:
            q, k, v = (tensor.to(dtype, copy=True).requires_grad_() for tensor in states)
            if queries is None:
                out = compute(q, k, v, call)[:, first:end]
            else:
                out = compute(q[:, first:end], k, v, replace(call, queries=queries))
            (out * direction).sum().backward()
            found.append(SimpleNamespace(out=out.detach(), q=q.grad, k=k.grad, v=v.grad))
        exact, whole, part = found
        for which in ("out", "q", "k", "v"):
            e, w, p = (getattr(run, which).float() for run in (exact, whole, part))
            assert (p - e).norm() <= 1.5 * (w - e).norm() + 1e-6 * e.norm(), (chunk, which)
