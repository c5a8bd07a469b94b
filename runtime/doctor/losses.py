"""The first loss, and whether changing a part of the model or of its config lowers it.

A trained model has its lowest loss unchanged. If another rotary base, swapping gate and up, transposing a matrix or
rescaling the head makes the loss much lower, that is the fault.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime.doctor import calls
from patchgen.runtime.doctor.finding import Check, Finding, failed, not_checked, passed
from patchgen.runtime.doctor.kernel_calls import expert_calls
from patchgen.runtime.doctor.layerwise import Change
from patchgen.runtime.doctor.patient import MissingPart
from patchgen.runtime.train import first_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from patchgen.runtime.doctor.patient import Patient

MIN_GAIN = 0.05
"""By how much a change must lower the loss: this many nats, or this share of a loss above 1."""
MIN_SCALAR_GAIN = 0.3
"""The same for a scale or a rotary base: another value may fit a text slightly better by chance."""
MIN_DIFFERENCE = 1e-3
"""Of alternatives whose losses differ by fewer nats, the one that was tried first is reported."""
SCALES = (100.0, 10.0, 0.1, 0.01)
ROTARY_BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
NUM_TRANSPOSED = 6
"""How many square matrices are tried transposed: those for which the gradient predicts the largest gain."""
MIN_RANDOM_SHARE = 0.3
"""A loss of random weights below this share of ln V shows that the model sees the tokens that it should predict."""


class FirstLoss(Check):
    """The loss of the first samples is plausible for trained or for random weights."""

    name = "first loss"

    def run(self, patient: Patient) -> Finding:
        loss, vocab_size = patient.loss, patient.config.get_text_config().vocab_size
        uniform_loss = math.log(vocab_size)
        summary = f"{loss:.3f} nats per label; ln V = {uniform_loss:.2f}"
        limit = patient.recipe.train.first_loss_limit
        refusal = first_loss.Expected(vocab_size, limit).refusal(loss)
        trained_limit = first_loss.TRAINED_FACTOR * uniform_loss
        if not math.isfinite(loss):
            return failed(
                f"The loss is {loss}.",
                "Look at the weights of the first layer whose output is not finite (forward hooks show it).",
            )
        if refusal:
            return failed(f"{summary}: implausibly high.", refusal)
        if not patient.is_trained:
            if loss < MIN_RANDOM_SHARE * uniform_loss:
                return failed(
                    f"{summary}: implausibly low for random weights.",
                    "The model sees the tokens that it predicts: look at its attention mask.",
                )
            return passed(f"{summary}, with random weights{'' if patient.checkpoint is None else ' in some parts'}.")
        if loss > (trained_limit if limit is None else limit):
            return failed(
                f"{summary}: these weights are hardly better than untrained ones on these samples.",
                "Look at the failures of tokenizer, labels, weights and alternatives in this table; if these weights were never "
                "trained, or not on data of this kind, set train.first_loss_limit.",
            )
        try:
            first_loss.save_measured(patient.recipe, loss)
        except OSError as error:  # the loss was measured all the same
            return passed(f"{summary}. Runs are not compared with it, because it cannot be saved: {error}.")
        return passed(f"{summary}. Runs with these weights and data are compared with it.")


@dataclass(frozen=True)
class Alternative:
    """A change of the model.

    Attributes:
        what: the change, as in "the loss is 0.051 with ...".
        advice: how to fix the fault, if the loss is lower by `min_gain`.
        changes: the tensors and their other values.
        min_gain: as `MIN_GAIN`.
    """

    what: str
    advice: str
    changes: Sequence[Change]
    min_gain: float = MIN_GAIN


class Alternatives(Check):
    """No change of the model makes the loss much lower."""

    name = "alternatives"

    def run(self, patient: Patient) -> Finding:
        if not patient.is_trained:
            return not_checked("weights are random, so no change can make them better.")
        loss, tried = patient.loss, []
        trained_limit = first_loss.TRAINED_FACTOR * math.log(patient.config.get_text_config().vocab_size)
        best: tuple[float, Alternative] | None = None
        for alternative in alternatives(patient):
            with patient.changed(alternative.changes):
                changed_loss = calls.loss(patient.model, patient.row, patient.kernels)
            tried.append(f"{changed_loss:.3f} with {alternative.what}")
            if changed_loss < min(loss - alternative.min_gain * max(1.0, loss), trained_limit) and (
                best is None or changed_loss < best[0] - MIN_DIFFERENCE
            ):
                best = changed_loss, alternative
        details = "\n".join(tried)
        if best is not None:
            return failed(f"The loss is {loss:.3f}, and {best[0]:.3f} with {best[1].what}.", best[1].advice, details)
        return passed(f"The loss is {loss:.3f}, and not much lower with any of {len(tried)} changes.", details)


def alternatives(patient: Patient) -> Iterator[Alternative]:
    """All changes that are tried, each on the unchanged model."""
    model = patient.model
    yield from _scaled_heads(model)
    yield from _tied(model)
    yield from _rotary(model)
    yield from _swapped(patient)
    with contextlib.suppress(MissingPart):
        yield from _transposed(patient)


# ---------------------------------------------------------------------------------------------------- head


def _scaled_heads(model: PreTrainedModel) -> Iterator[Alternative]:
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    if head is None or head.weight is embeddings.weight:
        return
    for scale in SCALES:
        yield Alternative(
            f"the head divided by {scale:g}",
            f"The weights of the head are about {scale:g} times the trained ones: repeat the merge or conversion that wrote "
            "them.",
            [(head.weight, lambda scale=scale: head.weight / scale)],
            MIN_SCALAR_GAIN,
        )


def _tied(model: PreTrainedModel) -> Iterator[Alternative]:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embeddings.weight or head.weight.shape != embeddings.weight.shape:
        return
    yield Alternative(
        "the head tied to the embeddings",
        "These weights were trained with a tied head: set tie_word_embeddings: true in config.json, and leave the head's own "
        "matrix out.",
        [(head.weight, lambda: embeddings.get_parameter("weight"))],
    )


# ------------------------------------------------------------------------------------------------- positions


def _rotary(model: PreTrainedModel) -> Iterator[Alternative]:
    """Other bases for the rotary modules of the language model that compute their frequencies from the config."""
    bases = ((m, _base(m)) for m in model.get_decoder().modules() if "inv_freq" in m._buffers)
    known = [(module, base) for module, base in bases if base is not None]
    if not known:
        return
    config_base = known[0][1]
    for base in (base for base in ROTARY_BASES if not math.isclose(base, config_base, rel_tol=0.1)):
        yield Alternative(
            f"rope_theta = {base:g} (the config has {config_base:g})",
            "The weights were trained with another rotary base: take the config.json that came with them, and check "
            "model.overrides.",
            [(module.get_buffer("inv_freq"), functools.partial(_frequencies, module, base)) for module, _ in known],
            MIN_SCALAR_GAIN,
        )


def _base(module: nn.Module) -> float | None:
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    return parameters.get("rope_theta") if isinstance(parameters, dict) else None


def _frequencies(module: nn.Module, base: float) -> Tensor:
    config: Any = copy.deepcopy(module.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
    return type(module)(config=config).get_buffer("inv_freq")


# -------------------------------------------------------------------------------------------------- matrices


def _swapped(patient: Patient) -> Iterator[Alternative]:
    """Gate and up swapped: in stacked experts, or any two linear layers of one shape in a module with an activation."""
    advice = (
        "Gate and up were swapped when these weights were written, and `silu(gate(x)) * up(x)` is not symmetric. Write them "
        "again, gate first."
    )
    stacks = expert_calls(patient.model, patient.row, patient.kernels)
    if any(call.is_gated for call in stacks):
        yield Alternative(
            "gate and up of all experts swapped",
            advice,
            [(call.gate_up, call.swapped_gate_up) for call in stacks if call.is_gated],
        )
    pairs: dict[tuple, list[tuple[nn.Linear, nn.Linear]]] = {}
    for module in patient.model.get_decoder().modules():
        linears = [(name, linear) for name, linear in module.named_children() if type(linear) is nn.Linear]
        if getattr(module, "act_fn", None) is None:
            continue
        for number, (name, first_linear) in enumerate(linears):
            for other_name, other in linears[number + 1 :]:
                if (
                    first_linear.weight.shape == other.weight.shape
                    and first_linear.bias is None
                    and other.bias is None
                ):
                    pairs.setdefault((type(module).__name__, name, other_name), []).append((first_linear, other))
    for (owner, name, other_name), linears in pairs.items():
        yield Alternative(
            f"{name} and {other_name} of {owner} swapped",
            advice,
            [change for linear, other in linears for change in _swap(linear.weight, other.weight)],
        )


def _swap(first: Tensor, second: Tensor) -> list[Change]:
    return [(first, lambda: second.detach().clone()), (second, lambda: first.detach().clone())]


def _transposed(patient: Patient) -> Iterator[Alternative]:
    """Single square matrices transposed: their shape does not show their orientation."""
    parameters = dict(patient.model.named_parameters())
    squares = [
        (gain, name, index)
        for name, summary in patient.gradient_summaries.items()
        for index, gain in enumerate(summary.transposition_gains)
    ]
    for _, name, index in sorted(squares, key=lambda square: -square[0])[:NUM_TRANSPOSED]:
        parameter = parameters[name]
        yield Alternative(
            f"{name}[{index}] transposed" if parameter.ndim > 2 else f"{name} transposed",
            "This matrix is stored transposed in the checkpoint: transpose it where the weights were written (linear layers "
            "are [out, in]; stacked experts as in the model's class).",
            [(parameter, functools.partial(_with_transposed, parameter, index))],
        )


@torch.no_grad()
def _with_transposed(parameter: nn.Parameter, index: int) -> Tensor:
    """A parameter with one of its square matrices transposed."""
    values = parameter.detach().clone()
    matrix = values.view(-1, *values.shape[-2:])[index]
    matrix.copy_(matrix.mT.clone())
    return values
