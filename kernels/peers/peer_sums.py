"""The sum of one part of each rank's gradients, where a rank's own lies apart from those that the others sent.

    out[i] = part of rank 0 [i] + part of rank 1 [i] + ...      in fp32, in the order of the ranks

In one pass: own and received parts are read where they lie, and the sum is written in the dtype of its parameter. Beside each
received part lies a word that says what its rank sent; another word than ours makes the sum NaN, for ranks that sum different
gradients would otherwise add what was left there before.

    n ranks   N elements of a part
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def sum_parts(own: Tensor, received: Tensor, words: Tensor, out: Tensor, *, rank: int, word: int) -> None:
    """Writes `out [N]`, fp32 or narrower.

    Args:
        own: `[N]`, contiguous, in the dtype of what was sent.
        received: `[n - 1, N]` of the ranks after this one, the first after the last; rows may lie apart.
        words: `[n - 1]` int64, what those ranks sent; may lie apart.
        rank: of this one.
        word: what this rank sent.

    Raises:
        ValueError: sizes that differ, or parts that are not contiguous.
    """
    num = out.numel()
    ranks = received.shape[0] + 1
    if own.shape != (num,) or received.shape != (ranks - 1, num) or words.shape != (ranks - 1,):
        raise ValueError(
            f"sum_parts takes own [N], received [n - 1, N], words [n - 1] and out [N], found {tuple(own.shape)}, "
            f"{tuple(received.shape)}, {tuple(words.shape)} and {tuple(out.shape)}."
        )
    if not (own.is_contiguous() and out.is_contiguous()) or (num and received.stride(1) != 1):
        raise ValueError("sum_parts takes parts that are contiguous, each by itself.")
    if num == 0:
        return
    if out.is_cuda:
        launch_sum_parts(own, received, words, out, rank, word)
        return
    parts = [received[(source - rank - 1) % ranks] if source != rank else own for source in range(ranks)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    out.copy_(total if bool((words == word).all()) else torch.full_like(total, float("nan")))


def launch_sum_parts(own: Tensor, received: Tensor, words: Tensor, out: Tensor, rank: int, word: int) -> None:
    """The kernel of `sum_parts`."""
    _sum_parts[(triton.cdiv(out.numel(), _BLOCK),)](
        own,
        received,
        words,
        out,
        out.numel(),
        received.stride(0),
        words.stride(0),
        word,
        RANK=rank,
        RANKS=received.shape[0] + 1,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["word"])
def _sum_parts(
    own,
    received,
    words,
    out,
    num,
    part_stride,
    word_stride,
    word,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    agree = tl.full((), 1, tl.int1)
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += tl.load(own + offset, mask=inside, other=0.0).to(tl.float32)
        else:
            place = (source - RANK - 1 + RANKS) % RANKS
            total += tl.load(received + place * part_stride + offset, mask=inside, other=0.0).to(tl.float32)
            agree = agree & (tl.load(words + place * word_stride) == word)
    total = tl.where(agree, total, float("nan"))
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
