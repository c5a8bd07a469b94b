"""Forward and backward of a step as one CUDA graph, for steps in which launching kernels takes longer than running them.

    first step of a shape    runs eagerly: kernels are compiled, communication buffers grow
    the next one             captured, then replayed
    all later ones           their rows are copied into the graph's inputs, and it is replayed

A replay runs the captured kernels in their order on the same memory: the numbers are those of the eager step.

What the host decides in a step is decided once, at capture. So rows are padded to one shape first: as many document bounds as
the graph has (the last documents are empty), its maximum document length, and a padding mask even without padding. A step that
does not fit runs eagerly, and the graph is captured again with a shape that it would have fitted. Ranks agree on this on the
host: a rank that replays takes no part in host-side collectives within a step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from patchgen.runtime.parallel import peer_shards, peer_units, tables, undivided, unused, watch
from patchgen.runtime.parallel.config import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train.host_copies import pinned
from patchgen.runtime.train.recipe import Recipe, RecipeError
from patchgen.runtime.verify.verdict import one_line_error

BOUNDS, MAX_LENGTHS, REAL_TOKENS = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k"), "real_tokens"
TEXT_INPUTS = {"input_ids", "labels", "shift_labels", "position_ids", REAL_TOKENS, *BOUNDS, *MAX_LENGTHS}
# What a step is to the graph. Ranks agree on the lowest: one that does not fit on some rank is replayed on none.
FIRST, OTHER_INPUTS, MORE_DOCUMENTS, LONGER_DOCUMENT, OTHER_STATE, REPLAYABLE = range(6)
REASONS = {
    FIRST: "the first of this start, which compiles kernels",
    OTHER_INPUTS: "of rows with other inputs, or of other sizes, than the graph's",
    MORE_DOCUMENTS: "of rows with more documents than the graph had room for",
    LONGER_DOCUMENT: "of rows with a longer document than the graph had room for",
    OTHER_STATE: "taken with gradients from before, or with weights that the optimizer had not written, as after loading them",
}
"""Why a step was not replayed. After the first four the graph is captured anew, with more room."""
WARN_AFTER = 20  # eager steps
# A graph has room for at least this many times the row's document bounds and longest document, up to its tokens.
SLACK = 2

logger = logging.getLogger(__name__)

# (inputs, number of labels [], number of non-padding tokens []) -> this rank's share of the loss; sets gradients.
Compute = Callable[[Mapping[str, Any], Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GraphShape:
    """The inputs that a graph is captured for.

    Attributes:
        num_bounds: number of document bounds; rows with fewer are padded to it.
        longest: the maximum tokens of a document.
        shapes: name, shape and dtype of the other tensors; name and value of inputs that are not tensors.
    """

    num_bounds: int
    longest: int
    shapes: tuple[tuple[str, Any], ...]

    @classmethod
    def with_slack(cls, inputs: Mapping[str, Any], previous: GraphShape | None = None) -> GraphShape:
        """A shape with room for more and longer documents than `inputs` has; if the other inputs have the shapes of
        `previous`, also for all rows that fit it."""
        bounds = inputs[BOUNDS[0]]
        tokens, longest = int(bounds[-1]), int(inputs[MAX_LENGTHS[0]])
        num_bounds = min(tokens, 2 ** (SLACK * len(bounds) - 1).bit_length()) + 1
        shape = cls(num_bounds, min(tokens, 2 ** (SLACK * longest - 1).bit_length()), _shapes(inputs))
        if previous is None or previous.shapes != shape.shapes:
            return shape
        return cls(max(num_bounds, previous.num_bounds), max(shape.longest, previous.longest), shape.shapes)

    def compare(self, inputs: Mapping[str, Any]) -> int:
        """Why rows do not fit, of `REASONS`; `REPLAYABLE` if they do."""
        if _shapes(inputs) != self.shapes:
            return OTHER_INPUTS
        if len(inputs[BOUNDS[0]]) > self.num_bounds:
            return MORE_DOCUMENTS
        return LONGER_DOCUMENT if int(inputs[MAX_LENGTHS[0]]) > self.longest else REPLAYABLE

    def pad(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The same rows, padded to this shape."""
        missing = self.num_bounds - len(inputs[BOUNDS[0]])
        padded = {name: F.pad(inputs[name], (0, missing), value=int(inputs[name][-1])) for name in BOUNDS}
        return {**inputs, **padded, **dict.fromkeys(MAX_LENGTHS, self.longest)}


