"""Tokens of a source, T in all, encoded once and memory-mapped by all ranks.

    <cache_dir>/<key>/tokens.npy     uint16 or uint32 (T,)    all samples, concatenated
                      targets.npy    bool or int32 (T,)       a loss mask or classes (`Tokens.targets`); absent: all have a loss
                      bounds.npy     int64 (samples + 1,)     where each sample, a document or a pair of them, starts
                      splits.npy     int64 (samples,)         the tokens of the first half of each pair; absent: no pairs
                      labels.npy     float64 (samples,)       the label of each; absent: no labels
                      places.txt     file and line of each sample
                      counters.json  bad samples: how many, and where
                      contents.txt   a hash of all these arrays, which a saved position must match

The key is a hash of the source (path, size and modification time of its files), the tokenizer, the encoding and on_bad. Of
processes that need the same tokens at once, one encodes and the others wait. A folder gets its name only when it is
complete, so a process that is killed leaves nothing that another would read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from patchgen.runtime.data.problems import BadSample, Counters, DataError, bad_sample_error
from patchgen.runtime.data.records import Record, Source
from patchgen.runtime.data.text import Encoder, Tokens, digest

VERSION = 6
ENCODE_BATCH_SIZE = 256  # samples per call of the tokenizer, which uses several threads
FULL_DISK_ERRORS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
"""Error of a write -> how to fix it."""


def write_error(what: str, error: OSError) -> DataError:
    """For an error of a write to the cache folder.

    Args:
        what: a sentence without its end, such as "The tokens do not fit into DIR".
    """
    remedies = [FULL_DISK_ERRORS.get(error.errno or 0), "name another data.cache_dir"]
    return DataError(f"{what}: {error.strerror or error}. To fix: {', or '.join(filter(None, remedies))}.")


@dataclass(frozen=True)
class TokenCache:
    """The tokens of one source. A sample is a document or a pair of them; T: all tokens.

    Attributes:
        content_hash: of the arrays; the text of `contents.txt`.
        tokens: `(T,)`.
        targets: `(T,)`. bool: a loss mask, whether each token has a loss. int32: classes, 0 for none, or the class plus 1. None:
            every token has a loss.
        bounds: `(samples + 1,)`, int64: where each sample starts, and T.
        places_file: file and line of each sample, one line of text per sample.
        counters: bad samples.
        splits: `(samples,)`, int64: the tokens of the first document of each pair; None: no pairs.
        labels: `(samples,)`, float64; None: no labels.
    """

    content_hash: str
    tokens: np.ndarray
    targets: np.ndarray | None
    bounds: np.ndarray
    places_file: Path
    counters: Counters
    splits: np.ndarray | None = None
    labels: np.ndarray | None = None

    def places(self, samples: Iterable[int]) -> list[str]:
        """File and line of each of these samples.

        Args:
            samples: their numbers, from 0, in any order.

        Returns:
            One text per sample, in ascending order of the numbers.
        """
        numbers = set(samples)
        with self.places_file.open(encoding="utf-8") as lines:
            leading_lines = itertools.islice(lines, max(numbers, default=-1) + 1)
            return [line.rstrip("\n") for number, line in enumerate(leading_lines) if number in numbers]


def open_cache(root: Path, source: Source, encoder: Encoder, *, skip_bad: bool) -> TokenCache:
    """The tokens of `source`, encoded now unless they are cached.

    Args:
        root: the folder of all caches.
        skip_bad: skip and count bad samples; otherwise the first one raises a DataError.

    Raises:
        DataError: a bad sample, no usable one, or the cache folder cannot be written or is full.
    """
    key_parts = {
        "version": VERSION,
        "source": source.fingerprint(),
        "encoder": encoder.fingerprint(),
        "skip_bad": skip_bad,
    }
    key = digest(key_parts)
    folder = root / key
    if not folder.exists():
        with cache_lock(root / f"{key}.lock"):
            if not folder.exists():
                _build(folder, source, encoder, skip_bad=skip_bad)
    optional_files = {name: folder / f"{name}.npy" for name in ("targets", "splits", "labels")}
    return TokenCache(
        tokens=_load_mapped(folder / "tokens.npy"),
        bounds=_load_mapped(folder / "bounds.npy"),
        **{name: _load_mapped(file) if file.exists() else None for name, file in optional_files.items()},
        content_hash=(folder / "contents.txt").read_text(),
        places_file=folder / "places.txt",
        counters=Counters.from_dict(json.loads((folder / "counters.json").read_text())),
    )


@contextlib.contextmanager
def cache_lock(file: Path) -> Iterator[FileLock]:
    """Locks a file in the cache folder, which is created if needed.

    Raises:
        DataError: the folder cannot be written.
    """
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise DataError(
            f"The cache folder {file.parent} cannot be written: {error}. To fix: name another data.cache_dir."
        ) from error
    try:
        yield lock
    finally:
        lock.release()


def _load_mapped(file: Path) -> np.ndarray:
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _build(folder: Path, source: Source, encoder: Encoder, *, skip_bad: bool) -> None:
    unfinished = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        unfinished.mkdir()
        _write(unfinished, source, encoder, skip_bad=skip_bad)
        try:
            os.rename(unfinished, folder)
        except OSError:
            # Where file locks do not work (some network file systems), another process may have been first.
            if not folder.exists():
                raise
    except OSError as error:
        if error.errno not in FULL_DISK_ERRORS:
            raise
        raise write_error(
            f"The tokens of {source.name} do not fit into the cache folder {folder.parent}", error
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(folder: Path, source: Source, encoder: Encoder, *, skip_bad: bool) -> None:
    counters = Counters()
    lengths = []
    per_sample: dict[str, list[float]] = {"splits": [], "labels": []}
    largest_id = 0
    any_targets, targets_dtype = False, np.dtype(bool)
    content_hash = hashlib.sha256()
    with (
        (folder / "tokens.raw").open("wb") as tokens,
        (folder / "targets.raw").open("wb") as targets,
        (folder / "places.txt").open("w", encoding="utf-8") as places,
    ):
        for where, encoded in _encoded(source, encoder):
            if isinstance(encoded, BadSample):
                if not skip_bad:
                    raise bad_sample_error(encoded.where, encoded.reason)
                counters.add("bad", encoded.where, encoded.reason)
                continue
            ids = encoded.ids.astype(np.uint32)
            tokens.write(ids.data)  # `tofile` would hide the reason for an error
            largest_id = max(largest_id, int(encoded.ids.max()))
            any_targets |= encoded.targets is not None
            sample_targets = np.ones(len(ids), dtype=bool) if encoded.targets is None else encoded.targets
            targets.write(sample_targets.data)
            targets_dtype = sample_targets.dtype  # the same for all samples of an encoder
            for part in (np.int64(len(ids)), ids, sample_targets):
                content_hash.update(part.tobytes())
            for values, value in ((per_sample["splits"], encoded.split), (per_sample["labels"], encoded.label)):
                if value is not None:
                    values.append(value)
                    content_hash.update(np.float64(value).tobytes())
            lengths.append(len(encoded.ids))
            places.write(where.replace("\n", " ") + "\n")
    if not lengths:
        raise DataError(
            f"No usable sample in {source.name}: {counters.summary() if counters.counts else 'the source is empty'}."
        )

    bounds = np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])
    _save(folder / "bounds.npy", bounds)
    for name, dtype in (("splits", np.int64), ("labels", np.float64)):
        if per_sample[name]:
            _save(folder / f"{name}.npy", np.array(per_sample[name], dtype=dtype))
    _raw_to_npy(folder / "tokens", np.uint32, np.uint16 if largest_id < 2**16 else np.uint32, int(bounds[-1]))
    if any_targets:
        _raw_to_npy(folder / "targets", targets_dtype, targets_dtype, int(bounds[-1]))
    else:
        (folder / "targets.raw").unlink()
    (folder / "contents.txt").write_text(content_hash.hexdigest()[:32])
    (folder / "counters.json").write_text(json.dumps(counters.as_dict()))


def _encoded(source: Source, encoder: Encoder) -> Iterator[tuple[str, Tokens | BadSample]]:
    for records in _batched(source):
        readable: list[tuple[str, dict[str, Any]]] = []
        bad: dict[str, BadSample] = {}
        for record in records:
            try:
                readable.append((record.where, record.fields()))
            except BadSample as error:
                bad[record.where] = error
        encoded = iter(encoder.encode(readable))
        for record in records:
            yield record.where, bad.get(record.where) or next(encoded)


def _batched(source: Source) -> Iterator[list[Record]]:
    records = (record for record, _ in source.read())
    while batch := list(itertools.islice(records, ENCODE_BATCH_SIZE)):
        yield batch


def _raw_to_npy(path: Path, raw_dtype: Any, dtype: Any, length: int) -> None:
    """Converts `path`.raw to `path`.npy in blocks: a source need not fit into memory."""
    raw = path.with_suffix(".raw")
    raw_array = np.memmap(raw, dtype=raw_dtype, mode="r", shape=(length,))
    _save(path.with_suffix(".npy"), raw_array, dtype)
    del raw_array
    raw.unlink()


def _save(file: Path, array: np.ndarray, dtype: Any = None) -> None:
    """Writes an array `(n,)` in blocks. Neither mapped (on a full disk, a write to a map ends the process) nor by `np.save`
    (its error does not say why)."""
    dtype, block_length = np.dtype(dtype or array.dtype), 2**24
    with file.open("wb") as out:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": array.shape}
        np.lib.format.write_array_header_1_0(out, header)
        for start in range(0, len(array), block_length):
            out.write(array[start : start + block_length].astype(dtype).data)
