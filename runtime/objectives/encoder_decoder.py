"""An encoder-decoder on the rows of the data pipeline: what is not learned of a document is read, what is learned is answered.

    document   p p p a a a e            (prompt, answer and the token that ends it)
    encoder    p p p                    with a mask where documents are shorter
    labels           a a a e            which the decoder is handed by one later, as upstream's own rule has it

`model_calls.separate_documents` puts the documents of a packed row into rows of their own first. The loss is the head's own,
a share of the step.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.loss import counted_targets
from patchgen.runtime.parallel.report import called_seams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OF_ROWS = ("position_ids", "real_tokens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What the rows of the pipeline say of their tokens, whose places in the encoder and the decoder are others."""


def is_served(head: type) -> bool:
    """Whether a generated head of an encoder-decoder computes a share of a step: its loss is the seam's."""
    return "causal_lm_loss" in called_seams(head.forward)


def on_rows(head: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The head with rows `input_ids`, `shift_labels` `(D, L)` of a document each for its inputs; upstream's are taken, too."""

    @functools.wraps(head.forward)
    def forward(
        self: PreTrainedModel, input_ids: Tensor | None = None, shift_labels: Tensor | None = None, **given: Any
    ) -> Any:
        rows = {name: value for name, value in given.items() if name not in OF_ROWS}
        if shift_labels is not None and input_ids is not None:
            rows |= prompts_and_answers(input_ids, shift_labels, given.get("real_tokens"))
        else:
            rows["input_ids"] = input_ids
            if not rows.keys() & {"labels", "decoder_input_ids", "decoder_inputs_embeds"}:
                rows["decoder_input_ids"] = input_ids
        with counted_targets():
            return head.forward(self, **rows)

    return type(head.__name__, (head,), {"forward": forward, "__module__": head.__module__, "__doc__": head.__doc__})


def prompts_and_answers(ids: Tensor, targets: Tensor, real: Tensor | None) -> dict[str, Tensor]:
    """What an encoder-decoder is handed, of rows `(D, L)` with the target of each token; `real` False: it is padding.

    One host sync.
    """
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    first = places.masked_fill(targets == IGNORED, ids.shape[1]).amin(dim=1, keepdim=True)  # it predicts the answer
    reads = places <= first if real is None else (places <= first) & real
    answer = targets.gather(1, (first + places).clamp(max=ids.shape[1] - 1))
    answer = answer.masked_fill(first + places >= ids.shape[1], IGNORED)
    longest, answers = (
        int(one) for one in torch.stack([reads.sum(1).max(), (answer != IGNORED).sum(1).max()]).tolist()
    )
    return {
        "input_ids": ids[:, :longest],
        "attention_mask": reads[:, :longest].long(),
        "labels": answer[:, : max(answers, 1)],
    }
