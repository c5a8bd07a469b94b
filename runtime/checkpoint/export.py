"""Weights out of a sharded model, as the original checkpoint had them: what transformers and vLLM load.

    export_pretrained(model, "runs/one/export", source="/models/Qwen3-30B-A3B", dtype=torch.bfloat16)

No rank ever has more than one whole tensor of the output. Each file is written by one rank; for each tensor, every rank
sends the writer what it holds of it:

    rank 0: experts 0-3   -+
    rank 1: experts 4-7    +->  experts.5.up_proj [I, H]  ->  its file, written by rank 2
    ...                   -+    (rank 1 alone sends)
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.layout import Origin, class_name, disassemble
from patchgen.runtime.checkpoint.load import finish, tied_groups
from patchgen.runtime.checkpoint.placement import (
    FAILURES,
    box_of_rank,
    intersection,
    local_tensor,
    together,
    within,
    world,
)
from patchgen.runtime.checkpoint.rest import Passed, Rest, find_rest
from patchgen.runtime.checkpoint.tensor_sources import Box, Moved, Pull, leaf, pull, whole
from patchgen.runtime.checkpoint.writing import MAX_FILE, FolderWriter, Output, PlannedFile, plan


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
    """Writes the weights of `model` as safetensors files with index and configs. Every rank calls it.

    What the checkpoint that the model was loaded from holds beside it (the voice of an omni model) is copied, byte for
    byte, under the config of the whole.

    Args:
        model: sharded or not.
        directory: where to; weights of an earlier export there are replaced once all new ones are written.
        layout: "per-expert" or "stacked"; None: that of the checkpoint that the model was loaded from, or upstream's
            own.
        source: the folder of the original, whose tokenizer, processor and generation config are copied; None: where the
            rest lies, if there is one.
        dtype: of floating-point weights, but for those that upstream keeps in fp32; None: as they are.
        max_file: bytes of a file.
        trained_only: write the model by itself, under its own config.

    Raises:
        CheckpointError: on every rank, naming rank, file and key, as soon as one rank cannot go on, or if the folder with
            the rest is gone; files that were there before are as they were.
    """
    directory = Path(directory)
    tensors = saved_tensors(model)

    def prepare() -> tuple[dict[str, str | Path], list[PlannedFile], _Gatherer]:
        require_no_adapters(model)
        leaves = {name: leaf(name, tensor.shape, tensor.dtype, name) for name, tensor in tensors.items()}
        origin, folder = getattr(model, "checkpoint_origin", None), Path(source) if source is not None else None
        made, others = with_rest(model, leaves, origin, folder, layout=layout, dtype=dtype, trained_only=trained_only)
        return others, plan(made, max_file=max_file), _Gatherer(tensors)

    others, files, gatherer = together(prepare, f"{directory} could not be written; its earlier content is unchanged:")
    writer = FolderWriter(directory, files)
    for round_ in _rounds([(file, output) for file in files for output in file.outputs]):
        if not _write_round(writer, gatherer, round_):
            break
    writer.close(others)


def _write_round(writer: FolderWriter, gatherer: _Gatherer, round_: Sequence[tuple[PlannedFile, Output]]) -> bool:
    """Brings a round's tensors to their files; False, and nothing done, if a rank cannot go on."""
    exchange = writer.attempt(lambda: gatherer.prepare(round_))
    try:
        if gatherer.is_any(writer.has_failed):  # nobody shall wait for what a rank cannot send
            return False
        assert exchange is not None, "no rank has failed, this one neither"
        exchange.run()
    except RuntimeError as error:  # another rank is gone: asking the others would wait for it
        writer.abandon()
        keys = f"{round_[0][1].name} ... {round_[-1][1].name}"
        raise CheckpointError(
            f"{writer.directory} could not be written: {keys} could not be exchanged: {error}"
        ) from error

    def write() -> None:
        for output, tensor in exchange.whole_tensors():
            writer.write(output, tensor)

    writer.attempt(write)
    return True


