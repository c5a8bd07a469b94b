"""What is added to a loss: a share of the step's loss, or a number of one rank's tokens."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.loss_terms import LossTerms

BALANCED = "aux = None\nif wanted:\n    aux = ops.router_loss(balance, logits)\n    if labels is not None:\n        "
RESULT = "return CausalLMOutputWithPast(loss=loss, logits=logits)"
HEAD = """
import functools
from dataclasses import dataclass
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

@dataclass
class Fields(ModelOutput):
    loss: float = None
    ce: float = None

class Squares(CausalLMOutputWithPast):
    def __post_init__(self):
        self.loss = self.loss**2

@dataclass
class Described(CausalLMOutputWithPast):
    image_states: float = None

    @property
    def last_image_state(self):
        return self.image_states[-1]

class Tupled(CausalLMOutputWithPast):
    @property
    def to_tuple(self):
        return lambda: (self.loss**2,)

class Initialised(CausalLMOutputWithPast):
    @property
    def __post_init__(self):
        return print

class Set(CausalLMOutputWithPast):
    @property
    def first(self):
        return self.logits[0]

    @first.setter
    def first(self, value):
        self.logits[0] = value

class Squared(CausalLMOutputWithPast):
    @functools.cached_property
    def to_loss(self):
        return self.loss**2

def SquaredOutput(loss, **kwargs):
    return CausalLMOutputWithPast(loss=loss**2, **kwargs)

class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.coefficient = config.router_aux_loss_coef
        self.weight = float(getattr(config, "weight", 0.5)) / 2
        self.moving = config.moving
        self.count = config.count
        self.learned = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.ones(()))

    @property
    def spread(self):
        return self.last.std()

    def forward(self, hidden, labels=None, pixels: torch.Tensor | None = None, wanted: bool | None = None, **kwargs):
        outputs = self.model(hidden, **kwargs)
        wanted = wanted if wanted is not None else self.config.wanted
        self.moving = hidden.std()
        setattr(self, "count", hidden.shape[1])
        self.config.step, table = hidden.shape[0], {"config": self.config}
