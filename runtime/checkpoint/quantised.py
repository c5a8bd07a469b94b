"""Quantised tensors of checkpoints, brought into the dtype that they are read in, region by region.

    with torch.device("meta"): ...; load_pretrained(model, "DeepSeek-V3")     # FP8 in the files, bf16 or fp32 in the model

`read_folder` gives one `QuantisedTensor` for each group of stored tensors (values, scales), under the name and with the shape that
the tensor has in an unquantised checkpoint. A rank reads the bytes and the scales of its region alone, blocks that cross its edges
included, and computes `value * scale` in fp32, as transformers does, before the cast.

    FP8, INT8        `X` and `X_scale_inv` or `X_scale`: one scale, one for each row, or one for each block      [N, K], [n, k]
    MXFP4            `X_blocks`, `X_scales` of gpt-oss (stored transposed); `X_packed` and `X_scale` in powers of 2
    NVFP4            `X_packed`, `X_scale` and `X_global_scale`, which divides; `X`, `X_scale` and `X_scale_2`, which multiplies
    INT4             `X_packed` of compressed-tensors, eight in each int32, and `X_scale` of groups along a row
    NF4, FP4         `X`, `X.absmax`, `X.quant_map` and `X.quant_state...` of bitsandbytes; `X.nested_...` if scales are quantised

    N output features   K input features   n, k blocks of them

A form is known by the dtypes and names of its parts; of config.json only the sizes of blocks and the number of bits are read.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.lazy_tensors import Region, full_region
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, StoredTensor, read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTISATION = ("quantization_config", "compression_config")
"""Fields of a config.json that say how its weights are quantised."""
OF_ACTIVATIONS = (
    "input_scale",
    "output_scale",
    "input_global_scale",
    "activation_scale",
    "q_scale",
    "k_scale",
    "v_scale",
)
"""Ends of keys with scales that a server uses for activations and caches; no weight depends on them."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1, by the four bits (OCP Microscaling Formats 1.0, 5.3.3)."""
INT32_BITS = 32
_BITSANDBYTES = ".quant_state.bitsandbytes__"


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
    codes = packed.view(torch.uint8)
    table = torch.tensor(FP4_VALUES)
    pairs = torch.stack([table[(codes & 0xF).long()], table[(codes >> 4).long()]], dim=-1)
    return pairs.flatten(-2)


def _integers(bits: int) -> Callable[[Tensor], Tensor]:
    """Of int32 `[..., n]` with 32 / bits numbers each, the lowest bits first; stored with an offset of half their range."""
    shifts = torch.arange(0, INT32_BITS, bits, dtype=torch.int32)

    def decode(packed: Tensor) -> Tensor:
        codes = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
        return (codes - 2 ** (bits - 1)).float().flatten(-2)

    return decode


FP8, INT8 = Form("FP8"), Form("INT8")
MXFP4, NVFP4 = Form("MXFP4", _fp4, 2), Form("NVFP4", _fp4, 2)
MXFP4_TRANSPOSED = replace(MXFP4, is_transposed=True)


# ---------------------------------------------------------------------------------------------- recognition


