"""Converts, exports and fingerprints checkpoints from disk to disk, in one process, without a GPU or a model in memory.

    convert("in", "out", layout="stacked")     another layout
    export_run("runs/one", "out")              the newest checkpoint of a run, in the layout of the original
    fingerprint("in")                          a hash per tensor, equal in every layout

For each tensor of the output, the regions of stored tensors that it is built from are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.export import make_outputs, most_common_dtype, outputs_and_files, saved_tensors
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.folders import describe, is_training_checkpoint
from patchgen.runtime.checkpoint.layout import Assembly, Origin, assemble, class_name, disassemble
from patchgen.runtime.checkpoint.lazy_tensors import (
    LazyTensor,
    Region,
    full_region,
    leaves,
    plan_reads,
    region_shape,
)
from patchgen.runtime.checkpoint.load import (
    COMPUTED_BUFFER_SUFFIXES,
    distinct_state,
    ignored_by_upstream,
    integer_weight_problems,
    keys_of_buffers,
    mismatch_messages,
    require_loadable_config,
    stored_leaves,
    tied_groups,
)
from patchgen.runtime.checkpoint.manifest import check_folder, require_checksums
from patchgen.runtime.checkpoint.model_files import (
    GENERATION_CONFIG,
    candidate_models_on_meta,
    config_files,
    read_config,
    side_files,
)
from patchgen.runtime.checkpoint.placement import intersection, narrow_to
from patchgen.runtime.checkpoint.quantised import read_folder, without_quantisation
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, INCOMPLETE, INDEX, StoredTensor
from patchgen.runtime.checkpoint.saved_shards import stored_shards
from patchgen.runtime.checkpoint.saved_steps import SavedSteps
from patchgen.runtime.checkpoint.train_state import MODEL
from patchgen.runtime.checkpoint.untrained_part import CopiedTensor, UntrainedPart, find_untrained_part
from patchgen.runtime.checkpoint.writing import MAX_FILE, FolderWriter, Output, ReadableOutput, plan_files
from patchgen.runtime.checkpoint.written_config import set_dtype

CHUNK = 64 << 20
"""Bytes that are hashed at a time."""


# ------------------------------------------------------------------------------------------------- convert


@dataclass(frozen=True)
class Converted:
    """What `convert` wrote.

    Attributes:
        outputs: tensors of the model.
        unchanged: tensors that the model's class ignores, copied with their keys and dtypes.
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

    Tensors that upstream's class ignores (multi-token prediction heads) are copied.

    Args:
        layout: "per-expert" or "stacked"; None: upstream's own.
        dtype: of floating-point weights, except those that upstream keeps in fp32; None: unchanged.

    Raises:
        CheckpointError: no such layout, the tensors do not fit the model of the config, or a file, with its key, cannot be
            read or written.
    """
    source, directory = Path(source), Path(directory)
    if source.resolve() == directory.resolve():
        raise CheckpointError(f"{source} is both the source and the output: give another output folder.")
    opened = _open_checkpoint(source)
    model, names = opened.model, saved_tensors(opened.model)
    parameters = {name: lazy for name, lazy in opened.parameters.items() if name in names}
    to_write = disassemble(model, parameters, layout=layout, origin=None)
    outputs = make_outputs(model, to_write, dtype)
    fields = without_quantisation(read_config(source))
    stored_dtype = dtype or most_common_dtype(outputs)
    if stored_dtype is not None:
        set_dtype(fields, stored_dtype, is_part=False)
    is_same = fields == read_config(source)
    config = source / CONFIG if is_same else json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    files = {**config_files(model, dtype), CONFIG: config}
    unchanged = [CopiedTensor.of(stored) for stored in opened.ignored.values()]
    write_folder(
        directory, [*outputs, *unchanged], files | side_files(source), max_file, keys_of_buffers(model, parameters)
    )
    return Converted(tuple(outputs), tuple(unchanged))


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
    """Writes the weights of a training checkpoint as a Hugging Face checkpoint; returns the folder of the training checkpoint.

    Args:
        run: a run's folder, its `checkpoints` folder, or one checkpoint (`step-...`).
        step: which; None: the newest complete one.
        source: folder of the original, for tokenizer, generation config and the untrained part; None: the one that the
            run's weights were loaded from, if it still exists.
        trained_only: write only the trained model, not the untrained part of the original.
        directory, layout, dtype, max_file: as in `export_pretrained`.

    Raises:
        CheckpointError: no complete checkpoint, or files that cannot be read or written.
    """
    folder = find_checkpoint(Path(run), step)
    manifest, _ = check_folder(folder)
    assert manifest is not None, "`find_checkpoint` returns complete ones"
    other_steps = [other for other in SavedSteps(folder.parent).complete_steps() if other != manifest.step]
    advice = f"--step chooses another: {', '.join(map(str, other_steps))}." if other_steps else ""
    require_checksums(folder, manifest, sorted(manifest.checksums), advice)
    stored = stored_shards(folder)
    origin = Origin.from_json(manifest.origin) if manifest.origin else None
    model = next(
        (model for model in candidate_models_on_meta(folder) if distinct_state(model).keys() == stored.keys()), None
    )
    if model is None and any(".lora_A." in name for name in stored):
        raise CheckpointError(
            f"{folder} holds adapters and weights separately. The run wrote the adapters to its folder `adapter`, in PEFT's "
            "format. To fix: for merged weights set lora.merge: true and start the run again; it resumes at its end and only "
            "writes `export`."
        )
    if model is None:
        raise CheckpointError(
            f"{folder} holds tensors that are not those of {manifest.model_class}: no class of that name in "
            "transformers or patchgen matches. To fix: register the generated model of this run."
        )
    for group in tied_groups(model):
        stored |= dict.fromkeys(group, stored[group[0]])
    parameters = {name: stored[name] for name in saved_tensors(model)}
    source_folder = Path(source) if source is not None else None
    if source_folder is None and origin is not None and Path(origin.directory).is_dir():
        source_folder = Path(origin.directory)
    untrained = UntrainedPart(trained_origin=origin)
    if not trained_only:
        untrained = find_untrained_part(model, origin, source_folder)
    outputs, files = outputs_and_files(model, parameters, untrained, source_folder, layout=layout, dtype=dtype)
    if isinstance(files.get(GENERATION_CONFIG), str) and (folder / GENERATION_CONFIG).is_file():
        files[GENERATION_CONFIG] = folder / GENERATION_CONFIG  # the run's, if the original has none
    write_folder(Path(directory), outputs, files, max_file, _keys_of_buffers_in_run(model))
    return folder


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """The folder of a run's newest complete checkpoint, or of the one of `step`.

    Raises:
        CheckpointError: there is none.
    """
    if is_training_checkpoint(run):
        manifest, problem = check_folder(run)
        if manifest is None or problem:
            raise CheckpointError(f"{run} is not a complete checkpoint: {problem}.")
        if step not in (None, manifest.step):
            raise CheckpointError(
                f"{run} is the checkpoint of step {manifest.step}, not of step {step}. To fix: omit the step (--step), or name "
                f"the folder of all: {run.absolute().parent}."
            )
        return run
    known: list[int] = []
    broken: dict[str, str] = {}
    for parent in (run, run / "checkpoints"):
        saved = SavedSteps(parent)
        known += saved.complete_steps()
        broken |= saved.broken()
        chosen_step = saved.latest() if step is None else step if step in known else None
        if chosen_step is not None:
            return saved.folder_of(chosen_step)
    if known:
        raise CheckpointError(
            f"{run} holds no complete checkpoint of step {step}, only of {', '.join(map(str, known))}."
        )
    if broken:
        problems = [f"{name}: {problem}" for name, problem in sorted(broken.items())]
        raise CheckpointError(f"{run} holds no complete checkpoint:", problems)
    raise CheckpointError(
        f"{run} holds no complete checkpoint of a training run, and neither does {run / 'checkpoints'}. {describe(run)}"
    )


@dataclass(frozen=True)
class _OpenCheckpoint:
    """A Hugging Face checkpoint, matched with the model of its config.

    Attributes:
        model: of its config, on the meta device.
        parameters: name in the state dict, also every tied one -> its tensor, built from the checkpoint's.
        ignored: key -> tensor that upstream's class ignores.
    """

    model: PreTrainedModel
    parameters: dict[str, LazyTensor]
    ignored: dict[str, StoredTensor]


def _open_checkpoint(source: Path) -> _OpenCheckpoint:
    """Reads the headers of a folder, and finds the model that they match.

    Raises:
        CheckpointError: they match no model, or copies of a tied tensor differ.
    """
    stored = read_folder(source)
    leaves = stored_leaves(stored)
    best: tuple[list[str], PreTrainedModel, Assembly, set[str]] | None = None
    for model in candidate_models_on_meta(source):
        require_loadable_config(model, source)
        assembly = assemble(model, leaves)
        ignored = ignored_by_upstream(model, assembly.unexpected)
        problems = mismatch_messages(model, assembly, stored, allowed=ignored)
        problems += integer_weight_problems(model.state_dict(), assembly.parameters, stored)
        if best is None or len(problems) < len(best[0]):
            best = problems, model, assembly, ignored
        if not problems:
            break
    assert best is not None, "`candidate_models_on_meta` yields one, or raises"
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
        advice = "To fix: set tie_word_embeddings=false in config.json, if both are needed."
        raise CheckpointError(f"{source} does not fit {class_name(model)}:", problems, advice=advice)
    return _OpenCheckpoint(model, parameters, {key: stored[key] for key in sorted(ignored)})


def are_equal(reader: FileReader, first: LazyTensor, second: LazyTensor) -> bool:
    """Whether two tensors have the same values."""
    if first.shape != second.shape:
        return False
    for region in _chunks(first):
        parts = [torch.empty(region_shape(region), dtype=lazy.dtype) for lazy in (first, second)]
        for lazy, part in zip((first, second), parts, strict=True):
            read_region(reader, lazy, region, part)
        if not bool((parts[0] == parts[1]).all()):
            return False
    return True


def _keys_of_buffers_in_run(model: PreTrainedModel) -> set[str]:
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {f"{MODEL}{name}" for name in model.state_dict() if name not in weights}


def write_folder(
    directory: Path,
    outputs: list[Output],
    files: Mapping[str, str | Path],
    max_file: int,
    may_be_infinite: Collection[str],
) -> None:
    """Writes tensors that are built from those of files, one in memory at a time, and other files.

    Args:
        may_be_infinite: keys of tensors that may have infinite values.

    Raises:
        CheckpointError: naming file and key; earlier content is unchanged, unless files could not be renamed.
    """
    planned = plan_files(outputs, max_file=max_file)
    writer = FolderWriter(directory, planned)
    with FileReader(may_be_infinite=may_be_infinite) as reader:
        for output in (output for file in planned for output in file.outputs):
            writer.attempt(lambda output=output: writer.write(output, _read_full(reader, output)))
            if writer.has_failed:
                break
    writer.close(files)


def _read_full(reader: FileReader, output: Output) -> Tensor:
    if isinstance(output, ReadableOutput):
        return output.read(reader)
    out = torch.empty(tuple(output.tensor.shape), dtype=output.dtype)
    read_region(reader, output.tensor, full_region(out.shape), out)
    return out


def read_region(reader: FileReader, lazy: LazyTensor, region: Region, out: Tensor) -> None:
    """Reads a region of a tensor that is built from those of files."""
    plan = plan_reads(lazy, region, out)
    for stored_leaf, part, view in plan.reads:
        if isinstance(stored_leaf.source, StoredTensor):
            reader.read(stored_leaf.source, part, view)
            continue
        assert isinstance(stored_leaf.source, list), "a leaf of `stored_leaves` or of `stored_shards`"
        for shard in stored_leaf.source:
            overlap = intersection(part, shard.region) if part else ()
            if overlap is not None:
                inner = tuple((a - c, b - c) for (a, b), (c, _) in zip(overlap, shard.region, strict=True))
                reader.read(shard.stored, inner, narrow_to(view, part, overlap))
    plan.finish()


# --------------------------------------------------------------------------------------------- fingerprint


def fingerprint(directory: str | Path) -> dict[str, str]:
    """A hash for each parameter and saved buffer of a Hugging Face checkpoint, in any layout, or of a run's.

    Names and shapes are those of the model, so the same weights have the same hashes in any layout and number of files. A
    hash covers dtype, shape and every byte. Tied parameters are listed once; tensors that upstream's class ignores are
    listed under their keys.

    Raises:
        CheckpointError: naming file and key.
    """
    directory = Path(directory)
    if any(directory.glob("*.safetensors")) or any((directory / name).is_file() for name in (INDEX, INCOMPLETE)):
        opened = _open_checkpoint(directory)
        copies = {name for group in tied_groups(opened.model) for name in group[1:]}
        tensors = {name: lazy for name, lazy in opened.parameters.items() if name not in copies}
        tensors |= stored_leaves(
            {key: stored for key, stored in opened.ignored.items() if not key.endswith(COMPUTED_BUFFER_SUFFIXES)}
        )
    else:
        tensors = stored_shards(find_checkpoint(directory))
    # Infinite values are hashed like others; NaN is refused.
    keys = {part.name for lazy in tensors.values() for part in leaves(lazy)} | {f"{MODEL}{name}" for name in tensors}
    with FileReader(may_be_infinite=keys) as reader:
        return {name: _hash(reader, lazy) for name, lazy in sorted(tensors.items())}


def _hash(reader: FileReader, lazy: LazyTensor) -> str:
    digest = hashlib.sha256(f"{lazy.dtype} {list(lazy.shape)} ".encode())
    for region in _chunks(lazy):
        out = torch.empty([stop - start for start, stop in region], dtype=lazy.dtype)
        read_region(reader, lazy, region, out)
        digest.update(out.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _chunks(lazy: LazyTensor) -> Iterator[Region]:
    """Consecutive regions of about CHUNK bytes."""
    region = full_region(lazy.shape)
    if not region or lazy.numel() * lazy.dtype.itemsize <= CHUNK:
        yield region
        return
    step = max(1, CHUNK * lazy.shape[0] // (lazy.numel() * lazy.dtype.itemsize))
    for start in range(0, lazy.shape[0], step):
        yield ((start, min(start + step, lazy.shape[0])), *region[1:])


def combined_hash(fingerprints: Mapping[str, str]) -> str:
    """One hash of all fingerprints."""
    return hashlib.sha256("\n".join(f"{k} {v}" for k, v in sorted(fingerprints.items())).encode()).hexdigest()[:32]
