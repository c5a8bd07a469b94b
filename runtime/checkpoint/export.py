"""Exports the weights of a sharded model in the layout of the original checkpoint, as transformers and vLLM load it.

    export_pretrained(model, "runs/one/export", source="/models/Qwen3-30B-A3B", dtype=torch.bfloat16)

The full tensors that a rank holds at any time are together no larger than the largest one. Each file is written by one rank;
the ranks that hold a region of a tensor send it to the rank that writes the tensor's file:

    rank 0: experts 0-3   -+
    rank 1: experts 4-7    +->  experts.5.up_proj [I, H]  ->  its file, written by rank 2
    ...                   -+    (rank 1 alone sends)

    I expert intermediate size   H hidden size
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patchgen.runtime import kept_dtypes
from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.file_reader import FileReader, unrepresentable
from patchgen.runtime.checkpoint.layout import Origin, class_name, disassemble
from patchgen.runtime.checkpoint.lazy_tensors import (
    LazyTensor,
    ReadPlan,
    Region,
    full_region,
    leaf,
    leaves,
    plan_reads,
)
from patchgen.runtime.checkpoint.load import tied_groups
from patchgen.runtime.checkpoint.placement import (
    FAILURES,
    device_of,
    intersection,
    local_tensor,
    narrow_to,
    rank_and_world_size,
    region_of_rank,
    run_on_all_ranks,
)
from patchgen.runtime.checkpoint.untrained_part import CopiedTensor, UntrainedPart, find_untrained_part
from patchgen.runtime.checkpoint.writing import MAX_FILE, FolderWriter, Output, PlannedFile, ReadableOutput, plan_files

Cast: TypeAlias = tuple[str, Tensor, torch.dtype]
"""The name of a tensor, this rank's shard of it, and the dtype it is written in."""


@torch.no_grad()
def export_pretrained(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    layout: str | None = None,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_file: int = MAX_FILE,
    trained_only: bool = False,
) -> None:
    """Writes the weights of `model` as safetensors files with index and configs. Collective.

    Parts of the source checkpoint that were not trained (the talker of an omni model) are copied byte for byte, and the
    config is that of the complete model.

    Args:
        model: sharded or not.
        directory: the output; weights of an earlier export are replaced once all new files are written.
        layout: "per-expert" or "stacked"; None: that of the checkpoint that the model was loaded from, or upstream's.
        source: the folder of the original, whose tokenizer, processor and generation config are copied; None: that of
            the untrained part, if there is one.
        dtype: of floating-point weights, except those that upstream keeps in fp32; None: for each tensor, that of the checkpoint
            that the model was loaded from; without one, that of the weights.
        max_file: bytes of a file, unless a single tensor is larger.
        trained_only: write only the model, with its own config.

    Raises:
        CheckpointError: on every rank, naming rank, file and key, as soon as one rank fails; also for an unknown layout,
            adapters in the model, no folder of the untrained part, or a weight that `dtype` cannot represent. Earlier files are
            unchanged, unless the message says otherwise.
    """
    directory = Path(directory)
    tensors = saved_tensors(model)

    def prepare() -> tuple[dict[str, str | Path], list[PlannedFile], _Gatherer]:
        require_no_adapters(model)
        origin, folder = getattr(model, "checkpoint_origin", None), Path(source) if source is not None else None
        untrained = (
            UntrainedPart(trained_origin=origin) if trained_only else find_untrained_part(model, origin, folder)
        )
        lazy = _lazy_tensors(tensors)
        outputs, other_files = outputs_and_files(model, lazy, untrained, folder, layout=layout, dtype=dtype)
        require_representable(outputs, tensors)
        return other_files, plan_files(outputs, max_file=max_file), _Gatherer(tensors)

    other_files, files, gatherer = run_on_all_ranks(
        prepare, f"{directory} could not be written; its earlier content is unchanged:"
    )
    writer = FolderWriter(directory, files)
    for round_ in _rounds([(file, output) for file in files for output in file.outputs]):
        if not _write_round(writer, gatherer, round_):
            break
    writer.close(other_files)


