"""Attention backends over the full sequence: pure functions of q, k, v and an `Attention` (`attention_calls.py`).

    B rows   S tokens per row   N_q, N_k query and key/value heads   D, D_v head sizes   T = B * S

Every backend takes q `(B, S, N_q, D)`, k `(B, S, N_k, D)`, v `(B, S, N_k, D_v)` and returns `(B, S, N_q, D_v)`. A call with
`attention.queries` has L of the S queries, and all keys.
`runtime/attention.py` connects them to transformers' interface and to the exchange of sequence parallelism.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from patchgen.kernels.packages import lacks_package
from patchgen.runtime.attention_calls import (
    FEATURES,
    FLOAT32,
    Attention,
    Documents,
    dense_mask,
    masks,
    parts_of_documents,
    rows_as_documents,
)
from patchgen.runtime.mask_functions import document_of


@dataclass(frozen=True)
class Backend:
    """A way to compute attention.

    Attributes:
        function: `(q, k, v, attention) -> out`.
        features: supported besides causal and full attention over documents.
        unavailable: returns why it cannot run here, or None.
        gpu_features: further features on a GPU.
        takes_blocks: it takes overlays as a BlockMask, not as a tensor.
        has_cpu_backward: whether it trains on a CPU, even on a machine with a GPU.
        max_head: the largest supported head size; None: any.
    """

    function: Callable[[Tensor, Tensor, Tensor, Attention], Tensor]
    features: frozenset[str]
    unavailable: Callable[[], str | None]
    gpu_features: frozenset[str] = frozenset()
    takes_blocks: bool = False
    has_cpu_backward: bool = False
    max_head: int | None = None

    def features_on(self, device_type: str) -> frozenset[str]:
        """The features supported on a device type."""
        return self.features | self.gpu_features if device_type == "cuda" else self.features


def repeat_heads(states: Tensor, N_q: int) -> Tensor:
    """Key/value heads `(B, S, N_k, D)` repeated to `(B, S, N_q, D)`."""
    return states if states.shape[2] == N_q else states.repeat_interleave(N_q // states.shape[2], dim=2)


def seen(states: Tensor, attention: Attention) -> Tensor:
    """The keys or values `(B, S, N_k, D)` that a call's queries may see, from the first."""
    return states[:, : attention.keys_seen(states.shape[1])]


