"""Weights into a model, from any Hugging Face layout; each rank reads the bytes of its own shards.

with torch.device("meta"):
    model = Qwen3MoeForCausalLM._from_config(config)
sharding.shard_model(model, state)
sharding.materialise(model, "cuda")
report = load_pretrained(model, "/models/Qwen3-30B-A3B")
"""

from __future__ import annotations

import fnmatch
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint import host_memory, initialise
from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.file_reader import STAGING, FileReader
from patchgen.runtime.checkpoint.layout import Origin, assemble, class_name
from patchgen.runtime.checkpoint.placement import box_of_rank, has_copies, local_tensor, together
from patchgen.runtime.checkpoint.safetensor_files import StoredTensor, read_folder
from patchgen.runtime.checkpoint.tensor_sources import Box, Leaf, Moved, Pull, leaf, leaves, pull
from patchgen.runtime.parallel import sharding

NUM_THREADS = 4
SPAN = 256 << 20
"""Bytes that a thread reads one after the other. A disk read at four places far apart, each in order, is as fast as one
read in order; one whose next block is asked for by whoever comes first is not."""
PIECE = STAGING
"""Bytes after which another thread may go on with a tensor."""
MAX_CACHED = 0.25
"""Share of the free memory that files may take in the page cache, for the next who reads them."""
SMALL = 1 << 20
"""Bytes of tensors that every rank may read without harm."""
DERIVED = (".rotary_emb.inv_freq",)
"""Old checkpoints hold these buffers; transformers computes them, and leaves them out when it loads."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank.

    Attributes:
        directory: what was read.
        num_tensors: parameters and buffers that were filled.
        num_bytes: bytes that this rank asked of the files.
        seconds: time it took.
        initialised: names that the checkpoint lacks and `allow_missing` (or upstream) allows: given upstream's own
            initial values, the same on any number of ranks.
        ignored: keys that upstream says its class leaves out.
    """

    directory: Path
    num_tensors: int
    num_bytes: int
    seconds: float
    initialised: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        gigabytes = self.num_bytes / 1e9
        lines = [
            f"{self.num_tensors} tensors from {self.directory}: {gigabytes:.2f} GB in {self.seconds:.1f} s "
            f"({gigabytes / max(self.seconds, 1e-9):.2f} GB/s) on this rank"
        ]
        for what, names in (("initialised, not loaded", self.initialised), ("left out by upstream", self.ignored)):
            if names:
                lines.append(f"  {what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if names[8:] else ''}")
        return "\n".join(lines)


@torch.no_grad()
def load_pretrained(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    seed: int = 0,
) -> LoadReport:
    """Fills the parameters and buffers of `model`, in place and in their own dtypes. Every rank calls it.

    Args:
        model: a generated model or any of transformers', sharded by `sharding.shard_model` or not. A model that is
            still on the meta device is materialised first, on the device of its mesh or the CPU.
        directory: safetensors files with or without an index, and `config.json`.
        allow_missing: patterns (`lm_head.*`) of names that the checkpoint may lack: these are initialised.
        allow_unexpected: patterns of keys that the checkpoint may hold and the model has no use for.
        seed: of what is initialised.

    Raises:
        CheckpointError: on every rank, with every missing, unexpected and mis-shaped key, or the file and key that
            cannot be read or holds NaN or, if it is not a buffer's, an infinite value. Before bytes are read nothing has changed in
            the model.
    """
    started = time.perf_counter()
    directory = Path(directory)
    # Ranks may see different files: each with a disk of its own, or a network disk of which one is behind.
    fit = together(
        lambda: fitting(model, directory, allow_missing, allow_unexpected),
        f"{directory} cannot be loaded; nothing was changed in the model:",
    )
    unusable = f"{directory} cannot be loaded; the model is not usable:"

    def fill() -> int:
        if any(tensor.is_meta for tensor in model.state_dict().values()):
            sharding.materialise(model, _own_device(model))
        state = model.state_dict()
        initialise.initialise(model, fit.initialised, seed=seed)
        with (
            FileReader(
                keeps_pages=_is_worth_keeping(fit.num_bytes, state),
                may_be_infinite=keys_of_buffers(model, fit.parameters),
            ) as reader,
            ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="load") as pool,
        ):
            wanted = {owner: fit.parameters[name] for owner, name in fit.wanted.items()}
            errors = read_all(reader, pool, wanted, state)
            if not errors:
                errors = compare_copies(reader, pool, fit.copies, fit.wanted, fit.parameters, state)
            if errors:
                raise CheckpointError(unusable, errors)
            return reader.bytes_read

    num_bytes = together(fill, unusable)
    # nn.Module takes any attribute; its type says tensors and modules.
    model.checkpoint_origin = fit.origin  # pyright: ignore[reportArgumentType]
    seconds = time.perf_counter() - started
    return LoadReport(directory, len(fit.wanted), num_bytes, seconds, fit.initialised, fit.ignored)


