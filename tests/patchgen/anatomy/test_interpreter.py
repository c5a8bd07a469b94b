"""What the interpreter makes of each operation, and what it leaves unread: one wrong step would be a wrong model."""

from __future__ import annotations

import ast
import textwrap

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.interpreter import Interpreter
from patchgen.anatomy.operations import operation
from patchgen.errors import Missed

FILE = """
import torch
from torch import nn
from torch.nn import functional as F

def product(left, right):
    return left * right

def twice(x, factor=2):
    return x * x

def deep(x, n):
    return deeper(x, n)

def deeper(x, n):
    return deepest(n, x)

def deepest(n, x):
    return last(x)

def last(x):
    return again(x)

def again(x):
    return x * x

def reads_a_weight(x, number):
    return F.linear(x, number)

class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n = config.n
        self.w = nn.Parameter(torch.empty(self.n, 8, 8))
        self.b = nn.Parameter(torch.empty(self.n, 8))
        self.act = nn.SiLU()
        self.parts = nn.ModuleList([nn.Linear(8, 8) for _ in range(self.n)])

    def squared(self, x):
        return x * x

    def gate(self, up):
        return up * up

    def of(self, x, *, by):
        return x * by

    def mask_of(self, chosen):
        return F.one_hot(chosen, self.n)

    def forward(self, x, index, weights):
        for e in range(self.n):
            pass
"""
ANATOMY = anatomy_of(FILE)
FORWARD = ANATOMY.classes["Experts"].methods["forward"]
X, CHOICE, W = ("value", "x"), ("value", "index"), ("value", "weights")
ABOVE = """
mask = F.one_hot(index, num_classes=self.n)
p = mask.permute(2, 1, 0)
hits = p.sum(dim=(-1, -2)).nonzero()
slots, tokens = torch.where(p[e])
up = F.linear(x, self.w[e])
"""
UP = ("linear", X, "w", None, False)
SELECTED = ("tuple", (("slots", CHOICE), ("tokens", CHOICE)))
HALVES = ("tuple", (("half", UP, 0), ("half", UP, 1)))
READ = {
    "F.one_hot(index, self.n)": ("mask", CHOICE, "tke"),
    "F.one_hot(index, num_classes=self.n + 1)": ("mask", CHOICE, "tke"),
    "nn.functional.one_hot(num_classes=self.n, tensor=index)": ("mask", CHOICE, "tke"),
    "self.mask_of(index)": ("mask", CHOICE, "tke"),
    "mask.permute(2, 1, 0)": ("mask", CHOICE, "ekt"),
    "mask.permute((2, 0, 1))": ("mask", CHOICE, "etk"),
    "mask.permute(-1, -2, -3)": ("mask", CHOICE, "ekt"),
    "p.permute(2, 1, 0)": ("mask", CHOICE, "tke"),
    "torch.permute(mask, (1, 0, 2))": ("mask", CHOICE, "kte"),
    "p.sum((1, 2))": ("count_of", CHOICE),
    "mask.sum(dim=(0, 1))": ("count_of", CHOICE),
    "torch.sum(p, (-1, -2))": ("count_of", CHOICE),
    "p.sum((1, 2)) > 0": ("hit", CHOICE),
    "torch.greater(p.sum((1, 2)), 0)": ("hit", CHOICE),
    "p.sum((1, 2)).gt(0)": ("hit", CHOICE),
    "torch.greater(p.sum((1, 2)), 0).nonzero()": ("hits", CHOICE),
    "torch.nonzero(p.sum((1, 2)))": ("hits", CHOICE),
    "torch.nonzero(p.sum((1, 2)), as_tuple=False)": ("hits", CHOICE),
    "hits.squeeze(-1)": ("hits", CHOICE),
    "hits.squeeze(1)": ("hits", CHOICE),
    "torch.where(p[e])": SELECTED,
    "torch.where(p[e].squeeze(0))": SELECTED,
    "p[e].nonzero(as_tuple=True)": SELECTED,
    "torch.where(index == e)": ("tuple", SELECTED[1][::-1]),
    "index == e": ("chosen", CHOICE, "tk"),
    "(index == e).any()": ("occupied",),
    "not (index == e).any()": ("empty",),
    "e == self.n": ("nobody",),
    "int(e)": ("number",),
    "e.item()": ("number",),
    "e[0]": ("number",),
    "range(self.n)": ("range",),
    "x[tokens]": ("rows", X, CHOICE),
    "x[None, tokens]": ("rows", X, CHOICE),
    "x[tokens].reshape(-1, x.shape[-1])": ("rows", X, CHOICE),
    "x[tokens].view(-1, x.size(1)).contiguous()": ("rows", X, CHOICE),
    "weights[tokens, slots]": ("weights", W, CHOICE),
    "weights[tokens, slots, None]": ("routing", W, CHOICE),
    "weights[tokens, slots][:, None]": ("routing", W, CHOICE),
    "weights[tokens, slots].unsqueeze(-1)": ("routing", W, CHOICE),
    "torch.unsqueeze(weights[tokens, slots], dim=1)": ("routing", W, CHOICE),
    "weights[tokens, slots].view(-1, 1)": ("routing", W, CHOICE),
    "x.shape[1]": ("size", X, 1),
    "tokens.shape[0]": ("number of tokens",),
    "tokens.size(0)": ("number of tokens",),
    "tokens.numel()": ("number of tokens",),
    "tokens.numel() == 0": ("empty",),
    "tokens.shape[0] > 0": ("occupied",),
    "F.linear(x, self.w[e])": UP,
    "F.linear(weight=self.w[e], input=x)": UP,
    "F.linear(x, self.w[e], bias=None)": UP,
    "F.linear(x, self.w[e], self.b[e])": ("linear", X, "w", "b", False),
    "F.linear(x, self.w[e]) + self.b[e]": ("linear", X, "w", "b", False),
    "x @ self.w[e]": ("linear", X, "w", None, True),
    "torch.matmul(x, self.w[e]) + self.b[e]": ("linear", X, "w", "b", True),
    "x.mm(self.w[e])": ("linear", X, "w", None, True),
    "up.chunk(2, dim=-1)": HALVES,
    "torch.chunk(up, 2, -1)": HALVES,
    "self.act(up)": ("call", "act", UP),
    "self.act(input=up)": ("call", "act", UP),
    "self.gate(up)": ("call", "gate", UP),
    "self.squared(x)": ("mul", X, X),
    "index * x": ("mul", CHOICE, X),
    "x.mul(other=index)": ("mul", CHOICE, X),
    "torch.multiply(x, index)": ("mul", CHOICE, X),
    "product(x, right=index)": ("mul", CHOICE, X),
    "deeper(x, index)": ("mul", X, X),
    "self.parts[e](x)": ("expert", X),
    "(x * x).to(x.dtype)": ("cast", ("mul", X, X)),
    "(x * x).type(torch.float32)": ("cast", ("mul", X, X)),
    "torch.zeros_like(x)": ("zeros", ("dtype", X)),
    "torch.zeros_like(x, dtype=torch.float32)": ("zeros", ("library", "torch.float32")),
    "torch.zeros(8, 8, dtype=x.dtype, device=x.device)": ("zeros", ("dtype", X)),
    "torch.zeros((8, 8))": ("zeros", None),
    "-1": ("const", -1),
}  # fmt: skip
UNREAD = (
    "F.one_hot(index)", "F.one_hot(index, 8)", "F.one_hot(mask, self.n)", "F.one_hot(index, self.n + 2)", "F.one_hot(index, e)",
    "one_hot(index, self.n)", "index.one_hot(self.n)",
    "mask.permute(2, 1)", "mask.permute(2, 2, 0)", "x.permute(2, 1, 0)", "mask.permute(2, 1, e)",
    "p.sum((0, 1))", "mask.sum((1, 2))", "p.sum(0)", "p.sum()", "x.sum((0, 1))", "p.sum((1, 2), True)",
    "p.sum((1, 2)) >= 0", "p.sum((1, 2)) > 1", "p.sum((1, 2)).gt(1)", "0 < p.sum((1, 2)) > 0", "p.sum((1, 2)) == 0", "p > 0",
    "p.sum((1, e))", "p.sum(dim=(1, 2, e))", "p.sum((1, x))", "p.sum((True, 2))", "p.permute(0, 1, 2, e)", "p.permute((0, e, 2))",
    "p.sum((1, 2)).nonzero(as_tuple=x)", "p.sum((1, 2)).nonzero(as_tuple=0)", "p[e].nonzero(as_tuple=1)", "p[e].nonzero(as_tuple=e)",
    "p.nonzero()", "p[e].nonzero()", "hits.squeeze(0)", "p[e].squeeze(1)", "hits.squeeze()", "x.squeeze(0)", "hits.nonzero()",
    "torch.where(mask[e])", "torch.where(p[0])", "torch.where(p)", "p[e].where()", "torch.where(p[e], x, x)",
    "index != e", "e == index", "x.any()", "p.any()", "e != self.n", "e == 8", "not x", "e[1]", "x.item()", "float(e)",
    "range(8)", "torch.range(self.n)", "range(self.n, 2)", "range(e)", "tokens.size(1)[0]",
    "x[slots]", "x[0, tokens]", "x[tokens, 0]", "x[e]", "mask[tokens]", "x[tokens].reshape(-1, 8)", "x[tokens].reshape(1, x.shape[1])",
    "x.reshape(-1, x.shape[1])", "x[tokens].reshape(-1)", "x[tokens].T",
    "weights[slots, tokens]", "weights[tokens, slots, 0]", "weights[tokens, slots, None, None]", "weights[tokens, slots][None]",
    "weights[tokens, slots].unsqueeze(0)", "weights[tokens, slots].view(1, -1)", "x.unsqueeze(1)", "weights[tokens, slots][:, 0]",
    "tokens.shape[0] < 0", "tokens.numel() > 1", "tokens.numel() == 1", "x.numel()", "x.shape[1] == 0",
    "F.linear(self.w[e], x)", "F.linear(x, self.w[0])", "F.linear(x, self.w[e], x)", "F.linear(x)", "F.linear(x, self.w[tokens])",
    "linear(x, self.w[e])", "x.linear(self.w[e])", "F.linear(x, self.w[e], scale=x)",
    "self.w[e] @ x", "x @ x", "x + x", "self.b[e] + x @ self.w[e]", "up + self.b[e] + self.b[e]", "x - x", "up + 1", "x ** x",
    "up.chunk(2)", "up.chunk(3, dim=-1)", "up.chunk(2, dim=1)", "x.chunk(2, dim=-1)", "up.split(2, dim=-1)",
    "self.act(up, x)", "self.act()", "self.gate(up, up)", "self.squared()", "self.of(x, x)", "self.of(by=x, x=index)", "other.act(up)",
    "self.parts(x)", "self.parts[0](x)", "self.parts[e](x, x)", "self.parts[e](input=x)", "self.w[e](x)", "x(index)", "self.act[e](x)",
    "product(x)", "product(x, index, x)", "product(x, left=index)", "twice(x)", "deep(x, index)", "product(*x)",
    "reads_a_weight(x, self)", "x.to(x.dtype)", "up.to(x.dtype)", "(x * x).to(e)", "(x * x).to(torch.float32, True)",
    "torch.zeros_like(x, x)", "torch.ones_like(x)", "x.zeros_like()", "-x", "+1", "unknown", "[x]", "lambda: x", "x.data", "x if e else x",
    "x[::2]", "x[1:]",
)  # fmt: skip