def read_folder(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, by key, as `read_headers` gives them; a quantised one as in an unquantised checkpoint.

    Raises:
        CheckpointError: as `read_headers`; scales are missing or do not fit their values; a form that is not known. Lists all
            problems.
    """
    stored = read_headers(directory)
    if not any(_may_be_quantised(tensor) for tensor in stored.values()):
        return stored
    found = _Found(stored, quantisation_of(directory))
    tensors = found.all()
    if found.problems:
        raise CheckpointError(f"{directory} holds quantised weights that cannot be read:", found.problems)
    return tensors


def quantisation_of(directory: Path) -> Mapping[str, Any]:
    """What config.json says of quantised weights, from its outermost level that says it; empty without any."""
    file = directory / CONFIG
    if not file.is_file():
        return {}
    try:
        levels = [json.loads(file.read_text(encoding="utf-8"))]
    except ValueError:  # told where the config is read
        return {}
    while levels:
        level = levels.pop(0)
        for name in QUANTISATION:
            if isinstance(level.get(name), dict):
                return level[name]
        levels += [value for value in level.values() if isinstance(value, dict)]
    return {}


def without_quantisation(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config at every level, but for those that say how weights are quantised."""
    return {
        name: without_quantisation(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in QUANTISATION
    }


def forget_quantisation(config: PreTrainedConfig) -> None:
    """Takes from a config what it says of quantised weights: those of a model that is built from it are not."""
    for part in (config, *(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None)):
        for name in QUANTISATION:
            vars(part).pop(name, None)


def summary(tensors: Iterable[StoredTensor]) -> str:
    """How many tensors are quantised, by form; "" if none is."""
    counts = Counter(tensor.form.name for tensor in tensors if isinstance(tensor, QuantisedTensor))
    return ", ".join(f"{count} from {name}" for name, count in counts.items())


def _may_be_quantised(tensor: StoredTensor) -> bool:
    return not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1


@dataclass
class _Found:
    """The groups of a folder's tensors.

    Attributes:
        stored: all of them, by key.
        config: `quantization_config`.
        problems: what keeps groups from being read.
        used: keys that belong to groups.
    """

    stored: Mapping[str, StoredTensor]
    config: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def all(self) -> dict[str, StoredTensor]:
        groups = {group.name: group for group in self._groups()}
        left = {key: tensor for key, tensor in self.stored.items() if key not in self.used}
        is_quantised = bool(groups or self.problems)
        for key, tensor in left.items():
            if tensor.dtype in FLOAT8 and not key.endswith(OF_ACTIVATIONS):
                self.problems.append(
                    f"{key} in {tensor.file.name} is {_dtype(tensor)} and has no scales: expected one of "
                    f"{', '.join(_scale_names(key))}."
                )
            elif key.endswith((".qweight", ".qzeros")):
                self.problems.append(f"{key} in {tensor.file.name} is of GPTQ or AWQ, which are not read.")
        return groups | {
            key: tensor for key, tensor in left.items() if not (is_quantised and key.endswith(OF_ACTIVATIONS))
        }

    def _groups(self) -> Iterator[QuantisedTensor]:
        states = {
            key.partition(_BITSANDBYTES)[0]: tensor for key, tensor in self.stored.items() if _BITSANDBYTES in key
        }
        for key, tensor in self.stored.items():
            if key.endswith("_blocks") and (scales := self.stored.get(f"{key.removesuffix('_blocks')}_scales")):
                values = replace(tensor, shape=(*tensor.shape[:-2], tensor.shape[-2] * tensor.shape[-1]))
                yield from self._group(key.removesuffix("_blocks"), MXFP4_TRANSPOSED, values, scales)
            elif (state := states.get(key)) is not None:
                yield from self._runs(key, tensor, state)
            elif key.endswith("_packed"):
                yield from self._packed(key.removesuffix("_packed"), tensor)
            elif tensor.dtype in (*FLOAT8, torch.int8, torch.uint8) and (scales := self._scales(key)) is not None:
                whole = self.stored.get(f"{key}_scale_2")
                yield from self._group(key, self._form(tensor, whole), tensor, scales, whole)

    def _form(self, values: StoredTensor, whole: StoredTensor | None) -> Form:
        """Of values with scales beside them. DeepSeek stores FP4 in int8 beside FP8, which its config names."""
        if values.dtype in FLOAT8:
            return FP8
        if values.dtype == torch.int8 and self.config.get("quant_method") != "fp8":
            return INT8
        return MXFP4 if whole is None else NVFP4

    def _packed(self, name: str, values: StoredTensor) -> Iterator[QuantisedTensor]:
        """A group of compressed-tensors."""
        scales, whole = self._scales(name), self.stored.get(f"{name}_global_scale")
        if scales is None:
            self.problems.append(
                f"{values.name} in {values.file.name} has no scales: expected {name}_scale beside it."
            )
            return
        if odd := next((key for end in ("zero_point", "g_idx") if (key := f"{name}_{end}") in self.stored), None):
            self.problems.append(f"{odd}: weights with zero points or in another order are not read.")
            return
        if values.dtype == torch.uint8:
            yield from self._group(name, replace(NVFP4, divides=True) if whole else MXFP4, values, scales, whole)
            return
        bits = self._bits()
        if INT32_BITS % bits:
            self.problems.append(
                f"{values.name} in {values.file.name} has numbers of {bits} bits, which are not read."
            )
            return
        yield from self._group(name, Form(f"INT{bits}", _integers(bits), INT32_BITS // bits), values, scales)

    def _runs(self, name: str, values: StoredTensor, state: StoredTensor) -> Iterator[QuantisedTensor]:
        """A group of bitsandbytes, unless parts of it are missing."""
        found = {key: self.stored.get(f"{name}.{key}") for key in ("absmax", "quant_map")}
        with state.file.open("rb") as file:
            file.seek(state.offset)
            options = json.loads(file.read(state.num_bytes))
        if "nested_blocksize" in options:
            found |= {key: self.stored.get(f"{name}.{key}") for key in ("nested_quant_map", "nested_absmax")}
        if missing := [key for key, tensor in found.items() if tensor is None]:
            self.problems.append(
                f"{values.name} in {values.file.name} lacks {', '.join(f'{name}.{key}' for key in missing)}."
            )
            return
        self.used |= {values.name, state.name, *(f"{name}.{key}" for key in found)}
        absmax, table, *nested = (tensor for tensor in found.values() if tensor is not None)
        yield ScaledRuns(
            name, values.file, torch.bfloat16, tuple(options["shape"]), values.offset,
            form=Form(options["quant_type"].upper()), values=replace(values, shape=(math.prod(values.shape),)),
            scales=absmax, table=table, run=options["blocksize"],
            nested=(nested[0], nested[1]) if nested else None,
            nested_run=options.get("nested_blocksize", 1), nested_offset=options.get("nested_offset", 0.0),
        )  # fmt: skip

    def _bits(self) -> int:
        """Of the integers that compressed-tensors packs, from the one number that its groups have."""
        groups = self.config.get("config_groups", {}).values()
        bits = {weights.get("num_bits", 4) for group in groups if isinstance(weights := group.get("weights"), dict)}
        return bits.pop() if len(bits) == 1 else 4

    def _scales(self, name: str) -> StoredTensor | None:
        return next((found for key in _scale_names(name) if (found := self.stored.get(key)) is not None), None)

    def _group(
        self, name: str, form: Form, values: StoredTensor, scales: StoredTensor, whole: StoredTensor | None = None
    ) -> Iterator[QuantisedTensor]:
        """The group, unless its scales do not fit its values."""
        self.used |= {values.name, scales.name, f"{name}_shape", *([whole.name] if whole is not None else [])}
        sizes = (*values.shape[:-1], values.shape[-1] * form.per_element) if values.shape else ()
        grid = scales.shape
        if math.prod(grid) == 1:
            grid = (1,) * len(sizes)
        elif len(grid) == len(sizes) - 1:  # one for each row
            grid = (*grid, 1)
        blocks = self._blocks(sizes, grid)
        if blocks is None or (whole is not None and math.prod(whole.shape) != 1):
            self.problems.append(
                f"{scales.name} in {scales.file.name} has the shape {list(scales.shape)}, which is no grid over {values.name} "
                f"{list(sizes)}."
            )
            return
        shape = (*sizes[:-2], sizes[-1], sizes[-2]) if form.is_transposed else sizes
        yield ScaledGrid(
            name, values.file, torch.bfloat16, shape, values.offset,
            form=form, values=values, scales=replace(scales, shape=grid), blocks=blocks, global_scale=whole,
        )  # fmt: skip

    def _blocks(self, sizes: Sequence[int], grid: Sequence[int]) -> tuple[int, ...] | None:
        """Numbers that share a scale, in each dimension: as the config says where that gives the grid, whose last blocks may be
        smaller, else by even division. None: neither does."""
        if len(grid) != len(sizes):
            return None
        declared = self.config.get("weight_block_size") or ()
        named = (*(0,) * (len(sizes) - len(declared)), *declared)
        blocks = []
        for size, count, wanted in zip(sizes, grid, named, strict=True):
            if count == 1:
                blocks.append(max(size, 1))
            elif wanted and -(-size // wanted) == count:
                blocks.append(wanted)
            elif count and size % count == 0:
                blocks.append(size // count)
            else:
                return None
        return tuple(blocks)


def _scale_names(name: str) -> tuple[str, ...]:
    """The keys that the scales of a tensor may have."""
    beside = (f"{name.removesuffix('weight')}scale",) if name.endswith(".weight") else ()
    return (f"{name}_scale_inv", f"{name}_scale", *beside)


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
