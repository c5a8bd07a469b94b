"""Loads weights of any Hugging Face layout into a model; each rank reads the bytes of its own shards.

with torch.device("meta"):
    model = Qwen3MoeForCausalLM._from_config(config)
sharding.shard_model(model, state)
sharding.materialise(model, "cuda")
report = load_pretrained(model, "/models/Qwen3-30B-A3B")
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from patchgen.runtime import kept_dtypes
from patchgen.runtime.checkpoint import host_memory, initialise, quantised
from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.file_reader import STAGING_BYTES, FileReader
from patchgen.runtime.checkpoint.layout import Assembly, Origin, assemble, class_name
from patchgen.runtime.checkpoint.lazy_tensors import LazyTensor, Leaf, Region, leaf, leaves, plan_reads
from patchgen.runtime.checkpoint.load_report import LoadReport
from patchgen.runtime.checkpoint.model_files import read_config
from patchgen.runtime.checkpoint.placement import device_of, is_replicated, local_tensor, run_on_all_ranks
from patchgen.runtime.checkpoint.quantised import read_folder
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, StoredTensor, unread_files
from patchgen.runtime.checkpoint.vocabulary import (
    NewRows,
    fill_new_rows,
    growth_advice,
    has_fewer_rows,
    stored_part,
    vocabulary_names,
)
from patchgen.runtime.parallel import sharding

NUM_THREADS = 4
SPAN_BYTES = 256 << 20
"""Bytes that one thread reads sequentially. Threads check and cast on several cores what they read. For the disk, four
sequential streams far apart are as fast as one; threads that take turns at one stream are slower."""
PIECE_BYTES = STAGING_BYTES
"""Bytes of the pieces that larger tensors are split into, so that several threads can read them. Reads may be larger:
`FileReader` joins pieces that follow each other in a file."""
MAX_CACHED_SHARE = 0.25
"""A checkpoint larger than this share of the available memory does not stay in the page cache, unless several ranks read the
same tensors of it."""
SMALL_TENSOR_BYTES = 1 << 20
"""Bytes up to which it does not matter that every rank reads the same tensor from disk."""
COMPUTED_BUFFER_SUFFIXES = (".rotary_emb.inv_freq",)
"""Ends of the keys of buffers that old checkpoints contain; transformers computes them, and ignores the keys."""


@torch.no_grad()
def load_pretrained(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    new_rows: NewRows | None = None,
    seed: int = 0,
) -> LoadReport:
    """Fills the parameters and buffers of `model`, in place and in their own dtypes. Collective.

    Args:
        model: a generated one or transformers' own, sharded by `sharding.shard_model` or not. A model on the meta device is
            materialised first, on the device of its mesh or the CPU, in the dtypes of `from_pretrained`.
        directory: safetensors files with or without an index, and `config.json`.
        allow_missing: patterns (`lm_head.*`) of names that the checkpoint may lack: these are initialised.
        allow_unexpected: patterns of keys that the checkpoint may have and the model does not use.
        new_rows: what the rows of embeddings and head are that the checkpoint lacks: "mean" of its rows, computed in fp64 from
            them in the model's dtype, or "random", upstream's initial values; both are the same on any number of ranks. None:
            a smaller vocabulary in the checkpoint is an error. One that is larger always is.
        seed: of the initial values.

    Raises:
        CheckpointError: on every rank. Before the model is changed: with all missing, unexpected and mis-shaped keys, or
            because weights are quantised in a form that is not read, or of another model type. Once tensors are read, with the
            file and key of each that cannot be read, has NaN or, unless it is a buffer, an infinite value, or with the keys of
            a tied tensor's copies that differ: then the model is not usable.
    """
    started = time.perf_counter()
    directory = Path(directory)
    # Ranks may see different files: on local disks, or on a network disk with stale caches.
    match = run_on_all_ranks(
        lambda: match_checkpoint(model, directory, allow_missing, allow_unexpected, new_rows),
        f"{directory} cannot be loaded; nothing was changed in the model:",
    )
    failure = f"{directory} cannot be loaded; the model is not usable:"

    def fill() -> int:
        if any(tensor.is_meta for tensor in model.state_dict().values()):
            kept_dtypes.keep_in_fp32(model)
            sharding.materialise(model, device_of(model.parameters(), otherwise=torch.device("cpu")))
        state = model.state_dict()
        initialise.initialise(model, match.initialised, seed=seed)
        if new_rows == "random":  # all rows: the checkpoint's are read over them
            initialise.initialise(model, list(match.grown), seed=seed)
        with FileReader(
            keeps_pages=_should_stay_cached(match.num_bytes, state),
            may_be_infinite=keys_of_buffers(model, match.lazy_tensors),
        ) as reader:
            problems = fill_tensors(reader, match, state)
            if problems:
                raise CheckpointError(failure, problems)
            return reader.bytes_read

    num_bytes = run_on_all_ranks(fill, failure)
    if new_rows == "mean":
        state = model.state_dict()
        for name, (num_stored, _) in match.grown.items():
            fill_new_rows(state[name], num_stored)
    # nn.Module takes any attribute; its type says tensors and modules.
    model.checkpoint_origin = match.origin  # pyright: ignore[reportArgumentType]
    model.grown_vocabulary = match.grown  # pyright: ignore[reportArgumentType]
    seconds = time.perf_counter() - started
    return LoadReport(
        directory,
        len(match.loaded_names),
        num_bytes,
        seconds,
        match.initialised,
        match.ignored,
        match.grown,
        new_rows,
        tuple(unread_files(directory)),
        match.dequantised,
    )


@dataclass(frozen=True)
class CheckpointMatch:
    """Which tensors of a checkpoint make up which parameters and buffers of a model.

    A tied tensor has several names; the first, in the order of the modules, is its first name.

    Attributes:
        lazy_tensors: name in the state dict -> how the parameter or buffer is built from the checkpoint's tensors.
        loaded_names: first name -> the name that the tensor is loaded from, one that the checkpoint has.
        copies: (further name that the checkpoint has, first name).
        initialised, ignored, grown: as in `LoadReport`; of a tied parameter, its first name.
        origin: the checkpoint's folder and layout, which an export of the model follows.
        num_bytes: of all tensors of the checkpoint.
        dequantised: how many of its tensors are quantised, by form.
    """

    lazy_tensors: dict[str, LazyTensor]
    loaded_names: dict[str, str]
    copies: list[tuple[str, str]]
    initialised: tuple[str, ...]
    ignored: tuple[str, ...]
    origin: Origin
    num_bytes: int
    grown: dict[str, tuple[int, int]]
    dequantised: str


def match_checkpoint(
    model: PreTrainedModel,
    directory: str | Path,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    new_rows: NewRows | None = None,
) -> CheckpointMatch:
    """Reads only the headers of a checkpoint, and matches its keys with the model, which may be on the meta device.

    Raises:
        CheckpointError: with all keys that do not match, as `load_pretrained` does before it reads weights.
    """
    directory = Path(directory)
    require_loadable_config(model, directory)
    stored = read_folder(directory)
    assembly = assemble(model, stored_leaves(stored), may_grow=vocabulary_names(model) if new_rows else ())
    state = model.state_dict()
    # A tied tensor is loaded from one of its names; other copies in the checkpoint must be equal.
    first_names = {name: group[0] for group in tied_groups(model) for name in group}
    loaded_names: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for name in assembly.parameters:
        first_name = first_names.get(name, name)
        if first_name in loaded_names:
            copies.append((name, first_name))
        else:
            loaded_names[first_name] = name
    upstream_patterns = _regexes(model, "_keys_to_ignore_on_load_missing")
    initialised = [
        name
        for name in missing_names(model, assembly)
        if _matches_pattern(name, allow_missing) or _matches_regex(name, upstream_patterns)
    ]
    ignored = ignored_by_upstream(model, assembly.unexpected)
    ignored |= {key for key in assembly.unexpected if _matches_pattern(key, allow_unexpected)}
    problems = mismatch_messages(model, assembly, stored, allowed={*initialised, *ignored})
    problems += [
        f"allow_missing: {pattern!r} names no parameter or buffer of the model: remove or correct it"
        for pattern in allow_missing
        if not any(_matches_pattern(name, [pattern]) for name in state)
    ]
    if problems:
        raise CheckpointError(
            f"{directory} does not fit {class_name(model)}:",
            problems,
            advice=growth_advice(model, {name: lazy.shape for name, lazy in assembly.parameters.items()}, new_rows)
            or "To fix: model.allow_missing (train --allow-missing PATTERN) initialises new parameters, and model.ignore_keys: "
            "[PATTERN] leaves out keys of the checkpoint (in Python load_pretrained(..., allow_unexpected=[PATTERN])).",
        )
    problems = integer_weight_problems(state, assembly.parameters, stored)
    if problems:
        raise CheckpointError(f"{directory} does not fit {class_name(model)}:", problems)
    shapes = {key: tensor.shape for key, tensor in stored.items()}
    origin = Origin.of(directory.absolute(), shapes, assembly.parameters)
    num_bytes = sum(tensor.num_bytes for tensor in stored.values())
    rows = {first: (assembly.parameters[name].shape, state[first].shape) for first, name in loaded_names.items()}
    grown = {name: (own[0], new[0]) for name, (own, new) in rows.items() if has_fewer_rows(own, new)}
    names = (loaded_names, copies, tuple(initialised), tuple(sorted(ignored)))
    dequantised = quantised.summary(stored[key] for keys in assembly.sources.values() for key in keys)
    return CheckpointMatch(assembly.parameters, *names, origin, num_bytes, grown, dequantised)


def missing_names(model: nn.Module, assembly: Assembly) -> list[str]:
    """The names in the state dict that the checkpoint has no tensor for; for a tied tensor, under none of its names.

    Those that cannot be built from its tensors are problems of the assembly already, and are not among them.
    """
    known = set(assembly.sources)
    for group in tied_groups(model):
        known |= set(group) if known & set(group) else set()
    return [name for name in model.state_dict() if name not in known]


def mismatch_messages(
    model: nn.Module, assembly: Assembly, stored: Mapping[str, StoredTensor], *, allowed: Collection[str]
) -> list[str]:
    """A message for each tensor that the checkpoint lacks, that the model does not have, or that cannot be built.

    Args:
        allowed: names that may be missing, and keys that may be unexpected.
    """
    state = model.state_dict()
    missing = [name for name in missing_names(model, assembly) if name not in allowed]
    unexpected = [key for key in assembly.unexpected if key not in allowed]
    return [
        *assembly.problems,
        *(f"missing: {name} {list(state[name].shape)}" for name in missing),
        *(f"unexpected: {key} {list(stored[key].shape)} in {stored[key].file.name}" for key in unexpected),
    ]


def stored_leaves(stored: Mapping[str, StoredTensor]) -> dict[str, LazyTensor]:
    """Lazy tensors for the tensors of files."""
    return {key: leaf(key, tensor.shape, tensor.dtype, tensor) for key, tensor in stored.items()}


def keys_of_buffers(model: nn.Module, lazy_tensors: Mapping[str, LazyTensor]) -> set[str]:
    """The keys of the buffers among `lazy_tensors`: they may be infinite (bounds, masks); weights may not."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {part.name for name, lazy in lazy_tensors.items() if name not in weights for part in leaves(lazy)}


