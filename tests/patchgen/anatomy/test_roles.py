"""The role of a class, by what its code does; the same class with one thing changed has none."""

from __future__ import annotations

import pytest
from role_cases import MODEL, OWN, forward, roles

from patchgen.anatomy.roles import Role

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


@pytest.mark.parametrize("kept", ["nn.Buffer", "self.register_buffer"])
def test_a_buffer_read_by_a_computed_name_is_one_of_either_kind(kept: str):
    lines = [line for line in BUFFERS.splitlines() if "ffer(" not in line or kept in line]
    turned = forward("f = getattr(self, f'{x.kind}_theta') * x", "return f.cos(), f.sin()")
    assert len(lines) < len(BUFFERS.splitlines())
    assert Role.ROTARY in roles("\n".join(lines) + "\n" + turned)


PROJECTIONS = "def __init__(self):\n    self.q_proj = nn.Linear(8, 8)\n    self.soft = nn.Softmax(-1)\n"
WRITTEN = "hand-written softmax(q k) v"
SCORES = "def scores(self, q, k):\n    return torch.einsum('', q, k)\n"
GIVES = "def __init__(self):\n    self.part = {}()\n"
GATES = "class Gates(nn.Module):\n    def forward(self, x):\n        return x.softmax(-1)\n"
GATES += "class Scores(nn.Module):\n    def forward(self, x):\n        return x @ x.mT\n"
GATES += "class Drops(nn.Module):\n    def forward(self, x):\n        return F.dropout(x, 0.1)\n"
GATES += "class Split(nn.Module):\n    def forward(self, mask, scale, q, k):\n        return q @ k.mT\n"
SPLIT = GIVES.format("Split")
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
        (forward("s = x @ x", "w = torch.exp(s - s.amax(-1, True))", "return (w / w.sum(-1, True)) @ x"), WRITTEN),
        (forward("s = x @ x", "return (s - torch.logsumexp(s, -1, True)).exp() @ x"), WRITTEN),
        (forward("return nn.functional.log_softmax(x @ x, -1).exp() @ x"), WRITTEN),
        (PROJECTIONS + forward("return torch.exp(x) @ x"), None),  # of no product
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
        (forward("for q in x.split(1):", "    x = (q @ q.mT).softmax(-1) @ q", "return x"), WRITTEN),
        (forward("def weigh(q):", "    return (q @ x).softmax(-1) @ x", "return weigh(x)"), WRITTEN),
        (SPLIT + forward("return self.part(None, 1, x, x).softmax(-1) @ x"), WRITTEN),
        (SPLIT + forward("return self.part(q=x, k=x, mask=None, scale=1).softmax(-1) @ x"), WRITTEN),
        (SPLIT + forward("return self.part(k=1, q=x, mask=x, scale=x).softmax(-1) @ x"), None),
        (SPLIT + forward("a = (None, 1, x, x)", "return self.part(*a).softmax(-1) @ x"), WRITTEN),
        (SPLIT + forward("a = {'q': x, 'k': x}", "return self.part(None, 1, **a).softmax(-1) @ x"), WRITTEN),
        (SPLIT + forward("return self.part(*self.table, q=x, k=1).softmax(-1) @ x"), None),
        (SCORES + forward("return self.scores(*(x, x)).softmax(-1) @ x"), WRITTEN),
        (
            SCORES.replace("q, k)", "*qk)", 1).replace("q, k)", "qk[0], qk[1])")
            + forward("return self.scores(x, x).softmax(-1) @ x"),
            WRITTEN,
        ),
        ("def forward(self, *a):\n    return (a[0] @ a[1]).softmax(-1) @ a[2]\n", WRITTEN),
        ("def forward(self, **a):\n    return (a['q'] @ a['k']).softmax(-1) @ a['v']\n", WRITTEN),
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


@pytest.mark.parametrize(
    ("made", "mixes"),
    [
        ("nn.Conv1d(8, 8, 3, groups=8)", "self.conv"),
        ("nn.Conv1d(8, 8, 3, groups=1)", "self.conv"),  # groups decide nothing
        ("nn.Conv1d(8, 8, config.width)", "self.conv"),
        ("nn.Conv1d(8, *sizes, 1)", "self.conv"),
        ("nn.Conv1d(8, 8, **options)", "self.conv"),
        ("nn.Sequential(nn.SiLU(), nn.Conv1d(8, 8, 3))", "self.conv"),
        ("weight_norm(nn.Conv1d(8, 8, 3))", "self.conv"),
        ("Causal(8, 1, 1)", "self.conv"),  # what a subclass makes of these is not read
        ("nn.ModuleList()\n    self.conv.append(nn.Conv1d(8, 8, 3))", "nn.Conv1d(8, 8, 3)"),
        ("nn.Conv1d(8, 8, 1, groups=8)", ""),
        ("nn.Conv1d(8, 8, kernel_size=1)", ""),
        ("nn.Linear(8, 8, 3)", ""),
    ],
)
def test_a_mixer_has_a_convolution_of_more_than_one_token(made: str, mixes: str):
    above = "class Causal(nn.Conv1d):\n    pass\n"
    code = f"def __init__(self, config):\n    self.conv = {made}\n" + forward("return x")
    told = f"mixes along the sequence with the convolution {mixes}" if mixes else None
    assert roles(code, above=above).get(Role.MIXER) == told


def test_a_mixer_calls_torchs_convolution():
    code = forward("return F.conv1d(x, self.taps)")
    assert "F.conv1d" in roles(code, above="import torch.nn.functional as F\n")[Role.MIXER]
    assert Role.MIXER not in roles(code, above="from elsewhere import F\n")


LAYERS = "def __init__(self, config):\n    self.layers = nn.ModuleList([Gated(config)])\n"
LOOP = ("for layer in self.layers:", "    x = layer(x)", "return x")


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
