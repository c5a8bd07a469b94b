"""Tensors that stand in files in few bits: which bytes a region of one needs, and the numbers that they are.

    ScaledGrid    a scale for each block of a grid over the values: FP8, INT8, FP4, packed integers
    ScaledRuns    a scale for each run of the flat tensor: bitsandbytes

`value * scale` is computed in fp32, as transformers does, and cast by the reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchgen.runtime.checkpoint.lazy_tensors import Region, full_region
from patchgen.runtime.checkpoint.safetensor_files import StoredTensor

INT32_BITS = 32
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1, by its four bits (OCP Microscaling Formats 1.0, 5.3.3)."""
_FP4_PAIRS = torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)])


@dataclass(frozen=True)
class Form:
    """How the numbers of a quantised tensor follow from its parts.

    Attributes:
        name: for messages and reports.
        decode: stored elements `[..., n]` -> their numbers `[..., n * per_element]`, fp32.
        per_element: numbers in one stored element, along the last dimension.
        is_transposed: the last two dimensions of the tensor are those of its parts exchanged.
        divides: the global scale divides the others, instead of multiplying them.
    """

    name: str
    decode: Callable[[Tensor], Tensor] = Tensor.float
    per_element: int = 1
    is_transposed: bool = False
    divides: bool = False


@dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """Several stored tensors as the one that they stand for; `offset` is that of the values in `file`."""

    form: Form
    values: StoredTensor
    scales: StoredTensor

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part, _ in self.reads(full_region(self.shape)))

    def cheapest_cut(self, region: Region) -> int:
        """The dimension in which pieces of a region are contiguous in the files: the first that is longer than one."""
        return next((dim for dim, (start, stop) in enumerate(region) if stop - start > 1), 0)

    def reads(self, region: Region) -> list[tuple[StoredTensor, Region]]:
        """The parts, each with the region that has the numbers of `region`."""
        raise NotImplementedError

    def numbers(self, region: Region, parts: Sequence[Tensor]) -> Tensor:
        """The numbers of a region, fp32, from its parts as `reads` lists them."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScaledGrid(QuantisedTensor):
    """A scale for each block of a grid over the values.

    Attributes:
        values: `[..., N, K / form.per_element]`.
        scales: as many dimensions as `values`; a scale belongs to `blocks` numbers of each.
        global_scale: of one element; None: there is none.
    """

    blocks: tuple[int, ...]
    global_scale: StoredTensor | None = None

    def reads(self, region: Region) -> list[tuple[StoredTensor, Region]]:
        region = self._of_parts(region)
        start, stop = region[-1]
        values = (*region[:-1], (start // self.form.per_element, -(-stop // self.form.per_element)))
        scales = tuple(
            (start // size, -(-stop // size)) for (start, stop), size in zip(region, self.blocks, strict=True)
        )
        found = [(self.values, values), (self.scales, scales)]
        return found + ([(self.global_scale, full_region(self.global_scale.shape))] if self.global_scale else [])

    def cheapest_cut(self, region: Region) -> int:
        dim = super().cheapest_cut(self._of_parts(region))
        last = len(region) - 1
        return {last: last - 1, last - 1: last}.get(dim, dim) if self.form.is_transposed else dim

    def numbers(self, region: Region, parts: Sequence[Tensor]) -> Tensor:
        region = self._of_parts(region)
        values, scales, *global_scale = parts
        start, stop = region[-1]
        offset = start - start // self.form.per_element * self.form.per_element
        numbers = self.form.decode(values)[..., offset : offset + stop - start]
        factors = _factors(scales)
        for whole in global_scale:
            factors = factors / whole.float() if self.form.divides else factors * whole.float()
        for dim, ((start, stop), size) in enumerate(zip(region, self.blocks, strict=True)):
            if size > 1 and factors.shape[dim] > 1:
                factors = factors.index_select(dim, torch.arange(start, stop) // size - start // size)
        numbers = numbers * factors
        return numbers.transpose(-1, -2) if self.form.is_transposed else numbers

    def _of_parts(self, region: Region) -> Region:
        return (*region[:-2], region[-1], region[-2]) if self.form.is_transposed else region


@dataclass(frozen=True)
class ScaledRuns(QuantisedTensor):
    """A scale for each run of the flat tensor: bitsandbytes in 4 bits, of which the upper ones are the first number.

    Attributes:
        values: bytes `[numel / 2]`.
        scales: `[numel / run]`, fp32; bytes, if they are quantised themselves.
        table: the number of each of the sixteen codes.
        run: numbers that share a scale.
        nested: (table of 256 numbers, scales of runs of scales, fp32), if scales are bytes.
        nested_run, nested_offset: scales that share one of those, and what is added to each.
    """

    table: StoredTensor
    run: int
    nested: tuple[StoredTensor, StoredTensor] | None = None
    nested_run: int = 1
    nested_offset: float = 0.0

    def reads(self, region: Region) -> list[tuple[StoredTensor, Region]]:
        start, stop = self._flat(region)
        runs = start // self.run, -(-stop // self.run)
        found = [(self.values, ((start // 2, -(-stop // 2)),)), (self.scales, (runs,)), (self.table, ((0, 16),))]
        if self.nested is not None:
            table, scales = self.nested
            found += [(table, ((0, 256),)), (scales, ((runs[0] // self.nested_run, -(-runs[1] // self.nested_run)),))]
        return found

    def numbers(self, region: Region, parts: Sequence[Tensor]) -> Tensor:
        values, scales, table, *nested = parts
        start, stop = self._flat(region)
        first_run, last_run = start // self.run, -(-stop // self.run)
        if nested:
            outer = torch.arange(first_run, last_run) // self.nested_run - first_run // self.nested_run
            scales = nested[0][scales.long()] * nested[1][outer] + self.nested_offset
        codes = torch.stack([values >> 4, values & 0xF], dim=-1).flatten()[start % 2 :][: stop - start]
        numbers = table[codes.long()] * scales[torch.arange(start, stop) // self.run - first_run]
        rows, inner = region[0], region[1:]
        numbers = numbers.view(rows[1] - rows[0], *self.shape[1:])
        return numbers[(slice(None), *(slice(*bounds) for bounds in inner))]

    def _flat(self, region: Region) -> tuple[int, int]:
        """The range of whole rows around a region."""
        row = math.prod(self.shape[1:])
        return region[0][0] * row, region[0][1] * row


def _factors(scales: Tensor) -> Tensor:
    """Scales in fp32; of bytes, which are exponents: 2 to the byte minus 127."""
    return torch.exp2(scales.float() - 127.0) if scales.dtype == torch.uint8 else scales.float()


# ------------------------------------------------------------------------------------------------- decoding


def _fp4(packed: Tensor) -> Tensor:
    """Bytes `[..., n]` with two numbers each, the lower bits first."""
    pairs = _FP4_PAIRS.index_select(0, packed.view(torch.uint8).reshape(-1).int())
    return pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])


def integers(packed: Tensor, bits: int) -> Tensor:
    """Of int32 `[..., n]` with 32 / bits numbers each, the lowest bits first; stored with an offset of half their range."""
    shifts = torch.arange(0, INT32_BITS, bits, dtype=torch.int32)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return (codes - 2 ** (bits - 1)).float().flatten(-2)


FP8, INT8 = Form("FP8"), Form("INT8")
MXFP4, NVFP4 = Form("MXFP4", _fp4, 2), Form("NVFP4", _fp4, 2)
MXFP4_TRANSPOSED = replace(MXFP4, is_transposed=True)