def integer_weight_problems(
    state: Mapping[str, Tensor], lazy_tensors: Mapping[str, LazyTensor], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """A message for each key with integers that belongs to a floating-point tensor of the model: weights that are quantised in no
    form that `quantised.py` knows."""
    problems: dict[str, str] = {}
    for name, lazy in lazy_tensors.items():
        for part in leaves(lazy) if state[name].is_floating_point() else ():
            if not stored[part.name].dtype.is_floating_point:
                kind = str(stored[part.name].dtype).removeprefix("torch.")
                problems[part.name] = (
                    f"{part.name} in {stored[part.name].file.name} is {kind}; {name} is a floating-point tensor: "
                    "it is quantised in a form that is not read. Dequantise the checkpoint first."
                )
    return list(problems.values())


def require_loadable_config(model: PreTrainedModel, directory: Path) -> None:
    """Raises CheckpointError if the folder's config is of another model type; without a config nothing is checked."""
    file = directory / CONFIG
    if not file.is_file():
        return
    config = read_config(directory)
    stored_type = config.get("model_type")
    # A part of a composite model (a thinker, a text tower) loads from the checkpoint of the whole model.
    stored_types = {stored_type} | {value.get("model_type") for value in config.values() if isinstance(value, dict)}
    own_config = model.config
    model_types = {own_config.model_type} | {
        getattr(own_config, key).model_type for key in own_config.sub_configs if getattr(own_config, key, None)
    }
    if stored_type and not stored_types & model_types:
        raise CheckpointError(
            f"{file} is of model type '{stored_type}'; {class_name(model)} is of type '{own_config.model_type}'. Load it into a "
            "model of its type."
        )


def ignored_by_upstream(model: nn.Module, unexpected: Sequence[str]) -> set[str]:
    """The unexpected keys that upstream ignores: those that its class names, and those of computed buffers."""
    patterns = _regexes(model, "_keys_to_ignore_on_load_unexpected")
    return {key for key in unexpected if _matches_regex(key, patterns) or key.endswith(COMPUTED_BUFFER_SUFFIXES)}


def tied_groups(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several (tied weights), in the order of the modules."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def distinct_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with each tied tensor once, under its first name."""
    copies = {name for group in tied_groups(model) for name in group[1:]}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in copies}


def _regexes(model: nn.Module, attribute: str) -> set[str]:
    return set(getattr(model, attribute, None) or ())


def _matches_pattern(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _matches_regex(name: str, expressions: set[str]) -> bool:
    return any(re.search(expression, name) for expression in expressions)


# ---------------------------------------------------------------------------------------------- reading


def _should_stay_cached(num_bytes: int, state: Mapping[str, Tensor]) -> bool:
    """Whether files should stay in the page cache: they are small beside available memory, or other ranks read them too."""
    if num_bytes <= MAX_CACHED_SHARE * host_memory.available():
        return True
    return any(is_replicated(tensor) for tensor in state.values() if local_tensor(tensor).nbytes > SMALL_TENSOR_BYTES)


def fill_tensors(reader: FileReader, match: CheckpointMatch, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fills this rank's shards of `tensors`, keyed by first name; returns the problems, also copies of tied tensors that differ."""
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="load") as pool:
        return _fill(reader, pool, match, tensors) or _compare_tied_copies(reader, pool, match, tensors)


def _fill(
    reader: FileReader, pool: ThreadPoolExecutor, match: CheckpointMatch, tensors: Mapping[str, Tensor]
) -> list[str]:
    lazy_tensors = {
        first_name: match.lazy_tensors[name]
        for first_name, name in match.loaded_names.items()
        if first_name in tensors
    }
    reads, names_read_through_scratch = [], []
    for name, lazy in lazy_tensors.items():
        host_memory.prefer_large_pages(local_tensor(tensors[name]))
        plan = plan_reads(lazy, *stored_part(lazy.shape, tensors[name]))
        if plan.final_copies:
            names_read_through_scratch.append(name)  # planned again when it is read: one buffer in memory at a time
        else:
            reads += plan.reads
        del plan
    problems = _read(reader, pool, reads)
    for name in names_read_through_scratch:
        plan = plan_reads(lazy_tensors[name], *stored_part(lazy_tensors[name].shape, tensors[name]))
        problems = _read(reader, pool, plan.reads) | problems
        plan.finish()
    return list(problems.values())


def _read(
    reader: FileReader, pool: ThreadPoolExecutor, reads: Iterable[tuple[Leaf, Region, Tensor]]
) -> dict[str, str]:
    """Reads with several threads; returns the first problem of each key."""
    problems: dict[str, str] = {}
    for new_problems in pool.map(reader.read_in_order, _spans(reads)):
        problems = new_problems | problems
    return problems


def _spans(reads: Iterable[tuple[Leaf, Region, Tensor]]) -> list[list[tuple[StoredTensor, Region, Tensor]]]:
    """The reads in file order, grouped into about SPAN_BYTES of one file for one thread."""
    pieces: list[tuple[StoredTensor, Region, Tensor]] = []
    for stored_leaf, region, out in reads:
        assert isinstance(stored_leaf.source, StoredTensor), "a leaf of `stored_leaves`"
        pieces += [(stored_leaf.source, *piece) for piece in _pieces(stored_leaf.source, region, out)]
    pieces.sort(key=lambda piece: (piece[0].file, piece[0].offset, piece[1]))
    spans: list[list[tuple[StoredTensor, Region, Tensor]]] = []
    bytes_left, file = 0, None
    for stored, region, out in pieces:
        if bytes_left <= 0 or stored.file != file:
            spans.append([])
            bytes_left, file = SPAN_BYTES, stored.file
        spans[-1].append((stored, region, out))
        bytes_left -= out.numel() * stored.dtype.itemsize
    return spans


def _pieces(stored: StoredTensor, region: Region, out: Tensor) -> list[tuple[Region, Tensor]]:
    """A region split along its first dimension into pieces of at most PIECE_BYTES, unless a single row is larger."""
    length = out.shape[0] if out.ndim else 1
    step = max(1, PIECE_BYTES * length // max(out.numel() * stored.dtype.itemsize, 1))
    if step >= length:
        return [(region, out)]
    first = region[0][0]
    return [
        (((first + start, first + min(start + step, length)), *region[1:]), out[start : start + step])
        for start in range(0, length, step)
    ]


def _compare_tied_copies(
    reader: FileReader, pool: ThreadPoolExecutor, match: CheckpointMatch, tensors: Mapping[str, Tensor]
) -> list[str]:
    """A sentence for each further copy of a tied tensor in the checkpoint that differs or cannot be read."""
    errors: list[str] = []
    for name, first_name in match.copies:
        if first_name not in tensors:
            continue
        stored, stored_copy = match.lazy_tensors[match.loaded_names[first_name]], match.lazy_tensors[name]
        region, loaded = stored_part(stored.shape, tensors[first_name])
        copy, problems = torch.empty_like(loaded), {}
        if stored_copy.shape == stored.shape:
            plan = plan_reads(stored_copy, region, copy)
            problems = _read(reader, pool, plan.reads)
            plan.finish()
        if problems:
            errors += problems.values()
        elif stored_copy.shape != stored.shape or not torch.equal(copy, loaded):
            keys = sorted(
                next(leaves(match.lazy_tensors[parameter])).name
                for parameter in (name, match.loaded_names[first_name])
            )
            errors.append(
                f"{keys[0]} and {keys[1]} are one tied tensor in the model, and differ in the checkpoint. If "
                "tie_word_embeddings ties them, load it into a model with tie_word_embeddings=False."
            )
    return errors