def require_fitting(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> None:
    """Reads the headers of a checkpoint and nothing else; `model` may be on the meta device.

    Raises:
        CheckpointError: what `load_pretrained` would refuse before it reads a byte.
    """
    fitting(model, Path(directory), allow_missing, allow_unexpected)


@dataclass(frozen=True)
class Fitting:
    """What of a checkpoint goes where in a model.

    Attributes:
        parameters: name in the state dict -> how it is made of the checkpoint's tensors.
        wanted: the name that owns a tensor -> the one of its names that the checkpoint holds.
        copies: further names that the checkpoint holds of a tensor, each with the owner's.
        num_bytes: of all tensors of the checkpoint.
    """

    parameters: dict[str, Moved]
    wanted: dict[str, str]
    copies: list[tuple[str, str]]
    initialised: tuple[str, ...]
    ignored: tuple[str, ...]
    origin: Origin
    num_bytes: int


def fitting(
    model: PreTrainedModel, directory: Path, allow_missing: Sequence[str], allow_unexpected: Sequence[str]
) -> Fitting:
    """Reads headers and finds out what fits.

    Raises:
        CheckpointError: with all that does not.
    """
    require_same_type(model, directory)
    stored = read_folder(directory)
    assembly = assemble(model, stored_leaves(stored))
    state = model.state_dict()
    ties = tied_groups(model)
    problems = list(assembly.problems)
    # Values for names of one tensor come once; further copies in the checkpoint must be equal.
    owners = {name: group[0] for group in ties for name in group}
    wanted: dict[str, str] = {}
    copies: list[tuple[str, str]] = []  # (name, the owner's name)
    for name in assembly.parameters:
        owner = owners.get(name, name)
        if owner in wanted:
            copies.append((name, owner))
        else:
            wanted[owner] = name
    blamed = {name for name in state if any(problem.startswith(f"{name} ") for problem in assembly.problems)}
    missing = [name for name in state if owners.get(name, name) not in wanted and name not in blamed]
    upstream_allows = _patterns(model, "_keys_to_ignore_on_load_missing")
    initialised = [name for name in missing if _matches(name, allow_missing) or _found(name, upstream_allows)]
    ignored = unexpected_by_upstream(model, assembly.unexpected)
    ignored |= {key for key in assembly.unexpected if _matches(key, allow_unexpected)}
    problems += [f"missing: {name} {list(state[name].shape)}" for name in missing if name not in initialised]
    problems += [
        f"unexpected: {key} {list(stored[key].shape)} in {stored[key].file.name}"
        for key in assembly.unexpected
        if key not in ignored
    ]
    if problems:
        raise CheckpointError(
            f"{directory} does not fit {class_name(model)}:",
            problems,
            advice="New parts are initialised with allow_missing=[PATTERN], parts without use left out with "
            "allow_unexpected=[PATTERN].",
        )
    problems = of_another_kind(state, assembly.parameters, stored)
    if problems:
        raise CheckpointError(f"{directory} does not fit {class_name(model)}:", problems)
    origin = Origin.of(directory.absolute(), {key: tensor.shape for key, tensor in stored.items()})
    num_bytes = sum(tensor.num_bytes for tensor in stored.values())
    return Fitting(assembly.parameters, wanted, copies, tuple(initialised), tuple(sorted(ignored)), origin, num_bytes)


def stored_leaves(stored: Mapping[str, StoredTensor]) -> dict[str, Moved]:
    """The tensors of files as leaves."""
    return {key: leaf(key, tensor.shape, tensor.dtype, tensor) for key, tensor in stored.items()}


def keys_of_buffers(model: nn.Module, made: Mapping[str, Moved]) -> set[str]:
    """The keys that buffers are made of: bounds and masks among them may be infinite, weights may not."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {part.name for name, moved in made.items() if name not in weights for part in leaves(moved)}


def of_another_kind(
    state: Mapping[str, Tensor], made: Mapping[str, Moved], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """Floating-point tensors of a model that a checkpoint has whole numbers for: quantised without a word, or others."""
    found = {}
    for name, moved in made.items():
        for part in leaves(moved) if state[name].is_floating_point() else ():
            if not stored[part.name].dtype.is_floating_point:
                kind = str(stored[part.name].dtype).removeprefix("torch.")
                found[part.name] = (
                    f"{part.name} in {stored[part.name].file.name} is {kind}, which is not a weight of {name}."
                )
    return list(found.values())


def require_same_type(model: PreTrainedModel, directory: Path) -> None:
    """Raises if the folder's config is that of another model type, or of quantised weights; no config says nothing."""
    file = directory / "config.json"
    if not file.is_file():
        return
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}.") from error
    quantised = config.get("quantization_config")
    if quantised:
        raise CheckpointError(
            f"{directory} holds quantised weights ({quantised.get('quant_method', 'unnamed')}): they cannot be trained "
            "on. Use the bf16 release, or dequantise it first."
        )
    kind = config.get("model_type")
    # A part of a composite model (a thinker, a text tower) loads from the whole's checkpoint.
    parts = {kind} | {value.get("model_type") for value in config.values() if isinstance(value, dict)}
    own = model.config
    ours = {own.model_type} | {getattr(own, key).model_type for key in own.sub_configs if getattr(own, key, None)}
    if kind and not parts & ours:
        raise CheckpointError(
            f"{file} is of model type '{kind}'; {class_name(model)} is of type '{own.model_type}'. Load it into the "
            "model that it belongs to."
        )


