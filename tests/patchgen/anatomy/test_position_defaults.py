"""Positions that a forward makes where it is given none."""

from __future__ import annotations

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.positions import counts_default

FILE = """
import torch

def forward(x, position_ids=None, past=None, offset=None):
    if position_ids is None:
        position_ids = {}
    return x + position_ids
"""


@pytest.mark.parametrize(
    ("value", "counts"),
    [
        ("torch.arange(x.shape[1], device=x.device)", True),
        ("torch.arange(0, x.shape[1])", True),
        ("torch.arange(past.get_seq_length(), x.shape[1]).unsqueeze(0)", True),
        ("torch.arange(x.shape[1]) + past.get_seq_length()", True),
        ("torch.arange(past.get_seq_length() if past is not None else 0, x.shape[1])", True),
        ("torch.arange(offset, x.shape[1])", False),
        ("torch.arange(2, x.shape[1])", False),
        ("torch.arange(x.shape[1]) + offset", False),
        ("torch.arange(past.get_seq_length() if past is not None else offset, x.shape[1])", False),
    ],
)
def test_they_count_from_0_or_the_length_of_a_cache(value: str, counts: bool):
    anatomy = anatomy_of(FILE.format(value))
    assert counts_default(anatomy, anatomy.functions["forward"]) is counts
