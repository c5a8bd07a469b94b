"""Routers, experts and the blocks around them, by what their code does; and signs of experts that have no role."""

from __future__ import annotations

import textwrap

import pytest
from generation_cases import anatomy_of
from role_cases import OWN, forward, roles

from patchgen.anatomy.roles import Role, left_alone_experts, stack_shapes, unread_experts

STACKS = (
    "def __init__(self, config):\n    self.w1 = nn.Parameter(torch.empty(config.n, 8, 9))\n"
    "    self.w2 = nn.Parameter(torch.empty([config.n, 9, 8]))\n"
)
SELECTS = forward("for e in index:", "    x = self.w2[e] @ self.w1[e]", "return x", parameters="x, index, weights")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("self.w1[e]", "self.w1[0]"),
        (", weights", ""),
        ("config.n, 8, 9", "config.m, 8, 9"),
        ("config.n, 8, 9", "config.n, 8"),
        ("nn.Parameter(torch.empty(config.n, 8, 9))", "torch.empty(config.n, 8, 9)"),
    ],
)
def test_experts_are_two_stacks_that_a_forward_selects_from(old: str, new: str):
    assert (Role.EXPERTS in roles((STACKS + SELECTS).replace(old, new))) is (old == new)


def test_the_shapes_of_stacks():
    anatomy = anatomy_of(
        f"class Example:\n{textwrap.indent(STACKS, '    ')}        self.b = nn.Parameter(torch.empty(8))\n"
        "        self.w3 = nn.Parameter(torch.empty(config.n, 7, 8), False)\n"
    )
    assert stack_shapes(anatomy, anatomy.classes["Example"]) == {
        "w1": ["config.n", "8", "9"],
        "w2": ["config.n", "9", "8"],
        "w3": ["config.n", "7", "8"],
    }


@pytest.mark.parametrize(
    ("made", "is_stack"),
    [
        ("torch.empty(size=(n, 8, 9))", True),
        ("torch.full((n, 8, 9), 0.5)", True),
        ("torch.full(size=(n, 8, 9), fill_value=0.5)", True),
        ("torch.Tensor(n, 8, 9)", True),
        ("0.02 * torch.randn(n, 8, 9).to(dtype)", True),
        ("nn.init.normal_(torch.empty(n, 8, 9), 0, 1)", True),
        ("torch.empty(n, 72).view(n, 8, 9)", True),
        ("torch.empty(8, n, 9).transpose(0, 1)", True),
        ("make(n, 8, 9)", True),  # code of the file: it may take sizes
        ("torch.linspace(0, 1, n)", False),
        ("torch.arange(0, n, 2)", False),
        ("torch.full((8, 9), 0.5)", False),
        ("torch.empty(8).uniform_(0, 1, generator)", False),
        ("torch.nn.init.uniform_(weight, 0, 1)", False),
    ],
)
def test_a_stack_is_made_by_what_takes_three_sizes(made: str, is_stack: bool):
    body = f"def __init__(self, n):\n    self.w = nn.Parameter({made})\ndef run(self, e):\n    return self.w[e]"
    assert signs(body) == ["Example chooses among the slices of self.w"] * is_stack


@pytest.mark.parametrize(
    "turned", ["transpose(0, 1)", "permute(1, 0, 2)", "clamp(0, 1, 2)", "transpose_(0, 1)", "repeat(2, 1, 1)"]
)
def test_the_sizes_of_a_stack_that_is_turned_are_not_those_that_it_was_made_with(turned: str):
    made = f"torch.empty(2, config.e, 3).{turned}"
    body = f"class Example:\n    def __init__(self):\n        self.w = nn.Parameter({made})\n"
    anatomy = anatomy_of(f"import torch\nfrom torch import nn\n{body}")
    shape = [f"{made}.shape[{axis}]" for axis in range(3)]
    assert stack_shapes(anatomy, anatomy.classes["Example"]) == {"w": shape}


LIST = "def __init__(self, config):\n    self.parts = nn.ModuleList([Gated(config) for _ in range(3)])\n"