def with_rest(
    model: PreTrainedModel,
    tensors: dict[str, Moved],
    origin: Origin | None,
    source: Path | None,
    *,
    layout: str | None,
    dtype: torch.dtype | None,
    trained_only: bool,
) -> tuple[list[Output], dict[str, str | Path]]:
    """What to write for a model and for what it was loaded beside: the tensors, and the files around them.

    Raises:
        CheckpointError: a layout that does not exist; the rest's folder is gone; two tensors of one key.
    """
    rest = Rest(taken=origin) if trained_only else find_rest(model, origin, source)
    made = outputs(model, disassemble(model, tensors, layout=layout, origin=rest.taken), dtype)
    twice = {output.name for output in made} & {output.name for output in rest.tensors}
    if twice:
        raise CheckpointError(
            f"{min(twice)} is written for {class_name(model)}, and {rest.directory} holds a tensor of that key which the "
            "model was not loaded from. Write what trained by itself (--trained-only; in Python trained_only=True)."
        )
    sizes: Counter[torch.dtype] = Counter()
    for output in made:
        sizes[output.dtype] += output.num_bytes if output.dtype.is_floating_point else 0
    stored = dtype or (sizes.most_common(1)[0][0] if sizes.total() else None)
    return [*made, *rest.tensors], rest.config_files(model, stored) | rest.side_files(source)


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint of `model` holds: parameters and persistent buffers, tied ones once."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    dropped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for group in tied_groups(model):
        targets = [name for name in group if name in tied]
        kept = next((name for name in group if name not in targets), group[0])
        dropped |= set(group) - {kept}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in dropped}


def planned_outputs(
    model: PreTrainedModel, tensors: dict[str, Tensor], layout: str | None, dtype: torch.dtype | None
) -> list[Output]:
    """How each tensor to write is made of `tensors`; arguments as in `export_pretrained`.

    Raises:
        CheckpointError: no such layout, or adapters in the model.
    """
    require_no_adapters(model)
    leaves = {name: leaf(name, tensor.shape, tensor.dtype, name) for name, tensor in tensors.items()}
    written = disassemble(model, leaves, layout=layout, origin=getattr(model, "checkpoint_origin", None))
    return outputs(model, written, dtype)


def require_no_adapters(model: nn.Module) -> None:
    """Refuses a model with PEFT's adapters in it: its weights go by other names, and lack what the adapters add."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # without it nobody made one
    layers = (name for name, module in model.named_modules() if tuners and isinstance(module, tuners.BaseTunerLayer))
    first = next(layers, None)
    if first is not None:
        raise CheckpointError(
            f"The model has adapters ({first}): upstream has no names for its weights. Merge them first (`lora.merge` of "
            "runtime/train/lora.py), or write the adapters alone (`lora.save`)."
        )


def outputs(model: nn.Module, written: dict[str, Moved], dtype: torch.dtype | None) -> list[Output]:
    """The tensors to write with their dtypes."""
    # transformers casts these up again on load, so they must not lose their digits here.
    exact = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    exact |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())

    def stored(name: str, own: torch.dtype) -> torch.dtype:
        is_exact = own == torch.float32 and any(f".{part}." in f".{name}." for part in exact)
        return own if dtype is None or not own.is_floating_point or is_exact else dtype

    return [Output(name, moved, stored(name, moved.dtype)) for name, moved in written.items()]


def _rounds(work: Sequence[tuple[PlannedFile, Output]]) -> Iterator[list[tuple[PlannedFile, Output]]]:
    """Tensors of all writers in turn, those of a round together no larger than the largest tensor of all."""
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
        operations: alike in number and order on the two ranks of each.
        arrivals: (part of a tensor, the buffer that it arrives in) where it cannot arrive in its place.
        made: what this rank writes: the output, its elements on the device, how its last elements come to their place;
            of what is copied from a file nothing yet.
    """

    operations: list[dist.P2POp] = field(default_factory=list)
    arrivals: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    made: list[tuple[PlannedFile, Output, tuple[Tensor, Pull] | None]] = field(default_factory=list)

    def run(self) -> None:
        """Waits until all has been sent and received."""
        for request in dist.batch_isend_irecv(self.operations) if self.operations else ():
            request.wait()

    def whole_tensors(self) -> Iterator[tuple[Output, Tensor]]:
        """The tensors that this rank writes, on the CPU."""
        for target, arrived in self.arrivals:
            target.copy_(arrived)
        with FileReader() as reader:
            for file, output, gathered in self.made:
                with _named(file, output):
                    if gathered is None:
                        assert isinstance(output, Passed), "nothing else is copied from a file"
                        on_cpu = output.read(reader)
                    else:
                        finish(gathered[1])
                        on_cpu = gathered[0].cpu()
                yield output, on_cpu