def _shapes(inputs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    names = sorted(inputs.keys() - {*BOUNDS, *MAX_LENGTHS})
    return tuple(
        (name, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value)
        for name, value in ((name, inputs[name]) for name in names)
    )


def complete_text_inputs(rows: Mapping[str, Any], sp: int) -> dict[str, Any] | None:
    """Text rows or a slice of them, on the host, with document bounds and padding mask added where they are implicit.

    None: there are inputs other than those of text, or no document bounds and not a single row with shifted labels.
    """
    if not rows.keys() <= TEXT_INPUTS or not isinstance(rows.get("input_ids"), Tensor):
        return None
    ids = rows["input_ids"]
    inputs = {name: value for name, value in rows.items() if value is not None}
    inputs.setdefault(REAL_TOKENS, torch.ones(ids.shape, dtype=torch.bool))
    if BOUNDS[0] not in inputs:
        if ids.shape[0] != 1 or "shift_labels" not in inputs:
            return None
        length = ids.shape[1] * sp  # bounds describe the full sequence
        inputs |= dict.fromkeys(BOUNDS, torch.tensor([0, length], dtype=torch.int32)) | dict.fromkeys(
            MAX_LENGTHS, length
        )
    return inputs


def require_replayable(recipe: Recipe, layout: ParallelConfig) -> None:
    """Raises RecipeError, naming the recipe's key, if the recipe alone shows that its steps cannot be replayed."""
    micro_batches = recipe.train.batches_per_step // layout.num_batches
    parallel = recipe.parallel
    reasons = {
        "needs a GPU, and torch finds none here": not torch.cuda.is_available(),
        f"replays the next-token loss only; objective.name is {recipe.objective.name}": recipe.objective.name
        != "next_token",
        "replays steps of one shape: set data.pad_batches: true": not recipe.data.pad_batches,
        "replays steps of text, whose shapes do not change; data.kind is multimodal": recipe.data.kind == "multimodal",
        f"replays steps of one micro-batch, and {micro_batches} are accumulated: set train.batches_per_step: "
        f"{layout.num_batches}": micro_batches > 1,
        "cannot offload to the host: remove parallel.cpu_offload": parallel.cpu_offload,
        "cannot offload to the host: set parallel.activation_checkpointing to none, selective or full": (
            parallel.activation_checkpointing == "offload"
        ),
        "cannot keep inputs in pieces of host memory that change owners: remove parallel.offload_inputs": (
            parallel.offload_inputs
        ),
        "needs an optimizer that updates the compute copies of parameters: set optim.name: adamw": (
            recipe.optim.name != "adamw"
        ),
        "cannot wait for the sizes of an all-to-all: set parallel.expert_capacity, or expert_exchange: peer_memory": (
            parallel.ep > 1 and parallel.expert_exchange == "all_to_all" and parallel.expert_capacity is None
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise RecipeError(f"train.cuda_graph {reason}.")


def require_no_tables(recipe: Recipe, model: nn.Module, *, world: int) -> None:
    """Raises RecipeError if rows of a table are sent for (`parallel/tables.py`): how many, the host has to know."""
    names, _ = tables.choose(model, recipe.parallel.shard_tables_above, world=world)
    if names:
        raise RecipeError(
            f"train.cuda_graph cannot wait for how many rows of {names[0]} ranks want: it has "
            f"{model.get_parameter(names[0]).numel():,} parameters, more than parallel.shard_tables_above. To fix: remove "
            "train.cuda_graph, or let FSDP gather it: parallel.shard_tables_above: null."
        )


def summary_of(replayed: int, others: Mapping[int, int]) -> str:
    """How many steps were replayed, and why the others were not, in a line.

    Args:
        others: reason, of `REASONS` -> number of steps.
    """
    told = [f"{count} {'was' if count == 1 else 'were'} {REASONS[reason]}" for reason, count in sorted(others.items())]
    return f"{replayed} of {replayed + sum(others.values())} steps were replayed as a CUDA graph" + (
        f"; {'; '.join(told)}" if told else ""
    )


class CapturedStep:
    """Forward and backward of steps of one micro-batch; every rank makes the same calls.

    Args:
        model: sharded, on GPUs; its optimizer sets gradients to None.
        compute: forward and backward of a step.

    Attributes:
        replayed: number of replayed steps.
    """

    def __init__(self, model: nn.Module, state: ParallelState, device: torch.device, compute: Compute) -> None:
        self.model, self.state, self.device, self.compute = model, state, device, compute
        self._group = dist.new_group(backend="gloo") if state.config.world > 1 else None
        self._shape: GraphShape | None = None
        self._reset()
        self.replayed = 0
        self._not_replayed: Counter[int] = Counter()

    def __call__(self, rows: Mapping[str, Any], items: int, tokens: int) -> Tensor:
        """This rank's share of the loss of one micro-batch, detached; parameters have their gradients.

        Args:
            rows: model inputs as `slice_batch` returns them, on the host.
            items, tokens: labels and non-padding tokens of the step, over all ranks.
        """
        inputs = complete_text_inputs(rows, self.state.sp)
        status = OTHER_INPUTS if inputs is None else FIRST if self._shape is None else self._shape.compare(inputs)
        if status == REPLAYABLE and not self._has_captured_state():
            status = OTHER_STATE
        status = self._minimum_over_ranks(status)
        if status < OTHER_STATE:
            self._reset()
            self._shape = GraphShape.with_slack(inputs, self._shape) if inputs is not None else None
        padded = self._shape.pad(inputs) if inputs is not None and self._shape is not None else rows
        self._copy_inputs(padded, torch.tensor(items), torch.tensor(tokens))
        if status != REPLAYABLE:
            self._count_not_replayed(status)
            return self.compute(self._inputs, self._items, self._tokens)
        if self._recording is None:
            self._record()
        assert self._recording is not None and self._loss_share is not None, "recording runs `compute`"
        self._recording.replay()
        for shards in self._shards:
            shards.mark_read()  # as after an eager step
        for parameter, gradient, is_zeros in self._gradients:
            parameter.grad = gradient
            setattr(parameter, unused.LEFT_OUT, is_zeros)
        self.replayed += 1
        return self._loss_share

    @property
    def summary(self) -> str:
        """How many steps were replayed, and why the others were not."""
        return summary_of(self.replayed, self._not_replayed)

    def _count_not_replayed(self, status: int) -> None:
        """Counts an eager step; warns once if there are too many for the graph to pay off."""
        self._not_replayed[status] += 1
        if self._not_replayed.total() == WARN_AFTER and self.replayed < WARN_AFTER:
            logger.warning("train.cuda_graph: %s. Without train.cuda_graph these are faster.", self.summary)

    def _reset(self) -> None:
        self._recording: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Any] = {}
        self._gradients: list[tuple[nn.Parameter, Tensor, bool]] = []
        self._loss_share: Tensor | None = None

    def _copy_inputs(self, inputs: Mapping[str, Any], items: Tensor, tokens: Tensor) -> None:
        """Copies a step's inputs into the tensors that the graph reads, or allocates them."""
        if self._inputs:
            for name, value in inputs.items():
                if isinstance(value, Tensor):
                    self._inputs[name].copy_(pinned(value, self.device), non_blocking=True)
            self._items.copy_(pinned(items, self.device), non_blocking=True)
            self._tokens.copy_(pinned(tokens, self.device), non_blocking=True)
            return
        self._inputs = {
            name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
        self._items, self._tokens = items.to(self.device), tokens.to(self.device)

    def _record(self) -> None:
        def run() -> None:
            self._loss_share = self.compute(self._inputs, self._items, self._tokens)

        with watch.operation("capture a step as a CUDA graph"):
            try:
                self._recording = _capture(run, self.model, self.state)
            except (torch.OutOfMemoryError, dist.DistError):  # not AcceleratorError, which the capture may cause
                raise
            except Exception as error:
                raise RuntimeError(
                    f"This step cannot be captured as a CUDA graph: {one_line_error(error)} Steps that wait for the "
                    "device cannot be captured. To fix: set train.cuda_graph: false."
                ) from error
        self._gradients = [
            (parameter, parameter.grad, getattr(parameter, unused.LEFT_OUT, False))
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]

    @functools.cached_property
    def _shards(self) -> set[peer_shards.PeerShards]:
        """The shards that an optimizer writes, known once all units were gathered. A unit with a frozen parameter has none."""
        groups = (group for group in _param_groups(self.model) if isinstance(group, peer_units.PeerGroup))
        return {group.shards for group in groups if group.keeps_copies}

    def _has_captured_state(self) -> bool:
        """Whether the model is in the state it was captured in: training mode, no gradients, compute copies as the optimizer
        wrote them."""
        return (
            self.model.training
            and all(shards.is_written for shards in self._shards)
            and all(
                parameter.grad is None
                and ((copy := undivided.copy_of(parameter)) is None or copy.is_current(parameter))
                for parameter in self.model.parameters()
            )
        )

    def _minimum_over_ranks(self, status: int) -> int:
        if self._group is None:
            return status
        minimum = torch.tensor(status)
        with watch.operation("agree on whether this step is replayed"):
            dist.all_reduce(minimum, op=dist.ReduceOp.MIN, group=self._group)
        return int(minimum)


# ----------------------------------------------------------------------------------------------------- capturing


def _param_groups(model: nn.Module) -> list:
    return [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in undivided.param_groups(module)
    ]


def _capture(run: Callable[[], None], model: nn.Module, state: ParallelState) -> torch.cuda.CUDAGraph:
    """Records what `run` launches, from autograd's thread too, on this stream and on those that wait for it; executes nothing."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the cache of eager steps: a graph has its own memory pool
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog thread may query events during capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with state.peers.replayable() if state.peers is not None else contextlib.nullcontext():
            run()
        _join_streams(model, state)
    return graph


def _join_streams(model: nn.Module, state: ParallelState) -> None:
    """Joins the communication streams into the current one, as a capture requires."""
    current = torch.cuda.current_stream()
    streams = set()
    for group in _param_groups(model):
        owners = (group.comm_ctx, getattr(group, "shards", None))
        streams |= {
            value
            for owner in owners
            if owner
            for value in vars(owner).values()
            if isinstance(value, torch.cuda.Stream)
        }
    if state.peers is not None:
        streams |= {value for value in vars(state.peers).values() if isinstance(value, torch.cuda.Stream)}
    for stream in streams - {current}:
        with torch.cuda.stream(stream):
            is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured:
            current.wait_stream(stream)
