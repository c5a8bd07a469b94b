"""Attention and positions of models beside the usual ones, on two ranks that share a sequence."""

from __future__ import annotations

import cases_attention as cases
import pytest


@pytest.mark.parametrize(
    ("kind", "head"), [("roberta", "RobertaForCausalLM"), ("xmod", "XmodForCausalLM"), ("opt", "OPTForCausalLM")]
)
def test_positions_are_those_of_each_document_alone(kind, head, two_ranks):
    two_ranks.run(cases.positions_are_those_of_each_document_alone, kind, head)


@pytest.mark.parametrize(
    ("kind", "head", "module"),
    [
        ("mpt", "MptForCausalLM", "MptModel"),
        ("mvp", "MvpForCausalLM", "MvpAttention"),
    ],
)
def test_attention_by_own_code_refuses_a_slice(kind, head, module, two_ranks):
    """In one sentence that names the module, the reason and what to do."""
    for message in two_ranks.run(cases.refusal, kind, head):
        assert message.startswith(f"{module} uses its mask as a tensor"), message
        assert message.endswith("Train this model with sp=1.")
