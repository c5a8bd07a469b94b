"""Packed rows of random text: document lengths and word frequencies as uneven as those of real text."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

MEAN_DOCUMENT, SIGMA = 1500, 1.0


def packed_row(tokens: int, vocabulary: int, seed: int) -> dict[str, Tensor]:
    """One row of `tokens` tokens: documents of log-normal length, ids as frequent as words (Zipf-Mandelbrot).

    Probability of the id of rank r as 1 / (r + 2.7): the first takes 2.5 %. The distribution of ids determines how
    unevenly an untrained router loads the experts.
    """
    draw = numpy.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = max(8, int(draw.lognormal(numpy.log(MEAN_DOCUMENT) - SIGMA**2 / 2, SIGMA)))
        lengths.append(min(length, tokens - sum(lengths)))
    share = numpy.cumsum(1 / (numpy.arange(vocabulary) + 1 + 2.7))
    ids = torch.from_numpy(numpy.searchsorted(share / share[-1], draw.random(tokens)))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}
