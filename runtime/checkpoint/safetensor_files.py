"""Reads the headers of safetensors files in a folder, and checks that it is complete. `file_reader.py` reads the data,
`quantised.py` knows the groups of quantised tensors.

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
INDEX_ENDING = ".safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
EXPLICIT = "transformers_weights"
"""A field of config.json with the name of the file that the weights are read from."""
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""What transformers loads from a folder that has none of the above; not read here."""
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of files that transformers loads weights from."""
INCOMPLETE = ".incomplete"
"""A file that marks a folder whose files are being replaced."""
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
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


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Every stored tensor of a checkpoint, by key, from the files that transformers would read (`entry_file`); reads only headers.

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
    entry = entry_file(directory)
    if entry is not None and entry.endswith(INDEX_ENDING):
        weight_map = _read_index(directory / entry)
        names = sorted(set(weight_map.values()))
    else:
        weight_map, names = None, [entry] if entry is not None else _other_files(directory)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        try:
            for tensor in read_header(directory / name):
                if tensor.name in tensors and weight_map is None:
                    problems.append(f"{tensor.name} is in {tensors[tensor.name].file.name} and in {name}.")
                if weight_map is None or weight_map.get(tensor.name) == name:
                    tensors[tensor.name] = tensor
                elif tensor.name not in weight_map:
                    problems.append(f"{name} holds {tensor.name}, which {entry} does not list.")
        except CheckpointError as error:
            problems += error.problems or [str(error)]
            lost = [key for key, file in (weight_map or {}).items() if file == name]
            if lost:
                problems.append(f"  so {len(lost)} keys are lost: {', '.join(lost[:3])}{', ...' if lost[3:] else ''}")
            continue
        problems += [
            f"{entry} says that {key} is in {name}; it is not."
            for key, file in (weight_map or {}).items()
            if file == name and key not in tensors
        ]
    if problems:
        raise CheckpointError(f"{directory} is not a complete checkpoint:", problems)
    return tensors


def entry_file(directory: Path) -> str | None:
    """The file of a folder that its weights are read from, or the index that lists their files: the first of those below, which is
    the order of transformers. None: it has none of them.

        the one that config.json names as transformers_weights      model.safetensors      model.safetensors.index.json

    Raises:
        CheckpointError: config.json names one that is not a safetensors file of the folder, or an index of some.
    """
    named = _named_file(directory / CONFIG)
    if named is None:
        return next((name for name in (SINGLE, INDEX) if (directory / name).is_file()), None)
    if not named.endswith((".safetensors", INDEX_ENDING)) or not _is_inside_folder(named):
        raise CheckpointError(
            f"{directory / CONFIG} has {EXPLICIT} = {named!r}, which is neither a safetensors file of its folder nor an index of "
            "some."
        )
    if not (directory / named).is_file():
        raise CheckpointError(f"{directory / CONFIG} has {EXPLICIT} = {named!r}, and {named} is missing.")
    return named


def _named_file(config: Path) -> str | None:
    """The field `transformers_weights` of a config.json; None: it has none, or cannot be read, which `read_config` reports."""
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    named = fields.get(EXPLICIT) if isinstance(fields, dict) else None
    return named if isinstance(named, str) else None


def weight_file_names(directory: Path) -> list[str]:
    """The names of the files that hold the weights of a folder, from its index if it is read from one.

    Raises:
        CheckpointError: as `entry_file`; an index that cannot be read.
    """
    entry = entry_file(directory)
    if entry is not None and entry.endswith(INDEX_ENDING):
        return sorted(set(_read_index(directory / entry).values()))
    return [entry or SINGLE]


def unread_files(directory: Path) -> list[str]:
    """The files in a folder that its weights could have been read from as well, and are not: others come first."""
    entry = entry_file(directory)
    return [name for name in (SINGLE, INDEX, *PICKLED) if name != entry and (directory / name).is_file()]


def _other_files(directory: Path) -> list[str]:
    """All safetensors files of a folder without `entry_file`.

    Raises:
        CheckpointError: there are none, some are parts of a set without its index, or transformers would read others.
    """
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{directory} has neither {INDEX} nor *.safetensors. {describe(directory)}")
    if parts := [name for name in names if WEIGHTS.fullmatch(name)]:
        raise CheckpointError(
            f"{directory} is not a complete checkpoint: {parts[0]} is one of several files, and {INDEX}, which lists "
            "them, is missing."
        )
    if pickled := [name for name in PICKLED if (directory / name).is_file()]:
        raise CheckpointError(
            f"{directory} has neither {SINGLE} nor {INDEX}, so transformers reads its weights from {pickled[0]} and not from "
            f"{names[0]}. That is a pickle, which could run code, and is not read here. To fix: load it with transformers, and "
            "write it with save_pretrained."
        )
    return names


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
            problems.append(
                f"{name} in {file.name} has the dtype {entry['dtype']}: supported are {', '.join(DTYPES)}."
            )
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
