"""What is added to a loss: a share of the step's loss, or a number of one rank's tokens."""

from __future__ import annotations

import ast

import pytest

from patchgen.anatomy.loss_terms import LossTerms

BALANCED = "aux = None\nif wanted:\n    aux = ops.router_loss(balance, logits)\n    if labels is not None:\n        "
RESULT = "\nreturn Output(loss=loss, logits=logits)"


def terms_of(code: str) -> LossTerms:
    return LossTerms(ast.parse(code + RESULT).body, "loss")


@pytest.mark.parametrize(
    "code",
    [
        "",
        BALANCED + "loss += self.coefficient * aux.to(loss.device)",
        BALANCED + "loss = loss + aux * 0.01",
        BALANCED + "total = self.weight * loss + (1 - self.weight) * aux\nloss = total",
        "loss = loss + self.coefficient * ops.router_loss(balance, logits)",
        "loss = loss * 2.0 / self.config.scale",
        "loss = loss.float() if loss is not None else None",
        "total = loss * 0.5\nloss = loss + total",
        "loss = loss + 0.1 * loss",
        "if loss is not None and labels is not None:\n    scaled = -loss",
    ],
)
def test_sums_and_multiples_of_shares_are_shares(code):
    terms = terms_of(code)
    assert terms.local == ()
    assert terms.lost is None


@pytest.mark.parametrize(
    ("code", "local"),
    [
        ("loss = loss + 0.1 * z.mean()", ["0.1 * z.mean()"]),
        ("loss += z.mean()", ["z.mean()"]),
        ("loss = z.mean() + (loss - y.mean())", ["y.mean()", "z.mean()"]),
        ("z = None\nif wanted:\n    z = second_head(hidden)\n    loss = z if loss is None else loss + z", ["z"]),
        ("total = loss + z\ntotal = total * 2\nloss = total + y", ["z", "y"]),
        (BALANCED + "loss = loss + aux * z.mean()", ["aux * z.mean()"]),
        (BALANCED + "aux = aux + z\nloss = loss + aux", ["aux"]),
        ("loss = loss * z.mean()", ["loss = loss * z.mean()"]),
        ("loss *= z.mean()", ["loss *= z.mean()"]),
        ("loss = 1.0 / loss", ["loss = 1.0 / loss"]),
        ("loss = loss.clamp(max=3.0)", ["loss = loss.clamp(max=3.0)"]),
        ("loss = torch.stack([loss, z]).sum()", ["loss = torch.stack([loss, z]).sum()"]),
        ("loss = loss + outputs.aux_loss", ["outputs.aux_loss"]),
        ("loss = loss + self.router_z_loss", ["self.router_z_loss"]),
    ],
)
def test_what_is_a_number_of_one_rank_is_named(code, local):
    terms = terms_of(code)
    assert sorted(terms.local) == sorted(local)
    assert terms.lost is None


@pytest.mark.parametrize(
    "code",
    [
        "loss = None",
        "total = loss * 2\nloss = None",
        "loss = z.mean()",
        "if wanted:\n    loss, z = f(x)",
        "for loss in z:\n    pass",
    ],
)
def test_a_loss_that_is_replaced_is_lost(code):
    assert terms_of(code).lost is not None
