"""Quantised weights as public checkpoints store them, and the numbers that they stand for, computed element by element."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BLOCK = 128

Stored = dict[str, Tensor]


def fp8_blocks(weight: Tensor, name: str, end: str = "_scale_inv", block: int = BLOCK) -> Stored:
    """A weight `[..., N, K]` in FP8 with a scale for each block of `block` x `block`; the last may be smaller."""
    rows, columns = weight.shape[-2:]
    grid = (*weight.shape[:-2], math.ceil(rows / block), math.ceil(columns / block))
    scales, values = torch.empty(grid), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for place in itertools.product(*map(range, grid)):
        *outer, row, column = place
        part = (*outer, slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
        scales[place] = weight[part].abs().max() / 448
        values[part] = (weight[part] / scales[place]).to(torch.float8_e4m3fn)
    return {name: values, f"{name}{end}": scales}


def numbers_of_fp8(stored: Stored, name: str, end: str = "_scale_inv", block: int = BLOCK) -> Tensor:
    values, scales = stored[name].float(), stored[f"{name}{end}"]
    numbers = torch.empty_like(values)
    for place in itertools.product(*map(range, values.shape)):
        *outer, row, column = place
        numbers[place] = values[place] * scales[(*outer, row // block, column // block)]
    return numbers


def packed_fp4(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random FP4: the bytes `[..., K / 2]`, and the numbers `[..., K]`."""
    codes = torch.randint(0, 16, shape, generator=generator)
    numbers = torch.tensor([FP4[code & 7] * (-1 if code & 8 else 1) for code in codes.flatten().tolist()]).view(shape)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), numbers


def packed_integers(shape: tuple[int, int], bits: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random integers of some bits: int32 `[N, K * bits / 32]`, and the numbers `[N, K]`."""
    half, each = 2 ** (bits - 1), 32 // bits
    numbers = torch.randint(-half, half, shape, generator=generator)
    words = []
    for chunk in (numbers + half).flatten().split(each):
        word = sum(code << (bits * place) for place, code in enumerate(chunk.tolist()))
        words.append(word - 2**32 if word >= 2**31 else word)
    return torch.tensor(words, dtype=torch.int32).view(shape[0], -1), numbers.float()


def spread(scales: Tensor, group: int) -> Tensor:
    """Scales `[..., K / group]` for every number of a row."""
    return scales.repeat_interleave(group, dim=-1)
