"""The role of a class, by what its code does; the same class with one thing changed has none."""

from __future__ import annotations

import textwrap

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.roles import Role, left_alone_experts, stack_shapes, unread_experts, unread_heads
from patchgen.source import parse

HEADER = """
import torch
from torch import nn
from transformers import PreTrainedModel, GenerationMixin

class Gated(nn.Module):
    def __init__(self, config):
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))

class Stacked(nn.Module):
    def __init__(self, config):
        self.w1 = nn.Parameter(torch.empty(config.n, 8, 8))
        self.w2 = nn.Parameter(torch.empty((config.n, 8, 8)))

    def forward(self, x, index, weights):
        for e in index:
            x = x + self.w2[e] @ self.w1[e]
        return x
"""


def roles(members: str, bases: str = "nn.Module", above: str = "") -> dict[str, str]:
    body = textwrap.indent(textwrap.dedent(members).strip(), "    ")
    anatomy = anatomy_of(f"{HEADER}\n{above}\nclass Example({bases}):\n{body}\n")
    return anatomy.classes["Example"].roles


def forward(*lines: str, parameters: str = "x") -> str:
    return f"def forward(self, {parameters}):\n" + textwrap.indent("\n".join(lines), "    ")


NORMS = (
    "return x * torch.rsqrt(x.pow(2).mean(-1) + self.eps)",
    "return x / torch.sqrt((x**2).mean(-1))",
    "return x * (x * x).mean(-1) ** -0.5",
    "return x / torch.mean(torch.square(x), -1).pow(0.5)",
    "return x / (torch.pow(x, 2).mean() ** (1 / 2))",
    "return x * torch.pow(x.square().mean(-1), -0.5)",
)
NO_NORMS = (
    "return x * torch.rsqrt((x**3).mean(-1))",
    "return x * torch.rsqrt(x.pow_of(2).sum(-1))",
    "return x * x.square().mean(-1) ** 3",
    "return x * torch.rsqrt((x * y).mean(-1))",
    "return x * torch.rsqrt((x + x).mean(-1))",
)


@pytest.mark.parametrize("code", NORMS)
def test_a_norm_divides_by_the_root_of_a_mean_of_squares(code: str):
    assert Role.NORM in roles(forward(code))
    assert Role.NORM in roles(forward(code, parameters="x, gate"))
    assert Role.NORM not in roles(forward(code, parameters="x, gate, more"))
    assert Role.NORM not in roles("def __init__(self):\n    self.part = Gated()\n" + forward(code))


@pytest.mark.parametrize("code", NO_NORMS)
def test_another_quotient_is_no_norm(code: str):
    assert Role.NORM not in roles(forward(code))


OWN = "def {}(x, *more):\n    return x\n"


@pytest.mark.parametrize("name", ["mean", "rsqrt", "square"])
def test_a_functions_own_namesake_is_no_operation_of_a_norm(name: str):
    """`name(...)` is torch's if it is imported from there, and nothing if this file defines it."""
    code = forward("return x * torch.rsqrt(torch.mean(torch.square(x), -1))").replace(f"torch.{name}(", f"{name}(")
    assert Role.NORM in roles(code, above=f"from torch import {name}")
    assert Role.NORM not in roles(code, above=OWN.format(name))


BUFFERS = """
def __init__(self, config):
    frequencies, self.scale = self.compute(config)
    self.register_buffer("theta", frequencies)
    self.inv_freq = config.inv_freq
    self.local = nn.Buffer(make())
"""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (("f = self.theta * x", "return f.cos(), f.sin()"), True),
        (("f = torch.outer(x, self.local)", "c = torch.cos(f) * self.scale", "return c, torch.sin(f)"), True),
        (("return torch.polar(torch.ones(1), self.theta * x)",), True),
        (("f = getattr(self, f'{x.kind}_theta') * x", "return f.cos(), f.sin()"), True),
        (("t, _ = self.compute(x.config)", "f = t * x", "return f.cos(), f.sin()"), True),
        (("f = self.theta * x", "return torch.cat([f.cos(), f.sin()])"), False),  # of a time: one vector
        (("f = self.theta * x", "return f.cos(), f.cos()"), False),
        (("f = self.theta * x", "return f, f.cos(), x.sin()"), False),
        (("f = self.theta * 2", "return f.cos(), f.sin()"), False),  # the same for all positions
        (("f = self.inv_freq * x", "return f.cos(), f.sin()"), False),  # which is no buffer here
    ],
)
def test_a_rotary_embedding_turns_frequencies_in_a_buffer_into_angles(code: tuple, found: bool):
    assert (Role.ROTARY in roles(BUFFERS + forward(*code))) is found


