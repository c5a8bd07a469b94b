"""Both models in bf16, in units of upstream's own error: what a cast adds or loses is invisible in fp32.

    upstream fp32    weights that bf16 has, exactly      the reference
    upstream bf16    the same weights                    its distance from the reference is upstream's own error
    ours bf16        the same weights                    may be at most `FACTOR` times as far

With eager seams ours computes upstream's operations, so both bf16 steps are equal bit for bit. Kernels order sums differently and
round elsewhere; a kernel that loses a cast which matters is further from the reference than upstream.

Tensors that upstream keeps in fp32 in a model of bf16 are kept (`runtime/kept_dtypes.py`).
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchgen.runtime import kept_dtypes
from patchgen.runtime.verify.comparison import GRADIENT_FLOOR, Step
from patchgen.runtime.verify.model_pair import build_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPE = torch.bfloat16
FACTOR = 3.0
"""Kernels in bf16 are at most 1.7 times as far on the types that were measured, one that rounds its tokens to FP8 3.4 times."""
EPS = torch.finfo(DTYPE).eps
GRADIENT_SHARE, LOSS_SHARE = 1 / 32, 1 / 16
"""Of a rounding error: a gradient is a sum over many tokens, a loss computed in fp32 a mean over some fifty."""
MOSTLY_ERROR = 0.5


@contextlib.contextmanager
def rounded(model: nn.Module) -> Iterator[None]:
    """Within the block the weights of a model in fp32 have values that bf16 has, but for those that upstream keeps in fp32."""
    is_kept = kept_dtypes.keeps_in_fp32(model, DTYPE)
    tensors = [t for name, t in model.state_dict().items() if t.is_floating_point() and not is_kept(name)]
    originals = [tensor.clone() for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.copy_(tensor.to(DTYPE))
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.copy_(original)


def model_in_bf16(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, weights: Mapping[str, Any]
) -> PreTrainedModel:
    """A model as `from_pretrained(dtype=torch.bfloat16)` loads it, with eager attention and experts."""
    model = build_model(model_class, config, DTYPE)
    kept_dtypes.keep_in_fp32(model, DTYPE)
    model.load_state_dict(weights, strict=True)
    return model


def inputs_in_bf16(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with its floating-point tensors in bf16."""
    return {
        name: value.to(DTYPE) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


class SameChoices(TorchFunctionMode):
    """Steps inside it choose what the first one chose: in bf16 another expert may win, or a ReLU open; that is no rounding error.

    choices = SameChoices()
    with choices: ...        # the first step: its top-k, sort, argmax and the signs of its ReLUs are recorded
    with choices: ...        # the next one gets the same indices and signs, with its own values
    """

    def __init__(self) -> None:
        super().__init__()
        self.differs = False
        self._recorded: dict[tuple[str, torch.Size], list[Tensor]] = {}
        """By function and shape: kernels choose for themselves in between."""
        self._is_first = True
        self._next: Counter[tuple[str, torch.Size]] = Counter()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._is_first = False
        self._next.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "relu":
            return torch.where(self._first(name, result > 0), args[0], 0)
        indices = result if isinstance(result, Tensor) else getattr(result, "indices", None)
        if name not in _DIM_PLACES or not isinstance(indices, Tensor) or indices.is_floating_point():
            return result
        if not args[0].is_floating_point():
            return result  # the order of tokens by expert
        recorded = self._first(name, indices)
        if self._is_first:
            return result
        if name == "max":
            # What a model derives from a maximum need not hold for another element. Attention only subtracts it.
            self.differs |= args[0].ndim < ATTENTION_NDIM and not torch.equal(recorded, indices)
            return result
        if isinstance(result, Tensor):
            return recorded
        place, default = _DIM_PLACES[name]
        dim = (kwargs or {}).get("dim", args[place] if len(args) > place else default)
        return type(result)((args[0].gather(dim, recorded), recorded))

    def _first(self, name: str, choice: Tensor) -> Tensor:
        """What the first step chose in this call of a function; this choice itself in the first step, or if it had none."""
        key = name, choice.shape
        if self._is_first:
            self._recorded.setdefault(key, []).append(choice)
            return choice
        choices, number = self._recorded.get(key, []), self._next[key]
        self._next[key] += 1
        return choices[number] if number < len(choices) else choice


_DIM_PLACES = {"topk": (2, -1), "sort": (1, -1), "argmax": (1, -1), "argsort": (1, -1), "max": (1, -1)}
"""Functions that choose -> the place of their argument `dim`, and its default."""
ATTENTION_NDIM = 4


def in_fp32(step: Step) -> Step:
    """A step with all results in fp32, to be compared with one that was computed there."""
    return Step(
        {name: tensor.float() for name, tensor in step.outputs.items()},
        {name: None if gradient is None else gradient.float() for name, gradient in step.gradients.items()},
        step.changed_inputs,
    )


def further_than_upstream(actual: Step, upstream: Step, exact: Step) -> dict[str, float]:
    """The outputs and gradients ("gradient of NAME") that are more than `FACTOR` times as far from `exact` as upstream's."""
    return {name: ratio for name, ratio in errors(actual, upstream, exact).items() if not ratio <= FACTOR}


def errors(actual: Step, upstream: Step, exact: Step) -> dict[str, float]:
    """How many times as far from `exact` each output and gradient is as upstream's.

    By chance a result of few elements is close to exact: what upstream's gradients are wrong by in the median, relative to their
    size, and a part of a rounding error of an output, or of the largest gradient, count as upstream's own error everywhere (of an
    output that upstream computes in bf16 the whole, and as much as of gradients: it may be a sum that cancels, too): small
    gradients are sums that cancel. Where upstream's result is mostly error, nothing is compared.
    """
    gradients = {
        f"gradient of {name}": (actual.gradients.get(name), upstream.gradients.get(name), gradient)
        for name, gradient in exact.gradients.items()
    }
    outputs = {name: (actual.outputs[name], upstream.outputs[name], exact.outputs[name]) for name in actual.outputs}
    smallest = GRADIENT_FLOOR * exact.max_gradient_norm
    own = {
        name: _distance(theirs, reference) / max(_norm(reference), smallest)
        for name, (_, theirs, reference) in gradients.items()
        if theirs is not None and reference is not None and _norm(reference)
    }
    usual = statistics.median(own.values()) if own else 0.0
    compared = {name: results for name, results in gradients.items() if own.get(name, 0.0) <= MOSTLY_ERROR}
    least = EPS * GRADIENT_SHARE * exact.max_gradient_norm
    ratios = {
        name: _ratio(*results, share=max(EPS, usual) if _is_of_bf16(results[1]) else EPS * LOSS_SHARE, least=0.0)
        for name, results in outputs.items()
    }
    return ratios | {name: _ratio(*results, share=usual, least=least) for name, results in compared.items()}


def _is_of_bf16(result: Tensor) -> bool:
    """Whether bf16 has these values: one of fp32 is among them once in 65,536 times."""
    return torch.equal(result.to(DTYPE).to(result.dtype), result)


def _ratio(
    actual: Tensor | None, upstream: Tensor | None, exact: Tensor | None, *, share: float, least: float
) -> float:
    """With at least this share of the exact result's norm, and this distance, as upstream's own error."""
    if actual is None or upstream is None or exact is None:
        return 1.0 if (actual is None) == (upstream is None) else math.inf
    own = max(_distance(upstream, exact), share * _norm(exact), least)
    distance = _distance(actual, exact)
    return distance / own if own else 0.0 if distance == 0.0 else math.inf


def _distance(result: Tensor, exact: Tensor) -> float:
    return (result.double() - exact.double()).norm().item()


def _norm(tensor: Tensor) -> float:
    return tensor.double().norm().item()
