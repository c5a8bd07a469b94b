"""The decoder's layers on slices of a sequence, compared one by one with those on the full sequence; see `selfcheck.py`.

Gradients too, if there is a backward: each layer gets the same random gradient of its output on slices as on the full
sequence, so the gradients of its input differ by what the layer computes, and by nothing that the layers after it do.

    forward     x1 -> layer 1 -> y1    x2 -> layer 2 -> y2      x: of the full sequence
    backward    dx1 <- layer 1 <- g2   dx2 <- layer 2 <- g3     g: random, the same for slices and the full sequence

B rows   S tokens of the full sequence   s = S / n of this rank   H hidden size   E experts
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from patchgen.runtime.parallel.state import ParallelState

CHANGE_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Of the largest change that a layer makes to its input, or of the largest output of a module inside a layer."""
HALF_PRECISION_CHANGE_TOLERANCE = 5e-2
ROUNDING = 8
"""Rounding errors (eps) of the largest hidden state that are allowed in addition: a layer's sum with its input is rounded."""

STATES, LOGITS, GRADIENTS = "hidden states", "router logits", "gradients"


class _OnOutput(Protocol):
    def __call__(self, path: str, hidden: Tensor | None, kind: str = STATES) -> None: ...


@dataclass
class _RecordedTensor:
    """A hidden state, router logits or a gradient of the full sequence, which that of slices is compared with.

    Attributes:
        local: this rank's slice, `(B, s, H)`.
        size: the largest absolute value over all tokens, a scalar.
        change: the largest absolute change that the layer made to its input, a scalar; of a part, its largest output.
    """

    local: Tensor
    size: Tensor
    change: Tensor