PROJECTIONS = "def __init__(self):\n    self.q_proj = nn.Linear(8, 8)\n    self.soft = nn.Softmax(-1)\n"
WRITTEN = "hand-written softmax(q k) v"
SCORES = "def scores(self, q, k):\n    return torch.einsum('', q, k)\n"
GIVES = "def __init__(self):\n    self.part = {}()\n"
GATES = "class Gates(nn.Module):\n    def forward(self, x):\n        return x.softmax(-1)\n"
GATES += "class Scores(nn.Module):\n    def forward(self, x):\n        return x @ x.mT\n"
GATES += "class Drops(nn.Module):\n    def forward(self, x):\n        return F.dropout(x, 0.1)\n"
POOLS = "class Pools(nn.Module):\n    def forward(self, x):\n        return (x @ x.mT).softmax(-1) @ x\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (forward("return ALL_ATTENTION_FUNCTIONS[0](x)"), "calls transformers' attention interface"),
        (forward("return F.scaled_dot_product_attention(x)"), "calls torch's scaled_dot_product_attention itself"),
        (forward("return torch.matmul(torch.matmul(x, x).softmax(-1), x)"), WRITTEN),
        (forward("w = torch.bmm(x, x)", "w = nn.functional.softmax(w, -1)", "return w @ self.third(x)"), WRITTEN),
        (PROJECTIONS + forward("w = self.drop(self.soft(x @ x.mT))", "return w @ x"), WRITTEN),
        (SCORES + forward("w = self.scores(x, k=x).softmax(-1)", "return w @ x"), WRITTEN),
        (forward("w = x @ x", "if x.any():", "    w = w + 1", "return w.softmax(-1) @ x"), WRITTEN),
        (PROJECTIONS + forward("return torch.matmul(x, x).softmax(-1)"), None),  # nothing is weighed
        (PROJECTIONS + forward("return torch.matmul(x.softmax(-1), x)"), None),
        (
            PROJECTIONS + forward("w = torch.softmax(x @ self.weight, -1)", "return w @ self.table"),
            None,
        ),  # linear maps
        (PROJECTIONS + forward("w = x @ x", "w = x", "return torch.softmax(w, -1) @ x"), None),
        (PROJECTIONS + forward("w = x @ x", "return (x @ x) * w.softmax(-1).sum()"), None),
        ("def __init__(self):\n    self.pools = Pools()\n" + forward("return self.pools(x) @ x"), None),  # it attends
        (GIVES.format("Scores") + forward("return self.part(x).softmax(-1) @ x"), WRITTEN),
        (GIVES.format("Gates") + forward("return self.part(x @ x) @ x"), None),  # of hidden states, not of scores
        (GIVES.format("Drops") + forward("return self.part((x @ x).softmax(-1)) @ x"), WRITTEN),
        (
            forward("try:", "    w = fast(x)", "except ImportError:", "    w = (x @ x).softmax(-1)", "return w @ x"),
            WRITTEN,
        ),
        (forward("def weigh(q):", "    return (q @ x).softmax(-1) @ x", "return weigh(x)"), WRITTEN),
        (forward("return x"), None),
        ("other = scaled_dot_product_attention()", None),
    ],
)
def test_attention(code: str, reason: str | None):
    assert roles(code, above="import torch.nn.functional as F\n" + POOLS + GATES).get(Role.ATTENTION) == reason


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("return self.down(self.act(self.gate(x)) * self.up(x))", True),
        ("y = self.act(self.gate(x)) * self.up(x)\nreturn y", True),
        ("return self.down(self.act(self.gate(x)) + self.up(x))", False),
        ("return self.down(act(self.gate(x)) * self.up(x))", False),
        ("return self.down(self.act(gate(x)) * self.up(x))", False),
        ("return self.down(self.act(self.gate(x)) * up(x))", False),
        ("return self.down(self.act(x) * self.up(x))", False),
    ],
)
def test_a_gated_mlp_is_a_product(code: str, found: bool):
    assert (Role.MLP in roles(forward(*code.split("\n")))) is found


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


