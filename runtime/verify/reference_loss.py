"""Loss and gradients of a step by upstream's class in one process, for comparisons with ranks.

The language-model loss is the mean over the labels of all batches. The router loss is defined as in `parallel/router_loss.py`:
upstream's formula on each row without its padding, averaged over rows with their token counts as weights. Upstream's forward
computes it over all rows of a call, so during the forward its function is replaced by one that records the router logits, and
the original is called for each row afterwards.

    B rows   S tokens per row   T tokens of a row without padding   E experts
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.runtime.parallel import loss
from patchgen.runtime.parallel.batch import IGNORED


@dataclass
class RouterLossCall:
    """A call of upstream's router loss.

    Attributes:
        result: the zero that the call returned; the gradient of the model's loss with respect to it is the loss's weight.
        function: upstream's; None: it was not called.
    """

    result: Tensor
    function: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    logits: Sequence[Tensor] = ()


def functions_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The functions of an upstream module that the pass `router_loss` rewrote, from `provenance.json`."""
    hits = [hit["site"] for step in record.get("passes", ()) if step["name"] == "router_loss" for hit in step["hits"]]
    return tuple(dict.fromkeys(name for name in hits if name.isidentifier()))


def loss_and_gradients(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    *,
    router_functions: Sequence[str] = (),
    packed_rows: Sequence[int] | None = None,
    training: bool = True,
    generated_class: type[nn.Module] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of upstream's class over all batches, as one step.

    Args:
        batches: `input_ids`, `labels` and perhaps `attention_mask`, each `(B, S)`, and further arguments of the forward.
        router_functions: names of upstream's functions that compute a router loss.
        packed_rows: for each batch, the index of the packed row that its rows are documents of; None: nothing is packed.
        generated_class: says whether upstream's head computes its loss inline: as the mean over the labels of the call,
            without `num_items_in_batch`.
    """
    model.zero_grad()
    model.train(training)
    items = sum((inputs["labels"][:, 1:] != IGNORED).sum() for inputs in batches)
    total, router = torch.zeros(()), None
    rows: dict[Any, list[list[Tensor]]] = {}
    for number, inputs in enumerate(batches):
        count = (inputs["labels"][:, 1:] != IGNORED).sum()
        arguments = loss.upstream_labels(generated_class, dict(inputs))
        is_mean = hasattr(generated_class, loss.LOSS_FORM)  # over the labels of the call
        with _recorded_router_loss(model, router_functions) as call:
            share = model(**arguments, **({} if is_mean else {"num_items_in_batch": items})).loss
        total = total + (share if not is_mean else share * (count / items) if count else torch.zeros(()))
        reset_rope_deltas(model)
        if call.function is not None:
            router = call, _weight_of(call.result, share)
            for place, layers in enumerate(_rows(call.logits, inputs)):
                row = (number, place) if packed_rows is None else packed_rows[number]
                rows.setdefault(row, []).append(layers)
    if router is not None:
        call, weight = router
        packed = [[torch.cat(layers) for layers in zip(*documents, strict=True)] for documents in rows.values()]
        total = total + weight * _mean_over_rows(call, packed)
    total.backward()
    return float(total.detach()), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def reset_rope_deltas(model: nn.Module) -> None:
    """Clears the position offset that some fusion models keep from their last batch, for generating."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            setattr(module, "rope_deltas", None)  # noqa: B010  # nn.Module's annotations allow tensors and modules only


@contextlib.contextmanager
def _recorded_router_loss(model: nn.Module, functions: Sequence[str]) -> Iterator[RouterLossCall]:
    """Within the block the router loss of upstream's module returns zero and records its call. The forward of a class may be
    inherited, and then its function is one of its parent's module; a name that the file binds to another function has the module's
    as an ending in the generated file (`load_balancing_loss_func_of_qwen3_moe`), not there."""
    call = RouterLossCall(torch.zeros((), requires_grad=True))
    modules = dict.fromkeys(sys.modules[cls.__module__] for cls in type(model).__mro__)
    functions = list(dict.fromkeys([*functions, *(name.partition("_of_")[0] for name in functions)]))
    with contextlib.ExitStack() as replaced:
        for module, name in itertools.product(modules, functions):
            if inspect.isfunction(original := getattr(module, name, None)):
                replaced.callback(setattr, module, name, original)
                setattr(module, name, _recording(call, original))
        yield call


def _recording(call: RouterLossCall, original: Any) -> Any:
    signature = inspect.signature(original)
    if "gate_logits" not in signature.parameters:
        raise ValueError(
            f"{original.__module__}.{original.__name__} computes a router loss without a parameter `gate_logits`, so its "
            "value on ranks is undefined."
        )

    def record(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        call.function, call.arguments = original, dict(bound.arguments)
        call.logits = call.arguments.pop("gate_logits")
        call.arguments.pop("attention_mask", None)
        return call.result

    return record


def _weight_of(router_loss: Tensor, total: Tensor) -> Tensor:
    """The coefficient of the router loss in the model's loss."""
    (weight,) = torch.autograd.grad(total, router_loss, retain_graph=True, allow_unused=True)
    return torch.zeros(()) if weight is None else weight


def _rows(logits: Sequence[Tensor], inputs: Mapping[str, Any]) -> list[list[Tensor]]:
    """The router logits `[T, E]` of each layer, for the tokens of each row that are not padding."""
    B, S = inputs["input_ids"].shape
    mask = inputs.get("attention_mask")
    real = torch.ones(B, S, dtype=torch.bool) if mask is None else mask.bool()
    return [[layer.view(B, S, -1)[row][real[row]] for layer in logits] for row in range(B)]


def _mean_over_rows(call: RouterLossCall, rows: Sequence[Sequence[Tensor]]) -> Tensor:
    tokens = [layers[0].shape[0] for layers in rows]
    shares = [
        call.function(tuple(layers), **call.arguments) * (count / sum(tokens))
        for layers, count in zip(rows, tokens, strict=True)
    ]
    return functools.reduce(torch.add, shares)