def _write_round(writer: FolderWriter, gatherer: _Gatherer, round_: Sequence[tuple[PlannedFile, Output]]) -> bool:
    """Gathers and writes the tensors of a round; False, with nothing written, if a rank has failed."""
    exchange = writer.attempt(lambda: gatherer.prepare(round_))
    try:
        if gatherer.any_rank(writer.has_failed):  # the other ranks would wait for its tensors
            return False
        assert exchange is not None, "this rank has not failed"
        exchange.run()
    except RuntimeError as error:  # another rank has died: a collective would wait for it
        writer.abandon()
        keys = f"{round_[0][1].name} ... {round_[-1][1].name}"
        raise CheckpointError(
            f"{writer.directory} could not be written: {keys} could not be exchanged: {error}"
        ) from error

    def write() -> None:
        for output, tensor in exchange.full_tensors():
            writer.write(output, tensor)

    writer.attempt(write)
    return True


def outputs_and_files(
    model: PreTrainedModel,
    tensors: dict[str, LazyTensor],
    untrained: UntrainedPart,
    source: Path | None,
    *,
    layout: str | None,
    dtype: torch.dtype | None,
) -> tuple[list[Output], dict[str, str | Path]]:
    """What an export writes: the model's tensors and those of the untrained part, and the other files.

    Raises:
        CheckpointError: no such layout; two tensors with the same key.
    """
    outputs = _outputs_of(model, tensors, layout, untrained.trained_origin, dtype)
    duplicates = {output.name for output in outputs} & {output.name for output in untrained.tensors}
    if duplicates:
        raise CheckpointError(
            f"{min(duplicates)} is a key of {class_name(model)}, and also of a tensor in {untrained.directory} that the model "
            "was not loaded from. To fix: export only the model (--trained-only; in Python trained_only=True)."
        )
    files = untrained.config_files(model, dtype or most_common_dtype(outputs)) | untrained.side_files(source)
    return [*outputs, *untrained.tensors], files


def most_common_dtype(outputs: Sequence[Output]) -> torch.dtype | None:
    """The floating-point dtype of most bytes, for the config; None: there is none.

    Not that of the first tensor, which may be one of the few that upstream keeps in fp32.
    """
    sizes: Counter[torch.dtype] = Counter()
    for output in outputs:
        sizes[output.dtype] += output.num_bytes if output.dtype.is_floating_point else 0
    return sizes.most_common(1)[0][0] if sizes.total() else None


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a checkpoint of `model`: parameters and persistent buffers, tied ones once, without those that
    upstream does not save."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    dropped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for group in tied_groups(model):
        targets = [name for name in group if name in tied]
        saved_name = next((name for name in group if name not in targets), group[0])
        dropped |= set(group) - {saved_name}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in dropped}


def plan_outputs(
    model: PreTrainedModel, tensors: dict[str, Tensor], layout: str | None, dtype: torch.dtype | None
) -> list[Output]:
    """The tensors to write, built from `tensors`; arguments as in `export_pretrained`.

    Raises:
        CheckpointError: no such layout, adapters in the model, or a weight on this rank that `dtype` cannot represent.
    """
    require_no_adapters(model)
    origin = getattr(model, "checkpoint_origin", None)
    outputs = _outputs_of(model, _lazy_tensors(tensors), layout, origin, dtype)
    require_representable(outputs, tensors)
    return outputs


def _lazy_tensors(tensors: dict[str, Tensor]) -> dict[str, LazyTensor]:
    return {name: leaf(name, tensor.shape, tensor.dtype, name) for name, tensor in tensors.items()}


def require_representable(outputs: Sequence[Output], tensors: dict[str, Tensor]) -> None:
    """Raises CheckpointError for a value of this rank's shards that the dtype it is written in cannot represent.

    Each rank sees only its shards, so the ranks must agree on the outcome. Casts would make infinities of such values, which
    `FileReader` refuses as well.
    """
    built = (output for output in outputs if not isinstance(output, ReadableOutput))
    casts = dict.fromkeys((part.name, output.dtype) for output in built for part in leaves(output.tensor))
    shards = [(name, local_tensor(tensors[name]), dtype) for name, dtype in casts]
    problems = []
    for name, shard, dtype in _not_surely_representable(shards):
        lost = unrepresentable(shard, dtype)
        if lost is not None:
            problems.append(f"{name} holds {lost:g}, which {dtype} cannot represent.")
    if problems:
        advice = "To fix: choose another (--dtype; in a recipe checkpoint.export_dtype), such as bfloat16."
        raise CheckpointError(
            "Weights do not fit into the dtype that they are to be written in:", problems, advice=advice
        )