def test_a_mixer_has_a_grouped_convolution():
    convolution = "def __init__(self):\n    self.conv = nn.Conv1d(8, 8, 3, {})\n"
    told = "mixes along the sequence with the depthwise convolution self.conv"
    assert roles(convolution.format("groups=8") + forward("return x"))[Role.MIXER] == told
    assert Role.MIXER not in roles(convolution.format("bias=False") + forward("return x"))
    assert Role.MIXER not in roles(convolution.format("groups=8").replace("Conv1d", "Linear") + forward("return x"))


LAYERS = "def __init__(self, config):\n    self.layers = nn.ModuleList([Gated(config)])\n"
LOOP = ("for layer in self.layers:", "    x = layer(x)", "return x")
MODEL = "PreTrainedModel"


def test_a_decoder_takes_tokens_through_layers():
    told = "takes token ids or embeddings and runs them through self.layers"
    for tokens in ("input_ids", "inputs_embeds"):
        assert roles(LAYERS + forward(*LOOP, parameters=tokens), MODEL)[Role.DECODER] == told
    plain = LAYERS.replace("nn.ModuleList([Gated(config)])", "nn.ModuleList(make())")
    assert Role.DECODER in roles(plain + forward(*LOOP, parameters="input_ids"), MODEL)
    assert Role.DECODER in roles(
        plain + forward("while x:", "    x = self.layers[0](x)", parameters="input_ids"), MODEL
    )
    assert Role.DECODER not in roles(LAYERS + forward(*LOOP, parameters="input_ids"))
    assert Role.DECODER not in roles(LAYERS + forward(*LOOP, parameters="hidden_states"), MODEL)
    assert Role.DECODER not in roles(LAYERS + forward("return self.layers[0](x)", parameters="input_ids"), MODEL)
    other = LAYERS.replace("nn.ModuleList([Gated(config)])", "make()")
    assert Role.DECODER not in roles(other + forward(*LOOP, parameters="input_ids"), MODEL)


def test_a_head_takes_labels_and_generates_or_computes_a_loss():
    loss = forward("return self.loss_function(self.lm_head(x), labels)", parameters="x, labels")
    head = "def __init__(self, config):\n    self.lm_head = nn.Linear(8, config.vocab_size)\n"
    assert roles(loss, "PreTrainedModel, GenerationMixin")[Role.HEAD] == "generates and takes labels"
    assert roles(head + loss, MODEL)[Role.HEAD] == "projects to the vocabulary and computes a loss"
    for code in (loss, head + loss.replace("loss_function", "other"), head + loss.replace("labels", "targets")):
        assert Role.HEAD not in roles(code, MODEL)
    renamed = head.replace("self.lm_head", "rows = config.vocab_size\n    self.lm_head").replace(
        "8, config.vocab_size", "8, rows"
    )
    assert Role.HEAD in roles(renamed + loss, MODEL)
    assert Role.HEAD not in roles(head + loss.replace("self.lm_head(x)", "x"), MODEL)
    size = ("8, config.vocab_size", "config.vocab_width, config.num_labels")
    for old, new in (("vocab_size", "size"), ("nn.Linear", "nn.Embedding"), size):
        assert Role.HEAD not in roles(head.replace(old, new) + loss, MODEL)


