"""Which implementation of the language-model loss serves a call when the choice is left to us: by what was measured.

TABLE
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from patchgen.kernels.causal_lm_loss import chunked_causal_lm_loss
from patchgen.kernels.linear_cross_entropy import linear_causal_lm_loss, unsupported


def auto_causal_lm_loss(
    head: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor, **arguments: object
) -> tuple[None, Tensor]:
    """`(None, loss)`: "linear" for the heads that it serves, "chunked" for all others; arguments as in either."""
    implementation = choose(head, hidden_states)
    return implementation(head, hidden_states, labels, **arguments)


def choose(head: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Callable[..., tuple[None, Tensor]]:
    """The implementation for this head and these hidden states `[B, S, H]`."""
    return linear_causal_lm_loss if unsupported(head, hidden_states) is None else chunked_causal_lm_loss
