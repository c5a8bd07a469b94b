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

import contextlib
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.quantised_tensors import (
    FP8,
    INT8,
    INT32_BITS,
    MXFP4,
    MXFP4_TRANSPOSED,
    NVFP4,
    Form,
    QuantisedTensor,
    ScaledGrid,
    ScaledRuns,
    integers,
)
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, StoredTensor, read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTISATION = ("quantization_config", "compression_config")
"""Fields of a config.json that say how its weights are quantised."""
USUAL_BLOCKS = (16, 32, 64, 128, 256)
_OF_ACTIVATIONS = re.compile(
    r"(^|\.)([qkv]_scale|[kv]_zero_point|prob_scale|kv_cache_scaling_factor"
    r"|(\w+_)?(input|output|activation)_(scale|scale_inv|scale_ub|global_scale|zero_point))$"
)
"""Keys with what a server scales activations and caches by; no weight depends on them."""
_BITSANDBYTES = ".quant_state.bitsandbytes__"


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
    with contextlib.ExitStack() as files:
        found = _Found(stored, quantisation_of(directory), files)
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
        if not isinstance(level, dict):
            continue
        for name in QUANTISATION:
            if isinstance(level.get(name), dict):
                return level[name]
        levels += level.values()
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
    for name in QUANTISATION:
        vars(config).pop(name, None)
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            forget_quantisation(part)


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
        config: `quantization_config`; empty: none is declared.
        files: closes the files that were opened.
        problems: what keeps groups from being read.
        used: keys that belong to groups.
    """

    stored: Mapping[str, StoredTensor]
    config: Mapping[str, Any]
    files: contextlib.ExitStack
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    _opened: dict[Path, BinaryIO] = field(default_factory=dict)

    def all(self) -> dict[str, StoredTensor]:
        groups = {group.name: group for group in self._groups()}
        is_quantised = bool(groups or self.problems)
        left: dict[str, StoredTensor] = {}
        for key, tensor in self.stored.items():
            if key in self.used or (is_quantised and _OF_ACTIVATIONS.search(key)):
                continue
            left[key] = tensor
            if tensor.dtype in FLOAT8:
                expected = ", ".join(_scale_names(key))
                self._refuse(tensor, f"is {_dtype(tensor)} and has no scales: expected one of {expected}")
            elif key.endswith((".qweight", ".qzeros")):
                self._refuse(tensor, "is of GPTQ or AWQ, which are not read")
        return groups | left

    def _groups(self) -> Iterator[QuantisedTensor]:
        states = {
            key.partition(_BITSANDBYTES)[0]: tensor for key, tensor in self.stored.items() if _BITSANDBYTES in key
        }
        for key, tensor in self.stored.items():
            if (state := states.get(key)) is not None:
                yield from self._runs(key, tensor, state)
            elif (name := key.removesuffix("_blocks")) != key and tensor.dtype == torch.uint8:
                scales = self.stored.get(f"{name}_scales")
                if scales is not None and scales.dtype == torch.uint8 and tensor.shape[-1:] == (16,):
                    values = replace(tensor, shape=(*tensor.shape[:-2], tensor.shape[-2] * 16))
                    yield from self._grid(name, MXFP4_TRANSPOSED, values, scales)
            elif (name := key.removesuffix("_packed")) != key and tensor.dtype in (torch.int32, torch.uint8):
                yield from self._packed(name, tensor)
            elif len(tensor.shape) > 1 or tensor.dtype in FLOAT8:
                scales, whole = self._scales(key), self.stored.get(f"{key}_scale_2")
                form = self._form(tensor, scales, whole)
                if scales is not None and form is not None:
                    yield from self._grid(key, form, tensor, scales, whole)

    def _form(self, values: StoredTensor, scales: StoredTensor | None, whole: StoredTensor | None) -> Form | None:
        """Of values beside scales; None: they are no quantised weights. FP4 may be stored as bytes or int8."""
        if scales is None:
            return None
        if values.dtype in FLOAT8:
            return FP8
        if values.dtype in (torch.uint8, torch.int8) and scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
            return MXFP4
        if values.dtype == torch.uint8 and scales.dtype in FLOAT8 and whole is not None:
            return NVFP4
        return INT8 if values.dtype == torch.int8 and self.config else None

    def _packed(self, name: str, values: StoredTensor) -> Iterator[QuantisedTensor]:
        """A group of compressed-tensors."""
        scales, whole = self._scales(name), self.stored.get(f"{name}_global_scale")
        if scales is None:
            if self.config:
                self._refuse(values, f"has no scales: expected {name}_scale beside it")
            return
        if values.dtype == torch.uint8:
            yield from self._grid(name, replace(NVFP4, divides=True) if whole else MXFP4, values, scales, whole)
            return
        length, bits = self._length(name), self._bits()
        if length is not None:
            bits = next((bits for bits in (4, 8, 2) if -(-length * bits // INT32_BITS) == values.shape[-1]), 0)
        if not bits or INT32_BITS % bits:
            self._refuse(values, f"has numbers of {bits or 'unknown many'} bits, which are not read")
            return
        form = Form(f"INT{bits}", functools.partial(integers, bits=bits), INT32_BITS // bits)
        yield from self._grid(name, form, values, scales, length=length)

    def _length(self, name: str) -> int | None:
        """K of packed integers `[N, K]`, as `X_shape` has it; the last integer may be filled up."""
        shape = self.stored.get(f"{name}_shape")
        return None if shape is None else int.from_bytes(self._bytes(shape)[-8:], "little", signed=True)

    def _bytes(self, tensor: StoredTensor) -> bytes:
        if tensor.file not in self._opened:
            self._opened[tensor.file] = self.files.enter_context(tensor.file.open("rb"))
        file = self._opened[tensor.file]
        file.seek(tensor.offset)
        return file.read(tensor.num_bytes)

    def _runs(self, name: str, values: StoredTensor, state: StoredTensor) -> Iterator[QuantisedTensor]:
        """A group of bitsandbytes, unless parts of it are missing."""
        found = {key: self.stored.get(f"{name}.{key}") for key in ("absmax", "quant_map")}
        try:
            options = json.loads(self._bytes(state))
            shape, run = tuple(options["shape"]), options["blocksize"]
            form = Form(options["quant_type"].upper())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._refuse(state, f"does not say how {name} is stored ({error!r})")
            return
        if is_nested := "nested_blocksize" in options:
            found |= {key: self.stored.get(f"{name}.{key}") for key in ("nested_quant_map", "nested_absmax")}
        self.used |= {values.name, state.name, *(f"{name}.{key}" for key in found)}
        if missing := [f"{name}.{key}" for key, tensor in found.items() if tensor is None]:
            self._refuse(values, f"lacks {', '.join(missing)}")
            return
        if 2 * values.num_bytes != math.prod(shape) + math.prod(shape) % 2:
            self._refuse(values, f"has {values.num_bytes} bytes, which are not {list(shape)} numbers of 4 bits")
            return
        absmax, table, *nested = (tensor for tensor in found.values() if tensor is not None)
        raw = replace(
            values, dtype=torch.uint8, shape=(values.num_bytes,)
        )  # stored in bytes, or in bf16 that holds them
        yield ScaledRuns(
            name, values.file, torch.bfloat16, shape, values.offset,
            form=form, values=raw, scales=absmax, table=table, run=run, nested=(nested[0], nested[1]) if is_nested else None,
            nested_run=options.get("nested_blocksize", 1), nested_offset=options.get("nested_offset", 0.0),
        )  # fmt: skip

    def _grid(
        self,
        name: str,
        form: Form,
        values: StoredTensor,
        scales: StoredTensor,
        whole: StoredTensor | None = None,
        *,
        length: int | None = None,
    ) -> Iterator[QuantisedTensor]:
        """The group, unless its scales do not fit its values; `length`: of a row, if not what its elements have."""
        self.used |= {values.name, scales.name, f"{name}_shape", *([whole.name] if whole is not None else [])}
        if odd := next((key for end in ("zero_point", "g_idx") if (key := f"{name}_{end}") in self.stored), None):
            self.used.add(odd)
            self.problems.append(f"{odd}: weights with zero points or in another order are not read.")
            return
        sizes: tuple[int, ...] = (
            (*values.shape[:-1], length or values.shape[-1] * form.per_element) if values.shape else ()
        )
        grid = scales.shape
        if math.prod(grid) == 1:
            grid = (1,) * len(sizes)
        elif len(grid) == len(sizes) - 1:  # one for each row
            grid = (*grid, 1)
        blocks = self._blocks(sizes, grid)
        if blocks is None or (whole is not None and math.prod(whole.shape) != 1):
            self._refuse(
                scales, f"has the shape {list(scales.shape)}, which is no grid over {values.name} {list(sizes)}"
            )
            return
        shape = (*sizes[:-2], *reversed(sizes[-2:])) if form.is_transposed else sizes
        yield ScaledGrid(
            name, values.file, torch.bfloat16, shape, values.offset,
            form=form, values=values, scales=replace(scales, shape=grid), blocks=blocks, global_scale=whole,
        )  # fmt: skip

    def _blocks(self, sizes: Sequence[int], grid: Sequence[int]) -> tuple[int, ...] | None:
        """Numbers that share a scale, in each dimension: all, one, what the config declares where that gives the grid (then the
        last blocks may be smaller), or a usual size that divides it. None: none of these."""
        if len(grid) != len(sizes):
            return None
        declared = self._declared_blocks()
        wanted = (*(0,) * (len(sizes) - len(declared)), *declared)[-len(sizes) :] if sizes else ()
        blocks = []
        for size, count, named in zip(sizes, grid, wanted, strict=True):
            if count in (1, size):
                blocks.append(max(size, 1) if count == 1 else 1)
            elif named and -(-size // named) == count:
                blocks.append(named)
            elif count and size % count == 0 and size // count in USUAL_BLOCKS:
                blocks.append(size // count)
            else:
                return None
        return tuple(blocks)

    def _weights(self) -> list[Mapping[str, Any]]:
        """What compressed-tensors declares of weights, by group."""
        groups = self.config.get("config_groups")
        found = (
            [group.get("weights") for group in groups.values() if isinstance(group, dict)]
            if isinstance(groups, dict)
            else []
        )
        return [weights for weights in found if isinstance(weights, dict)]

    def _declared_blocks(self) -> Sequence[int]:
        sizes = [self.config.get("weight_block_size"), *(one.get("block_structure") for one in self._weights())]
        named = {tuple(size) for size in sizes if isinstance(size, list) and all(type(one) is int for one in size)}
        return named.pop() if len(named) == 1 else ()

    def _bits(self) -> int:
        """Of the integers that compressed-tensors packs; 0: its groups have several."""
        bits = {weights.get("num_bits", 4) for weights in self._weights()} or {4}
        return bits.pop() if len(bits) == 1 else 0

    def _scales(self, name: str) -> StoredTensor | None:
        return next((found for key in _scale_names(name) if (found := self.stored.get(key)) is not None), None)

    def _refuse(self, tensor: StoredTensor, what: str) -> None:
        self.problems.append(f"{tensor.name} in {tensor.file.name} {what}.")


def _scale_names(name: str) -> tuple[str, ...]:
    """The keys that the scales of a tensor may have."""
    beside = (f"{name.removesuffix('weight')}scale",) if name.endswith(".weight") else ()
    return (f"{name}_scale_inv", f"{name}_scale", *beside)


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
