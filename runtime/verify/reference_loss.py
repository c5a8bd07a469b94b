"""The loss of a step and its gradients by upstream's class in one process, for comparisons with ranks.

The language-model loss is the mean over the labels of all batches. The router loss is what `parallel/router_loss.py` defines: the
mean over the rows of upstream's own formula on that row without its padding, each row weighted by its tokens. Upstream's
forward computes it over whatever is in a call, so its function is replaced while the forward runs by one that keeps the
router logits, and is called for each row afterwards.

    B rows   S tokens per row   E experts
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.runtime.parallel import loss
from patchgen.runtime.parallel.batch import IGNORED


@dataclass
class RouterLoss:
    """What upstream's forward asked its router loss, and what the loss of the model does with the answer."""

    answer: Tensor
    function: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    logits: Sequence[Tensor] = ()


def functions_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The functions of an upstream module that the pass `router_loss` rewrote, from `provenance.json`."""
    hits = [hit["site"] for step in record.get("passes", ()) if step["name"] == "router_loss" for hit in step["hits"]]
    return tuple(dict.fromkeys(name for name in hits if name.isidentifier()))


def one_rank(
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
        batches: `input_ids`, `labels` and perhaps `attention_mask`, each `(B, S)`, with what else the forward takes.
        router_functions: names of upstream's functions that compute a router loss.
        packed_rows: for each batch, which of the packed rows that ranks hold its rows are documents of; None: every row
            is one by itself.
        generated_class: tells whether upstream's head writes its loss out: the mean over its own labels, of no step.
    """
    model.zero_grad()
    model.train(training)
    items = sum((inputs["labels"][:, 1:] != IGNORED).sum() for inputs in batches)
    total, router = torch.zeros(()), None
    rows: dict[Any, list[list[Tensor]]] = {}
    for number, inputs in enumerate(batches):
        count = (inputs["labels"][:, 1:] != IGNORED).sum()
        handed = loss.upstream_labels(generated_class, dict(inputs))
        is_mean = hasattr(generated_class, loss.LOSS_FORM)  # over the labels of the call
        with recorded(model, router_functions) as asked:
            share = model(**handed, **({} if is_mean else {"num_items_in_batch": items})).loss
        total = total + (share if not is_mean else share * (count / items) if count else torch.zeros(()))
        forget_positions(model)
        if asked.function is not None:
            router = asked, _factor(share, asked.answer)
            for place, layers in enumerate(_rows(asked.logits, inputs)):
                row = (number, place) if packed_rows is None else packed_rows[number]
                rows.setdefault(row, []).append(layers)
    if router is not None:
        asked, factor = router
        total = total + factor * _over_rows(asked, [_joined(documents) for documents in rows.values()])
    total.backward()
    return float(total.detach()), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def forget_positions(model: nn.Module) -> None:
    """Some fusion models keep the offset of their last batch for generating."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            setattr(module, "rope_deltas", None)  # noqa: B010  # no tensor and no module, as its type wants them


@contextlib.contextmanager
def recorded(model: nn.Module, functions: Sequence[str]) -> Iterator[RouterLoss]:
    """Within the block the router loss of upstream's module is a zero whose factor the gradient tells."""
    asked = RouterLoss(torch.zeros((), requires_grad=True))
    module = sys.modules[type(model).__module__]
    originals = {name: one for name in functions if inspect.isfunction(one := getattr(module, name, None))}
    for name, original in originals.items():
        setattr(module, name, _keeping(asked, original))
    try:
        yield asked
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def _keeping(asked: RouterLoss, original: Any) -> Any:
    signature = inspect.signature(original)
    if "gate_logits" not in signature.parameters:
        raise ValueError(
            f"{original.__module__}.{original.__name__} computes a router loss and has no parameter `gate_logits`, so "
            "what it should be on ranks cannot be told."
        )

    def keep(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        asked.function, asked.arguments = original, dict(bound.arguments)
        asked.logits = asked.arguments.pop("gate_logits")
        asked.arguments.pop("attention_mask", None)
        return asked.answer

    return keep


def _factor(share: Tensor, answer: Tensor) -> Tensor:
    """What the model multiplies its router loss with."""
    (factor,) = torch.autograd.grad(share, answer, retain_graph=True, allow_unused=True)
    return torch.zeros(()) if factor is None else factor


def _rows(logits: Sequence[Tensor], inputs: Mapping[str, Any]) -> list[list[Tensor]]:
    """The router logits `[T, E]` of each layer, for the tokens of each row that are not padding."""
    B, S = inputs["input_ids"].shape
    mask = inputs.get("attention_mask")
    real = torch.ones(B, S, dtype=torch.bool) if mask is None else mask.bool()
    return [[layer.view(B, S, -1)[row][real[row]] for layer in logits] for row in range(B)]


def _joined(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(layers) for layers in zip(*rows, strict=True)]


def _over_rows(asked: RouterLoss, rows: Sequence[Sequence[Tensor]]) -> Tensor:
    tokens = [layers[0].shape[0] for layers in rows]
    shares = [
        asked.function(tuple(layers), **asked.arguments) * (count / sum(tokens))
        for layers, count in zip(rows, tokens, strict=True)
    ]
    return functools.reduce(torch.add, shares)
