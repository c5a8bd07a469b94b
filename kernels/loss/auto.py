"""The implementation of the language-model loss that "auto" takes, by measurement.

One H200, 2026-11-21, bf16, V = 151,936, H = 2048, torch 2.11.0+cu130, triton 3.6.0, transformers 5.17.0. Forward and
backward in ms, peak memory above the inputs in GiB, gradients included; all three options in one process
(benchmarks/bench_loss.py; every row is in benchmarks/results_loss.csv):

    option                          8192 tokens      32768 tokens
    linear                          24.5   2.35       97.3   2.45
    chunked                         35.2   1.77      140.3   1.86
    upstream under torch.compile    24.2   2.93      108.8   9.98

"linear" computes three products where "chunked" computes four, so it is chosen on other devices too, which were not
measured. "chunked" takes any head.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from patchgen.kernels import choices
from patchgen.kernels.loss.causal_lm_loss import chunked_causal_lm_loss
from patchgen.kernels.loss.linear_cross_entropy import linear_causal_lm_loss, unsupported


def auto_causal_lm_loss(
    head: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor, **arguments: object
) -> tuple[None, Tensor]:
    """`(None, loss)`: "linear" for the heads that it supports, "chunked" for all others; arguments as in either."""
    implementation = choose(head, hidden_states)
    chosen = "linear" if implementation is linear_causal_lm_loss else "chunked"
    choices.record("causal_lm_loss", chosen, hidden_states, getattr(head, "weight", None))
    return implementation(head, hidden_states, labels, **arguments)


def choose(head: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Callable[..., tuple[None, Tensor]]:
    """The implementation for this head and these hidden states `[B, S, H]`."""
    return linear_causal_lm_loss if unsupported(head, hidden_states) is None else chunked_causal_lm_loss
