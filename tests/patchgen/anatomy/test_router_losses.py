"""Upstream's forms of the load-balancing loss: the same number from each, and upstream's own functions are among them."""

from __future__ import annotations

import ast

import pytest
import torch
from generation_cases import load

from patchgen.anatomy.bodies import normal_form
from patchgen.anatomy.classes import FunctionNode
from patchgen.anatomy.router_losses import known_forms
from patchgen.templates import render


def losses_of(attention_mask):
    namespace = {"torch": torch}
    exec(render("router_losses.jinja"), namespace)
    torch.manual_seed(0)
    logits = tuple(torch.randn(2 * 6, 8, dtype=torch.float64) for _ in range(3))
    functions = [value for name, value in namespace.items() if callable(value)]
    return [function(logits, 8, 2, attention_mask) for function in functions]


@pytest.mark.parametrize("mask", [None, torch.tensor([[1] * 6, [1] * 4 + [0] * 2])], ids=["all", "padding"])
def test_all_known_forms_are_one_number(mask):
    found = losses_of(mask)
    assert len(found) == len(known_forms()) == 3
    for one in found[1:]:
        torch.testing.assert_close(one.double(), found[0].double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("model", ["qwen3_moe", "nllb_moe"])
def test_what_upstream_has_is_known(model):
    nodes = ast.parse(load(model).text).body
    (function,) = (n for n in nodes if isinstance(n, FunctionNode) and n.name == "load_balancing_loss_func")
    assert normal_form(function).text in known_forms()
