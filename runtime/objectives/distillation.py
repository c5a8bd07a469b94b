"""Distillation from the teacher's k most likely tokens.

    loss = sum over the k tokens and the tail of  p_teacher (log p_teacher - log p_student)

Summed over the tokens that have a loss; the step divides by their number. All other tokens are one event ("the tail"), so that
the student also matches the probability outside the k tokens. This equals TRL's forward KL with `loss_top_k` and
`loss_add_tail`. The teacher is the model of section `teacher`, with the student's tokenizer; per token, its k
largest log-probabilities and their ids are stored; the full logits of neither model are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from patchgen.runtime.objectives.base import Objective
from patchgen.runtime.objectives.batch import Batch

MAX_TOP_LOG_PROB = -1e-7
"""Upper bound of the summed log-probability of the k tokens: at 0, the logarithm of the tail would be infinite."""


@dataclass(frozen=True)
class Distillation(Objective):
    """Forward KL from the teacher's distribution over its most likely tokens.

    Attributes:
        top_k: number of the teacher's most likely tokens that count one by one.
        temperature: divides the logits of both models in the distillation term.
        next_token: weight of the next-token loss; the distillation term has the remaining weight.
    """

    top_k: int = 64
    temperature: float = 1.0
    next_token: float = 0.0

    needs_teacher: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.top_k >= 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k}.")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}.")
        if not 0 <= self.next_token < 1:
            raise ValueError(f"next_token must be at least 0 and below 1, not {self.next_token}.")

    def of_teacher(self, batch: Batch) -> tuple[Tensor, ...]:
        """The log-probabilities `(s, k)` of the k most likely tokens, and their ids `(s, k)`."""

        def top_log_probs(logits: Tensor) -> tuple[Tensor, ...]:
            logits = logits / self.temperature
            top = logits.topk(min(self.top_k, logits.shape[1]))
            return top.values - logits.logsumexp(1, keepdim=True), top.indices

        return batch.per_token(top_log_probs)

    def loss(self, batch: Batch) -> Tensor:
        def divergence(logits: Tensor, log_teacher: Tensor, ids: Tensor) -> tuple[Tensor]:
            logits = logits / self.temperature
            log_student = logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
            log_teacher, log_student = _with_tail(log_teacher), _with_tail(log_student)
            return ((log_teacher.exp() * (log_teacher - log_student)).sum(1),)

        total = batch.per_token(divergence, *batch.teacher)[0].where(batch.is_learned, 0).sum()
        if not self.next_token:
            return total
        return (1 - self.next_token) * total - self.next_token * batch.token_log_probs().sum()


def _with_tail(log_probs: Tensor) -> Tensor:
    """`(s, k + 1)`: the log-probabilities `(s, k)` of the k tokens, and of all others together."""
    top = log_probs.logsumexp(1, keepdim=True).clamp(max=MAX_TOP_LOG_PROB)
    return torch.cat([log_probs, torch.log(-torch.expm1(top))], dim=1)
