"""An encoder-decoder on packed rows: the encoder reads a document up to its answer, the decoder predicts the answer.

    document   p p p a a a e            (prompt, answer and end token)
    encoder    p p p                    with a padding mask
    labels           a a a e            upstream shifts them right for the decoder's input

The answer is the tokens with a loss, which are consecutive. A document with several answers is refused: what is between them
would be input of neither encoder nor decoder (`require_one_answer`). Tokens after the answer are left out: no loss depends on
them.

`model_calls.separate_documents` first puts each document of a packed row into its own row. The loss is the head's own, as a
share of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from patchgen.runtime.data.problems import DataError
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.loss import counted_targets
from patchgen.runtime.parallel.report import called_seams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROW_FIELDS = ("position_ids", "real_tokens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Fields about positions in a row, which do not apply to the inputs of encoder and decoder."""
ONE_ANSWER = (
    "An encoder-decoder learns one answer per document: its encoder reads what is before the answer, and nothing would read "
    "what follows, up to the next one. To fix: set data.learn: last and remove train and weight from the messages, or split "
    "conversations into one per answer."
)


class AcceptsPackedRows:
    """Marks the heads that `accept_packed_rows` makes."""


def has_loss_seam(head: type) -> bool:
    """Whether an encoder-decoder computes its loss by the seam `causal_lm_loss`, which returns a share of the step's loss."""
    return "causal_lm_loss" in called_seams(head.forward)


def accept_packed_rows(head: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The head with inputs `input_ids`, `shift_labels` `(D, L)`: D documents, L tokens per row; it also takes upstream's inputs."""

    @functools.wraps(head.forward)
    def forward(
        self: PreTrainedModel, input_ids: Tensor | None = None, shift_labels: Tensor | None = None, **kwargs: Any
    ) -> Any:
        inputs = {name: value for name, value in kwargs.items() if name not in ROW_FIELDS}
        if shift_labels is not None and input_ids is not None:
            inputs |= prompts_and_answers(input_ids, shift_labels, kwargs.get("real_tokens"))
        else:
            inputs["input_ids"] = input_ids
            # A forward without labels, such as the one before a run that counts attention heads: any decoder input will do.
            if not inputs.keys() & {"labels", "decoder_input_ids", "decoder_inputs_embeds"}:
                inputs["decoder_input_ids"] = input_ids
        with counted_targets():
            return head.forward(self, **inputs)

    members = {"forward": forward, "__module__": head.__module__, "__doc__": head.__doc__}
    return type(head.__name__, (AcceptsPackedRows, head), members)


def row_check(model: object) -> Callable[[Mapping[str, Any]], None] | None:
    """What a full micro-batch has to pass before any rank starts its step; None if the model has no such check."""
    return require_one_answer if isinstance(model, AcceptsPackedRows) else None


def require_one_answer(row: Mapping[str, Any]) -> None:
    """Checks a full micro-batch, with `labels` `(1, S)` that are not shifted and `cu_seq_lens_q`, on the host.

    Raises:
        DataError: a document has several answers, or one with tokens without a loss inside.
    """
    has_loss = row["labels"].flatten() != IGNORED
    has_loss[row["cu_seq_lens_q"][:-1].long().clamp(max=len(has_loss) - 1)] = False  # nothing predicts a first token
    starts = has_loss & ~has_loss.roll(1)
    ends = row["cu_seq_lens_q"][1:].long()
    answers = torch.bincount(torch.bucketize(starts.nonzero().flatten(), ends, right=True), minlength=len(ends))
    if several := int((answers > 1).sum()):
        raise DataError(
            f"{several} of the {len(ends)} documents of a row have several answers, or one with tokens without a loss "
            f"inside. {ONE_ANSWER}"
        )


def prompts_and_answers(ids: Tensor, targets: Tensor, real: Tensor | None) -> dict[str, Tensor]:
    """The inputs of an encoder-decoder, from D documents `(D, L)` and the target of each token; `real` is False for padding.

    One host sync. A document has one answer, which `require_one_answer` checked.
    """
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    has_loss = targets != IGNORED
    # The prompt's last token, whose target is the answer's first; beyond the row for a document that is padding.
    prompt_end = positions.masked_fill(~has_loss, ids.shape[1]).amin(dim=1, keepdim=True)
    is_prompt = positions <= prompt_end if real is None else (positions <= prompt_end) & real
    answer = targets.gather(1, (prompt_end + positions).clamp(max=ids.shape[1] - 1))
    answer = answer.masked_fill(prompt_end + positions >= ids.shape[1], IGNORED)
    prompt_length, answer_length = map(
        int, torch.stack([is_prompt.sum(1).max(), (answer != IGNORED).sum(1).max()]).tolist()
    )
    return {
        "input_ids": ids[:, :prompt_length],
        "attention_mask": is_prompt[:, :prompt_length].long(),
        "labels": answer[:, : max(answer_length, 1)],
    }
