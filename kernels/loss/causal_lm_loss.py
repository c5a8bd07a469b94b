"""The language-model loss without the full logits: chunks of tokens, each recomputed in the backward.

Upstream's loss (`ForCausalLMLoss`) keeps logits of `[B, S, V]` in the dtype of the model and again in fp32, with their
gradients: 14 GiB at a vocabulary of 151,936 and 8k tokens. Here the logits of one chunk exist at a time. The head is any
function of hidden states, with its softcaps, scaling and biases: it is called as the model does, on fewer tokens.

    B batch   S sequence   H hidden size   V vocabulary   T = B * S tokens   C tokens of one chunk
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from patchgen.kernels import packages
from patchgen.kernels.loss.chunking import within_limit

CHUNK_LOGITS = 2**29
"""Logits of one chunk: at most 1 GiB in bf16, and as much for their gradient. With half of it the head's products
become small; with more only the memory grows."""

_LARGEST_CHUNK = 8192
IS_CROSS_ENTROPY = "is_mean_cross_entropy"
"""Attribute of a loss function that computes what ForCausalLMLoss does on the targets that it gets."""


def chunk_size(vocab_size: int) -> int:
    """Tokens per chunk: a power of two from 128 to 8192, with at most `CHUNK_LOGITS` logits if possible."""
    return min(_LARGEST_CHUNK, max(128, 1 << ((CHUNK_LOGITS // vocab_size).bit_length() - 1)))


def chunked_causal_lm_loss(
    head: Callable[[Tensor], Tensor],
    hidden_states: Tensor,
    labels: Tensor,
    *,
    loss_function: Callable[..., Tensor],
    vocab_size: int | None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    read_losses: Callable[[Tensor], None] | None = None,
    **ignored_by_upstream: object,
) -> tuple[None, Tensor]:
    """`(None, loss)`, the loss of transformers' `ForCausalLMLoss` (loss/loss_utils.py) in fp32.

    Args:
        head: maps `[1, C, H]` to logits `[1, C, V]`; must treat tokens independently of each other.
        hidden_states: `[B, S, H]`.
        labels: `[B, S]`, not yet shifted. Not read if `shift_labels` is given.
        loss_function: upstream's loss for the class; only `ForCausalLMLoss` has this form.
        vocab_size: V; None for that of the head's logits.
        num_items_in_batch: the divisor of the sum; by default the number of labels that are not ignored.
        ignore_index: the label of ignored tokens.
        shift_labels: `[B, S]`, already shifted.
        read_losses: called with the undivided loss of each token `[T]`, 0 for ignored labels.
        ignored_by_upstream: other keywords of the model's forward, which upstream's loss ignores too.

    Raises:
        ValueError: another loss function, a wrong number of labels, or a head whose logits are not `[1, C, V]`.
    """
    require_causal_lm_loss(loss_function, "causal_lm_loss='chunked'")
    target_T = shifted_targets(hidden_states, labels, shift_labels, ignore_index)
    hidden_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    if vocab_size is None:
        with torch.no_grad():  # from one token: the chunk size must be known first
            vocab_size = head(hidden_TH[:1].unsqueeze(0)).shape[-1]
    size = within_limit(chunk_size(vocab_size))
    total = hidden_TH.new_zeros((), dtype=torch.float32)
    rows = []
    for hidden_CH, target_C in zip(hidden_TH.split(size), target_T.split(size), strict=True):
        part, loss_C = checkpoint(
            _chunk_loss,
            head,
            hidden_CH,
            target_C,
            vocab_size,
            ignore_index,
            read_losses is not None,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        total = total + part
        rows.append(loss_C)
    if read_losses is not None:
        read_losses(torch.cat(rows))
    return None, total / loss_divisor(target_T, num_items_in_batch, ignore_index)


def require_causal_lm_loss(
    loss_function: Callable[..., Tensor], what: str, to_fix: str = "use causal_lm_loss='eager'"
) -> None:
    """Raises ValueError unless `loss_function` computes transformers' ForCausalLMLoss, as `what` does."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if loss_function is not ForCausalLMLoss and not getattr(loss_function, IS_CROSS_ENTROPY, False):
        name = getattr(loss_function, "__qualname__", repr(loss_function))
        raise ValueError(
            f"{what} computes transformers' ForCausalLMLoss; this model's loss_function is {name}. To fix: {to_fix}."
        )


def shifted_targets(hidden_states: Tensor, labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """The target of each position, `[T]`: the next label; `ignore_index` for the last of each sequence.

    Args:
        hidden_states: `[B, S, H]`, on the device of the result.
        labels: `[B, S]`, not yet shifted. Not read if `shift_labels` is given.
        shift_labels: `[B, S]`, already shifted.

    Raises:
        ValueError: different numbers of labels and hidden states.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target_T = shift_labels.reshape(-1).to(hidden_states.device)
    num_tokens = hidden_states.shape[:-1].numel()
    if target_T.numel() != num_tokens:
        raise ValueError(
            f"causal_lm_loss: {target_T.numel()} labels for {num_tokens} hidden states. To fix: pass labels of shape "
            f"{tuple(hidden_states.shape[:2])}."
        )
    return target_T


def loss_divisor(target_T: Tensor, num_items_in_batch: Tensor | int | None, ignore_index: int) -> Tensor | int:
    """The divisor of the sum of losses: the caller's, or the number of labels that are not ignored."""
    if num_items_in_batch is None:
        return (target_T != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(target_T.device)
    return num_items_in_batch


def _chunk_loss(
    head: Callable[[Tensor], Tensor],
    hidden_CH: Tensor,
    target_C: Tensor,
    vocab_size: int,
    ignore_index: int,
    with_rows: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sum of losses, bit-identical with and without `with_rows`, and the loss of each token (None without `with_rows`)."""
    logits_1CV = head(hidden_CH.unsqueeze(0))
    if logits_1CV.shape != (1, hidden_CH.shape[0], vocab_size):
        raise ValueError(
            f"causal_lm_loss: the head must map [1, {hidden_CH.shape[0]}, {hidden_CH.shape[1]}] to logits of "
            f"vocab_size {vocab_size}, found {tuple(logits_1CV.shape)}."
        )
    logits_CV = logits_1CV.squeeze(0)
    total = _compiled_on_gpu(logits_CV, cross_entropy_sum)(logits_CV, target_C, ignore_index)
    with torch.no_grad():
        rows = (
            _compiled_on_gpu(logits_CV, _cross_entropy_rows)(logits_CV, target_C, ignore_index) if with_rows else None
        )
    return total, rows


def cross_entropy_sum(logits_CV: Tensor, target_C: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(logits_CV.float(), target_C, ignore_index=ignore_index, reduction="sum")


@torch.no_grad()
def losses_of_rows(logits: Tensor, shift_labels: Tensor, ignore_index: int = -100) -> Tensor:
    """The loss of each token `[T]` in fp32 from logits `[B, S, V]`; 0 for ignored labels `[B, S]`."""
    logits_TV = logits.flatten(0, -2)
    return _compiled_on_gpu(logits_TV, _cross_entropy_rows)(
        logits_TV, shift_labels.reshape(-1).to(logits.device), ignore_index
    )


def _cross_entropy_rows(logits_CV: Tensor, target_C: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(logits_CV.float(), target_C, ignore_index=ignore_index, reduction="none")


def _compiled_on_gpu(logits_CV: Tensor, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, compiled on a GPU, where the fp32 logits then never exist in memory; in a traced graph as it is."""
    return _compiled(function) if logits_CV.is_cuda and not torch.compiler.is_compiling() else function


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return packages.compiled(function)
