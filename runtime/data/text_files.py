"""Files of text as UTF-8: plain, compressed by gzip or zstd, or in UTF-16 or UTF-32. Their first bytes tell, not their names."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from patchgen.runtime.data.problems import DataError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""The first bytes of compressed files."""
UTF8 = ("utf-8", "utf-8-sig")
NUM_FIRST_BYTES = 4  # of a text, which tell its encoding


class UnreadableText(Exception):
    """A file of text is damaged; the message names it and says how to fix it."""


@contextlib.contextmanager
def open_utf8(file: Path) -> Iterator[IO[bytes]]:
    """The bytes of a text file in UTF-8, decompressed, from its start on.

    Raises:
        UnreadableText: it is damaged; also while it is read.
        DataError: it is compressed by zstd, and the package that reads it is not installed.
    """
    try:
        with _decompressed(file) as stream:
            encoding = json.detect_encoding(stream.read(NUM_FIRST_BYTES))
            stream.seek(0)
            yield stream if encoding in UTF8 else _transcoded(file, stream.read(), encoding)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableText(f"{file} is compressed and damaged: {error}. To fix: compress it again.") from error


def _transcoded(file: Path, content: bytes, encoding: str) -> IO[bytes]:
    try:
        return io.BytesIO(content.decode(encoding).encode())
    except UnicodeDecodeError as error:
        raise UnreadableText(f"{file} begins as {encoding}, but {error}. To fix: convert it to UTF-8.") from error


def is_plain(file: Path) -> bool:
    """Whether a text file is UTF-8 and not compressed, so that any part of it can be read by its offset."""
    with file.open("rb") as stream:
        first = stream.read(NUM_FIRST_BYTES)
    return not first.startswith((GZIP, ZSTD)) and json.detect_encoding(first) in UTF8


def read_text(file: Path) -> str:
    """The text of a file, without a byte order mark. Raises UnicodeDecodeError, UnreadableText, DataError."""
    with open_utf8(file) as stream:
        content = stream.read()
    return content.decode("utf-8-sig")


def _decompressed(file: Path) -> IO[bytes]:
    """The decompressed bytes of a file. Raises EOFError or DataError for zstd that is damaged or cannot be read."""
    with file.open("rb") as stream:
        first = stream.read(len(ZSTD))
    if first.startswith(GZIP):
        return cast(IO[bytes], gzip.open(file, "rb"))
    if first != ZSTD:
        return file.open("rb")
    try:
        import zstandard  # pyright: ignore[reportMissingImports] - nothing else needs it
    except ImportError as error:
        raise DataError(
            f"{file} is compressed by zstd, which needs the package zstandard. To fix: pip install zstandard, or decompress it."
        ) from error
    compressed, pieces = file.read_bytes(), []
    try:
        while compressed:  # a file may hold several frames
            frame = zstandard.ZstdDecompressor().decompressobj()
            pieces.append(frame.decompress(compressed))
            if not frame.eof:
                raise EOFError("it ends within a frame")
            compressed = frame.unused_data
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
    return io.BytesIO(b"".join(pieces))
