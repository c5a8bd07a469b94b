"""Checkpoints from disk to disk, in one process without a GPU and without a model in memory.

    convert("in", "out", layout="stacked")     another layout
    export_run("runs/one", "out")              the newest checkpoint of a run, as the original was laid out
    fingerprint("in")                          a hash per tensor, equal in every layout

What is read for a tensor of the output are the boxes that it is made of, of the files as they are.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.export import outputs, saved_tensors, with_rest
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.folders import describe
from patchgen.runtime.checkpoint.layout import Assembly, Origin, assemble, class_name, disassemble
from patchgen.runtime.checkpoint.load import (
    DERIVED,
    distinct_state,
    finish,
    keys_of_buffers,
    of_another_kind,
    require_same_type,
    stored_leaves,
    tied_groups,
    unexpected_by_upstream,
)
from patchgen.runtime.checkpoint.manifest import examine, require_content
from patchgen.runtime.checkpoint.model_files import GENERATION_CONFIG, config_files, empty_models, side_files
from patchgen.runtime.checkpoint.placement import intersection, within
from patchgen.runtime.checkpoint.rest import Passed
from patchgen.runtime.checkpoint.safetensor_files import INCOMPLETE, INDEX, StoredTensor, read_folder
from patchgen.runtime.checkpoint.saved_steps import SavedSteps
from patchgen.runtime.checkpoint.tensor_index import read_index
from patchgen.runtime.checkpoint.tensor_sources import Box, Moved, box_shape, leaf, leaves, pull, whole
from patchgen.runtime.checkpoint.train_state import MODEL
from patchgen.runtime.checkpoint.writing import MAX_FILE, FolderWriter, Output, ReadOutput, plan

CHUNK = 64 << 20
"""Bytes that are hashed at a time."""


# ------------------------------------------------------------------------------------------------- convert


@dataclass(frozen=True)
class Converted:
    """What `convert` wrote.

    Attributes:
        outputs: tensors of the model.
        unchanged: tensors that the model's class has no use for, under their keys and in their dtypes.
    """

    outputs: tuple[Output, ...]
    unchanged: tuple[Output, ...]


def convert(
    source: str | Path,
    directory: str | Path,
    *,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
    max_file: int = MAX_FILE,
) -> Converted:
    """Writes a Hugging Face checkpoint in another layout; returns what was written.

    Tensors that upstream's class leaves out when it loads (further prediction heads) are written as they are.

    Args:
        layout: "per-expert" or "stacked"; None: upstream's own.
        dtype: of floating-point weights; None: as they are.

    Raises:
        CheckpointError: naming file and key.
    """
    source, directory = Path(source), Path(directory)
    if source.resolve() == directory.resolve():
        raise CheckpointError(f"{source} is both the source and the output: give another output folder.")
    opened = _open(source)
    model, names = opened.model, saved_tensors(opened.model)
    parameters = {name: moved for name, moved in opened.parameters.items() if name in names}
    written = disassemble(model, parameters, layout=layout, origin=None)
    made = outputs(model, written, dtype)
    files = config_files(model, dtype or next((o.dtype for o in made if o.dtype.is_floating_point), None))
    unchanged = [Passed.of(stored) for stored in opened.others.values()]
    write_folder(
        directory, [*made, *unchanged], files | side_files(source), max_file, keys_of_buffers(model, parameters)
    )
    return Converted(tuple(made), tuple(unchanged))


def export_run(
    run: str | Path,
    directory: str | Path,
    *,
    step: int | None = None,
    layout: str | None = None,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_file: int = MAX_FILE,
    trained_only: bool = False,
) -> Path:
    """Writes the weights of a training checkpoint as a Hugging Face checkpoint; returns the folder it was made from.

    Args:
        run: a run's folder, its `checkpoints` folder, or one checkpoint (`step-...`).
        step: which; None: the newest whole one.
        source: folder of the original, for tokenizer, generation config and what of it did not train; None: the one that
            the run's weights were loaded from, where that still exists.
        trained_only: write the model that trained by itself, not what it was loaded beside.

    Raises:
        CheckpointError: no complete checkpoint, or files that cannot be read or written.
    """
    folder = find_checkpoint(Path(run), step)
    manifest, _ = examine(folder)
    assert manifest is not None, "`find_checkpoint` finds whole ones"
    others = [other for other in SavedSteps(folder.parent).complete() if other != manifest.step]
    advice = f"--step takes another: {', '.join(map(str, others))}." if others else ""
    require_content(folder, manifest, sorted(manifest.checksums), advice)
    stored = _stored_shards(folder)
    origin = Origin.from_json(manifest.origin) if manifest.origin else None
    model = next((model for model in empty_models(folder) if distinct_state(model).keys() == stored.keys()), None)
    if model is None and any(".lora_A." in name for name in stored):
        raise CheckpointError(
            f"{folder} holds adapters beside the weights. The run wrote them to its folder `adapter`, as PEFT loads them. For the "
            "model with both added up set lora.merge: true and start the run again: it trains nothing that is trained, and "
            "writes `export`."
        )
    if model is None:
        raise CheckpointError(
            f"{folder} holds tensors that are not those of {manifest.model_class}: no class that transformers or "
            "patchgen has under that name fits. Is the generated model of this run there, and registered?"
        )
    for group in tied_groups(model):
        stored |= dict.fromkeys(group, stored[group[0]])
    parameters = {name: stored[name] for name in saved_tensors(model)}
    beside = Path(source) if source is not None else None
    if beside is None and origin is not None and Path(origin.directory).is_dir():
        beside = Path(origin.directory)
    made, files = with_rest(model, parameters, origin, beside, layout=layout, dtype=dtype, trained_only=trained_only)
    if isinstance(files.get(GENERATION_CONFIG), str) and (folder / GENERATION_CONFIG).is_file():
        files[GENERATION_CONFIG] = folder / GENERATION_CONFIG  # the run's own, where the original has none
    write_folder(Path(directory), made, files, max_file, _keys_of_buffers_in_run(model))
    return folder


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """The folder of a run's newest whole checkpoint, or of that of a step.

    Raises:
        CheckpointError: there is none.
    """
    if step is None and (run / "checkpoint.json").is_file():
        _, problem = examine(run)
        if problem:
            raise CheckpointError(f"{run} is not a complete checkpoint: {problem}.")
        return run
    known: list[int] = []
    broken: dict[str, str] = {}
    for parent in (run, run / "checkpoints"):
        checkpointer = SavedSteps(parent)
        known += checkpointer.complete()
        broken |= checkpointer.broken()
        found = checkpointer.latest() if step is None else step if step in known else None
        if found is not None:
            return checkpointer.folder_of(found)
    if known:
        raise CheckpointError(
            f"{run} holds no complete checkpoint of step {step}, but of {', '.join(map(str, known))}."
        )
    if broken:
        problems = [f"{name}: {problem}" for name, problem in sorted(broken.items())]
        raise CheckpointError(f"{run} holds no complete checkpoint:", problems)
    raise CheckpointError(
        f"{run} holds no complete checkpoint of a training run, and neither does {run / 'checkpoints'}. {describe(run)}"
    )


@dataclass(frozen=True)
class _Opened:
    """A Hugging Face checkpoint.

    Attributes:
        model: that it belongs to, on the meta device.
        parameters: name in the state dict -> how it is made; of tied ones every name.
        others: key -> tensor that upstream's class leaves out.
    """

    model: PreTrainedModel
    parameters: dict[str, Moved]
    others: dict[str, StoredTensor]


def _open(source: Path) -> _Opened:
    """Finds out what a folder's tensors are.

    Raises:
        CheckpointError: they fit no model, or tied ones differ.
    """
    stored = read_folder(source)
    leaves = stored_leaves(stored)
    best: tuple[list[str], PreTrainedModel, Assembly, set[str]] | None = None
    for model in empty_models(source):
        require_same_type(model, source)
        assembly = assemble(model, leaves)
        given = set(assembly.parameters)
        for group in tied_groups(model):
            given |= set(group) if given & set(group) else set()
        ignored = unexpected_by_upstream(model, assembly.unexpected)
        problems = [*assembly.problems]
        problems += [f"missing: {name}" for name in model.state_dict() if name not in given]
        problems += [
            f"unexpected: {key} in {stored[key].file.name}" for key in assembly.unexpected if key not in ignored
        ]
        problems += of_another_kind(model.state_dict(), assembly.parameters, stored)
        if best is None or len(problems) < len(best[0]):
            best = problems, model, assembly, ignored
        if not problems:
            break
    assert best is not None, "`empty_models` gives one, or raises"
    problems, model, assembly, ignored = best
    if problems:
        raise CheckpointError(f"{source} does not fit {class_name(model)}:", problems)
    parameters = dict(assembly.parameters)
    with FileReader() as reader:
        for group in tied_groups(model):
            first, *copies = [name for name in group if name in parameters]
            problems += [
                f"{first} and {copy} are one tied tensor in the model, and differ in the checkpoint."
                for copy in copies
                if not are_equal(reader, parameters[first], parameters[copy])
            ]
            parameters |= dict.fromkeys(group, parameters[first])
    if problems:
        advice = "If both are wanted, the config must say tie_word_embeddings=false."
        raise CheckpointError(f"{source} does not fit {class_name(model)}:", problems, advice=advice)
    return _Opened(model, parameters, {key: stored[key] for key in sorted(ignored)})


def are_equal(reader: FileReader, one: Moved, other: Moved) -> bool:
    """Whether two tensors of files hold the same values."""
    if one.shape != other.shape:
        return False
    for box in _slabs(one):
        parts = [torch.empty(box_shape(box), dtype=moved.dtype) for moved in (one, other)]
        for moved, part in zip((one, other), parts, strict=True):
            fill(reader, moved, box, part)
        if not bool((parts[0] == parts[1]).all()):
            return False
    return True


def _keys_of_buffers_in_run(model: PreTrainedModel) -> set[str]:
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {f"{MODEL}{name}" for name in model.state_dict() if name not in weights}


def write_folder(
    directory: Path, made: list[Output], files: Mapping[str, str | Path], max_file: int, infinite: Collection[str]
) -> None:
    """Writes tensors that are made of those of files, one in memory at a time, and the files beside them.

    Args:
        infinite: keys that may hold infinite values.

    Raises:
        CheckpointError: naming file and key; what was there before is as it was.
    """
    planned = plan(made, max_file=max_file)
    writer = FolderWriter(directory, planned)
    with FileReader(may_be_infinite=infinite) as reader:
        for output in (output for file in planned for output in file.outputs):
            writer.attempt(lambda output=output: writer.write(output, _read_whole(reader, output)))
            if writer.has_failed:
                break
    writer.close(files)


def _read_whole(reader: FileReader, output: Output) -> Tensor:
    if isinstance(output, ReadOutput):
        return output.read(reader)
    out = torch.empty(tuple(output.moved.shape), dtype=output.dtype)
    fill(reader, output.moved, whole(out.shape), out)
    return out


def fill(reader: FileReader, moved: Moved, box: Box, out: Tensor) -> None:
    """Reads a box of a tensor that is made of those of files."""
    part = pull(moved, box, out)
    for found, wanted, view in part.reads:
        if isinstance(found.source, StoredTensor):
            reader.read(found.source, wanted, view)
            continue
        assert isinstance(found.source, list), "leaves of files, or of shards"
        for shard in found.source:
            shared = intersection(wanted, shard.box) if wanted else ()
            if shared is not None:
                inner = tuple((a - c, b - c) for (a, b), (c, _) in zip(shared, shard.box, strict=True))
                reader.read(shard.stored, inner, within(view, wanted, shared))
    finish(part)


# ------------------------------------------------------------------------- tensors of a training checkpoint


@dataclass(frozen=True)
class _Shard:
    """A part of a tensor in a file of torch's distributed checkpoint."""

    box: Box
    stored: StoredTensor