def _not_surely_representable(casts: Sequence[Cast]) -> Iterator[Cast]:
    """Those to be examined one by one, as their extremes are not finite in the new dtype.

    The host waits for a device once per pair of dtypes, not for each tensor.
    """
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Cast]] = {}
    for cast in casts:
        _, shard, dtype = cast
        if not (shard.is_floating_point() and dtype.is_floating_point):
            yield cast
        elif shard.numel() and torch.finfo(dtype).max < torch.finfo(shard.dtype).max:
            groups.setdefault((shard.device, shard.dtype, dtype), []).append(cast)
    for (_, _, dtype), members in groups.items():
        extremes = torch.stack([torch.stack(shard.aminmax()) for _, shard, _ in members])
        are_finite = extremes.to(dtype).isfinite().all(1).tolist()
        yield from (cast for cast, is_finite in zip(members, are_finite, strict=True) if not is_finite)


def require_no_adapters(model: nn.Module) -> None:
    """Raises CheckpointError for a model with PEFT adapters: its weights have other names, and lack what the adapters add."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # None if peft was not imported: then there are no adapters
    layers = (name for name, module in model.named_modules() if tuners and isinstance(module, tuners.BaseTunerLayer))
    first = next(layers, None)
    if first is not None:
        raise CheckpointError(
            f"The model has adapters ({first}): upstream has no names for its weights. To fix: merge them first "
            "(`lora.merge` of runtime/train/lora.py), or save only the adapters (`lora.save`)."
        )


def _outputs_of(
    model: PreTrainedModel,
    tensors: dict[str, LazyTensor],
    layout: str | None,
    origin: Origin | None,
    dtype: torch.dtype | None,
) -> list[Output]:
    """The tensors to write, in the dtype that is chosen, or each in that of the original.

    Raises:
        CheckpointError: no such layout.
    """
    to_write = disassemble(model, tensors, layout=layout, origin=origin)
    if dtype is not None or origin is None or not origin.dtypes:
        return make_outputs(model, to_write, dtype)
    as_stored = {}
    for name, tensor in tensors.items():
        stored = origin.dtype_of(name) if tensor.is_floating_point() else None
        as_stored[name] = leaf(name, tensor.shape, stored or tensor.dtype, None)
    dtypes = disassemble(model, as_stored, layout=layout, origin=origin)
    return [Output(key, lazy, dtypes[key].dtype) for key, lazy in to_write.items()]


def make_outputs(model: nn.Module, to_write: dict[str, LazyTensor], dtype: torch.dtype | None) -> list[Output]:
    """The tensors to write, with their dtypes."""
    is_kept = kept_dtypes.keeps_in_fp32(model, dtype)  # transformers loads these in fp32, so they keep their precision

    def stored_dtype(name: str, lazy: LazyTensor) -> torch.dtype:
        # By the model's names: a checkpoint may have others.
        keep = lazy.dtype == torch.float32 and (is_kept(name) or any(is_kept(part.name) for part in leaves(lazy)))
        return lazy.dtype if dtype is None or not lazy.dtype.is_floating_point or keep else dtype

    return [Output(name, lazy, stored_dtype(name, lazy)) for name, lazy in to_write.items()]


def _rounds(work: Sequence[tuple[PlannedFile, Output]]) -> Iterator[list[tuple[PlannedFile, Output]]]:
    """Groups of tensors, from all writers in turn; no group is larger than the largest tensor."""
    queues: dict[int, list[tuple[PlannedFile, Output]]] = {}
    for file, output in work:
        queues.setdefault(file.writer, []).append((file, output))
    limit = max((output.num_bytes for _, output in work), default=0)
    round_: list[tuple[PlannedFile, Output]] = []
    size = 0
    for column in itertools.zip_longest(*queues.values()):
        for file, output in filter(None, column):
            if round_ and size + output.num_bytes > limit:
                yield round_
                round_, size = [], 0
            round_.append((file, output))
            size += output.num_bytes
    if round_:
        yield round_


@dataclass
class _Exchange:
    """What this rank sends and receives for the tensors of a round.

    Attributes:
        operations: sends and receives, in the same order on both ranks of each.
        receive_buffers: (view of an output, the buffer to copy into it), where the view is not contiguous.
        outputs: what this rank writes: the output, its tensor on the device, and the plan with its final copies; None
            instead of the last two for a tensor that is copied from a file.
    """

    operations: list[dist.P2POp] = field(default_factory=list)
    receive_buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    outputs: list[tuple[PlannedFile, Output, tuple[Tensor, ReadPlan] | None]] = field(default_factory=list)

    def run(self) -> None:
        """Sends and receives everything, and waits for it."""
        for request in dist.batch_isend_irecv(self.operations) if self.operations else ():
            request.wait()

    def full_tensors(self) -> Iterator[tuple[Output, Tensor]]:
        """The tensors that this rank writes, on the CPU."""
        for target, buffer in self.receive_buffers:
            target.copy_(buffer)
        with FileReader() as reader:
            for file, output, gathered in self.outputs:
                with _naming_tensor(file, output):
                    if gathered is None:
                        assert isinstance(output, CopiedTensor), "nothing else is copied from a file"
                        on_cpu = output.read(reader)
                    else:
                        gathered[1].finish()
                        on_cpu = gathered[0].cpu()
                yield output, on_cpu


@contextlib.contextmanager
def _naming_tensor(file: PlannedFile, output: Output) -> Iterator[None]:
    """Adds the tensor and its file to errors."""
    try:
        yield
    except FAILURES as error:
        what = f"{output.name} could not be gathered for {file.name}: {type(error).__name__}: {error}"
        raise CheckpointError(what) from error


class _Gatherer:
    """Gathers full tensors on the ranks that write them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._rank, self._world = rank_and_world_size()
        self._local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        self._holders = {name: holders_of(tensor, self._world) for name, tensor in tensors.items()}
        self._device = device_of(tensors.values(), otherwise=torch.device("cpu"))

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. Collective."""
        if self._world == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32, device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def prepare(self, round_: Sequence[tuple[PlannedFile, Output]]) -> _Exchange:
        """What this rank sends and receives for the tensors of a round; does not communicate.

        Raises:
            CheckpointError: naming the tensor that this rank fails to prepare.
        """
        exchange = _Exchange()
        tags = itertools.count()  # the same on all ranks
        for file, output in round_:
            with _naming_tensor(file, output):
                self._prepare(file, output, exchange, tags)
        return exchange

    def _prepare(self, file: PlannedFile, output: Output, exchange: _Exchange, tags: Iterator[int]) -> None:
        is_writer = file.writer == self._rank
        if isinstance(output, CopiedTensor):
            exchange.outputs += [(file, output, None)] if is_writer else []
            return
        shape = tuple(output.tensor.shape)
        out = torch.empty(shape, dtype=output.dtype, device=self._device if is_writer else "meta")
        plan = plan_reads(output.tensor, full_region(shape), out)
        for stored, region, view in plan.reads:
            for holders, held_region in self._holders[stored.name]:
                overlap = intersection(region, held_region)
                if overlap is None:
                    continue
                sender = file.writer if file.writer in holders else holders[file.writer % len(holders)]
                tag = next(tags)
                target = narrow_to(view, region, overlap)
                if self._rank == sender:
                    piece = narrow_to(self._local[stored.name], held_region, overlap)
                    if is_writer:
                        target.copy_(piece)
                    else:
                        sent = piece.to(self._device, output.dtype).contiguous()
                        exchange.operations.append(dist.P2POp(dist.isend, sent, file.writer, tag=tag))
                elif is_writer:
                    buffer = target if target.is_contiguous() else torch.empty_like(target).contiguous()
                    exchange.operations.append(dist.P2POp(dist.irecv, buffer, sender, tag=tag))
                    if buffer is not target:
                        exchange.receive_buffers.append((target, buffer))
        if is_writer:
            exchange.outputs.append((file, output, (out, plan)))


def holders_of(tensor: Tensor, num_ranks: int) -> list[tuple[list[int], Region]]:
    """The distinct regions that a tensor is sharded into, each with the ranks that hold it."""
    if not isinstance(tensor, DTensor):
        return [(list(range(num_ranks)), full_region(tensor.shape))]
    parts: dict[Region, list[int]] = {}
    for rank in range(num_ranks):
        region = region_of_rank(tensor, rank)
        if region is not None and all(start < stop for start, stop in region):
            parts.setdefault(region, []).append(rank)
    return [(ranks, region) for region, ranks in parts.items()]