class LayerComparison:
    """The hidden states of the decoder's layers, of the modules directly inside them, and what the model records of its routers;
    the gradients of the layers' inputs, where they have any.

    Args:
        input_ids: of the full sequence, `(B, S)`.
        real_tokens: those that are compared, `(B, S)` bool: not padding.

    Attributes:
        worst_ratio: the largest difference on this rank, in units of what is allowed; above 1 it is not rounding.
        first_module: the path of the first module on this rank whose difference is not rounding.
        first_kind: what differs there: hidden states, router logits or gradients.
    """

    def __init__(self, model: nn.Module, state: ParallelState, input_ids: Tensor, real_tokens: Tensor) -> None:
        self.worst_ratio, self.first_module, self.first_kind = 0.0, "", STATES
        self._state, self._ids, self.real_tokens = state, input_ids, real_tokens
        self._layers, self._parts = _layers_and_parts(model)
        self._routers = recorded_routers(model)
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        self._embeddings = [(path, module) for path, module in model.named_modules() if module is embedding]
        self._dtypes: set[torch.dtype] = set()
        self._inputs: dict[str, list[_RecordedTensor | None]] = defaultdict(list)
        self._outputs: dict[tuple[str, str], list[_RecordedTensor | None]] = defaultdict(list)
        self._gradients: dict[tuple[str, int], _RecordedTensor] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the calls in the block, which computes the full sequence."""
        running: list[Tensor | None] = []
        last_input: list[Tensor] = []
        embeddings = itertools.count()

        def before(path: str, hidden: Tensor | None) -> Tensor | None:
            full = _rows(hidden, self._ids)
            place = (f"the input of {path}", len(self._inputs[path]))
            running.append(full.detach().clone() if full is not None else None)
            change = full - last_input[-1] if full is not None and last_input else full
            self._inputs[path].append(self._recorded_tensor(full, change))
            if full is None or hidden is None:
                return None
            last_input[:] = [full.detach().clone()]
            if not hidden.requires_grad:
                return None

            def record(gradient: Tensor) -> Tensor:
                self._record_gradient(place, gradient)
                return random_slice(gradient, 1, 0, seed=place[1])

            # A copy: the gradient of this use alone. A view would lose its hook where the layer changes its input in place.
            return _with_hook(hidden.clone(), record)

        def embedded(path: str, hidden: Tensor) -> None:
            hidden.register_hook(partial(self._record_gradient, (path, next(embeddings))))

        def after(path: str, hidden: Tensor | None) -> None:
            full, hidden_before = _rows(hidden, self._ids), running.pop()
            change = None
            if full is not None and hidden_before is not None and full.shape == hidden_before.shape:
                change = full - hidden_before
            self._outputs[path, STATES].append(self._recorded_tensor(full, change))

        def part(path: str, hidden: Tensor | None, kind: str = STATES) -> None:
            full = _rows(hidden, self._ids)
            self._outputs[path, kind].append(self._recorded_tensor(full, full))

        with self._hooked(before, after, part, embedded, self._ids):
            yield

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Compares the calls in the block, which computes this rank's slice; layers get the inputs of the recorded calls."""
        inputs = {path: iter(enumerate(values)) for path, values in self._inputs.items()}
        outputs = {place: iter(values) for place, values in self._outputs.items()}
        embeddings = itertools.count()

        def before(path: str, hidden: Tensor | None) -> Tensor | None:
            call, expected = next(inputs.get(path, iter(())), (0, None))
            place = (f"the input of {path}", call)
            if not self._compare(place[0], hidden, expected) or expected is None or hidden is None:
                self._gradients.pop(place, None)
                return None
            if not hidden.requires_grad:
                return expected.local

            def compare(gradient: Tensor) -> Tensor:
                self._compare_gradient(place, gradient)
                return random_slice(gradient, self._state.sp, self._state.sp_rank, seed=call)

            # The value of the one, in the graph of the other.
            return _with_hook(expected.local + (hidden - hidden.detach()), compare)

        def after(path: str, hidden: Tensor | None, kind: str = STATES) -> None:
            self._compare(path, hidden, next(outputs.get((path, kind), iter(())), None), kind)

        def embedded(path: str, hidden: Tensor) -> None:
            hidden.register_hook(partial(self._compare_gradient, (path, next(embeddings))))

        local = self._ids.chunk(self._state.sp, dim=1)[self._state.sp_rank]
        with self._hooked(before, after, after, embedded, local):
            yield
        for path, _ in self._gradients:
            self._keep_worst(path, float("inf"), GRADIENTS)  # slices have none there

    def _record_gradient(self, place: tuple[str, int], gradient: Tensor) -> None:
        value = self._recorded_tensor(gradient, gradient)
        assert value is not None
        self._gradients[place] = value

    def _compare_gradient(self, place: tuple[str, int], gradient: Tensor) -> None:
        self._compare(place[0], gradient, self._gradients.pop(place, None), GRADIENTS)

    def _recorded_tensor(self, hidden: Tensor | None, change: Tensor | None) -> _RecordedTensor | None:
        """None if there is nothing to compare: calls are counted, so that later ones find theirs."""
        if hidden is None or change is None:
            return None
        hidden, change = hidden.detach(), change.detach()
        is_rounded = hidden.is_cuda and torch.get_float32_matmul_precision() != "highest"  # products in TF32 or bf16
        self._dtypes |= {hidden.dtype, torch.bfloat16} if is_rounded else {hidden.dtype}
        local = hidden.chunk(self._state.sp, dim=1)[self._state.sp_rank].clone()
        size, largest_change = (tensor[self.real_tokens].abs().max().float() for tensor in (hidden, change))
        return _RecordedTensor(local, size, largest_change)

    def _compare(self, path: str, hidden: Tensor | None, expected: _RecordedTensor | None, kind: str = STATES) -> bool:
        """Whether the two could be compared."""
        hidden = None if hidden is None or expected is None else _rows(hidden.detach(), expected.local)
        if hidden is None or expected is None or hidden.shape != expected.local.shape:
            return False
        # A part in fp32 computes on what others have rounded.
        dtype = max(self._dtypes, key=lambda one: torch.finfo(one).eps)
        tolerance = CHANGE_TOLERANCE.get(dtype, HALF_PRECISION_CHANGE_TOLERANCE)
        is_real = self.real_tokens.chunk(self._state.sp, dim=1)[self._state.sp_rank]
        by_token = (hidden - expected.local).float().abs().amax(dim=-1)[is_real]
        if not len(by_token):
            return True
        # In half precision a token near a tie of its router may get another expert; most tokens do not.
        deviation = by_token.max() if dtype in CHANGE_TOLERANCE else by_token.median()
        allowed = tolerance * expected.change + ROUNDING * torch.finfo(dtype).eps * expected.size
        ratio = float((deviation / allowed.clamp(min=1e-30)).nan_to_num(nan=float("inf")))
        self._keep_worst(path, ratio, kind)
        return True

    def _keep_worst(self, path: str, ratio: float, kind: str) -> None:
        self.worst_ratio = max(self.worst_ratio, ratio)
        if ratio > 1 and not self.first_module:
            self.first_module, self.first_kind = path, kind

    @contextlib.contextmanager
    def _hooked(
        self,
        before: Callable[[str, Tensor | None], Tensor | None],
        after: Callable[[str, Tensor | None], None],
        part: _OnOutput,
        embedded: Callable[[str, Tensor], None],
        input_ids: Tensor,
    ) -> Iterator[None]:
        """Calls `before` with a layer's input, which its result replaces, and the others with outputs of layers, of their parts,
        and of the embedding of these ids, if it has a gradient; features may be looked up in the same table."""
        with contextlib.ExitStack() as hooks:
            for path, layer in self._layers:
                name = next(iter(inspect.signature(layer.forward).parameters), "")

                def enter(_, args, kwargs, path=path, name=name):
                    replaced = before(path, _tensor(args[0] if args else kwargs.get(name)))
                    if replaced is None:
                        return None
                    return ((replaced, *args[1:]), kwargs) if args else (args, kwargs | {name: replaced})

                def leave(_, __, output, path=path):
                    after(path, _tensor(output))

                hooks.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(layer.register_forward_hook(leave).remove)
                # A compiled call would keep the hooks.
                hooks.callback(setattr, layer, "_compiled_call_impl", layer._compiled_call_impl)
                layer._compiled_call_impl = None
            for path, module in self._parts:

                def output_of(_, __, output, path=path):
                    part(path, _tensor(output))

                hooks.callback(module.register_forward_hook(output_of).remove)
            for path, module, index in self._routers:

                def logits_of(_, __, output, path=path, index=index):
                    logits = router_logits(output, index)
                    if logits is None:
                        return
                    num_rows = len(input_ids)
                    if logits.ndim == 2 and len(logits) % num_rows == 0:
                        # (B * S, E), in the order of the loss of the routers
                        logits = logits.unflatten(0, (num_rows, -1))
                    part(path, logits, LOGITS)

                hooks.callback(module.register_forward_hook(logits_of).remove)
            for path, module in self._embeddings:

                def embeddings_of(_, args, output, path=path):
                    if output.requires_grad and args and torch.equal(args[0].to(input_ids), input_ids):
                        embedded(path, output)

                hooks.callback(module.register_forward_hook(embeddings_of).remove)
            yield