def _stored_shards(folder: Path) -> dict[str, Moved]:
    """The tensors of the model in a training checkpoint, as leaves whose source is a list of shards."""
    index = read_index(folder)
    found = {}
    for key, entry in index.state_dict_metadata.items():
        if not key.startswith(MODEL):
            continue
        shards = []
        assert isinstance(entry, TensorStorageMetadata), "`read_index` admits tensors alone"
        for chunk in entry.chunks:
            place = index.storage_data[MetadataIndex(key, chunk.offsets)]
            file = folder / place.relative_path
            offset = place.offset + _data_offset(file, place.offset, place.length, key)
            box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            shards.append(_Shard(box, StoredTensor(key, file, entry.properties.dtype, tuple(chunk.sizes), offset)))
        name = key.removeprefix(MODEL)
        found[name] = leaf(name, entry.size, entry.properties.dtype, shards)
    return found


class _Part:
    """A stretch of a file as a file of its own, for zipfile and torch.load."""

    def __init__(self, stream, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._place = stream, start, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._length)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        left = self._length - self._place
        count = left if count is None or count < 0 else min(count, left)
        self._stream.seek(self._start + self._place)
        data = self._stream.read(count)
        self._place += len(data)
        return data


def _data_offset(file: Path, start: int, length: int, key: str) -> int:
    """Where, after `start`, the elements of a tensor lie that torch.save wrote there: uncompressed, as one record.

    Raises:
        CheckpointError: they do not lie so, or the file is damaged.
    """
    try:
        with file.open("rb") as stream:
            part = _Part(stream, start, length)  # of IO it has what torch asks for
            tensor = torch.load(cast("IO[bytes]", part), map_location="meta", weights_only=True)
            part.seek(0)
            with zipfile.ZipFile(part) as archive:
                records = [entry for entry in archive.infolist() if "/data/" in entry.filename]
            if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED or not tensor.is_contiguous():
                raise CheckpointError(f"{key} in {file} is not stored contiguously.")
            part.seek(records[0].header_offset + 26)  # the local header ends with the lengths of name and extra field
            lengths = part.read(4)
            name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
            return records[0].header_offset + 30 + name + extra + tensor.storage_offset() * tensor.element_size()
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:
        raise CheckpointError(f"{key} cannot be read from {file}: {error}") from error