def interpreter(above: str = ABOVE) -> Interpreter:
    values = {"x": X, "index": CHOICE, "weights": W}
    made = Interpreter(ANATOMY, "Experts", FORWARD, values, frozenset({"self.n"}), "parts")
    made.values["e"] = ("number",)
    made.run(ast.parse(above).body)
    return made


def run(code: str):
    return interpreter().run(ast.parse(textwrap.dedent(code)).body)


@pytest.mark.parametrize("code", READ)
def test_an_operation_is_read(code: str):
    assert run(f"return {code}") == READ[code]


@pytest.mark.parametrize("code", UNREAD)
def test_an_operation_is_left_unread(code: str):
    with pytest.raises(Missed):
        run(f"return {code}")


STATEMENTS = {
    "gate, y = up.chunk(2, -1)\nreturn gate": ("half", UP, 0),
    "y: torch.Tensor = x * x\nreturn y": ("mul", X, X),
    "'words'\nreturn x": X,
    "with torch.no_grad():\n    m = F.one_hot(index, self.n)\nreturn m": ("mask", CHOICE, "tke"),
    "with torch.no_grad():\n    a, b = torch.where(p[e])\nreturn b": ("tokens", CHOICE),
    "if tokens.numel() == 0:\n    continue\nreturn x": X,
    "if e == self.n:\n    continue\nreturn x": X,
    "y = x\nif tokens.numel() > 0:\n    y = x * x": None,
}
UNREAD_STATEMENTS = (
    "return x\ny = x", "y = z = x\nreturn x", "x += x\nreturn x", "x *= 2\nreturn x", "x: int\nreturn x", "del x\nreturn x",
    "self.y = x\nreturn x", "y, z = x\nreturn x", "y, z, u = up.chunk(2, -1)\nreturn y", "self = x\nreturn x", "x.clamp_(0)\nreturn x",
    "x[0] = x\nreturn x", "print(x)\nreturn x", "x\nreturn x", "for a in x:\n    pass\nreturn x",
    "with torch.no_grad():\n    y = x * x\nreturn x", "with torch.enable_grad():\n    m = p\nreturn x", "with torch.no_grad(), a:\n    m = p\nreturn x",
    "with torch.no_grad(x):\n    m = p\nreturn x",
    "if tokens.numel() == 0:\n    continue\nelse:\n    y = x\nreturn x", "if tokens.numel() > 0:\n    continue\nreturn x",
    "if tokens.numel() == 0:\n    y = x\n    continue\nreturn x", "if tokens.numel() > 0:\n    y = x\nreturn x", "if (x * x) == 0:\n    continue\nreturn x",
    "if tokens.numel() == 0:\n    break\nreturn x",
)  # fmt: skip


