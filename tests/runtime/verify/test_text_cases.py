"""The batches that a forward is compared with."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import LlamaConfig

from patchgen.runtime.verify.inputs import text_cases


class Head(nn.Module):
    def forward(self, input_ids, attention_mask=None, labels=None):
        raise NotImplementedError


class HeadWithPositions(nn.Module):
    def forward(self, input_ids, position_ids=None, labels=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("head", "packed", "names"),
    [
        (Head, False, ["plain", "padded"]),
        (Head, True, ["plain", "padded", "packed"]),
        (HeadWithPositions, False, ["plain", "packed"]),
        (HeadWithPositions, True, ["plain", "packed"]),
    ],
)
def test_a_forward_without_positions_has_a_packed_case_where_it_is_asked_for(head, packed, names):
    cases = text_cases(LlamaConfig(vocab_size=40), head, packed=packed)
    assert [case.name for case in cases] == names
