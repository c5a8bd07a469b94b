"""The language-model loss of a plain `nn.Linear` head, its gradients computed in the forward: "linear".

For each chunk of tokens, in one buffer of logits that all chunks share:

    logits  = x @ weight.T (+ bias)
    loss    = cross-entropy of each row; logits become their own gradient in place
    dx      = logits @ weight
    dweight += logits.T @ x              in fp32

The backward only multiplies by the gradient of the loss: three products in total, where recomputing the logits
("chunked") takes four. Saved for the backward: dx in the dtype of x and dweight in fp32, rounded once, when it is
multiplied. The gradients are divided by the number of labels in fp32, before rounding.

No step waits for the device or adds atomically: the same inputs give the same bits.

    B batch   S sequence   H hidden size   V vocabulary   T = B * S tokens   C tokens of one chunk
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from patchgen.kernels.bypassed_modules import addition
from patchgen.kernels.loss.causal_lm_loss import loss_divisor, require_causal_lm_loss, shifted_targets
from patchgen.kernels.loss.chunking import within_limit
from patchgen.kernels.packages import failed_import
from patchgen.kernels.unsupported import UnsupportedOptionError

CHUNK_LOGITS = 5 * 2**27
"""Logits of one chunk: at most 1.25 GiB in bf16. At V = 151,936 that is 4096 tokens, and with the 1.16 GiB of the
weight's gradient in fp32 (H = 2048) the loss stays below 2.6 GiB. Half of it costs 1.3 % of the time at 8k tokens and
0.2 % at 32k, and saves 0.58 GiB (H200, 2026-11-21)."""

_LARGEST_CHUNK = 8192
_CHUNK_MULTIPLE = 128
"""Chunks are multiples of this many tokens, so that only the last product has a partial tile."""

_ROW_ALIGNMENT = 16
"""On a GPU, rows of logits begin at multiples of 16 elements: every vocabulary has aligned products."""


def linear_causal_lm_loss(
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
    """`(None, loss)`, the loss of transformers' `ForCausalLMLoss` (loss/loss_utils.py) in fp32 (fp64 for fp64 inputs).

    Args:
        head, vocab_size: an `nn.Linear` from H to V, see `unsupported`; V, or None for that of the head.
        hidden_states: `[B, S, H]` in the dtype of the head: bf16, fp32 or fp64.
        labels, shift_labels: `[B, S]`, not yet and already shifted; the first are not read if the second are given.
        loss_function: upstream's loss for the class; only `ForCausalLMLoss` has this form.
        num_items_in_batch: the divisor of the sum; by default the number of labels that are not `ignore_index`.
        read_losses: called with the undivided loss of each token `[T]`, 0 for ignored labels.
        ignored_by_upstream: other keywords of the model's forward, which upstream's loss ignores too.

    Raises:
        UnsupportedOptionError: another head, or an unsupported dtype; the message says which.
        ValueError: another loss function, or inconsistent sizes.
    """
    require_causal_lm_loss(loss_function, "causal_lm_loss='linear'")
    reason = unsupported(head, hidden_states)
    if reason is not None:
        raise UnsupportedOptionError(f"causal_lm_loss='linear': {reason} To fix: use causal_lm_loss='chunked'.")
    rows, width = head.weight.shape  # of the weight: a tied one may differ from the layer's attributes
    if width != hidden_states.shape[-1] or vocab_size not in (None, rows):
        raise ValueError(
            f"causal_lm_loss: the head maps {width} to {rows} features; expected hidden size {hidden_states.shape[-1]} to "
            f"vocab_size {vocab_size}."
        )
    target_T = shifted_targets(hidden_states, labels, shift_labels, ignore_index)
    weight, bias = head.weight, head.bias
    divisor = loss_divisor(target_T, num_items_in_batch, ignore_index)
    if isinstance(divisor, Tensor):
        divisor = divisor.to(_fp32_or_more(weight)).reshape(())
    else:  # filled on the device: copying the number there would wait
        divisor = torch.full((), divisor, dtype=_fp32_or_more(weight), device=weight.device)
    keep = torch.is_grad_enabled()
    loss, *_, loss_T = torch.ops.patchgen.linear_cross_entropy(
        hidden_states.reshape(-1, width),
        weight,
        bias,
        target_T,
        divisor,
        ignore_index,
        keep and hidden_states.requires_grad,
        keep and weight.requires_grad,
        keep and bias is not None and bias.requires_grad,
    )
    if read_losses is not None:
        read_losses(loss_T.detach())
    return None, loss


def unsupported(head: Callable[[Tensor], Tensor], hidden_states: Tensor) -> str | None:
    """Why this implementation cannot compute the call, in one sentence; None if it can."""
    if not isinstance(head, nn.Linear) or type(head) is not nn.Linear:
        return (
            f"the head must be a plain nn.Linear, found a {type(head).__qualname__}, which may do more to the logits."
        )
    if (added := addition(head)) is not None:
        return f"the head has {added}, which would not run: its weight is read without calling it."
    for name, parameter in head.named_parameters():
        if type(parameter) not in (nn.Parameter, Tensor):
            return f"the head's {name} is a {type(parameter).__name__}, a plain tensor is needed."
        if parameter.dtype != hidden_states.dtype or parameter.device != hidden_states.device:
            return (
                f"the head's {name} is {parameter.dtype} on {parameter.device}, the hidden states are "
                f"{hidden_states.dtype} on {hidden_states.device}; they must agree."
            )
    if hidden_states.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        return (
            f"dtype {hidden_states.dtype} is not supported, bfloat16, float32 and float64 are: gradients divided by "
            f"the number of labels would underflow in float16, before any loss scale reaches them."
        )
    failure = failed_import("triton") if hidden_states.is_cuda else None
    if failure is not None:
        return f"on a GPU it needs Triton in a form that can be imported here: {failure}."
    if torch.is_autocast_enabled(hidden_states.device.type):
        return "autocast is on: the products would not run in its dtype."
    return None


def tokens_per_chunk(num_tokens: int, vocab_size: int) -> int:
    """C, for chunks of nearly equal size with at most about `CHUNK_LOGITS` logits."""
    most = min(_LARGEST_CHUNK, max(_CHUNK_MULTIPLE, CHUNK_LOGITS // vocab_size // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE))
    num_chunks = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // num_chunks // _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE


# --------------------------------------------------------------------------------------------- operator


@torch.library.custom_op("patchgen::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_T: Tensor,
    divisor: Tensor,
    ignore_index: int,
    with_hidden: bool,
    with_weight: bool,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`(loss, d_hidden [T, H], d_weight [V, H], d_bias [V], loss of each token [T])`; gradients not requested are empty."""
    num_tokens, vocab_size = hidden_TH.shape[0], weight_VH.shape[0]
    loss_T, d_hidden_TH, d_weight_VH, d_bias_V = _outputs(
        (num_tokens,), hidden_TH, weight_VH, with_hidden, with_weight, with_bias
    )
    if num_tokens == 0:
        d_weight_VH.zero_()
        d_bias_V.zero_()
    size = min(within_limit(tokens_per_chunk(num_tokens, vocab_size)), num_tokens)
    buffer = _logits_buffer(hidden_TH, size, vocab_size)
    with_gradient = with_hidden or with_weight or with_bias
    for start in range(0, num_tokens, size or 1):
        chunk = slice(start, min(start + size, num_tokens))
        hidden_CH = hidden_TH[chunk]
        logits_CV = buffer[: hidden_CH.shape[0]]
        if bias_V is None:
            torch.mm(hidden_CH, weight_VH.t(), out=logits_CV)
        else:
            torch.addmm(bias_V, hidden_CH, weight_VH.t(), out=logits_CV)
        _cross_entropy_in_place(logits_CV, target_T[chunk], divisor, loss_T[chunk], ignore_index, with_gradient)
        if with_hidden:
            torch.mm(logits_CV, weight_VH, out=d_hidden_TH[chunk])
        if with_weight:
            _add_product(d_weight_VH, logits_CV.t(), hidden_CH, is_first=start == 0)
        if with_bias:
            part_V = logits_CV.sum(0, dtype=d_bias_V.dtype)
            d_bias_V.copy_(part_V) if start == 0 else d_bias_V.add_(part_V)
    return loss_T.sum() / divisor, d_hidden_TH, d_weight_VH, d_bias_V, loss_T


