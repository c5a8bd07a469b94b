"""Whether the first loss can be that of a sound model, judged before the optimizer has moved anything.

A model that knows nothing says that all V tokens are equally likely: ln V. Random weights are a little above it, for their
logits are not quite equal; a checkpoint is far below. Far above it are weights or data that do not belong together: a head
that was scaled, a tokenizer of another model, labels that were shifted twice.

    V = 151,936    ln V = 11.93    most that is believed = 18.9
"""

from __future__ import annotations

import math

from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.train.records import TrainingStopped

SHARE, SPREAD = 1.5, 1.0
KNOWN = 0.8
"""Of ln V: a checkpoint that has learned these tokens, in whatever language, is below."""


def highest(vocab_size: int) -> float:
    """The most that is believed of a first loss per label, in nats."""
    return SHARE * math.log(vocab_size) + SPREAD


def refusal(loss: float, vocab_size: int, limit: float | None = None) -> str:
    """Why a first loss cannot be that of a sound model; empty if it can.

    Args:
        loss: the mean per label over the first step.
        limit: the most that is believed instead of `highest`.
    """
    most = highest(vocab_size) if limit is None else limit
    if not loss > most:  # one that is no number is told by its gradient (optim.on_nonfinite)
        return ""
    return (
        f"The first loss is {loss:.2f}; a model of {vocab_size:,} tokens that knows nothing has ln V = "
        f"{math.log(vocab_size):.2f}, and more than {most:.2f} is not believed. The weights are damaged (a scaled head, "
        "parts left at random), or they and the data do not belong together (another tokenizer, shifted labels): "
        "`patchgen doctor RECIPE` says which. train.first_loss_limit raises the limit."
    )


def require_believable(share: Tensor, model: PreTrainedModel, limit: float | None) -> None:
    """Looks at the loss before the optimizer has moved anything. Every rank takes part in the sum.

    Args:
        share: this rank's of the first step's loss.

    Raises:
        TrainingStopped: no sound model has such a loss.
    """
    total = float(all_reduce(share, operation="add up the first loss"))
    if told := refusal(total, model.config.get_text_config().vocab_size, limit):
        raise TrainingStopped(told)
