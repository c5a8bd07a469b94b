"""The manifest of a saved training state (`checkpoint.json`), and checks that its folder is complete and undamaged."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patchgen.runtime.checkpoint.errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """The fields of `checkpoint.json`, without `format`. The newest checkpoint has the highest `serial`, whatever its step.

    Attributes:
        world: the number of ranks.
        origin: `Origin` of the checkpoint that the weights were loaded from, as JSON; None: they were not loaded.
        files: name -> size in bytes, of every other file.
        checksums: name -> CRC-32 of the content.
    """

    step: int
    serial: int
    world: int
    model_class: str
    model_type: str
    origin: dict | None
    files: dict[str, int]
    checksums: dict[str, int] = field(default_factory=dict)


def check_folder(folder: Path) -> tuple[Manifest | None, str]:
    """The manifest of a checkpoint, and what makes it incomplete; "" if it is complete."""
    if not folder.is_dir():
        return None, "it does not exist"
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return None, str(error)
    for name, size in manifest.files.items():
        file = folder / name
        if not file.is_file():
            return manifest, f"{name} is missing"
        if file.stat().st_size != size:
            return manifest, f"{name} has {file.stat().st_size} bytes instead of {size}"
    return manifest, ""


def require_checksums(folder: Path, manifest: Manifest, names: Sequence[str], advice: str = "") -> None:
    """Compares files with their checksums.

    Raises:
        CheckpointError: naming those whose content has changed since it was saved.
    """
    problems = [
        f"{name} has changed since it was saved"
        for name in names
        if checksum(folder / name) != manifest.checksums[name]
    ]
    if problems:
        raise CheckpointError(f"{folder} is damaged:", problems, advice=advice)


def checksum(file: Path) -> int:
    """CRC-32 of a file's bytes."""
    value = 0
    with file.open("rb") as stream:
        while part := stream.read(16 << 20):
            value = zlib.crc32(part, value)
    return value


def read_manifest(folder: Path) -> Manifest:
    """Reads `checkpoint.json`.

    Raises:
        CheckpointError: it is missing, damaged or of another version.
    """
    file = folder / MANIFEST
    try:
        fields = json.loads(file.read_text())
        if not isinstance(fields, dict):
            raise CheckpointError(f"{MANIFEST} is damaged: expected a JSON object, found {type(fields).__name__}")
        if fields.pop("format") != FORMAT:
            raise CheckpointError(f"{file} is not of format {FORMAT}: another version of patchgen wrote it")
        return Manifest(**fields)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error
