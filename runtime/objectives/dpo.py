"""Direct preference optimisation (Rafailov et al., 2023): raises the likelihood of the chosen answer over the rejected one.

    loss = -logsigmoid(beta * ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))))

A mean over pairs; log p of a document is the sum over its tokens with a loss. As TRL's DPOTrainer computes it (loss_type
"sigmoid").

The reference is the untrained model: with adapters, the model without them, run in each step; else its log-probabilities
computed once before the first step and saved in the run directory (`reference.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from patchgen.runtime.objectives.base import Objective
from patchgen.runtime.objectives.batch import Batch


@dataclass(frozen=True)
class DPO(Objective):
    """Direct preference optimisation.

    Attributes:
        beta: strength of the pull towards the reference.
        label_smoothing: assumed probability that a pair is swapped (conservative DPO), below 0.5.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    kinds: ClassVar[tuple[str, ...]] = ("preference",)
    per: ClassVar = "pair"
    needs_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta must be above 0, not {self.beta}.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be at least 0 and below 0.5, not {self.label_smoothing}.")

    def loss(self, batch: Batch) -> Tensor:
        log_probs = batch.document_log_probs()
        assert batch.reference is not None, "needs_reference is set"
        chosen, rejected = batch.pairs(log_probs - batch.reference.to(log_probs.dtype))
        margin = self.beta * (chosen - rejected)
        smooth = self.label_smoothing
        return -((1 - smooth) * logsigmoid(margin) + smooth * logsigmoid(-margin)).sum()
