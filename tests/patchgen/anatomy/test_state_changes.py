"""What a forward keeps for the next call, of data of this one: which names hold data, and which only flags."""

from __future__ import annotations

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.classes import parameters
from patchgen.anatomy.state_changes import StateChanges

FILE = """
import torch
from torch import nn
{above}

class Example(nn.Module):
    def __init__(self, config):
        self.register_buffer("load", torch.zeros(()))
        self.scale = config.scale

    def grown(self, table, x):
        return table

    def forward(self, x{more}):
        {code}
"""


def changes(code: str, more: str = "", above: str = "") -> bool:
    anatomy = anatomy_of(FILE.format(code=code, more=more, above=above))
    forward = anatomy.classes["Example"].methods["forward"]
    return any(StateChanges(anatomy, "Example").of(forward, parameters(forward), {}))


@pytest.mark.parametrize("above", ["def len(x):\n    return x.sum()", "from elsewhere import len"])
def test_a_length_is_asked_by_pythons_len(above: str):
    code = "self.load += len(x)"
    assert not changes(code)
    assert changes(code, above=above)
    assert changes(f"len = torch.sum\n        {code}")


@pytest.mark.parametrize(
    ("more", "condition", "is_flag"),
    [
        (", wanted: bool", "wanted", True),
        (", wanted=False", "wanted", True),
        (", *, wanted=True", "not wanted", True),
        (", wanted=None", "wanted and self.training", True),
        (", mask: torch.Tensor = None", "mask", False),
        (", mask", "mask", False),  # nothing tells
        (", mask=None", "mask.any()", False),
        (", mask=None", "mask > 0", False),
        (", mask=None", "torch.any(mask)", False),
    ],
)
def test_a_flag_is_annotated_or_asked_only_whether_it_holds(more: str, condition: str, is_flag: bool):
    assert changes(f"if {condition}: self.load += 1", more) is not is_flag


@pytest.mark.parametrize(
    ("code", "is_change"),
    [
        ("self.load.detach().add_(x.sum())", True),  # the same memory
        ("self.load.cumsum(0).add_(x.sum())", False),
        ("load = self.load; load += x.sum()", True),
        ("self.load[0] += x.sum()", True),
        ("a, b = x, 1; self.load += a", True),
        ("a, b = x, 1; self.load += b", False),
        ("scale = self.scale; scale += x.sum()", False),  # a number: the name alone is new
    ],
)
def test_what_shares_the_memory_of_an_attribute_changes_it(code: str, is_change: bool):
    assert changes(code) is is_change


def test_a_value_made_here_of_the_old_one_is_a_change():
    assert changes("self.seen = self.seen + x.sum()")
    assert not changes("self.seen = self.grown(self.seen, x)")  # it may be a table of the sizes alone
    assert not changes("self.seen = x.sum()")


@pytest.mark.parametrize(
    ("code", "is_change"),
    [
        ("if self.seen is None: self.seen = x.mean()", True),
        ("if not hasattr(self, 'seen'): self.seen = x.mean()", True),
        ("if getattr(self, 'seen', None) is None and self.training: self.seen = x.mean()", True),
        ("if not self.seen: self.seen = x.mean()", True),
        ("if self.seen is None: self.seen = x.shape[1]", False),  # of the sizes alone
        ("if self.other is None: self.seen = x.mean()", False),
        ("if self.seen is not None: pass\n        else: self.seen = x.mean()", True),
        ("if None is self.seen: self.seen = x.mean()", True),
        ("if self.seen is None: pass\n        else: self.seen = x.mean()", False),
        ("self.seen = None\n        if self.seen is None: self.seen = x.mean()", False),
        ("if self.seen is None or x is not None: self.seen = x.mean()", False),  # of this call, where it has data
        ("if self.seen is not None: self.seen = x.mean()", False),
    ],
)
def test_a_value_kept_from_the_first_call_is_a_change(code: str, is_change: bool):
    assert changes(code) is is_change
