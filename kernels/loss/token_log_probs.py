"""Values per token computed from its logits, without the full logits: chunks of tokens, recomputed in the backward.

    log_probs_T = token_log_probs(head, hidden_TH, target_T)        # what DPO and similar objectives sum over documents
    values, ids = per_token(head, hidden_TH, top_logits)            # any other function of a token's logits

The language-model loss has its own kernels (`causal_lm_loss.py`, `linear_cross_entropy.py`): it only needs the sum.

    H hidden size   V vocabulary   T tokens   C tokens of one chunk
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from patchgen.kernels.loss.causal_lm_loss import chunk_size
from patchgen.kernels.loss.chunking import within_limit


def per_token(
    head: Callable[[Tensor], Tensor], hidden_TH: Tensor, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """`function` of the logits of each token; the logits of one chunk exist at a time.

    Args:
        head: maps `[1, C, H]` to logits `[1, C, V]`; treats tokens independently of each other.
        hidden_TH: `[T, H]`, at least one token.
        function: `(logits [C, V], *inputs [C, ...]) -> tuple of tensors [C, ...]`; logits are fp32, or wider if the head's are.
        inputs: other values per token, `[T, ...]`.

    Returns:
        The tensors of `function` for all tokens, `[T, ...]`.
    """
    with torch.no_grad():  # from one token: the chunk size must be known first
        vocab_size = head(hidden_TH[:1].unsqueeze(0)).shape[-1]
    size = within_limit(chunk_size(vocab_size))
    chunks = zip(hidden_TH.split(size), *(values.split(size) for values in inputs), strict=True)
    if torch.is_grad_enabled():
        recomputed = functools.partial(
            checkpoint, _compute_chunk, head, function, use_reentrant=False, preserve_rng_state=False
        )
        outputs = [recomputed(*chunk) for chunk in chunks]
    else:
        outputs = [_compute_chunk(head, function, *chunk) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def token_log_probs(
    head: Callable[[Tensor], Tensor], hidden_TH: Tensor, target_T: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """The log-probability of each position's target, `[T]` in fp32 (fp64 for fp64 logits); 0 for ignored targets.

    Args:
        head, hidden_TH: see `per_token`.
        target_T: `[T]`, already shifted: the next token; `ignore_index` for none.
    """

    def log_prob_of_target(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor]:
        counts_C = target_C != ignore_index
        chosen_C = logits_CV.gather(1, target_C.masked_fill(~counts_C, 0).unsqueeze(1)).squeeze(1)
        return ((chosen_C - logits_CV.logsumexp(1)).masked_fill(~counts_C, 0),)

    return per_token(head, hidden_TH, log_prob_of_target, target_T)[0]


def _compute_chunk(
    head: Callable[[Tensor], Tensor], function: Callable[..., tuple[Tensor, ...]], hidden_CH: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    logits_CV = head(hidden_CH.unsqueeze(0)).squeeze(0)
    return function(logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)), *inputs)
