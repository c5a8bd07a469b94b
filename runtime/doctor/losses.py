"""The first loss, and whether it is lower when a part of the model or of its config is taken otherwise.

A trained model is at its best as it is. Where another base of the rotary positions, gate and up exchanged, a matrix
transposed or a head at another scale makes the loss much lower, that is what was wrong.
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
from patchgen.runtime.doctor.layerwise import Change
from patchgen.runtime.doctor.patient import Needs
from patchgen.runtime.doctor.recorded_experts import expert_calls
from patchgen.runtime.train import first_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from patchgen.runtime.doctor.patient import Patient

GAIN = 0.05
"""Nats, and share of the loss, by which other weights must be better: those of a trained model are the best that it has."""
GAIN_OF_NUMBERS = 0.3
"""The same for a scale or a base, of which another may happen to suit a text a little better."""
SAME = 1e-3
"""Nats by which two ways do not differ: the one that was tried first is told."""
SCALES = (100.0, 10.0, 0.1, 0.01)
BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
TRIED = 6
"""Square matrices of which the gradient says most that they may be transposed."""
TOO_GOOD = 0.3
"""Of ln V: random weights that are below see the tokens that they should predict."""


class FirstLoss(Check):
    """The loss of the first samples is that of a model that has, or has not yet, learned."""

    name = "first loss"

    def run(self, patient: Patient) -> Finding:
        loss, size = patient.loss, patient.config.get_text_config().vocab_size
        untrained = math.log(size)
        told = f"{loss:.3f} nats per label; ln V = {untrained:.2f}"
        limit = patient.recipe.train.first_loss_limit
        too_high = first_loss.Expected(size, limit).refusal(loss)
        known = first_loss.TRAINED_FACTOR * untrained
        if not math.isfinite(loss):
            return failed(
                f"The loss is {loss}.",
                "Look at the weights of the layer where the first value is lost (torch.autograd.detect_anomaly).",
            )
        if too_high:
            return failed(f"{told}: implausibly high.", f"{too_high}")
        if not patient.is_trained:
            if loss < TOO_GOOD * untrained:
                return failed(
                    f"{told}: implausibly low for random weights.",
                    "The model sees the tokens that it predicts: look at its mask.",
                )
            return passed(f"{told}, of random weights{'' if patient.checkpoint is None else ' in parts'}.")
        if loss > (known if limit is None else limit):
            return failed(
                f"{told}: these weights are hardly better than untrained ones on these tokens.",
                "Look at the failures of tokenizer, labels, weights and alternatives in this table; if these weights were never "
                "trained, or not on data of this kind, set train.first_loss_limit.",
            )
        first_loss.save_measured(patient.recipe, loss)
        return passed(f"{told}. A run with these weights and data is held to it.")


@dataclass(frozen=True)
class Alternative:
    """Another way to take the model: what it is, what to do if it is better by `gain`, and other values of its tensors."""

    what: str
    advice: str
    changes: Sequence[Change]
    gain: float = GAIN


class Alternatives(Check):
    """The loss is lowest with the model as it is."""

    name = "alternatives"

    def run(self, patient: Patient) -> Finding:
        if not patient.is_trained:
            return not_checked("weights are random: no way to take them is better than another.")
        loss, tried = patient.loss, []
        known = first_loss.TRAINED_FACTOR * math.log(patient.config.get_text_config().vocab_size)
        best: tuple[float, Alternative] | None = None
        for alternative in alternatives(patient):
            with patient.changed(alternative.changes):
                found = calls.loss(patient.model, patient.row, patient.kernels)
            tried.append(f"{found:.3f} with {alternative.what}")
            if found < min(loss - alternative.gain * max(1.0, loss), known) and (
                best is None or found < best[0] - SAME
            ):
                best = found, alternative
        shown = "\n".join(tried)
        if best is not None:
            return failed(f"The loss is {loss:.3f}, and {best[0]:.3f} with {best[1].what}.", best[1].advice, shown)
        return passed(f"The loss is {loss:.3f}, and not much lower in any of {len(tried)} other ways.", shown)


def alternatives(patient: Patient) -> Iterator[Alternative]:
    """All that is tried, one after the other; the model is as it was between them."""
    model = patient.model
    yield from _scaled_heads(model)
    yield from _tied(model)
    yield from _rotary(model)
    yield from _exchanged(patient)
    with contextlib.suppress(Needs):
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
            f"The weights of the head are about {scale:g} times what they were trained as: write them again where they were "
            "made (a merge, a conversion, a change of dtype).",
            [(head.weight, lambda scale=scale: head.weight / scale)],
            GAIN_OF_NUMBERS,
        )


def _tied(model: PreTrainedModel) -> Iterator[Alternative]:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embeddings.weight or head.weight.shape != embeddings.weight.shape:
        return
    yield Alternative(
        "the head tied to the embeddings",
        "These weights were trained with a tied head: set tie_word_embeddings: true in config.json, and leave the head's own "
        "matrix out.",
        [(head.weight, lambda: _weight(embeddings))],
    )


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor), "embeddings are a matrix"
    return weight


# ------------------------------------------------------------------------------------------------- positions


def _rotary(model: PreTrainedModel) -> Iterator[Alternative]:
    """Modules of the language model that make their frequencies of a base that their config has."""
    found = ((m, _base(m)) for m in model.get_decoder().modules() if "inv_freq" in m._buffers)
    known = [(module, base) for module, base in found if base is not None]
    if not known:
        return
    now = known[0][1]
    for base in (base for base in BASES if not math.isclose(base, now, rel_tol=0.1)):
        yield Alternative(
            f"rope_theta = {base:g} (the config has {now:g})",
            "The weights were trained with another base of their rotary positions: take the config.json that came with them, "
            "and look at model.overrides.",
            [(module.get_buffer("inv_freq"), functools.partial(_frequencies, module, base)) for module, _ in known],
            GAIN_OF_NUMBERS,
        )


def _base(module: nn.Module) -> float | None:
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    return parameters.get("rope_theta") if isinstance(parameters, dict) else None


def _frequencies(module: nn.Module, base: float) -> Tensor:
    config: Any = copy.deepcopy(module.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
    return type(module)(config=config).get_buffer("inv_freq")


# -------------------------------------------------------------------------------------------------- matrices


def _exchanged(patient: Patient) -> Iterator[Alternative]:
    """Gate and up: halves or every other row of stacked experts, or two linear layers of one shape side by side."""
    advice = (
        "Gate and up were exchanged where these weights were written: `silu(gate(x)) * up(x)` is not the same the other way "
        "round. Write them again, gate first."
    )
    stacks = expert_calls(patient.model, patient.row, patient.kernels)
    if any(call.is_gated for call in stacks):
        yield Alternative(
            "gate and up of all experts exchanged",
            advice,
            [(call.gate_up, call.exchanged) for call in stacks if call.is_gated],
        )
    pairs: dict[tuple, list[tuple[nn.Linear, nn.Linear]]] = {}
    for module in patient.model.get_decoder().modules():
        linears = [(name, one) for name, one in module.named_children() if type(one) is nn.Linear]
        if getattr(module, "act_fn", None) is None:
            continue
        for place, (name, one) in enumerate(linears):
            for other_name, other in linears[place + 1 :]:
                if one.weight.shape == other.weight.shape and one.bias is None and other.bias is None:
                    pairs.setdefault((type(module).__name__, name, other_name), []).append((one, other))
    for (owner, name, other_name), found in pairs.items():
        yield Alternative(
            f"{name} and {other_name} of {owner} exchanged",
            advice,
            [change for one, other in found for change in _exchange(one.weight, other.weight)],
        )


def _exchange(one: Tensor, other: Tensor) -> list[Change]:
    return [(one, lambda: other.detach().clone()), (other, lambda: one.detach().clone())]


def _transposed(patient: Patient) -> Iterator[Alternative]:
    """Square matrices: their shape does not say which way round they lie."""
    parameters = dict(patient.model.named_parameters())
    squares = [(gain, name, place) for name, slope in patient.slopes.items() for place, gain in enumerate(slope.gains)]
    for _, name, place in sorted(squares, key=lambda one: -one[0])[:TRIED]:
        parameter = parameters[name]
        yield Alternative(
            f"{name}[{place}] transposed" if parameter.ndim > 2 else f"{name} transposed",
            "This matrix lies the wrong way round in the checkpoint: transpose it where the weights were written (linear layers "
            "are [out, in]; stacked experts as the config's model has them).",
            [(parameter, functools.partial(_turned, parameter, place))],
        )


@torch.no_grad()
def _turned(parameter: nn.Parameter, place: int) -> Tensor:
    """A parameter with one of its square matrices transposed."""
    values = parameter.detach().clone()
    matrix = values.view(-1, *values.shape[-2:])[place]
    matrix.copy_(matrix.mT.clone())
    return values