@pytest.mark.parametrize("code", STATEMENTS)
def test_statements_are_read(code: str):
    assert run(code) == STATEMENTS[code]


@pytest.mark.parametrize("code", UNREAD_STATEMENTS)
def test_statements_are_left_unread(code: str):
    with pytest.raises(Missed):
        run(code)


ADDED = ("mul", ("routing", W, CHOICE), ("rows", X, CHOICE))
BODY = "slots, tokens = torch.where(p[e])\ny = x[tokens] * weights[tokens, slots, None]\n"
ABOVE_LOOP = "total = torch.zeros_like(x)\nmask = F.one_hot(index, num_classes=self.n)\np = mask.permute(2, 1, 0)\nhits = p.sum((1, 2)).nonzero()"
LOOPS = {
    "for e in hits": BODY + "total.index_add_(0, tokens, y)",
    "for e in range(self.n)": BODY + "total.index_add_(0, tokens, y.to(total.dtype))",
    "for e in hits.squeeze(-1)": BODY + "total.index_add_(dim=0, index=tokens, source=y)",
    "for e, part in enumerate(self.parts)": BODY + "total[tokens] += y",
    "for (e) in hits": BODY + "total = total.index_add(0, tokens, y)",
}
UNREAD_LOOPS = (
    ("for e in hits", BODY), ("for e in hits", BODY + "total.index_add_(1, tokens, y)"), ("for e in hits", BODY + "total.index_add_(0, slots, y)"),
    ("for e in hits", BODY + "x.index_add_(0, tokens, y)"), ("for e in hits", BODY + "total.index_add_(0, tokens, y)\nz = x"),
    ("for e in hits", BODY + "total.index_add(0, tokens, y)"), ("for e in hits", BODY + "y = total.index_add(0, tokens, y)"),
    ("for e in hits", BODY + "total.index_add_(0, tokens, y, alpha=2)"), ("for e in hits", BODY + "total.index_copy_(0, tokens, y)"),
    ("for e in hits", BODY + "x = y\ntotal.index_add_(0, tokens, y)"), ("for e in hits", BODY + "mask = p\ntotal.index_add_(0, tokens, y)"),
    ("for e in mask", BODY + "total.index_add_(0, tokens, y)"), ("for e, part in hits", BODY + "total.index_add_(0, tokens, y)"),
    ("for e, part in enumerate(self.others)", BODY + "total.index_add_(0, tokens, y)"), ("for self.e in hits", BODY + "total.index_add_(0, tokens, y)"),
    ("for e, part in zip(self.parts)", BODY + "total.index_add_(0, tokens, y)"),
    ("for e, part in enumerate(self.parts, 1)", BODY + "total.index_add_(0, tokens, y)"),
    ("for e in hits", BODY.replace("p[e]", "weights == e") + "total.index_add_(0, tokens, y)"),
    ("for e in hits", BODY + "total[slots] += y"), ("for e in hits", BODY + "total[tokens] -= y"), ("for e in hits", BODY + "total += y"),
)  # fmt: skip


