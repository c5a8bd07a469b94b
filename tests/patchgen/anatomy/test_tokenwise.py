"""Code that treats each token by itself is known by what it does; everything else is named."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy import known
from patchgen.anatomy.tokenwise import mixing, mixing_member, stored_names

FILE = """
import torch
import torch.nn.functional as F
from torch import nn
from ...activations import ACT2FN, get_activation
from ...pytorch_utils import apply_chunking_to_forward
from elsewhere import gelu, Norm

def doubled(x):
    \"\"\"Twice.\"\"\"
    return x * 2

def mixed(x):
    return x - x.mean(0)

def endless(x):
    return endless(x) * 2

class Gate(nn.Module):
    def __init__(self, size, act):
        self.proj = nn.Linear(size, size)
        self.act = act

    def forward(self, x):
        return self.act(self.proj(x))

class Mixer(nn.Module):
    def forward(self, x):
        return x.cumsum(1)

SHAPE = (4, 8)
WIDTH = 8

class Row(nn.Module):
    def __init__(self, size):
        size = size * 2
        size = 2 + size
        self.norm = nn.LayerNorm(size)

    def forward(self, x):
        return self.norm(x)

class Plane(nn.Module):
    def __init__(self, size=8):
        self.norm = nn.LayerNorm(size)

    def forward(self, x):
        return self.norm(x)

class Named(nn.Module):
    def __init__(self, *, size=8):
        self.norm = nn.LayerNorm(size)

    def forward(self, x):
        return self.norm(x)

class Head(nn.Module):
    def __init__(self, config, outside):
        self.proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.plane = nn.LayerNorm((4, 8))
        sizes = (4, 8)
        self.shape = (4, 8)
        self.plane_by_name = nn.LayerNorm(sizes)
        self.plane_by_attribute = nn.LayerNorm(self.shape)
        self.joined_plane = nn.LayerNorm([4] + [8])
        self.module_plane = nn.LayerNorm(SHAPE)
        self.handed_plane = Plane((4, 8))
        self.unpacked_plane = nn.LayerNorm(outside.shape)
        width = config.width * 2
        self.width = (width,)
        self.rows = nn.RMSNorm(width if config.wide else WIDTH, eps=1e-6)
        self.row = nn.LayerNorm(normalized_shape=self.width)
        self.part = config.width
        self.handed_row = Row(self.part * 2)
        self.named_row = Named()
        self.drop = nn.Dropout(0.1)
        self.conv = nn.Conv1d(8, 8, 3)
        self.act = ACT2FN[config.act]
        self.other_act = get_activation("gelu")
        self.silu = nn.SiLU() if config.silu else nn.GELU()
        self.function = F.gelu
        self.own_function = doubled
        self.own_mixed = mixed
        self.gate = Gate(8, nn.Tanh())
        self.mixer = Mixer()
        self.nothing = None
        self.handed = outside
        self.of_config = config.act_fn
        self.table = config.table["a"]
        self.foreign = Norm(8)
        self.either = nn.Linear(8, 8) if config.a else Mixer()
        self.scale = config.scale
        self.power = 2 ** float(config.power) if config.power > 1 else -1
        self.learned = nn.Parameter(torch.ones(8))
        self.matrix = nn.Parameter(torch.ones(8, 8))
        self.filled = nn.Parameter(torch.full((8,), 0.5))
        self.steps = nn.ModuleList([nn.Linear(8, 8), nn.GELU()])
        self.alike = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.odd_alike = nn.ModuleList([Mixer() for _ in range(3)])
        self.odd_steps = nn.ModuleList([nn.Linear(8, 8), Mixer()])

    def twice(self, x):
        return doubled(x) + self.proj(x)

    def sequence(self, x):
        return self.mixer(x)

    def scaled(self, x):
        return x * self.scale

    def weighted(self, x):
        return x * self.learned

    def odd(self, x):
        return x * self.nowhere

    def attended(self, x):
        return x @ x.mT
