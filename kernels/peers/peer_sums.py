"""The sum over ranks of one part of their gradients: the local part and those received from the other ranks.

    out[i] = part of rank 0 [i] + part of rank 1 [i] + ...      in fp32, in rank order

In one pass: local and received parts are read in place, and the sum is written in the dtype of its parameter. Each received
part has a tag that identifies what its rank sent. A tag that differs from this rank's makes the sum NaN: otherwise ranks that
reduce different gradients would silently sum old data.

    n ranks   N elements of a part
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def sum_parts(own: Tensor, received: Tensor, tags: Tensor, out: Tensor, *, rank: int, tag: int) -> None:
    """Writes `out [N]`, fp32 or narrower.

    Args:
        own: `[N]`, contiguous, in the dtype of what was sent.
        received: `[n - 1, N]` of the following ranks, cyclically; rows may have any stride.
        tags: `[n - 1]` int64, those that these ranks sent; any stride.
        rank: of this process.
        tag: the tag that this rank sent.

    Raises:
        ValueError: sizes that differ, or parts that are not contiguous.
    """
    num = out.numel()
    ranks = received.shape[0] + 1
    if own.shape != (num,) or received.shape != (ranks - 1, num) or tags.shape != (ranks - 1,):
        raise ValueError(
            f"sum_parts takes own [N], received [n - 1, N], tags [n - 1] and out [N], found {tuple(own.shape)}, "
            f"{tuple(received.shape)}, {tuple(tags.shape)} and {tuple(out.shape)}."
        )
    if not (own.is_contiguous() and out.is_contiguous()) or (num and received.stride(1) != 1):
        raise ValueError("sum_parts takes parts that are each contiguous.")
    if num == 0:
        return
    if out.is_cuda:
        launch_sum_parts(own, received, tags, out, rank, tag)
        return
    parts = [received[(source - rank - 1) % ranks] if source != rank else own for source in range(ranks)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    out.copy_(total if bool((tags == tag).all()) else torch.full_like(total, float("nan")))


def launch_sum_parts(own: Tensor, received: Tensor, tags: Tensor, out: Tensor, rank: int, tag: int) -> None:
    """The kernel of `sum_parts`."""
    _sum_parts[(triton.cdiv(out.numel(), _BLOCK),)](
        own,
        received,
        tags,
        out,
        out.numel(),
        received.stride(0),
        tags.stride(0),
        tag,
        RANK=rank,
        RANKS=received.shape[0] + 1,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["tag"])
def _sum_parts(
    own,
    received,
    tags,
    out,
    num,
    part_stride,
    tag_stride,
    tag,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = offset < num
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    agree = tl.full((), 1, tl.int1)
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += tl.load(own + offset, mask=in_bounds, other=0.0).to(tl.float32)
        else:
            place = (source - RANK - 1 + RANKS) % RANKS
            total += tl.load(received + place * part_stride + offset, mask=in_bounds, other=0.0).to(tl.float32)
            agree = agree & (tl.load(tags + place * tag_stride) == tag)
    total = tl.where(agree, total, float("nan"))
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=in_bounds)
