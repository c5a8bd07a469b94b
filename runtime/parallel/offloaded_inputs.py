"""Inputs of checkpointed layers in host memory: what `checkpointing.apply(model, "full")` keeps per layer leaves the device.

    checkpointing.apply(model, "full")
    offloaded_inputs.apply(model)                    # the input of each layer
    offloaded_inputs.apply(model, attention=True)    # and the results of attention, which then is not computed again

Copies have a stream of their own, in both directions:

    forward    computing  | layer 0        | layer 1        | layer 2        |
               copies         input 0 out      input 1 out      input 2 out
    backward   computing  | layer 2, again and back | layer 1, again and back | layer 0 ...
               copies         input 1 in               input 0 in

So the device has the inputs of two layers instead of all: the running layer's, and one on its way. In the forward an input is
freed when the next layer's is sent, in the backward it is fetched when the backward of the layer after it starts.

Only hidden states travel, the first argument of a layer. What layers share (masks, rotary tables, an encoder's states) stays,
and so does an input without a gradient, such as that of the first layer under frozen embeddings.

Attention takes most of the time of long rows: at 1M tokens of Qwen3-30B-A3B 98 % of all operations. Kept, its results cost twice
the host memory of the inputs (heads times their size is 2 H there), and a backward has no second forward of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from patchgen.runtime.parallel import checkpointing
from patchgen.runtime.parallel.checkpointing import CHECKPOINT_ATTRIBUTE

PIECE_BYTES = 2**24
"""Host memory is taken in pieces of one size: tensors of all lengths share them, and none is larger than needed by more than
one. 16 MiB take 0.3 ms to copy, so a copy of pieces is as fast as one of the whole."""

_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
_ATTENTION_NAMESPACES = {"torch_attn", "flash_attn", "flash_attn_3"}
KEPT_ATTENTION = (
    "patchgen_flash_attention_3",
    "patchgen_flash_attention_2",
    "patchgen_flash_varlen",
    "patchgen_sdpa",
)
"""Attention whose results can be kept: it is an operator of torch's dispatcher, as FlashAttention 4 and flex are not."""


def apply(model: nn.Module, *, attention: bool = False, piece_bytes: int = PIECE_BYTES) -> Transfers:
    """Sends the inputs of all checkpointed layers of `model` to the host; call it after `checkpointing.apply`.

    Args:
        attention: also the results of attention, so that only the remainder of a layer is computed again.
        piece_bytes: size of the pieces of host memory.

    Returns:
        What the layers share; its counts tell what was sent.

    Raises:
        ValueError: no layer is checkpointed by `checkpointing.apply` with "full" or "selective".
    """
    transfers = Transfers(piece_bytes)
    found = 0
    for layer in model.modules():
        function = vars(layer).get(CHECKPOINT_ATTRIBUTE)
        if not isinstance(function, partial) or not checkpointing.is_ours(function):
            continue
        run = partial(_run_layer, transfers=transfers, keeps_attention=attention, **function.keywords)
        setattr(layer, CHECKPOINT_ATTRIBUTE, run)
        found += 1
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer whose input is kept for the backward, so there is nothing to send to the "
            "host. To fix: call checkpointing.apply(model, 'full' or 'selective') before."
        )
    return transfers