# --------------------------------------------------------------------------------------------- fingerprint


def fingerprint(directory: str | Path) -> dict[str, str]:
    """A hash for each parameter and saved buffer of a checkpoint: Hugging Face in any layout, or of a run.

    Parameters are named and laid out as the model has them, so the same weights give the same hashes whatever layout,
    order or number of files they lie in. The hash covers dtype, shape and every byte. Of tied parameters one is listed;
    tensors that upstream's class leaves out when it loads are listed under their keys.

    Raises:
        CheckpointError: naming file and key.
    """
    directory = Path(directory)
    if any(directory.glob("*.safetensors")) or any((directory / name).is_file() for name in (INDEX, INCOMPLETE)):
        opened = _open(directory)
        copies = {name for group in tied_groups(opened.model) for name in group[1:]}
        made = {name: moved for name, moved in opened.parameters.items() if name not in copies}
        made |= stored_leaves({key: stored for key, stored in opened.others.items() if not key.endswith(DERIVED)})
    else:
        made = _stored_shards(find_checkpoint(directory))
    # What is damaged has a hash as well; NaN has none, for it equals nothing.
    every = {part.name for moved in made.values() for part in leaves(moved)} | {f"{MODEL}{name}" for name in made}
    with FileReader(may_be_infinite=every) as reader:
        return {name: _hash(reader, moved) for name, moved in sorted(made.items())}


def _hash(reader: FileReader, moved: Moved) -> str:
    digest = hashlib.sha256(f"{moved.dtype} {list(moved.shape)} ".encode())
    for box in _slabs(moved):
        out = torch.empty([stop - start for start, stop in box], dtype=moved.dtype)
        fill(reader, moved, box, out)
        digest.update(out.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _slabs(moved: Moved) -> Iterator[Box]:
    """Boxes of about CHUNK bytes that follow each other in memory."""
    box = whole(moved.shape)
    if not box or moved.numel() * moved.dtype.itemsize <= CHUNK:
        yield box
        return
    step = max(1, CHUNK * moved.shape[0] // (moved.numel() * moved.dtype.itemsize))
    for start in range(0, moved.shape[0], step):
        yield ((start, min(start + step, moved.shape[0])), *box[1:])


def hash_of(fingerprints: Mapping[str, str]) -> str:
    """One hash of all."""
    return hashlib.sha256("\n".join(f"{k} {v}" for k, v in sorted(fingerprints.items())).encode()).hexdigest()[:32]