def unexpected_by_upstream(model: nn.Module, unexpected: Sequence[str]) -> set[str]:
    """Those of the keys without a parameter that upstream's class says it leaves out."""
    patterns = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    return {key for key in unexpected if _found(key, patterns) or key.endswith(DERIVED)}


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Names of one and the same parameter or buffer, where there are several; the first is what a module calls it."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def distinct_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, tied tensors once, under the first of their names."""
    copies = {name for group in tied_groups(model) for name in group[1:]}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in copies}


def _own_device(model: nn.Module) -> str:
    mesh_types = [p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)]
    return mesh_types[0] if mesh_types else "cpu"


def _patterns(model: nn.Module, attribute: str) -> set[str]:
    return set(getattr(model, attribute, None) or ())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _found(name: str, expressions: set[str]) -> bool:
    return any(re.search(expression, name) for expression in expressions)


# ---------------------------------------------------------------------------------------------- reading


def _is_worth_keeping(num_bytes: int, state: Mapping[str, Tensor]) -> bool:
    """Whether files of this size should stay in the page cache: small beside free memory, or read by other ranks too."""
    if num_bytes <= MAX_CACHED * host_memory.available():
        return True
    large = [tensor for tensor in state.values() if local_tensor(tensor).nbytes > SMALL]
    return any(has_copies(tensor) for tensor in large)


def own_box(tensor: Tensor) -> Box:
    """The part of a tensor that this rank, which is on its mesh, holds."""
    held = box_of_rank(tensor)
    assert held is not None, "models are laid out over all ranks"
    return held