@_linear_cross_entropy.register_fake
def _(hidden_TH, weight_VH, bias_V, target_T, divisor, ignore_index, with_hidden, with_weight, with_bias):
    loss, *gradients = _outputs((), hidden_TH, weight_VH, with_hidden, with_weight, with_bias)
    return loss, *gradients, loss.new_empty(hidden_TH.shape[:1])


def _outputs(
    loss_shape: tuple[int, ...],
    hidden_TH: Tensor,
    weight_VH: Tensor,
    with_hidden: bool,
    with_weight: bool,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised loss and gradients; the sums over tokens in fp32."""
    wide = _fp32_or_more(weight_VH)
    return (
        hidden_TH.new_empty(loss_shape, dtype=wide),
        hidden_TH.new_empty(hidden_TH.shape if with_hidden else (0,)),
        weight_VH.new_empty(weight_VH.shape if with_weight else (0,), dtype=wide),
        weight_VH.new_empty(weight_VH.shape[:1] if with_bias else (0,), dtype=wide),
    )


def _logits_buffer(like: Tensor, num_rows: int, vocab_size: int) -> Tensor:
    """An uninitialised `[num_rows, V]`, except that padding between rows is zero.

    A product may read past a row and multiply by zero, which gives NaN if fresh memory contains NaN: oneDNN (3.12) rounds the
    rows of bf16 operands up to 32 elements on processors with AMX. Past a row there is the next one, or zeros.
    """
    if not like.is_cuda:
        return like.new_empty(num_rows, vocab_size)
    buffer = like.new_empty(num_rows, -(-vocab_size // _ROW_ALIGNMENT) * _ROW_ALIGNMENT)
    buffer[:, vocab_size:].zero_()
    return buffer[:, :vocab_size]


def _fp32_or_more(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """`total += left @ right`, summed in the dtype of `total`; the first product overwrites."""
    beta = 0 if is_first else 1
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:  # only CUDA multiplies bf16 into fp32
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)


def _cross_entropy_in_place(
    logits_CV: Tensor, target_C: Tensor, divisor: Tensor, loss_C: Tensor, ignore_index: int, with_gradient: bool
) -> None:
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64:
        from patchgen.kernels.loss.cross_entropy_rows import cross_entropy_rows  # loads Triton
    else:
        cross_entropy_rows = cross_entropy_rows_in_torch
    cross_entropy_rows(logits_CV, target_C, divisor, loss_C, ignore_index, with_gradient)


def cross_entropy_rows_in_torch(
    logits_CV: Tensor, target_C: Tensor, divisor: Tensor, loss_C: Tensor, ignore_index: int, with_gradient: bool
) -> None:
    """`cross_entropy_rows.cross_entropy_rows` by torch, in the dtype of `loss_C`; a label out of range raises."""
    counts_C = target_C != ignore_index
    column_C1 = target_C.masked_fill(~counts_C, 0).unsqueeze(1)
    wide_CV = logits_CV.to(loss_C.dtype)
    log_sum_C1 = wide_CV.logsumexp(1, keepdim=True)
    loss_C.copy_((log_sum_C1 - wide_CV.gather(1, column_C1)).squeeze(1).masked_fill(~counts_C, 0))
    if with_gradient:
        gradient_CV = torch.exp(wide_CV - log_sum_C1)
        gradient_CV.scatter_add_(1, column_C1, gradient_CV.new_full(column_C1.shape, -1))
        logits_CV.copy_((gradient_CV / divisor).masked_fill(~counts_C.unsqueeze(1), 0))


# --------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx, inputs, output):
    hidden_TH, weight_VH, bias_V, *_, with_hidden, with_weight, with_bias = inputs
    _, *gradients, _ = output
    ctx.set_materialize_grads(False)  # or autograd allocates zeros for the outputs that are gradients
    ctx.save_for_backward(*gradients)
    ctx.requested = (with_hidden, with_weight, with_bias)
    ctx.dtypes = (hidden_TH.dtype, weight_VH.dtype, weight_VH.dtype if bias_V is None else bias_V.dtype)


def _backward(ctx, d_loss, *d_gradients):
    if any(gradient is not None for gradient in d_gradients):
        raise RuntimeError(
            "causal_lm_loss='linear' has no second derivative: its gradients are computed in the forward. To fix: use "
            "causal_lm_loss='eager' to differentiate twice."
        )
    if d_loss is None:
        return (None,) * 9
    gradients = [
        _scaled(gradient, d_loss, dtype) if requested else None
        for gradient, dtype, requested in zip(ctx.saved_tensors, ctx.dtypes, ctx.requested, strict=True)
    ]
    return (*gradients, *(None,) * 6)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient * factor`, rounded once to `dtype`, without an fp32 product in memory or a sync for the factor."""
    if gradient.requires_grad and torch.is_grad_enabled():
        return (gradient * factor).to(dtype)  # `create_graph`: the second backward raises the error above
    if gradient.is_cuda and gradient.dtype != torch.float64:
        from patchgen.kernels.loss.scaled import scaled  # loads Triton

        return scaled(gradient, factor, dtype)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
