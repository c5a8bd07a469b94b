"""What `auto` took is told, while somebody wants to know."""

from __future__ import annotations

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from patchgen.kernels import choices
from patchgen.kernels.fused_moe import fused_moe
from patchgen.kernels.loss_auto import auto_causal_lm_loss


def experts(tokens: int, backend: str) -> None:
    weights, index = torch.full((tokens, 1), 0.5), torch.zeros(tokens, 1, dtype=torch.long)
    matrices = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    fused_moe(torch.randn(tokens, 4), index, weights, *matrices, num_experts=2, activation=nn.SiLU(), backend=backend)


def test_each_kernel_is_told_with_its_shapes():
    experts(3, "auto")  # nobody wants to know
    with choices.recorded() as taken:
        experts(3, "auto")
        experts(5, "auto")
        experts(5, "auto")
        experts(7, "torch")  # named: there was no choice
        head, hidden = nn.Linear(4, 9, bias=False), torch.randn(1, 6, 4)
        labels = torch.zeros(1, 6, dtype=torch.long)
        auto_causal_lm_loss(head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=9)
        auto_causal_lm_loss(lambda rows: head(rows) * 2, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=9)
    assert taken["fused_moe"] == {("torch", (5, 4)): 2, ("torch", (3, 4)): 1}
    assert choices.described(taken) == [
        "fused_moe auto: torch 2 x [5, 4], torch 1 x [3, 4]",
        "causal_lm_loss auto: linear 1 x [1, 6, 4], chunked 1 x [1, 6, 4]",
    ]


def test_compiled_code_is_not_traced_again_for_it():
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def compute(hidden_states):
        choices.note("rms_norm", "compiled", hidden_states)
        return hidden_states * 2

    compute(torch.ones(2))
    with choices.recorded() as taken:
        compute(torch.ones(2))
    assert len(traced) == 1 and not taken