"""
ANATOMY = anatomy_of(FILE)
ALONE = (
    "y = x.float().to(torch.float32) * 2 + x.pow(2)",
    "y = torch.tanh(x / self.scale) * self.scale",
    "y = F.gelu(x) + torch.special.exp(x)",
    "y = x.mean(-1, keepdim=True) + x.softmax(dim=-1) + torch.logsumexp(x, axis=-1, keepdim=True)",
    "y = x.sum(-1, True) + torch.norm(x, 2, -1, True) + x.norm(dim=-1, keepdim=True) + F.normalize(x, 2, -1) + F.normalize(x, dim=-1)",
    "a, b = torch.chunk(x, 2, -1)\nc, d = x.split(4, -1)\ny = x.var(-1, keepdim=True) + x.softmax(-1) + torch.softmax(input=x, dim=-1)",
    "a, b = x.chunk(2, dim=-1)",
    "y = F.linear(x, self.matrix) + torch.matmul(x, self.matrix) + x @ self.matrix",
    "y = F.linear(x, self.proj.weight).softmax(-1)",
    "y = x[..., :4] + x[:, :, 1:3]",
    "y = x * x.shape[-1]",
    "y = x * x.size(-1)",
    "y = self.proj(self.norm(x)) + self.act(x) + self.other_act(x) + self.silu(x) + self.function(x)",
    "y = self.own_function(x) + self.gate(x) + self.twice(x) + doubled(x) + self.of_config(x)",
    "y = self.nothing(x)",
    "y = self.rows(x) + self.row(x) + self.handed_row(x) + self.named_row(x) + F.layer_norm(x, self.width) + F.layer_norm(x, [8]) + F.layer_norm(x, self.learned.shape[-1:])",
    "y = apply_chunking_to_forward(self.twice, 1, x)",
    "y = endless(x)",
    "x.mul_(2)\nx.clamp_(min=0)",
    "if isinstance(x, Output):\n    y = x * 2",
    "if torch.is_tensor(x):\n    y = x * 2",
    "for step in self.alike:\n    x = step(x)",
    "y = self.alike[0](x) + self.steps[place](x)",
    "if self.scale is not None:\n    y = x / self.scale\nelse:\n    y = x",
    "'words'\ny: Tensor = x\ny += x",
    "if not self.training:\n    y[0] = self.mixer(z)",
    "if not self.training and wanted:\n    with torch.no_grad():\n        x[0:1] = self.mixer(x[0:1])",
    "y = torch.where(x > 0, x, -x).masked_fill(x > 3, 0)",
    "y = other.sum(0) + elsewhere(other)",
    "y = torch.cat((x, x * 2), dim=-1)",
    "if (scale := self.scale) is not None:\n    y = x / scale",
    "for step in self.steps:\n    x = step(x)\ny = x",
    "x[:, :, columns] = 0",
)  # fmt: skip
MIXED = (
    "y = x.mean(0)", "y = x.mean()", "y = x.sum(dim=1)", "y = torch.softmax(x, 0)", "y = x.softmax(dim=1)", "y = x.chunk(2)", "y = x.chunk(2, 1)",
    "y = x.cumsum(-1)", "y = x.roll(1)", "y = torch.flip(x, (-1,))", "y = x.size(1)", "y = x.view(-1)",
    "y = x[0]", "y = x[1:]", "y = x[:, 0]", "y = x[:, 1:, :]", "y = x[..., 0, :]", "y = x[mask]", "y = x[:, :, 0, 0]", "y = x[::2, :, 0]",
    "y = x.shape[0]", "y = x * x.shape[1]", "y = x.shape", "y = x.T", "y = x.mT @ w", "y = self.learned @ x", "y = F.linear(self.learned, x)",
    "y = F.linear(x, self.learned).mean(-1)", "y = (x @ self.learned).softmax(-1)",
    "y = F.linear(x, self.norm.weight).softmax(-1)", "y = F.linear(x, self.filled).softmax(-1)",
    "y = torch.matmul(w, x)", "y = self.conv(x)", "y = self.drop(x)", "y = self.mixer(x)", "y = self.sequence(x)", "y = self.own_mixed(x)", "y = mixed(x)",
    "y = self.foreign(x)", "y = self.either(x)", "y = self.handed(x)", "y = self.table(x)", "y = self.unknown(x)", "y = gelu(x)", "y = unknown(x)", "y = numpy.tanh(x)",
    "y = apply_chunking_to_forward(self.sequence, 1, x)", "y = [t * 2 for t in x]", "y = (lambda t: t)(x)", "y = f(*x)",
    "for step in self.odd_alike:\n    x = step(x)", "y = self.odd_alike[0](x)", "y = self.odd_steps[place](x)", "y = self.act[0](x)",
    "for step in self.odd_steps:\n    x = step(x)", "for step in self.steps:\n    x = step(x)\nelse:\n    x = x.mean(0)",
    "for step in self.steps:\n    x = step(x)\nstep = self.mixer\nx = step(x)",
    "for t in x:\n    y = t", "while x:\n    y = x", "with torch.no_grad():\n    y = x * 2", "print(x)", "y = x * 2\nreturn y.mean(0)",
    "if x.mean(0) > 1:\n    y = x", "if wanted:\n    y = x.mean(0)", "if wanted:\n    y = x\nelse:\n    y = x.mean(0)", "y = x\ny = y.sum(0)",
    "if not self.training:\n    y = x\nelse:\n    y = x.mean(0)", "if not self.training or wanted:\n    y = self.mixer(x)", "if not self.training:\n    y = self.mixer(x)",
    "y = x\nif not self.training:\n    x[0:1] = self.mixer(x[0:1], y)",
    # -1 as another parameter than the dimension, and what follows on a last dimension that is gone
    "y = x / x.norm(-1)", "y = x / x.norm(-1, keepdim=True)", "y = F.normalize(x, -1)", "y = F.normalize(x, -1, 1)", "y = torch.norm(x, -1)", "y = torch.norm(x, p=-1)",
    "y = torch.split(x, -1)", "y = x.chunk(-1)", "y = x.clone().chunk(2, 1, -1)", "y = torch.var(x, 1, -1)", "y = x.std(1, unbiased=-1)", "y = torch.sum(x, 1, -1)",
    "y = x.mean(-1)", "y = x.mean(-1).softmax(-1)", "y = x.sum(-1, False)", "y = x[..., 0].softmax(-1)", "y = x[:, :, 0]", "y = x.var(-1, True)",
    "y = F.linear(input=x, weight=x)", "y = x.matmul(x)", "y = torch.where(x)", "y = F.softmax(x, *where)", "y = F.softmax(x, **where)",
    "y = F.layer_norm(x, x.shape[1:])", "y = F.layer_norm(x, (4, 8))", "y = F.layer_norm(x, normalized_shape=(4, 8))", "y = self.plane(x)",
    "y = F.layer_norm(x, self.shape)", "s = (4, 8)\ny = F.layer_norm(x, s)", "y = F.layer_norm(x, [4] + [8])", "y = F.layer_norm(x, (4,) * 2)",
    "y = self.plane_by_name(x)", "y = self.plane_by_attribute(x)", "y = self.joined_plane(x)", "y = self.module_plane(x)", "y = self.handed_plane(x)",
    "y = self.unpacked_plane(x)",
    "x.cumsum_(0)", "y = x.__len__()", "y = torch.cat((x, x), dim=1)", "y = torch.cat((x, other), dim=-1)", "y = x + x.unsqueeze(-1)", "y = x + x[..., None]", "y = z = x\nz.sum(0)",
)  # fmt: skip


def found(code: str):
    return mixing(ast.parse(code).body, {"x": "*."}, "Head", ANATOMY)


@pytest.mark.parametrize("code", ALONE)
def test_each_token_by_itself(code: str):
    assert found(code) is None


@pytest.mark.parametrize("code", MIXED)
def test_tokens_that_meet_are_named(code: str):
    assert isinstance(found(code), ast.AST)


@pytest.mark.parametrize(
    ("code", "is_apart"),
    [("y = x.view(-1, 32)", True), ("y = x.view(-1, x.shape[0])", False), ("y = x.view(32, -1)", False)],
)
def test_rows_are_put_into_groups_where_that_is_allowed(code: str, is_apart: bool):
    body = ast.parse(code).body
    assert (mixing(body, {"x": "r."}, "Head", ANATOMY, groups=True) is None) is is_apart
    assert mixing(body, {"x": "r."}, "Head", ANATOMY) is not None


@pytest.mark.parametrize(
    ("attribute", "fixed", "reason"),
    [
        ("proj", False, None),
        ("proj", True, "self.proj, which is nn.Linear(8, 8)"),
        ("act", True, None),
        ("silu", True, None),
        ("of_config", True, None),
        ("gate", True, "self.proj, which is nn.Linear(size, size)"),
        ("gate", False, None),
        ("scaled", True, None),
        ("weighted", False, None),
        ("weighted", True, "self.learned"),
        ("odd", True, "self.nowhere"),
        ("attended", False, "x.mT"),
        ("own_mixed", False, "x.mean(0)"),
        ("sequence", False, "x.cumsum(1)"),
        ("unknown", False, "self.unknown, which is not said in the class"),
        ("conv", False, "self.conv, which is nn.Conv1d(8, 8, 3)"),
    ],
)
def test_what_an_attribute_runs_is_named_by_its_innermost_code(attribute: str, fixed: bool, reason: str | None):
    mixed = mixing_member(ANATOMY, "Head", attribute, fixed=fixed)
    assert (ast.unparse(mixed) if isinstance(mixed, ast.AST) else mixed) == reason


def test_names_that_are_stored_or_changed_in_place():
    code = "a = b\nc[0] = d\ne.f.g = h\nfor i in j:\n    pass\ndel k\nl.add_(m)\nn(o.p())\nq = r.s()\ntorch.t_(u)\nv: int = 1\nw += 1"
    found = {"a", "c", "e", "i", "k", "l", "m", "n", "o", "q", "u", "v", "w"}
    assert stored_names(ast.parse(code), {*"abcdefghijklmnopqrstuvw"}) == found
    assert stored_names(ast.parse("F.mul_(2)\nlogger[0] = a"), {"F", "logger", "a"}) == {"F", "logger"}  # by any name


def test_the_axes_of_a_sum_are_those_that_are_known():
    """Of `r&` nothing is known of the last axis, of `r.` it is."""
    added = ast.parse("z = x + y\nz = z.softmax(-1)").body
    assert mixing(added, {"x": "r&", "y": "r."}, "Head", ANATOMY) is None
    assert mixing(added, {"x": "r.", "y": "r&"}, "Head", ANATOMY) is None
    assert mixing(added, {"x": "r&"}, "Head", ANATOMY) is not None


def test_an_operation_whose_rows_meet_another_axis_is_named():
    code = "y = torch.maximum(x, x.transpose(0, 1))"
    named = mixing(ast.parse(code).body, {"x": "r."}, "Head", ANATOMY)
    assert isinstance(named, ast.AST) and ast.unparse(named) == code.removeprefix("y = ")


def test_what_the_caller_knows_gives_rows_as_it_took_them():
    code = ast.parse("y = torch.squeeze(x) + x").body
    assert mixing(code, {"x": "r."}, "Head", ANATOMY, {"torch.squeeze"}) is None


def test_rows_are_joined_where_they_were_cut():
    """A list of whole tensors in a row is more rows than there are."""
    joined = "\ny = torch.cat(parts, dim=0)"
    cut = "parts = []\nfor part in torch.split(x, lengths, dim=0):\n    parts.append(part)"
    loop = "\n    for part_again in torch.split(part, lengths, dim=0):\n        pass"
    one = f"parts = []\nfor part in torch.split(x, lengths, dim=0):{loop}\n    parts.append(part)"
    cases = (
        (cut + joined, False),
        ("parts = []\nparts.append(x)" + joined, True),
        (f"{one}\ny = parts[0] + x", True),  # one piece, whatever the loop has inside
    )
    for code, mixes in cases:
        assert (mixing(ast.parse(code).body, {"x": "r."}, "Head", ANATOMY) is not None) is mixes


@pytest.mark.parametrize(
    "code",
    ["config.act_fn = mixed", "setattr(config, 'act_fn', mixed)", "object.__setattr__(config, 'act_fn', mixed)"],
)
def test_what_code_of_the_file_puts_into_a_config_is_no_callers(code: str):
    anatomy = anatomy_of(f"{FILE}\ndef prepare(config):\n    {code}\n")
    call = ast.parse("y = self.of_config(x)").body
    assert mixing(call, {"x": "*."}, "Head", ANATOMY) is None
    assert mixing(call, {"x": "*."}, "Head", anatomy) is not None


NUMBER = """
class Part(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def change(self, {parameter}):
        self.scale = {parameter}

class Model(nn.Module):
    def __init__(self, config):
        self.part = Part(config.factor)
"""


def test_a_name_of_another_method_is_no_number_of_the_init():
    for parameter, is_number in (("scale: float", True), ("scale", False)):
        name = parameter.partition(":")[0]
        text = NUMBER.replace("{parameter}):", f"{parameter}):").replace("{parameter}", name)
        assert known.is_number(anatomy_of(text), "Part", "scale") is is_number


@pytest.mark.parametrize(
    ("given", "is_number"),
    [
        ("config.factor", True),
        ("self.factor", True),
        ("nn.Parameter(torch.ones(8))", False),
        ("self.learned", False),
        ("config.factor if config.wide else torch.ones(8)", False),
    ],
)
def test_what_a_part_is_made_with_counts_more_than_an_annotation(given: str, is_number: bool):
    text = f"""
class Part(nn.Module):
    def __init__(self, scale: float = 1.0):
        self.scale = scale

class Model(nn.Module):
    def __init__(self, config):
        self.factor = config.factor
        self.learned = nn.Parameter(torch.ones(8))
        self.part = Part({given})
        self.other = Part()
"""
    assert known.is_number(anatomy_of(text), "Part", "scale") is is_number


def test_a_number_that_the_file_stores_in_a_config_is_not_read():
    text = NUMBER.replace("def change(self, {parameter}):\n        self.scale = {parameter}", "")
    assert known.is_number(anatomy_of(text), "Part", "scale")
    assert not known.is_number(
        anatomy_of(f"{text}        config.factor = nn.Parameter(torch.ones(8))"), "Part", "scale"
    )


@pytest.mark.parametrize("code", ["if wide:\n    WIDTH = (4, 8)", "WIDTH = (4, 8)\nWIDTH = 8", "WIDTH += (4,)"])
def test_a_size_of_the_module_is_told_by_its_only_statement(code: str):
    call = ast.parse("y = self.rows(x)").body
    assert mixing(call, {"x": "*."}, "Head", ANATOMY) is None
    assert mixing(call, {"x": "*."}, "Head", anatomy_of(f"{FILE}\n{code}\n")) is not None


@pytest.mark.parametrize(
    ("parameter", "is_number"), [("scale: float = 1.0", True), ("scale=1.0", False), ("scale: torch.Tensor", False)]
)
def test_a_default_tells_nothing_of_what_a_method_is_called_with(parameter: str, is_number: bool):
    text = (
        "class Part(nn.Module):\n    def __init__(self):\n        self.change(nn.Parameter(torch.ones(8)))\n"
        f"    def change(self, {parameter}):\n        self.scale = scale\n"
    )
    assert known.is_number(anatomy_of(text), "Part", "scale") is is_number


@pytest.mark.parametrize(
    ("store", "read", "is_number"),
    [
        ("pass", "getattr(config, 'factor', 1.0)", True),
        ("config.factor = torch.ones(8)", "getattr(config, 'factor', 1.0)", False),
        ("pass", "getattr(config, 'factor', torch.ones(8))", False),
        ("pass", "config['factor']", True),
        ("config['factor'] = torch.ones(8)", "config['factor']", False),
        ("config['factor'] = torch.ones(8)", "config.factor", False),
        ("config.update({'factor': torch.ones(8)})", "config.factor", False),
        ("config.update({'width': torch.ones(8)})", "config.factor", True),
        ("config.update(others)", "config.factor", False),
        ("self.config.update(factor=torch.ones(8))", "config.factor", False),
        ("config.rope['factor'] = torch.ones(8)", "config.rope['factor']", False),
        ("config.rope['factor'] = torch.ones(8)", "config.factor", True),
    ],
)
def test_a_number_of_a_config_is_read_unless_the_file_stores_it_there(store: str, read: str, is_number: bool):
    text = NUMBER.replace("def change(self, {parameter}):\n        self.scale = {parameter}", "")
    text = text.replace("self.part = Part(config.factor)", f"{store}\n        self.part = Part({read})")
    assert known.is_number(anatomy_of(text), "Part", "scale") is is_number