def test_routers_blocks_and_lists_of_experts():
    assert roles("def choose(self, x):\n    return torch.topk(x, 2)")[Role.ROUTER] == "choose calls topk"
    assert Role.ROUTER not in roles(forward("return x.sort()"))
    plain = forward("return topk(x, 2)")
    assert Role.ROUTER in roles(plain, above="from torch import topk")
    assert Role.ROUTER not in roles(plain, above=OWN.format("topk"))
    assert Role.ROUTER not in roles(forward("return self.topk(x, 2)"))
    built = "def __init__(self, config):\n    self.experts = {}(config)\n"
    assert roles(built.format("Stacked"))[Role.MOE_BLOCK] == "builds Stacked as self.experts"
    assert Role.MOE_BLOCK not in roles(built.format("Gated"))
    routed = forward("return torch.where(x)")
    told = "builds a list of Gated as self.parts and routes among them"
    assert roles(LIST + routed)[Role.EXPERT_LIST] == told
    assert roles(LIST + forward("return x.topk(2)"))[Role.EXPERT_LIST] == told
    assert roles(LIST + forward("return F.one_hot(x)"))[Role.EXPERT_LIST] == told
    chosen = "class Chooser:\n    def choose(self, x):\n        return x.topk(2)\n"
    assert Role.EXPERT_LIST in roles(LIST + "    self.chooser = Chooser()\n" + forward("return x"), above=chosen)
    for name in ("one_hot", "where"):
        assert Role.EXPERT_LIST not in roles(LIST + forward(f"return {name}(x)"), above=OWN.format(name))
    for other in (
        LIST + forward("return x"),
        LIST.replace("Gated", "Stacked") + routed,
        LIST + routed.replace("forward", "run"),
    ):
        assert Role.EXPERT_LIST not in roles(other)
    assert Role.EXPERT_LIST not in roles(
        LIST.replace("nn.ModuleList([Gated(config) for _ in range(3)])", "Gated(config)") + routed
    )


def signs(members: str, decorator: str = "") -> list[str]:
    body = textwrap.indent(members.strip(), "    ")
    text = f"import torch\nfrom torch import nn\n{decorator}\nclass Example(nn.Module):\n{body}\n"
    return unread_experts(anatomy_of(text))


@pytest.mark.parametrize(
    ("members", "told"),
    [
        (STACKS.replace("config.n", "config.num_experts"), "has the stacked weights w1, w2, and its forward is no loop over them"),
        (STACKS + "def run(self, e):\n    return self.w1[e]", "chooses among the slices of self.w1"),
        ("def __init__(self):\n    self.experts = make()", "sets self.experts"),
        ("def __init__(self):\n    self.local_experts = make()", "sets self.local_experts"),
        ("def __init__(self):\n    self.many = nn.ModuleList(make())\ndef run(self, x):\n    for part in self.many:\n        x.index_add_(0, part)", "adds up what modules of self.many make of chosen rows"),
        ("def __init__(self, config):\n    self.n = config.expert_count", "reads config.expert_count"),
    ],
)  # fmt: skip
def test_signs_of_experts_that_no_role_names(members: str, told: str):
    assert f"Example {told}" in signs(members)


@pytest.mark.parametrize(
    "members",
    [
        STACKS,
        STACKS.replace("config.n", "shared_experts"),
        STACKS + "def run(self, e):\n    return self.w1[0] + self.w2[1:2] + self.w1[0, e]",
        "def __init__(self):\n    self.many = nn.ModuleList(make())\ndef run(self, x):\n    for part in self.many:\n        x.add_(0, part)",
        "def __init__(self):\n    self.many = nn.ModuleList(make())\ndef run(self, x):\n    for part in self.others:\n        x.index_add_(0, part)",
        "def __init__(self, expert):\n    self.n = expert.count",
        "pass",
    ],
)  # fmt: skip
def test_what_is_no_sign_of_experts(members: str):
    assert signs(members) == []


def test_a_decorated_class_is_a_sign():
    assert signs("pass", "@use_experts_implementation") == ["Example is decorated with use_experts_implementation"]
    assert signs("pass", "@other") == []


TABLES = "def __init__(self, config):\n    self.keys = nn.Embedding(config.num_experts, 8)"


def test_experts_of_another_kind_are_left_alone():
    def found(members: str, more: str = "") -> dict[str, str]:
        body = textwrap.indent(members, "    ")
        return left_alone_experts(
            anatomy_of(f"import torch\nfrom torch import nn\n\nclass Example(nn.Module):\n{body}\n{more}")
        )

    assert found(TABLES) == {"Example": "reads config.num_experts"}
    beside = "\nclass Block(nn.Module):\n    def __init__(self):\n        self.experts = make()\n"
    assert found(TABLES, beside) == {"Block": "sets self.experts"}  # which says more than an option that is read
    router = TABLES.replace("    self.keys", "    self.top = torch.topk(config.num_experts)\n    self.keys")
    assert found(router) == {"Example": "reads config.num_experts"}