def loop(header: str, body: str):
    made = interpreter(ABOVE_LOOP)
    return made.loop(ast.parse(f"{header}:\n{textwrap.indent(body, '    ')}").body[0])


@pytest.mark.parametrize("header", LOOPS)
def test_a_loop_adds_the_rows_of_each_expert(header: str):
    assert loop(header, LOOPS[header]) == ("total", ADDED)


@pytest.mark.parametrize(("header", "body"), UNREAD_LOOPS)
def test_another_loop_is_unread(header: str, body: str):
    with pytest.raises(Missed):
        loop(header, body)


def test_a_loop_with_an_else_is_unread():
    made = interpreter(ABOVE_LOOP)
    with pytest.raises(Missed):
        made.loop(
            ast.parse(f"for e in hits:\n{textwrap.indent(LOOPS['for e in hits'], '    ')}\nelse:\n    pass").body[0]
        )


def test_numbers_of_axes_are_those_that_are_known():
    outputs, mask = ("outputs", ("value", "x")), ("mask", ("value", "selected"), "tke")
    assert operation("cat", outputs, ("const", 0)) == outputs
    assert operation("cat", outputs, ("const", 1)) is None
    assert operation("permute", mask, (("const", 2), ("const", 1), ("const", 0))) == (*mask[:2], "ekt")
    assert operation("permute", mask, (("const", 2), ("const", 1), ("const", None))) is None
