"""Forward and backward of a step as one CUDA graph: launched kernel by kernel they cost the host more than they take.

    first step of a shape    as always: kernels are compiled, buffers of exchanges grow
    the next one             captured, then replayed
    all after it             their rows are copied into the graph's inputs, and it is replayed

A replay runs the kernels of the capture, in their order, on the same memory: the numbers are those of the step without a graph.

What the host decides in a step is decided once, when it is captured. So rows are brought to one form first: as many bounds of
documents as the graph has (the last are of documents without tokens), the longest document as long as the graph's, padding told
also where there is none. A step that does not fit runs as always, and the graph is captured again with bounds that it would
have fitted. Ranks agree on it, on the host: one that replays takes no part in what hosts tell each other within a step.

    T tokens of this rank   D documents
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from patchgen.runtime.parallel import peer_shards, peer_units, undivided, unused, watch
from patchgen.runtime.parallel.config import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train.recipe import Recipe, RecipeError

BOUNDS, LENGTHS, REAL = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k"), "real_tokens"
TEXT = {"input_ids", "labels", "shift_labels", "position_ids", REAL, *BOUNDS, *LENGTHS}
NEITHER, FITS, READY = range(3)  # does a step fit the graph's form, and find what the captured one found
MANY = 20  # steps that are not replayed, after which a warning says so
SLACK = 2  # times the documents and the longest one of the row for which a graph is captured

logger = logging.getLogger(__name__)

# (inputs, labels that count [], tokens that are not padding []) -> this rank's share of the loss; leaves gradients.
Compute = Callable[[Mapping[str, Any], Tensor, Tensor], Tensor]


class Recording(Protocol):
    """What `capture` returns."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class Form:
    """What a graph is captured for.

    Attributes:
        num_bounds: of documents, D + 1 at most.
        longest: tokens of a document at most.
        shapes: names, shapes and dtypes of what else a step is given; what is not a tensor with its value.
    """

    num_bounds: int
    longest: int
    shapes: tuple[tuple[str, Any], ...]

    @classmethod
    def that_fits(cls, inputs: Mapping[str, Any], before: Form | None = None) -> Form:
        """With room for rows of the same shape that hold more documents, or longer ones; for all that fitted `before`, too."""
        bounds = inputs[BOUNDS[0]]
        tokens, longest = int(bounds[-1]), int(inputs[LENGTHS[0]])
        num_bounds = min(tokens, 2 ** (SLACK * len(bounds) - 1).bit_length()) + 1
        found = cls(num_bounds, min(tokens, 2 ** (SLACK * longest - 1).bit_length()), _shapes(inputs))
        if before is None or before.shapes != found.shapes:
            return found
        return cls(max(num_bounds, before.num_bounds), max(found.longest, before.longest), found.shapes)

    def fits(self, inputs: Mapping[str, Any]) -> bool:
        return (
            len(inputs[BOUNDS[0]]) <= self.num_bounds
            and int(inputs[LENGTHS[0]]) <= self.longest
            and _shapes(inputs) == self.shapes
        )

    def bring(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The same rows in this form."""
        more = self.num_bounds - len(inputs[BOUNDS[0]])
        padded = {name: F.pad(inputs[name], (0, more), value=int(inputs[name][-1])) for name in BOUNDS}
        return {**inputs, **padded, **dict.fromkeys(LENGTHS, self.longest)}


def _shapes(inputs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    rest = sorted(inputs.keys() - {*BOUNDS, *LENGTHS})
    return tuple(
        (name, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value)
        for name, value in ((name, inputs[name]) for name in rest)
    )


def completed(rows: Mapping[str, Any], sp: int) -> dict[str, Any] | None:
    """Rows of text, or a slice of them, on the host, with documents and padding told also where there is one or none.

    None: rows of something else, whose shapes change from step to step.
    """
    if not rows.keys() <= TEXT or not isinstance(rows.get("input_ids"), Tensor):
        return None
    ids = rows["input_ids"]
    inputs = {name: value for name, value in rows.items() if value is not None}
    inputs.setdefault(REAL, torch.ones(ids.shape, dtype=torch.bool))
    if BOUNDS[0] not in inputs:
        if ids.shape[0] != 1 or "shift_labels" not in inputs:
            return None
        length = ids.shape[1] * sp  # bounds are of the whole sequence
        inputs |= dict.fromkeys(BOUNDS, torch.tensor([0, length], dtype=torch.int32)) | dict.fromkeys(LENGTHS, length)
    return inputs


def require_possible(recipe: Recipe, layout: ParallelConfig) -> None:
    """Raises RecipeError where steps of a recipe cannot be replayed, in words of the recipe."""
    micro_batches = recipe.train.batches_per_step // layout.num_batches
    parallel = recipe.parallel
    reasons = {
        "runs on GPUs": not torch.cuda.is_available(),
        f"replays the loss of the next token; objective.name is {recipe.objective.name}": recipe.objective.name
        != "next_token",
        "replays steps of one shape: set data.pad_batches: true": not recipe.data.pad_batches,
        "replays steps of text, whose shapes do not change; data.kind is multimodal": recipe.data.kind == "multimodal",
        f"replays steps of one micro-batch, and {micro_batches} are accumulated: set train.batches_per_step: "
        f"{layout.num_batches}": micro_batches > 1,
        "leaves the host out: remove parallel.cpu_offload": parallel.cpu_offload,
        "leaves the host out: set parallel.activation_checkpointing to none, selective or full": (
            parallel.activation_checkpointing == "offload"
        ),
        "needs an optimizer that writes what layers compute with: set optim.name: adamw": recipe.optim.name != "adamw",
        "cannot wait for the sizes of an all-to-all: set parallel.expert_capacity, or expert_exchange: peer_memory": (
            parallel.ep > 1 and parallel.expert_exchange == "all_to_all" and parallel.expert_capacity is None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RecipeError(f"train.cuda_graph {reason}.")


class CapturedStep:
    """Forward and backward of steps of one micro-batch; every rank makes the same calls.

    Args:
        model: sharded, on GPUs; its optimizer sets gradients to None.
        compute: one step.
        capture: records what a function launches; for tests on other devices.

    Attributes:
        replayed: steps so far.
        captured: graphs so far.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ParallelState,
        device: torch.device,
        compute: Compute,
        capture: Callable[[Callable[[], None], nn.Module, ParallelState], Recording] | None = None,
    ) -> None:
        self.model, self.state, self.device, self.compute = model, state, device, compute
        self._capture = capture or _capture
        self._group = dist.new_group(backend="gloo") if state.config.world > 1 else None
        self._form: Form | None = None
        self._forget()
        self.replayed = self.captured = 0
        self._not_replayed: Counter[int] = Counter()

    def __call__(self, rows: Mapping[str, Any], items: int, tokens: int) -> Tensor:
        """This rank's share of the loss of one micro-batch, detached; parameters have their gradients.

        Args:
            rows: as `slice_batch` returns them, on the host.
            items, tokens: of the step, over all ranks: labels that count, tokens that are not padding.
        """
        inputs = completed(rows, self.state.sp)
        fits = inputs is not None and self._form is not None and self._form.fits(inputs)
        answer = self._least(READY if fits and self._is_as_left() else FITS if fits else NEITHER)
        if answer == NEITHER:
            self._forget()
            self._form = Form.that_fits(inputs, self._form) if inputs is not None else None
        self._write(self._form.bring(inputs) if inputs is not None and self._form is not None else rows, items, tokens)
        if answer != READY:
            self._tell_not_replayed(answer)
            return self.compute(self._inputs, self._items, self._tokens)
        if self._recording is None:
            self._record()
        assert self._recording is not None and self._share is not None, (
            "recording runs the step, which gives its share"
        )
        self._recording.replay()
        for shards in self._shards:
            shards.mark_read()  # as after a step
        for parameter, gradient, is_zeros in self._gradients:
            parameter.grad = gradient
            setattr(parameter, unused.LEFT_OUT, is_zeros)
        self.replayed += 1
        return self._share

    def _tell_not_replayed(self, answer: int) -> None:
        """Once, if so many steps are not replayed that it does not pay."""
        self._not_replayed[answer] += 1
        if sum(self._not_replayed.values()) == MANY and self.replayed < MANY:
            logger.warning(
                "train.cuda_graph: %d of %d steps were replayed. Of the others the rows of %d differ too much in shape or in the "
                "documents that they hold; %d found gradients, or weights that something else than the optimizer wrote. Without it "
                "these steps take less time.",
                self.replayed,
                self.replayed + MANY,
                self._not_replayed[NEITHER],
                self._not_replayed[FITS],
            )

    def _forget(self) -> None:
        self._recording: Recording | None = None
        self._inputs: dict[str, Any] = {}
        self._gradients: list[tuple[nn.Parameter, Tensor, bool]] = []
        self._share: Tensor | None = None

    def _write(self, inputs: Mapping[str, Any], items: int, tokens: int) -> None:
        """Into the tensors that a graph reads, where there are any of this form."""
        numbers = {"items": torch.tensor(items), "tokens": torch.tensor(tokens)}
        if self._inputs:
            for name, value in inputs.items():
                if isinstance(value, Tensor):
                    self._inputs[name].copy_(_pinned(value, self.device), non_blocking=True)
            self._items.copy_(_pinned(numbers["items"], self.device), non_blocking=True)
            self._tokens.copy_(_pinned(numbers["tokens"], self.device), non_blocking=True)
            return
        self._inputs = {
            name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
        self._items, self._tokens = (number.to(self.device) for number in numbers.values())

    def _record(self) -> None:
        def run() -> None:
            self._share = self.compute(self._inputs, self._items, self._tokens)

        with watch.operation("capture a step as a CUDA graph"):
            try:
                self._recording = self._capture(run, self.model, self.state)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise RuntimeError(
                    f"This step cannot be captured as a CUDA graph: {error} A step that waits for the device cannot. Set "
                    "train.cuda_graph: false."
                ) from error
        self._gradients = [
            (one, one.grad, getattr(one, unused.LEFT_OUT, False))
            for one in self.model.parameters()
            if one.grad is not None
        ]
        self.captured += 1

    @functools.cached_property
    def _shards(self) -> set[peer_shards.PeerShards]:
        """Those that an optimizer writes; which are, is decided when a unit is gathered first. A frozen unit has none."""
        groups = (group for group in _groups(self.model) if isinstance(group, peer_units.PeerGroup))
        return {group.shards for group in groups if group.keeps_copies}

    def _is_as_left(self) -> bool:
        """Whether a step finds what the captured one found: no gradients, and copies as the optimizer wrote them."""
        return (
            self.model.training
            and all(shards.is_written for shards in self._shards)
            and all(
                parameter.grad is None
                and ((copy := undivided.copy_of(parameter)) is None or copy.is_current(parameter))
                for parameter in self.model.parameters()
            )
        )

    def _least(self, here: int) -> int:
        """The smallest answer of all ranks."""
        if self._group is None:
            return here
        answer = torch.tensor(here)
        with watch.operation("agree on whether this step is replayed"):
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        return int(answer)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """From other memory of the host a copy to a GPU would wait for it."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_pinned() else tensor


# ----------------------------------------------------------------------------------------------------- capturing


def _groups(model: nn.Module) -> list:
    return [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in undivided.param_groups(module)
    ]


def _capture(run: Callable[[], None], model: nn.Module, state: ParallelState) -> torch.cuda.CUDAGraph:
    """Records what `run` launches, on whatever streams and from autograd's thread too, without running it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # of steps without a graph: it has memory of its own
    graph = torch.cuda.CUDAGraph()
    # Only this thread may not wait for the device meanwhile: that of NCCL asks for its events.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with state.peers.replayable() if state.peers is not None else contextlib.nullcontext():
            run()
        _join(model, state)
    return graph


def _join(model: nn.Module, state: ParallelState) -> None:
    """The streams of exchanges end in the current one: a graph with loose ends is none."""
    current = torch.cuda.current_stream()
    streams = set()
    for group in _groups(model):
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
