"""Upstream's forms of the load-balancing loss: the same number from each, and upstream's own functions are among them."""

from __future__ import annotations

import ast

import pytest
import torch
from generation_cases import anatomy_of, applied, load

from patchgen.anatomy.bodies import normal_form
from patchgen.anatomy.classes import FunctionNode
from patchgen.anatomy.router_losses import called_losses, known_forms
from patchgen.passes.router_loss import RouterLoss
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


@pytest.mark.parametrize(
    ("parameters", "above", "is_called"),
    [
        ("self", "", True),
        ("self, balance", "", False),
        ("self", "def balance_all(balance):\n    return balance()", True),
    ],
)
def test_a_caller_is_one_for_which_the_name_stands_for_the_loss(parameters: str, above: str, is_called: bool):
    known = next(iter(known_forms().values()))
    name = known.removeprefix("def ").partition("(")[0]
    head = f"class Head(nn.Module):\n    def forward({parameters}):\n        return balance(self.logits)\n"
    anatomy = anatomy_of(f"{above}\n\n{known.replace(name, 'balance')}\n\n{head}")
    found = called_losses(anatomy.classes["Head"].methods["forward"], anatomy)
    assert found == ({"balance"} if is_called else set())
    assert not any(called_losses(node, anatomy) for name, node in anatomy.functions.items() if name == "balance_all")


COUNTING = """
{above}

def balance(rows):
    weights = soften(rows, dim=-1)
    return F.one_hot(weights.topk(2)[1], 8).float().mean()
"""


def test_a_sign_of_another_balancing_loss_is_a_softmax_of_torchs():
    told = applied(RouterLoss(), COUNTING.format(above="from torch import softmax as soften"))
    assert not told.hits and any("balance counts the choices of a softmax" in note for note in told.notes)
    other = COUNTING.replace("soften", "softmax").format(above="def softmax(rows, dim):\n    return rows")
    assert not applied(RouterLoss(), other).hits and not applied(RouterLoss(), other).notes
