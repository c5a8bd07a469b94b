"""The cross entropies that some heads compute inline, as loss functions for `ops.causal_lm_loss`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def aligned_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    **ignored_by_upstream: object,
) -> Tensor:
    """The inline cross entropy of heads whose labels are aligned with the logits, not shifted.

    Args:
        logits: `[B, S, V]`.
        labels: `[B, S]`; `-100` is ignored. Not read if `shift_labels` is given, as by `ops.causal_lm_loss`.
        num_items_in_batch: divides the sum, in fp32; default: the number of labels other than -100.
        ignored_by_upstream: further keywords of the model's forward, which upstream's loss does not use.

    Returns:
        The mean, in the logits' dtype like upstream's; a share of the step in fp32.
    """
    targets = labels if shift_labels is None else shift_labels
    logits_TV, target_T = logits.reshape(-1, vocab_size), targets.reshape(-1).to(logits.device)
    if num_items_in_batch is None:
        return F.cross_entropy(logits_TV, target_T)
    from patchgen.kernels.loss.causal_lm_loss import (  # here: what generated code imports loads no kernel
        cross_entropy_sum,
        loss_divisor,
    )

    return cross_entropy_sum(logits_TV, target_T, -100) / loss_divisor(target_T, num_items_in_batch, -100)


def shifted_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    attention_mask: Tensor | None = None,
    shift_labels: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """The inline cross entropy over `logits[..., :-1, :]` and `labels[..., 1:]`.

    Args:
        labels: `[B, S]`, not yet shifted. Not read if `shift_labels` is given.
        attention_mask: `[B, S]` or longer (the last entries count); masked tokens are not targets.
        more: see `aligned_cross_entropy`.
    """
    if shift_labels is not None:
        return aligned_cross_entropy(logits, labels, vocab_size, shift_labels=shift_labels, **more)
    logits, labels = logits[..., :-1, :], labels[..., 1:]
    if attention_mask is not None:
        is_token = attention_mask[:, -logits.shape[1] :] != 0
        logits, labels = logits[is_token.to(logits.device)], labels[is_token.to(labels.device)]
    return aligned_cross_entropy(logits, labels, vocab_size, **more)


def kept_labels(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The labels `[B, S]` with -100 where a mask, `[B, S]` or longer, is zero; unchanged if it is None."""
    if attention_mask is None:
        return labels
    return labels.masked_fill(attention_mask[:, -labels.shape[1] :].to(labels.device) == 0, -100)


aligned_cross_entropy.is_mean_cross_entropy = True
shifted_cross_entropy.is_mean_cross_entropy = True