USES = (
    "head = self.lm_head\nreturn self.loss_function(head(x), labels)",
    "return self.loss_function(F.linear(x, self.lm_head.weight), labels)",
    "return self.loss_function(self.project(x), labels)",
    "return self.loss_function(getattr(self, 'lm_head')(x), labels)",
    "return self.loss_function(self.get_output_embeddings()(x), labels)",
    "loss = self.loss_function\nreturn loss(self.lm_head(x), labels)",
)
PROJECT = "def project(self, x):\n    return self.once_more(x)\n"
ONCE_MORE = "def once_more(self, x):\n    return self.lm_head(x) if x else self.project(x)\n"


def head_of(layer: str, code: str, above: str = "") -> bool:
    init = f"def __init__(self, config):\n{textwrap.indent(above, '    ')}    self.lm_head = {layer}\n"
    members = init + PROJECT + ONCE_MORE + forward(*code.split("\n"), parameters="x, labels")
    return Role.HEAD in roles(members, MODEL)


@pytest.mark.parametrize("code", USES)
def test_any_use_of_the_projection_makes_a_head(code: str):
    """The alias, the weight alone, a method of the class: what `fused_loss` cannot read it refuses, by the role."""
    assert head_of("nn.Linear(8, config.vocab_size)", code)
    assert not head_of("nn.Linear(8, config.size)", code)
    assert not head_of("nn.Linear(8, config.vocab_size)", "self.lm_head = x\nreturn self.loss_function(x, labels)")


CALLS = "return self.loss_function(self.lm_head(x), labels)"
TO_VOCABULARY = (
    ("nn.Linear(8, config.vocab_size + 0)", ""),
    ("nn.Linear(8, max(8, self.rows))", "self.rows = config.vocab_size\n"),
    ("nn.Linear(8, getattr(config, 'vocab_size'))", ""),
    ("nn.Linear(8, of_text.vocab_size)", "of_text = config.get_text_config()\n"),
    ("nn.Linear(8, self.vocab_size)", ""),  # of which the file says no more
    ("nn.Linear(*sizes)", "sizes = (8, config.vocab_size)\n"),
    ("nn.Sequential(nn.Dropout(0.1), nn.Linear(8, config.vocab_size))", ""),
    ("nn.Sequential(nn.Dropout(0.1), last)", "last = nn.Linear(8, config.vocab_size)\n"),
)
TO_OTHERS = (
    ("nn.Linear(8, config.num_labels + 0)", ""),
    ("nn.Linear(8, self.rows)", "self.rows = config.num_labels\n"),
    ("nn.Linear(8, getattr(config, 'num_labels'))", ""),
    ("nn.Linear(8, rows)", "rows = 8\nrows = rows + 1\n"),
    ("nn.Sequential(nn.Linear(8, config.vocab_size), nn.Linear(config.vocab_size, 8))", ""),
    ("nn.Linear(8, self.vocab_size)", "self.vocab_size = 8\n"),
    ("nn.Sequential()", ""),
    ("head", "head = make()\nlast = nn.Sequential(head)\nhead = nn.Sequential(last)\n"),
)


@pytest.mark.parametrize(("layer", "above"), [*TO_VOCABULARY, *TO_OTHERS])
def test_a_projection_to_the_vocabulary_has_rows_computed_from_its_size(layer: str, above: str):
    assert head_of(layer, CALLS, above) is ((layer, above) in TO_VOCABULARY)
    assert not head_of(layer, "return self.loss_function(x, labels)", above)


def test_a_projection_that_other_code_sets_as_well_makes_a_head():
    head = "def __init__(self, config):\n    self.lm_head = nn.Linear(8, config.vocab_size)\n"
    code = head + forward(CALLS, parameters="x, labels")
    assert Role.HEAD in roles(code, MODEL, "def change(model):\n    model.lm_head = nn.Identity()\n")