class Transfers:
    """Copies between the device and pieces of host memory that are used again, in the order in which they are asked for.

    On a GPU the pieces are pinned and copies have a stream of their own, whose order makes pieces safe to use again; tensors of
    other devices are copied at once.

    Attributes:
        num_sent: tensors sent to the host so far.
        num_attention_calls: calls of attention whose results were kept so far.
        host_bytes: size of the pieces, in use or not.
    """

    def __init__(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.num_sent = self.num_attention_calls = self.host_bytes = 0
        self.last_input: Callable[[], HostCopy | None] = lambda: None
        self._free: dict[bool, list[Tensor]] = {True: [], False: []}  # is pinned -> pieces
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._leaving: list[tuple[Tensor, torch.cuda.Event]] = []

    def send(self, values: Tensor) -> list[Tensor]:
        """Starts to copy `values`, bytes `(n,)`, to the host; returns the pieces, which `give_back` takes."""
        self.num_sent += 1
        pieces = [self._piece(pinned=values.is_cuda) for _ in range(-(-len(values) // self.piece_bytes))]
        if not values.is_cuda:
            _copy(values, pieces, to_host=True)
            return pieces
        self.free_sent()
        stream, current = self._stream(values.device), torch.cuda.current_stream(values.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            _copy(values, pieces, to_host=True)
            (event := torch.cuda.Event()).record(stream)
            self._leaving.append((values, event))
        return pieces

    def free_sent(self) -> None:
        """Lets go of the tensors on their way to the host. What the current stream computes next may reuse their memory, so it
        waits for the copies, which are as old as the layer."""
        for values, event in self._leaving:
            torch.cuda.current_stream(values.device).wait_event(event)
        self._leaving.clear()

    def bring(self, values: Tensor, pieces: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Starts to copy pieces to `values`, bytes `(n,)` allocated on the current stream; the event tells when they are there."""
        if not values.is_cuda:
            _copy(values, pieces, to_host=False)
            return None
        stream = self._stream(values.device)
        stream.wait_stream(torch.cuda.current_stream(values.device))  # for the former use of this memory
        with torch.cuda.stream(stream):
            _copy(values, pieces, to_host=False)
            (event := torch.cuda.Event()).record(stream)
            return event

    def give_back(self, pieces: Sequence[Tensor], pinned: bool) -> None:
        """Takes pieces back. Copies out of them may be under way: those into them are queued behind on the same stream."""
        self._free[pinned].extend(pieces)

    def _piece(self, pinned: bool) -> Tensor:
        if self._free[pinned]:
            return self._free[pinned].pop()
        self.host_bytes += self.piece_bytes
        return torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=pinned)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _copy(values: Tensor, pieces: Sequence[Tensor], *, to_host: bool) -> None:
    for part, piece in zip(values.split(len(pieces[0])), pieces, strict=True) if len(values) else ():
        target, source = (piece[: len(part)], part) if to_host else (part, piece[: len(part)])
        target.copy_(source, non_blocking=True)


class HostCopy:
    """A dense tensor in host memory; `fetch` returns it with its strides, any number of times.

    Args:
        previous: of the layer before, fetched ahead when this one is.
    """

    def __init__(self, tensor: Tensor, transfers: Transfers, previous: HostCopy | None = None) -> None:
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():  # with gaps, or overlapping
            tensor = tensor.contiguous()
        self._layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self._transfers, self._previous = transfers, weakref.ref(previous) if previous is not None else lambda: None
        self._arriving: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._pieces = transfers.send(_bytes_of(tensor.detach()))

    def prefetch(self) -> None:
        """Starts to copy the values to the device, unless they are on their way."""
        if self._arriving is None:
            shape, stride, dtype, device = self._layout
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            self._arriving = tensor, self._transfers.bring(_bytes_of(tensor), self._pieces)

    def prefetch_previous(self) -> None:
        previous = self._previous()
        if previous is not None:
            previous.prefetch()

    def fetch(self) -> Tensor:
        """The values on the device, for the current stream."""
        self.prefetch()
        assert self._arriving is not None
        (tensor, event), self._arriving = self._arriving, None
        if event is not None:
            torch.cuda.current_stream(tensor.device).wait_event(event)
        return tensor

    def __del__(self) -> None:
        if "_pieces" not in vars(self):  # an error while it was made
            return
        if self._arriving is not None:  # fetched ahead for nothing: its memory is free when the copy has ended
            self.fetch()
        self._transfers.give_back(self._pieces, pinned=self._layout[3].type == "cuda")


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, uint8 `(n,)`."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _travels(hidden: object) -> bool:
    """Whether a layer's first argument goes to the host: a plain tensor of hidden states that have a gradient."""
    if not isinstance(hidden, Tensor) or type(hidden) is not Tensor:
        return False
    return hidden.is_floating_point() and hidden.requires_grad


def _run_layer(run_layer: Callable, *args: Any, transfers: Transfers, keeps_attention: bool, **options: Any) -> Any:
    """`checkpoint(run_layer, *args, **options)` with the first argument in host memory until the backward.

    torch's checkpoint saves a region's arguments like any autograd function, outside the hooks that it installs for the region's
    own tensors: hooks around the call see the arguments alone.
    """
    hidden = args[0] if args else None
    if not torch.is_grad_enabled():
        return torch_checkpoint.checkpoint(run_layer, *args, **options)
    kept: list[Any] = []
    if keeps_attention:
        run_layer = partial(_run_with_kept_attention, run_layer, transfers, kept)
    if not _travels(hidden):
        return torch_checkpoint.checkpoint(run_layer, *args, **options)

    travels = id(hidden)  # autograd keeps the hooks, and so all that they refer to

    def send(tensor: Tensor) -> Tensor | HostCopy:
        if id(tensor) != travels:
            return tensor
        copy = HostCopy(tensor, transfers, transfers.last_input())
        transfers.last_input = weakref.ref(copy)
        return copy

    def bring(saved: Tensor | HostCopy) -> Tensor:
        if not isinstance(saved, HostCopy):
            return saved
        transfers.free_sent()
        if keeps_attention and not transfers.num_attention_calls:
            raise ValueError(
                "No result of attention could be kept: none of the layers calls attention as an operator of torch's dispatcher. "
                f"To fix: set model.attention to one of {', '.join(KEPT_ATTENTION)}, or remove parallel.offload_attention."
            )
        tensor = saved.fetch()
        tree_map_only(HostCopy, HostCopy.prefetch, kept)
        saved.prefetch_previous()
        return tensor

    with saved_tensors_hooks(send, bring):
        return torch_checkpoint.checkpoint(run_layer, *args, **options)


def _run_with_kept_attention(run_layer: Callable, transfers: Transfers, kept: list[Any], *args: Any) -> Any:
    """Runs a layer; the first time it adds the results of attention to `kept`, and in a replay takes them from there."""
    with _KeptAttention(transfers, kept, is_replay=checkpointing.is_replay()):
        return run_layer(*args)


class _KeptAttention(TorchDispatchMode):
    """Below autograd: in a replay attention is recorded with its recomputed arguments and its first results."""

    def __init__(self, transfers: Transfers, kept: list[Any], *, is_replay: bool) -> None:
        super().__init__()
        self._transfers, self._kept = transfers, kept
        # A region may be replayed more than once: each replay reads from the start.
        self._replayed = iter(list(kept)) if is_replay else None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled functions inside the layer stay compiled

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _ATTENTION and func.namespace not in _ATTENTION_NAMESPACES:
            return func(*args, **kwargs)
        names = (argument.name for argument in func._schema.arguments)
        if (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"):
            return func(*args, **kwargs)  # not kept: a replay must draw the same numbers
        if self._replayed is not None:
            return tree_map_only(HostCopy, HostCopy.fetch, next(self._replayed))
        results = func(*args, **kwargs)
        self._kept.append(tree_map_only(Tensor, self._send, results))
        self._transfers.num_attention_calls += 1
        return results

    def _send(self, tensor: Tensor) -> Tensor | HostCopy:
        return HostCopy(tensor, self._transfers) if tensor.is_floating_point() and tensor.numel() else tensor.detach()