@contextlib.contextmanager
def _named(file: PlannedFile, output: Output) -> Iterator[None]:
    """Says of an error which tensor it befell."""
    try:
        yield
    except FAILURES as error:
        what = f"{output.name} could not be gathered for {file.name}: {type(error).__name__}: {error}"
        raise CheckpointError(what) from error


class _Gatherer:
    """Collects whole tensors on the ranks that write them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._rank, self._world = world()
        self._local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        self._holders = {name: holders_of(tensor, self._world) for name, tensor in tensors.items()}
        self._device = device_of(tensors.values(), otherwise=torch.device("cpu"))

    def is_any(self, flag: bool) -> bool:
        """Whether it is so on any rank. Every rank calls it."""
        if self._world == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32, device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def prepare(self, round_: Sequence[tuple[PlannedFile, Output]]) -> _Exchange:
        """What this rank has to do with the tensors of a round. Every rank calls it; none waits for another.

        Raises:
            CheckpointError: naming the tensor that this rank cannot take part in.
        """
        exchange = _Exchange()
        transfers = itertools.count()  # counted alike on all ranks: a tag for each pair of send and receive
        for file, output in round_:
            with _named(file, output):
                self._prepare(file, output, exchange, transfers)
        return exchange

    def _prepare(self, file: PlannedFile, output: Output, exchange: _Exchange, transfers: Iterator[int]) -> None:
        mine = file.writer == self._rank
        if isinstance(output, Passed):
            exchange.made += [(file, output, None)] if mine else []
            return
        shape = tuple(output.moved.shape)
        out = torch.empty(shape, dtype=output.dtype, device=self._device if mine else "meta")
        part = pull(output.moved, whole(shape), out)
        for found, box, view in part.reads:
            for holders, held in self._holders[found.name]:
                shared = intersection(box, held)
                if shared is None:
                    continue
                sender = file.writer if file.writer in holders else holders[file.writer % len(holders)]
                tag = next(transfers)
                target = within(view, box, shared)
                if self._rank == sender:
                    piece = within(self._local[found.name], held, shared)
                    if mine:
                        target.copy_(piece)
                    else:
                        sent = piece.to(self._device, output.dtype).contiguous()
                        exchange.operations.append(dist.P2POp(dist.isend, sent, file.writer, tag=tag))
                elif mine:
                    arrived = target if target.is_contiguous() else torch.empty_like(target).contiguous()
                    exchange.operations.append(dist.P2POp(dist.irecv, arrived, sender, tag=tag))
                    if arrived is not target:
                        exchange.arrivals.append((target, arrived))
        if mine:
            exchange.made.append((file, output, (out, part)))


def device_of(tensors: Iterable[Tensor], otherwise: torch.device) -> torch.device:
    """Where ranks exchange tensors: the device of their mesh, whose shards may be kept on the CPU; without one `otherwise`."""
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh is None:
        return otherwise
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def holders_of(tensor: Tensor, size: int) -> list[tuple[list[int], Box]]:
    """The distinct parts of a tensor and the ranks that hold each."""
    if not isinstance(tensor, DTensor):
        return [(list(range(size)), whole(tensor.shape))]
    parts: dict[Box, list[int]] = {}
    for rank in range(size):
        box = box_of_rank(tensor, rank)
        if box is not None and all(start < stop for start, stop in box):
            parts.setdefault(box, []).append(rank)
    return [(ranks, box) for box, ranks in parts.items()]