def read_all(
    reader: FileReader, pool: ThreadPoolExecutor, wanted: Mapping[str, Moved], state: Mapping[str, Tensor]
) -> list[str]:
    """Fills this rank's parts, in the order of the files; returns what went wrong."""
    simple, others = [], []
    for name, moved in wanted.items():
        target = local_tensor(state[name])
        host_memory.prefer_large_pages(target)
        part = pull(moved, own_box(state[name]), target)
        if part.finishes:
            others.append(name)  # it has a buffer: made anew when its turn comes, one at a time
        else:
            simple += part.reads
        del part
    problems = _read(reader, pool, simple)
    for name in others:
        part = pull(wanted[name], own_box(state[name]), local_tensor(state[name]))
        problems = _read(reader, pool, part.reads) | problems
        finish(part)
    return list(problems.values())


def _read(reader: FileReader, pool: ThreadPoolExecutor, reads: Iterable[tuple[Leaf, Box, Tensor]]) -> dict[str, str]:
    """Reads by several threads; returns what went wrong first, by key."""
    problems: dict[str, str] = {}
    for found in pool.map(reader.read_in_order, _spans(reads)):
        problems = found | problems
    return problems


def finish(part: Pull) -> None:
    """Copies out of the buffers of a pull whose reads are done."""
    for call in part.finishes:
        call()
    part.finishes.clear()
    part.reads.clear()


def _spans(reads: Iterable[tuple[Leaf, Box, Tensor]]) -> list[list[tuple[StoredTensor, Box, Tensor]]]:
    """Reads in the order of the files, in parts of about SPAN bytes of one file: one for a thread at a time."""
    pieces: list[tuple[StoredTensor, Box, Tensor]] = []
    for found, box, out in reads:
        assert isinstance(found.source, StoredTensor), "what is read here is made of `stored_leaves`"
        pieces += [(found.source, *piece) for piece in _pieces(found.source, box, out)]
    pieces.sort(key=lambda piece: (piece[0].file, piece[0].offset, piece[1]))
    spans: list[list[tuple[StoredTensor, Box, Tensor]]] = []
    free, file = 0, None
    for stored, box, out in pieces:
        if free <= 0 or stored.file != file:
            spans.append([])
            free, file = SPAN, stored.file
        spans[-1].append((stored, box, out))
        free -= out.numel() * stored.dtype.itemsize
    return spans


def _pieces(stored: StoredTensor, box: Box, out: Tensor) -> list[tuple[Box, Tensor]]:
    """A box as several of no more than PIECE bytes, as far as its first dimension can be cut."""
    length = out.shape[0] if out.ndim else 1
    step = max(1, PIECE * length // max(out.numel() * stored.dtype.itemsize, 1))
    if step >= length:
        return [(box, out)]
    first = box[0][0]
    return [
        (((first + start, first + min(start + step, length)), *box[1:]), out[start : start + step])
        for start in range(0, length, step)
    ]


def compare_copies(
    reader: FileReader,
    pool: ThreadPoolExecutor,
    copies: Sequence[tuple[str, str]],
    loaded: Mapping[str, str],
    parameters: Mapping[str, Moved],
    state: Mapping[str, Tensor],
) -> list[str]:
    """Tied tensors that the checkpoint holds more than once must be equal."""
    errors: list[str] = []
    for name, owner in copies:
        mine = local_tensor(state[owner])
        copy = torch.empty_like(mine)
        part = pull(parameters[name], own_box(state[owner]), copy)
        problems = _read(reader, pool, part.reads)
        finish(part)
        if problems:
            errors += problems.values()
        elif not torch.equal(copy, mine):
            keys = sorted(next(leaves(parameters[one])).name for one in (name, loaded[owner]))
            errors.append(
                f"{keys[0]} and {keys[1]} are one tied tensor in the model, and differ in the checkpoint. Load it into "
                "a model with tie_word_embeddings=False."
            )
    return errors