def test_fusion_and_towers_by_their_media():
    scatter = forward("return x.masked_scatter(x, pixel_values)", parameters="x, pixel_values")
    assert Role.FUSION in roles(scatter, MODEL)
    assert Role.FUSION not in roles(scatter.replace("pixel_values", "pixels"), MODEL)
    assert Role.FUSION not in roles(scatter.replace("masked_scatter", "add"), MODEL)
    audio = EMBEDS.format("nn.Conv1d(8, 8, 3)") + forward("x = self.stem(input_features)", *LOOP, parameters=SOUND)
    assert roles(audio, MODEL)[Role.AUDIO] == "takes input_features, embeds it with self.stem and runs layers"
    inside = audio.replace("nn.Conv1d(8, 8, 3)", "Patches()")
    assert Role.AUDIO not in roles(inside, MODEL, PATCHES)  # whose chunks are not the tower's
    assert Role.AUDIO in roles(audio.replace("x = self", "for p in input_features:\n        x = self"), MODEL)
    assert Role.VISION not in roles(audio, MODEL)


EMBEDS = "def __init__(self, config):\n    self.conv1 = config.width\n    self.stem = {}\n    self.layers = []\n"
SOUND = "input_features"
PATCHES = """
class Patches(nn.Module):
    def __init__(self):
        self.inner = nn.Conv3d(8, 8, 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.inner(x))
"""


def test_a_vision_tower_makes_patches_of_its_input_by_a_convolution_or_linear_map():
    line = "x = self.stem(x.float())"
    vision = EMBEDS.format("Patches()") + forward(line, *LOOP, parameters="x, grid_thw")
    assert roles(vision, MODEL, PATCHES)[Role.VISION] == "takes grid_thw, embeds it with self.stem and runs layers"
    for made in ("nn.Linear(8, 8)", "nn.Conv2d(8, 8, 3)", "nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())"):
        assert Role.VISION in roles(vision.replace("Patches()", made), MODEL)
    for old, new in (
        ("grid_thw", "grid"),
        ("Patches()", "nn.LayerNorm(8)"),
        (line, "x = self.stem(self.table)"),
        (line, "for layer in self.layers:\n        x = self.stem(layer(x))"),
        (line, "pass"),
        ("for layer in", "if"),
        ("grid_thw", "grid_thw, labels"),
        ("grid_thw", "grid_thw, input_ids"),
    ):
        assert Role.VISION not in roles(vision.replace(old, new), MODEL, PATCHES), new
    assert Role.VISION not in roles(
        vision.replace("stem", "patch_embed").replace("Patches()", "nn.LayerNorm(8)"), MODEL
    )
    assert Role.AUDIO not in roles(vision, MODEL, PATCHES)


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


def test_a_listed_head_without_the_role_is_named():
    text = f"{HEADER}\nclass Head({MODEL}):\n    pass\n"
    told = unread_heads(parse(text), anatomy_of(text, heads=("Head", "NotHere")))
    assert len(told) == 1 and told[0].startswith("upstream lists Head as a head")
    good = f"{HEADER}\nclass Head({MODEL}, GenerationMixin):\n    def forward(self, labels):\n        pass\n"
    assert unread_heads(parse(good), anatomy_of(good, heads=("Head",))) == []


TABLES = "def __init__(self, config):\n    self.keys = nn.Embedding(config.num_experts, 8)"


def test_experts_of_another_kind_are_left_alone_where_a_file_has_no_others():
    def found(members: str, more: str = "") -> dict[str, str]:
        body = textwrap.indent(members, "    ")
        return left_alone_experts(
            anatomy_of(f"import torch\nfrom torch import nn\n\nclass Example(nn.Module):\n{body}\n{more}")
        )

    assert found(TABLES) == {"Example": "reads config.num_experts"}
    beside = "\nclass Block(nn.Module):\n    def __init__(self):\n        self.experts = make()\n"
    assert found(TABLES, beside) == {"Block": "sets self.experts"}  # which says more than an option that is read
    decorated = "\n@use_experts_implementation\nclass Other(nn.Module):\n    pass\n"
    assert found(TABLES, decorated) == {}  # the decorator says that they are of the seam's kind
    router = TABLES.replace("    self.keys", "    self.top = torch.topk(config.num_experts)\n    self.keys")
    assert found(router) == {}
