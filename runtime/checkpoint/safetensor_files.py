"""Reads the headers of safetensors files in a folder, and checks that it is complete. `file_reader.py` reads the data.

The format: eight bytes with the length of a JSON header, the header (`{key: {dtype, shape, data_offsets}}`), the data.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.folders import describe

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of files that transformers loads weights from."""
INCOMPLETE = ".incomplete"
"""A file that marks a folder whose files are being replaced."""
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `offset` of its first byte."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_folder(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, by key; reads only headers.

    Raises:
        CheckpointError: no safetensors files; an interrupted write; a file of the index is missing, truncated or damaged;
            a key of the index is not in its file; a dtype that is not supported. Lists all problems.
    """
    if not directory.is_dir():
        raise CheckpointError(f"A checkpoint is a folder with safetensors files. {describe(directory)}")
    if (directory / INCOMPLETE).exists():
        raise CheckpointError(
            f"{directory} is not a complete checkpoint: {INCOMPLETE} says that writing it was interrupted while files were "
            "replaced. To fix: write it again."
        )
    problems: list[str] = []
    index = directory / INDEX
    if index.is_file():
        weight_map = _read_index(index)
        names = sorted(set(weight_map.values()))
    else:
        weight_map = None
        file_names = sorted(path.name for path in directory.glob("*.safetensors"))
        names = [SINGLE] if SINGLE in file_names else file_names
        parts = [name for name in names if name != SINGLE and WEIGHTS.fullmatch(name)]
        if parts:
            raise CheckpointError(
                f"{directory} is not a complete checkpoint: {parts[0]} is one of several files, and {INDEX}, which lists "
                "them, is missing."
            )
    if not names:
        raise CheckpointError(f"{directory} has neither {INDEX} nor *.safetensors. {describe(directory)}")
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        try:
            for tensor in read_header(directory / name):
                if tensor.name in tensors and weight_map is None:
                    problems.append(f"{tensor.name} is in {tensors[tensor.name].file.name} and in {name}.")
                if weight_map is None or weight_map.get(tensor.name) == name:
                    tensors[tensor.name] = tensor
                elif tensor.name not in weight_map:
                    problems.append(f"{name} holds {tensor.name}, which {INDEX} does not list.")
        except CheckpointError as error:
            problems += error.problems or [str(error)]
            lost = [key for key, file in (weight_map or {}).items() if file == name]
            if lost:
                problems.append(f"  so {len(lost)} keys are lost: {', '.join(lost[:3])}{', ...' if lost[3:] else ''}")
            continue
        problems += [
            f"{INDEX} says that {key} is in {name}; it is not."
            for key, file in (weight_map or {}).items()
            if file == name and key not in tensors
        ]
    if problems:
        raise CheckpointError(f"{directory} is not a complete checkpoint:", problems)
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}.") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} lists no tensors.")
    outside = [f"{key} in {file!r}" for key, file in weight_map.items() if not _is_inside_folder(file)]
    if outside:
        raise CheckpointError(f"{index} points outside of its folder:", outside)
    return weight_map


def _is_inside_folder(file: object) -> bool:
    """Whether a path of an index stays inside its folder; the file may be a link, as in the Hub's cache."""
    return isinstance(file, str) and not Path(file).is_absolute() and ".." not in Path(file).parts


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file, after a check of its size.

    Raises:
        CheckpointError: the file is missing, shorter or longer than its header says, or not a safetensors file; a dtype is not
            supported.
    """
    if not file.is_file():
        raise CheckpointError(f"{file.name} is missing.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise CheckpointError(
                f"{file.name} is truncated in its header, or is not a safetensors file ({size} bytes)."
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file.name} has a header that is not JSON: {error}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.name} has a header that is not a JSON object: it is not a safetensors file.")
    header.pop("__metadata__", None)
    malformed = [name for name, entry in header.items() if not _is_well_formed(entry)]
    if malformed:
        raise CheckpointError(
            f"{file.name} has a damaged header:",
            [f"{name} in {file.name} has no valid dtype, shape and data_offsets." for name in malformed],
        )
    tensors, problems, end, last = [], [], 0, ""
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end:
            where = f"overlaps {last}" if start < end else f"comes after {start - end} bytes that belong to no tensor"
            problems.append(f"{name} in {file.name} {where} (bytes {start} to {stop} of the data).")
        end, last = max(end, stop), name
        if entry["dtype"] not in DTYPES:
            why = f"supported are {', '.join(DTYPES)}."
            if entry["dtype"].startswith(("F8", "F6", "F4")):
                why = "quantised weights cannot be trained. Use a bf16 checkpoint, or dequantise the checkpoint first."
            problems.append(f"{name} in {file.name} has the dtype {entry['dtype']}: {why}")
            continue
        tensor = StoredTensor(name, file, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start)
        if tensor.num_bytes != stop - start:
            problems.append(
                f"{name} in {file.name} has {stop - start} bytes; {entry['dtype']} {entry['shape']} takes "
                f"{tensor.num_bytes}."
            )
        elif 8 + length + stop > size:
            problems.append(f"{name} in {file.name} ends at byte {8 + length + stop}; the file ends at {size}.")
        tensors.append(tensor)
    if not problems and 8 + length + end != size:
        problems.append(f"{file.name} has {size} bytes; its header describes {8 + length + end}.")
    if problems:
        summary = f"{file.name} is truncated or damaged:" if size < 8 + length + end else f"{file.name}:"
        raise CheckpointError(summary, problems)
    return tensors


def _is_well_formed(entry: object) -> bool:
    """Whether a tensor's entry in a header is well-formed."""

    def are_sizes(value: object) -> bool:
        return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)

    return (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and are_sizes(entry.get("shape"))
        and are_sizes(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
        and entry["data_offsets"][0] <= entry["data_offsets"][1]
    )