def eager(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
    """The reference: softmax in fp32 over scores `(B, N_q, L, S)`; sinks join the softmax and are dropped from its result."""
    B, L, N_q, _ = q.shape
    mask = dense_mask(attention, B, k.shape[1], q.device)
    k, v = repeat_heads(seen(k, attention), N_q), repeat_heads(seen(v, attention), N_q)
    scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) * attention.scaling
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if attention.sinks is not None:
        sinks = attention.sinks if attention.sinks.ndim > 1 else attention.sinks.view(1, N_q, 1, 1)
        sinks = sinks.to(scores.dtype).expand(B, N_q, L, 1)
        weights = F.softmax(torch.cat([scores, sinks], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    else:
        weights = F.softmax(scores, dim=-1, dtype=torch.float32)
    weights = F.dropout(weights.to(q.dtype), p=attention.dropout)
    return torch.matmul(weights, v.transpose(1, 2)).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
    """`scaled_dot_product_attention`; plain causal rows need no mask and use its flash kernels.

    With a mask the key heads are repeated: its fused kernels take a mask or grouped heads, not both.
    """
    B, L, N_q, D = q.shape
    causal_rows = attention.is_plain and attention.causal
    mask: Any = None if causal_rows else dense_mask(attention, B, k.shape[1], q.device)
    k, v = seen(k, attention), seen(v, attention)
    if causal_rows and k.shape[1] > L:
        mask = causal_lower_right(L, k.shape[1])  # the last query sees the last key
    grouped = k.shape[2] != N_q and mask is None and D == v.shape[-1] <= 256
    if not grouped:
        k, v = repeat_heads(k, N_q), repeat_heads(v, N_q)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=attention.dropout,
        is_causal=mask is None and causal_rows and L > 1,
        scale=attention.scaling,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


_COMPILED_FLEX: list[Callable] = []


def flex(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
    """`flex_attention` with a block mask, built once per packed batch; sinks by renormalising with the log-sum-exp:
    `out * exp(lse) / (exp(lse) + exp(sink)) = out * sigmoid(lse - sink)`.

    Compiled on the GPU; the CPU runs torch's unfused form, which has no log-sum-exp for sinks.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    on_gpu = q.device.type == "cuda"
    if on_gpu and not _COMPILED_FLEX:
        _COMPILED_FLEX.append(torch.compile(flex_attention))
    cap, bias = attention.softcap, None
    mask: Any = attention.overlay
    if mask is None:
        mask = _block_mask(attention, q.shape[0], k.shape[1], q.device)
    elif isinstance(mask, Tensor):
        mask = dense_mask(attention, q.shape[0], k.shape[1], q.device)
        mask, bias = (_blocks_of(mask), None) if mask.dtype == torch.bool else (None, mask)
    elif attention.queries is not None:
        mask = _rows_of_blocks(mask, *attention.queries)
    k, v = seen(k, attention), seen(v, attention)

    def score_mod(score, batch, head, query, key):
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias is None else score + bias[(*_at(bias, batch, head), query, key)]

    compute: Callable[..., Any] = _COMPILED_FLEX[0] if on_gpu else flex_attention
    out = compute(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=score_mod if cap is not None or bias is not None else None,
        block_mask=mask,
        scale=attention.scaling,
        enable_gqa=k.shape[2] != q.shape[2],
        return_aux=AuxRequest(lse=True) if attention.sinks is not None else None,
    )
    if attention.sinks is not None:
        out, aux = out
        keep = torch.sigmoid(aux.lse - attention.sinks.float().view(1, -1, 1))
        out = out * keep.unsqueeze(-1).to(out.dtype)
    return out.transpose(1, 2)


def _at(per_head: Tensor, batch: Tensor, head: Tensor) -> tuple:
    """The indices of a batch row and a head in a tensor that may broadcast over either."""
    return (batch if per_head.shape[0] > 1 else 0, head if per_head.shape[1] > 1 else 0)


def _blocks_of(mask: Tensor):
    """A BlockMask from a dense mask `(B or 1, N_q or 1, S, keys)`, bool."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, heads, S, K = mask.shape

    def sees(batch, head, query, key):
        return mask[(*_at(mask, batch, head), query, key)]

    return create_block_mask(sees, rows, heads, S, K, device=mask.device)


def _rows_of_blocks(mask: Any, first: int, end: int):
    """The BlockMask of some queries of a BlockMask's rows, made once for all layers."""
    from torch.nn.attention.flex_attention import create_block_mask

    cache = masks(mask)
    if (first, end) not in cache:
        rows, heads, _, keys = mask.shape
        sees = mask.mask_mod  # not the mask, which the cache would keep alive
        device = mask.kv_indices.device
        offset = torch.full((), first, device=device)  # compiled code is for any tensor, but for one number
        cache[first, end] = create_block_mask(
            lambda batch, head, query, key: sees(batch, head, query + offset, key),
            *(rows, heads, end - first, keys),
            device=device,
        )
    return cache[first, end]


def _block_mask(attention: Attention, B: int, S: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    documents, padding, window = attention.documents, attention.padding, attention.window
    if documents is None and padding is None and window is None and not attention.causal:
        return None
    cache = masks(documents.bounds) if documents is not None and padding is None else {}
    key = ("block", B, S, attention.causal, window, attention.queries)
    first, end = attention.queries or (0, S)
    if key not in cache:
        document = document_of(documents.bounds, B, S) if documents is not None else None

        offset = torch.full((), first, device=device) if attention.queries is not None else None

        def sees(batch, _head, query, key_):
            query = query if offset is None else query + offset
            result = (query >= key_) if attention.causal else (query == query)
            if window is not None:
                result = result & ((query - key_).abs() < window)
            if document is not None:
                result = result & (document[batch, query] == document[batch, key_])
            if padding is not None:
                result = result & (padding[batch, key_] | (query == key_))
            return result

        rows = B if document is not None or padding is not None else None
        cache[key] = create_block_mask(sees, rows, None, end - first, attention.keys_seen(S), device=device)
    return cache[key]


def _flattened(call: Callable, q: Tensor, k: Tensor, v: Tensor, attention: Attention, *, pad_values: bool) -> Tensor:
    """Runs a varlen kernel on `(T, N, D)`; pads values to the query's head size if the kernel needs them equal.

    Args:
        call: `(q, k, v, documents of the queries, documents of the keys) -> out`.
    """
    B, L, N_q, D = q.shape
    S, D_v = k.shape[1], v.shape[-1]
    documents = attention.documents or rows_as_documents(B, S, q.device)
    of_queries = of_keys = documents
    if attention.queries is not None:
        first, end = attention.queries
        if attention.window is not None and not attention.causal:
            # A window of both sides is aligned by the last tokens of a document: it needs the queries after these.
            q = F.pad(q, (0, 0, 0, 0, first, S - end))
            return _flattened(call, q, k, v, replace(attention, queries=None), pad_values=pad_values)[:, first:end]
        of_queries, of_keys = parts_of_documents(documents, S, attention)
        k, v = seen(k, attention), seen(v, attention)
    if pad_values and D_v != D:
        v = F.pad(v, (0, D - D_v))
    out = call(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), of_queries, of_keys)
    return out[..., :D_v].view(B, L, N_q, D_v)


def _window(attention: Attention) -> tuple[int, int]:
    reach = -1 if attention.window is None else attention.window - 1
    return (reach, 0) if attention.causal else (reach, reach)


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`: the flash-attention 2 in torch."""
    from torch.nn.attention.varlen import varlen_attn

    # Later releases of torch need a flag for grouped heads; earlier ones have no such parameter.
    grouped = k.shape[2] != q.shape[2] and "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if grouped else {}

    def call(q_TND, k_TND, v_TND, of_queries: Documents, of_keys: Documents):
        return varlen_attn(
            q_TND,
            k_TND,
            v_TND,
            of_queries.bounds,
            of_keys.bounds,
            of_queries.longest,
            of_keys.longest,
            scale=attention.scaling,
            window_size=_window(attention),
            **options,
        )

    return _flattened(call, q, k, v, attention, pad_values=True)


def _flash(kernel: Callable[..., Any], attention: Attention, **options: Any) -> Callable[..., Tensor]:
    """A varlen kernel of flash-attn, 2 to 4, called for `attention`."""

    def call(q_TND, k_TND, v_TND, of_queries: Documents, of_keys: Documents):
        arguments = {
            "cu_seqlens_q": of_queries.bounds,
            "cu_seqlens_k": of_keys.bounds,
            "max_seqlen_q": of_queries.longest,
            "max_seqlen_k": of_keys.longest,
            "softmax_scale": attention.scaling,
            "causal": attention.causal,
            "window_size": _window(attention),
            "softcap": attention.softcap or 0.0,
        }
        out = kernel(q_TND, k_TND, v_TND, **arguments | options)
        return out[0] if isinstance(out, tuple) else out

    return call


def flash_2(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
    """`flash_attn.flash_attn_varlen_func`."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]  # of one's own

    call = _flash(flash_attn_varlen_func, attention, dropout_p=attention.dropout)
    return _flattened(call, q, k, v, attention, pad_values=True)


def flash_3(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
    """`flash_attn_interface.flash_attn_varlen_func` (Hopper)."""
    from flash_attn_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]  # of one's own

    return _flattened(_flash(flash_attn_varlen_func, attention), q, k, v, attention, pad_values=True)


def flash_4(q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
    """`flash_attn.cute.flash_attn_varlen_func`, called directly: torch's own activation of it fails in torch 2.11."""
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]  # of one's own

    left, right = _window(attention)
    window = None if left < 0 else left, None if right < 0 or attention.causal else right
    call = _flash(flash_attn_varlen_func, attention, window_size=window, learnable_sink=attention.sinks)
    # FA4 takes the head sizes of DeepSeek, (192, 128), as they are.
    return _flattened(call, q, k, v, attention, pad_values=(q.shape[-1], v.shape[-1]) != (192, 128))


def _needs(module: str, package: str) -> Callable[[], str | None]:
    """Why a backend that needs a CUDA device and `module` of `package` cannot run here, or None."""
    return functools.partial(lacks_package, module, package)


# The flash kernels, torch's included, only compute in 16 bits. Padding would need a host sync per layer to unpad: a padded
# batch is packed before training instead.
_FLASH = frozenset({"sliding window"})
FLASH_HEAD = 256
"""Flash kernels, torch's included, are compiled for heads of up to this size."""

BACKENDS: dict[str, Backend] = {
    "patchgen_eager": Backend(eager, frozenset(FEATURES), lambda: None, has_cpu_backward=True),
    "patchgen_sdpa": Backend(
        sdpa,
        frozenset({"sliding window", "dropout", "padding", "overlays", "two sequences", FLOAT32}),
        lambda: None,
        has_cpu_backward=True,
    ),
    "patchgen_flex_attention": Backend(
        flex,
        frozenset({"sliding window", "soft cap", "padding", "overlays", FLOAT32}),
        lambda: None,
        gpu_features=frozenset({"sinks"}),  # they need the log-sum-exp, which the CPU form does not return
        takes_blocks=True,
    ),
    "patchgen_flash_varlen": Backend(
        torch_varlen, _FLASH, _needs("torch.nn.attention.varlen", "torch"), max_head=FLASH_HEAD
    ),
    "patchgen_flash_attention_2": Backend(
        flash_2, _FLASH | {"soft cap", "dropout"}, _needs("flash_attn.bert_padding", "flash-attn"), max_head=FLASH_HEAD
    ),
    "patchgen_flash_attention_3": Backend(
        flash_3, _FLASH | {"soft cap"}, _needs("flash_attn_interface", "flash-attn-3"), max_head=FLASH_HEAD
    ),
    "patchgen_flash_attention_4": Backend(
        flash_4, _FLASH | {"soft cap", "sinks"}, _needs("flash_attn.cute", "flash-attn-4"), max_head=FLASH_HEAD
    ),
}