def _layers_and_parts(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """The elements of the decoder's outermost module lists, and their children, by path."""
    decoder: Any = getattr(model, "get_decoder", lambda: model)()
    modules = set(decoder.modules())
    if not any(isinstance(module, nn.ModuleList) for module in modules):  # some heads call their last layer so
        modules = set(model.modules())
    layers: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_inner = any(path.startswith(f"{outer}.") for outer in layers)
        if isinstance(module, nn.ModuleList) and module in modules and not is_inner:
            layers |= {f"{path}.{index}": layer for index, layer in enumerate(module)}
    parts = [(f"{path}.{name}", part) for path, layer in layers.items() for name, part in layer.named_children()]
    return list(layers.items()), parts


def recorded_routers(model: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """Modules of which transformers records router logits, for a loss of the routers, by path: and which of their outputs."""
    routers: dict[str, tuple[str, nn.Module, int]] = {}
    for prefix, owner in model.named_modules():
        recorders = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target, index = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
            found = [(path, part) for path, part in owner.named_modules(prefix=prefix) if isinstance(part, target)]
            routers |= {path: (path, part, index) for path, part in found}
    return list(routers.values())


def router_logits(output: Any, index: int) -> Any:
    """What transformers records of a router's output."""
    return output[index] if isinstance(output, tuple | list) else output


def _with_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor; its gradient is handed to `hook`, and what that returns is passed on in its place."""
    tensor.register_hook(hook)
    return tensor


def random_slice(like: Tensor, sp: int, sp_rank: int, *, seed: int) -> Tensor:
    """A rank's slice, `(B, s, ...)` as `like`, of random numbers for all tokens, which are the same on every rank."""
    size = (like.shape[0], like.shape[1] * sp, *like.shape[2:])
    full = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return full.chunk(sp, dim=1)[sp_rank].to(like)


def _rows(hidden: Tensor | None, like: Tensor) -> Tensor | None:
    """The tensor, if it has as many rows and tokens as `like`, `(B, S, ...)`: `(B, S, H)`."""
    if hidden is not None and hidden.is_floating_point() and hidden.ndim == 3 and hidden.shape[:2] == like.shape[:2]:
        return hidden
    return None


def _tensor(value: Any) -> Tensor | None:
    value = value[0] if isinstance(value, tuple | list) and value else value
    return value if isinstance(value, Tensor) else None