"""


def terms_of(code: str, result: str = RESULT) -> LossTerms:
    lines = "".join(f"        {line}\n" for line in f"{code}\n{result}".splitlines())
    anatomy = anatomy_of(HEAD + "        loss = self.loss_function(logits, labels)\n" + lines)
    forward = anatomy.classes["Head"].methods["forward"]
    below = forward.body[next(i for i, node in enumerate(forward.body) if "loss_function" in ast.unparse(node)) + 1 :]
    return LossTerms(forward, below, "loss", "labels", "Head", anatomy)


@pytest.mark.parametrize(
    "code",
    [
        "",
        BALANCED + "loss += self.coefficient * aux.to(loss.device)",
        BALANCED + "loss = loss + aux * 0.01",
        BALANCED + "total = self.weight * loss + (1 - self.weight) * aux\nloss = total",
        BALANCED.replace("wanted", 'kwargs.get("wanted", False)') + "loss += self.coefficient * aux",
        "loss = loss + self.coefficient * ops.router_loss(balance, logits)",
        "loss = loss * 2.0 / self.config.scale",
        "loss = loss.float() if loss is not None else None",
        "total = loss * 0.5\nloss = loss + total",
        "loss = loss + 0.1 * loss",
        "if loss is not None and labels is not None:\n    scaled = -loss",
        "if self.training and self.config.factor > 0:\n    loss = loss * 2",
        "if not wanted:\n    return (loss,) + outputs[1:] if loss is not None else outputs[1:]",
        "result = (loss, logits)\nif wanted:\n    return result",
        "if wanted:\n    return Fields(loss, ce=loss)",
        "if wanted:\n    return Described(loss, ce=loss)",
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
        ("loss **= 2", ["loss **= 2"]),
        ("loss = 1.0 / loss", ["loss = 1.0 / loss"]),
        ("loss = loss.clamp(max=3.0)", ["loss = loss.clamp(max=3.0)"]),
        ("loss = torch.stack([loss, z]).sum()", ["loss = torch.stack([loss, z]).sum()"]),
        ("loss = loss + outputs.aux_loss", ["outputs.aux_loss"]),
        ("loss = loss + self.router_z_loss", ["self.router_z_loss"]),
        *(
            (f"loss = loss * {factor}", [f"loss = loss * {factor}"])
            for factor in (
                "self.moving",
                "self.count",
                "self.config.step",
                "self.seen",
                "self.learned",
                "self.spread",
                "self.unknown",
                "self.config.scale(hidden)",
                "hidden.shape[1]",
                "labels",
            )
        ),
        ("setattr(self, 'config', outputs)\nloss = loss * self.config.scale", ["loss = loss * self.config.scale"]),
        ("self.config = outputs\nloss = loss * self.config.scale", ["loss = loss * self.config.scale"]),
        (BALANCED + "loss += self.moving * aux", ["self.moving * aux"]),
        *(
            (before + BALANCED.replace("wanted", asked) + "loss = loss + aux", ["aux"])
            for before, asked in (
                ("", 'kwargs.get("mask")'),
                ("", 'outputs.get("wanted", False)'),
                ("kwargs['wanted'] = z.any()\n", 'kwargs.get("wanted", False)'),
                ("grow(kwargs)\n", 'kwargs.get("wanted", False)'),
            )
        ),
        (BALANCED + "aux.mul_(z)\n        loss = loss + aux", ["aux"]),
        (BALANCED + "aux[...] = z\n        loss = loss + aux", ["aux"]),
        (BALANCED + "grow(aux, z)\n        loss = loss + aux", ["aux"]),
        ("aux = None\nif z.any():\n    aux = ops.router_loss(balance, logits)\n    loss = loss + aux", ["aux"]),
        ("if z.mean() > 1:\n    loss = loss * 2", ["if z.mean() > 1:"]),
        ("if pixels is not None:\n    loss = loss * 2", ["if pixels is not None:"]),
        ("for _ in z:\n    loss = loss * 2", ["for _ in z:"]),
        ("loss = loss * 2 if z.any() else loss", ["z.any()"]),
        ("loss[...] *= z", ["loss[...] *= z"]),
        ("loss.data = z", ["z"]),
        (BALANCED + "aux *= z\n        loss = loss + aux", ["aux"]),
        ("if wanted:\n    hidden = ops.router_loss(balance, logits)\nloss = loss + hidden", ["hidden"]),
        ("aux, z = f(x)\nif wanted:\n    aux = ops.router_loss(balance, logits)\nloss = loss + aux", ["aux"]),
        (f"if z.any():\n    {RESULT.replace('loss=loss', 'loss=loss * 2')}", ["if z.any():"]),
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
        "loss = z.mean() if loss is not None else None",
        "loss = z.mean().to(loss.device)",
        "pair = (loss, z)\nloss = sum(pair)",
        "total = loss * 2\ntotal = z.mean()",
        "result = CausalLMOutputWithPast(loss=loss)\nresult.loss = z",
        "result = CausalLMOutputWithPast(loss=loss)\nreturn grow(result)",
        "if wanted:\n    return CausalLMOutputWithPast(loss=z)",
        "if wanted:\n    return Fields(loss=z, ce=loss)",
        "if wanted:\n    return (z, loss)",
        "if wanted:\n    return loss",
        "if wanted:\n    return SquaredOutput(loss=loss)",
        *(
            f"if wanted:\n    return {name}(loss=loss)"
            for name in ("Squares", "Tupled", "Initialised", "Set", "Squared")
        ),
        "if wanted:\n    return self.make(loss=loss)",
        "if wanted:\n    return torch.stack((loss, z)).sum()",
        "if wanted:\n    return (loss,) if wanted else (z,)",
        "result = (loss, z)\nif wanted:\n    result = (z, z)\nreturn result",
        "other = loss = z.mean()",
        "if wanted:\n    z = (loss := z.mean())",
    ],
)
def test_a_loss_that_is_replaced_is_lost(code):
    assert terms_of(code).lost is not None
