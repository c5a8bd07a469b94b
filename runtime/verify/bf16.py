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
MAX_LOSS_SHARE = 4.0
"""Of a rounding error: gradients may be wrong by more than what a loss or logits in bf16 may be."""
MOSTLY_ERROR = 0.5
LEFT_OUT = "bf16: gradients"
"""Under this name a proof tells what is not compared, beside the checks that it leaves out."""
NUM_NAMED = 3
"""How many gradients that are not compared are named; the others are counted."""


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

    Of a maximum the element is only compared with that of the step before (`differs`).

        choices = SameChoices()
        with choices: ...        # the first step: its top-k, sort, argmax and the signs of its ReLUs are recorded
        with choices: ...        # the next one gets the same indices and signs, with its own values
    """

    def __init__(self) -> None:
        super().__init__()
        self.differs = False
        """Whether a maximum in the latest step is another element than in the one before."""
        self._recorded: dict[tuple[str, torch.Size], list[Tensor]] = {}
        """By function and shape: kernels choose for themselves in between."""
        self._is_first = True
        self._next: Counter[tuple[str, torch.Size]] = Counter()

    def __enter__(self) -> SameChoices:
        self.differs = False
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._is_first = False
        self._next.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name != "relu" and name not in _DIM_PLACES:
            return result
        chosen_from = args[0] if args else (kwargs or {})["input"]
        if name == "relu":
            return torch.where(self._first(name, result > 0), chosen_from, 0)
        indices = result if isinstance(result, Tensor) else getattr(result, "indices", None)
        if not isinstance(indices, Tensor) or indices.is_floating_point():
            return result
        if not chosen_from.is_floating_point():
            return result  # the order of tokens by expert
        recorded = self._first(name, indices)
        if self._is_first:
            return result
        if name == "max":
            # What a model derives from a maximum need not hold for another element. Attention only subtracts it.
            self.differs |= chosen_from.ndim < ATTENTION_NDIM and not torch.equal(recorded, indices)
            return result
        if isinstance(result, Tensor):
            return recorded
        place, default = _DIM_PLACES[name]
        dim = (kwargs or {}).get("dim", args[place] if len(args) > place else default)
        return type(result)((chosen_from.gather(dim, recorded), recorded))

    def _first(self, name: str, choice: Tensor) -> Tensor:
        """What the first step chose in this call of a function (of a maximum: the step before); this choice if it had none."""
        key = name, choice.shape
        if self._is_first:
            self._recorded.setdefault(key, []).append(choice)
            return choice
        choices, number = self._recorded.get(key, []), self._next[key]
        self._next[key] += 1
        if number >= len(choices):
            return choice
        recorded = choices[number]
        if name == "max":
            choices[number] = choice
        return recorded


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

    By chance a result of few elements is close to exact, and small gradients are sums that cancel. So these count as upstream's own
    error everywhere:

        a gradient    what upstream's compared gradients are wrong by in the median, relative to their size, and a part of a
                      rounding error of the largest
        an output     a part of a rounding error; if upstream computes it in bf16 the whole, and as much as of gradients, up to
                      `MAX_LOSS_SHARE`: it may be a sum that cancels, too

    Of a gradient that is mostly error upstream (`left_out`) only the form is compared, and that it is finite.
    """
    names = dict.fromkeys([*exact.outputs, *upstream.outputs, *actual.outputs])
    outputs = {name: (actual.outputs.get(name), upstream.outputs.get(name), exact.outputs.get(name)) for name in names}
    own = _own_errors(upstream, exact)
    compared = [error for error in own.values() if error <= MOSTLY_ERROR]
    usual = statistics.median(compared) if compared else 0.0
    share = max(EPS, min(usual, MAX_LOSS_SHARE * EPS))
    ratios = {
        name: _ratio(*results, share=share if _is_of_bf16(results[1]) else EPS * LOSS_SHARE, least=0.0)
        for name, results in outputs.items()
    }
    least = EPS * GRADIENT_SHARE * exact.max_gradient_norm
    for name, reference in exact.gradients.items():
        ours, theirs = actual.gradients.get(name), upstream.gradients.get(name)
        ratio = _ratio(ours, theirs, reference, share=usual, least=least)
        is_compared = own.get(name, 0.0) <= MOSTLY_ERROR or not math.isfinite(ratio)
        ratios[f"gradient of {name}"] = ratio if is_compared else 0.0
    return ratios


def left_out(upstream: Step, exact: Step) -> dict[str, str]:
    """What `errors` does not compare and why, as an entry of what a proof leaves out; {} if it compares everything."""
    own = _own_errors(upstream, exact)
    names = [name for name, error in own.items() if not error <= MOSTLY_ERROR]
    if not names:
        return {}
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    named = f"{', '.join(names[:NUM_NAMED])}{more}"
    return {LEFT_OUT: f"{len(names)} of {len(own)} are mostly rounding error in upstream's own step: {named}."}


def _own_errors(upstream: Step, exact: Step) -> dict[str, float]:
    """Parameter -> what upstream's gradient in bf16 is wrong by, relative to its size; without those that are zero."""
    smallest = GRADIENT_FLOOR * exact.max_gradient_norm
    return {
        name: _distance(theirs, reference) / max(_norm(reference), smallest)
        for name, reference in exact.gradients.items()
        if (theirs := upstream.gradients.get(name)) is not None and reference is not None and _norm(reference)
    }


def _is_of_bf16(result: Tensor | None) -> bool:
    """Whether bf16 has these values: one of fp32 is among them once in 65,536 times."""
    return result is not None and torch.equal(result.to(DTYPE).to(result.dtype), result)


def _ratio(
    actual: Tensor | None, upstream: Tensor | None, exact: Tensor | None, *, share: float, least: float
) -> float:
    """With at least this share of the exact result's norm, and this distance, as upstream's own error; infinite if ours and
    upstream's are not of one form."""
    if actual is None or upstream is None:
        return 1.0 if actual is upstream else math.inf
    if actual.shape != upstream.shape or actual.dtype != upstream.dtype:
        return math.inf
    if exact is None:
        return 1.0
    own = max(_distance(upstream, exact), share * _norm(exact), least)
    distance = _distance(actual, exact)
    return distance / own if own else 0.0 if distance == 0.0 else math.inf


def _distance(result: Tensor, exact: Tensor) -> float:
    return (result.double() - exact.double()).norm().item()


def _norm(tensor: Tensor) -> float:
    return tensor.double().norm().item()
