"""Which code runs along the language model's sequence, and how: scans, mixers of other forms, decoders, towers."""

from __future__ import annotations

import pytest
from generation_cases import anatomy_of, applied, edited, load

from patchgen import pipeline
from patchgen.anatomy import Role
from patchgen.anatomy.sequence_operations import sequence_operations
from patchgen.errors import PassMismatch
from patchgen.passes.language_sp import LanguageSP
from patchgen.passes.mixer_sp import MixerSP

SCANS = """
from transformers.integrations import use_kernel_func_from_hub_with_fallback as or_kernel

def by_heads(x, dt, A, B, C, chunk_size, D=None):
    \"\"\"A docstring.\"\"\"
    batch, length, heads, width = x.shape
    decays, padding = A.float() * dt, -length % chunk_size
    return x

def by_channels(u, dt, A, B, C, D=None, z=None):
    batch, channels, length = u.shape
    decays = dt[:, :, :, None] * A[None]
    for i in range(length):
        u = u * decays[:, :, i]
    return u

def step(state, x, dt, A, B, C):
    state.copy_(state * (x * dt))
    for i in range(1):
        pass
    return x

@or_kernel("fused", "mamba_ssm")
def all_at_once(xz, weight, A, D):
    return None

def of_other_names(x, step_size, rate, write, read, size):
    batch, length, heads, width = x.shape
    decays, padding = rate * step_size, -length % size
    return x

def of_another_shape(x, dt, A, B, C, size):
    length, width = x.shape
    decays, padding = A * dt, -length % size
    return x

def of_another_tensor(x, dt, A, B, C, size):
    batch, length, heads, width = B.shape
    decays, padding = A * dt, -length % size
    return x

def elementwise(x, dt, A, B, C, chunk_size):
    batch, length, heads, width = x.shape
    return x * (A * dt)

def nothing(xz, weight, A, D):
    return None
"""


def test_scans_are_read_from_their_bodies():
    assert sequence_operations(anatomy_of(SCANS)) == {
        "by_heads": "state_space_scan",
        "by_channels": "selective_scan",
        "all_at_once": "fused_scan",
        "of_other_names": "state_space_scan",
        "of_another_shape": "unread_scan",
        "of_another_tensor": "unread_scan",
    }


CONVOLUTION = """
def conv(x, weight, bias=None):
    batch, channels, length = x.shape
    return F.conv1d(x.float(), weight.unsqueeze(1), bias, padding=3, groups=channels)[..., :length]
"""


@pytest.mark.parametrize(
    ("edits", "kind"),
    [
        ([], {"conv": "causal_conv1d"}),
        ([("weight", "taps"), ("bias", "offset")], {"conv": "causal_conv1d"}),
        ([("groups=channels", "groups=x.shape[1]")], {"conv": "causal_conv1d"}),
        ([(", groups=channels", "")], {"conv": "unread_scan"}),  # mixes channels
        ([("groups=channels", "groups=length")], {"conv": "unread_scan"}),
        ([("F.conv1d(x.float()", "F.conv1d(bias"), ("(1), bias", "(1), x")], {"conv": "unread_scan"}),
        (
            [("x, weight, bias=None", "x, state, weight, bias=None"), ("    batch", "    state.copy_(x)\n    batch")],
            {},
        ),
    ],
)
def test_a_convolution_is_read_by_what_it_hands_to_torch(edits: list[tuple[str, str]], kind: dict[str, str]):
    text = CONVOLUTION
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    assert sequence_operations(anatomy_of(text)) == kind


MIXER = """
import torch.nn.functional as F
from torch import nn
{scans}
def conv(x, weight, bias=None):
    return F.conv1d(x, weight, bias, groups=x.shape[1])

class Mixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, groups=8)

    def forward(self, x, dt, **kwargs):
        fused = all_at_once(x, self.conv.weight, self.A, self.D)
        if fused is not None:
            return fused
        x = {convolved}
        return {scan}(x, dt, self.A, self.B, self.C)
"""
SERVED = "conv(x, self.conv.weight, self.conv.bias)"


def mixer(convolved: str = SERVED, scan: str = "by_heads") -> str:
    return MIXER.format(scans=SCANS, convolved=convolved, scan=scan)


def test_a_scan_and_its_kernel_are_served_together():
    (hit,) = (outcome := applied(MixerSP(), mixer())).hits
    assert hit.what == "fused_scan and causal_conv1d and state_space_scan"
    assert "return ops.state_space_scan(by_heads, x, dt, self.A" in outcome.module.text
    assert "return ops.selective_scan(by_channels, x, " in applied(MixerSP(), mixer(scan="by_channels")).module.text


@pytest.mark.parametrize("scan", ["of_another_tensor", "of_another_shape"])
def test_a_scan_of_another_form_refuses_slices(scan: str):
    outcome = applied(MixerSP(), mixer(scan=scan))
    assert 'ops.refuse_slices("Mixer")' in outcome.module.text
    assert "ops.causal_conv1d" not in outcome.module.text  # half of a mixer helps nobody


def test_a_convolution_beside_a_served_scan_refuses_slices():
    assert 'ops.refuse_slices("Mixer")' in applied(MixerSP(), mixer("self.conv(x)")).module.text


@pytest.mark.parametrize(
    "body",
    [
        "    for a, b in zip((dt * A).unbind(2), B.unbind(2)):\n        x = a * x + b\n",
        "    i = 0\n    while i < x.shape[2]:\n        x, i = A[i] * x + B[:, i], i + 1\n",
        "    x = (C @ B.mT * torch.exp(A)) @ x\n",
    ],
    ids=["over slices", "while", "quadratic"],
)
def test_a_scan_of_a_form_that_is_not_read_refuses_slices(body: str):
    text = (
        mixer("scan(x, dt, self.A, self.B, self.C)") + f"\n\ndef scan(x, dt, A, B, C, D=None):\n{body}    return x\n"
    )
    assert 'ops.refuse_slices("Mixer")' in applied(MixerSP(), text).module.text


def test_a_mixer_without_any_known_operation_refuses_slices():
    text = mixer("self.conv(x)", "self.recurrence").replace("all_at_once(x, self.conv.weight, self.A, self.D)", "None")
    (hit,) = (outcome := applied(MixerSP(), text)).hits
    assert hit.what == "cannot be divided by heads or channels: refuses sequence slices"
    first = outcome.module.text.split("def forward(self, x, dt, **kwargs):")[1].splitlines()[1:3]
    assert [line.strip() for line in first] == ["# patchgen: mixer_sp", 'ops.refuse_slices("Mixer")']


@pytest.mark.parametrize(
    "made",
    ["nn.Conv1d(8, 8, 3, groups=1)", "nn.Conv1d(8, 8, 3)", "nn.Sequential(nn.Conv1d(8, 8, 3))", "nn.Conv1d(8, 8, 1)"],
)
def test_a_convolution_in_a_layer_refuses_slices_unless_it_is_of_one_token(made: str):
    layer = "        self.self_attn = "
    run = "        residual = hidden_states\n        hidden_states = self.input_layernorm("
    convolved = f"        hidden_states = self.conv(hidden_states.mT)[..., : hidden_states.shape[1]].mT\n{run}"
    source = edited(load("qwen3"), (layer, f"        self.conv = {made}\n{layer}"), (run, convolved))
    text = pipeline.generate(source).text
    assert ('ops.refuse_slices("Qwen3DecoderLayer")' in text) == ("8, 3" in made)


def test_an_ungrouped_convolution_beside_a_served_one_refuses_slices():
    text = mixer().replace("groups=8)", "groups=8)\n        self.pre = nn.Conv1d(8, 8, 3)")
    beside = applied(MixerSP(), text.replace("x = conv(x,", "x = conv(self.pre(x),"))
    assert 'ops.refuse_slices("Mixer")' in beside.module.text
    listed = text.replace("self.pre = nn.Conv1d(8, 8, 3)", "self.pre.append(nn.Conv1d(8, 8, 3))")
    assert 'ops.refuse_slices("Mixer")' in applied(MixerSP(), listed).module.text


MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel

class Rotary(nn.Module):
    def __init__(self, config):
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)

    def forward(self, x, position_ids):
        angles = self.inv_freq * position_ids
        return angles.cos(), angles.sin()

class Time(nn.Module):
    def __init__(self, config):
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)

    def forward(self, time):
        angles = self.inv_freq * time
        return torch.cat([angles.cos(), angles.sin()])

class Conv(nn.Module):
    def __init__(self, config):
        self.conv = nn.Conv1d(8, 8, 3, groups=8)

    def forward(self, x):
        return self.conv(x)

class Stack(nn.Module):
    def __init__(self, config):
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Encoder(PreTrainedModel):
    def __init__(self, config):
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList([Conv(config)])

    def forward(self, {media}, inputs_embeds=None, position_ids=None):
        places = self.rotary(inputs_embeds, position_ids)
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        return inputs_embeds

class Decoder(PreTrainedModel):
    def __init__(self, config):
        self.encoder = Encoder(config)
        self.time = Time(config)
        {built}

    def layer_list(self):
        found = []
        return {returned}

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        t = self.time(self.clock)
        {read}
        {run}
        return inputs_embeds
"""
LOOP = "for layer in self.layers: inputs_embeds = layer(inputs_embeds)"
ROTARY = "self.rotary = Rotary(config); "
READ = "places = self.rotary(inputs_embeds, position_ids)"


def model(
    built: str, run: str = LOOP, returned: str = "nn.ModuleList(found)", media: str = "pixel_values", **more: str
) -> str:
    return MODEL.format(built=built, run=run, returned=returned, media=media, **{"read": READ} | more)


def decoders(text: str) -> list[str]:
    return [info.name for info in anatomy_of(text).with_role(Role.DECODER)]


def test_a_decoder_has_its_layers_from_a_list_a_helper_or_a_stack():
    assert decoders(model("self.layers = nn.ModuleList([Stack(config)])")) == ["Decoder"]
    assert decoders(model("self.layers = self.layer_list()")) == ["Decoder"]
    assert decoders(model("self.layers = self.layer_list()", returned="found")) == []
    stacked = "inputs_embeds = self.high(inputs_embeds)"
    assert decoders(model(f"{ROTARY}self.high = Stack(config)", stacked)) == ["Decoder"]
    assert decoders(model("self.high = Stack(config)", stacked)) == []  # a projector may be a stack, too
    assert decoders(model(f"{ROTARY}self.high = nn.Linear(8, 8)", stacked)) == []


def test_a_model_of_media_is_no_decoder_and_its_positions_are_its_own():
    text = model("self.layers = nn.ModuleList([Stack(config)])")
    assert [hit.site for hit in applied(LanguageSP(), text).hits] == ["Decoder.forward"]
    of_tokens = text.replace("pixel_values, inputs_embeds=None", "input_ids, inputs_embeds=None")
    assert decoders(of_tokens) == ["Encoder", "Decoder"]


def test_mixers_of_a_model_inside_that_takes_no_tokens_are_not_the_language_models():
    text = model("self.layers = nn.ModuleList([Stack(config)])")
    assert not applied(MixerSP(), text).hits
    of_frames = text.replace("pixel_values, inputs_embeds=None, position_ids=None", "frames, mask")
    assert not applied(MixerSP(), of_frames.replace("inputs_embeds, position_ids)", "frames, mask)", 1)).hits
    shared = text.replace("nn.ModuleList([Stack(config)])", "nn.ModuleList([Conv(config)])")
    assert [hit.site for hit in applied(MixerSP(), shared).hits] == ["Conv"]


def test_mixers_beside_a_language_model_of_another_file_are_not_its_own():
    text = model("self.x = Conv(config)", "inputs_embeds = self.x(inputs_embeds)", read="pass")
    text = text.replace("class Decoder(PreTrainedModel)", "class Decoder(PreTrainedModel, GenerationMixin)")
    text = text.replace("import PreTrainedModel", "import AutoModel, GenerationMixin, PreTrainedModel")
    assert [hit.site for hit in applied(MixerSP(), text).hits] == ["Conv"]
    for config, hits in (("config.text_config", []), ("config.vision_config", ["Conv"])):
        elsewhere = text.replace("self.x = Conv", f"self.y = AutoModel.from_config({config}); self.x = Conv")
        assert [hit.site for hit in applied(MixerSP(), elsewhere).hits] == hits


def test_an_embedding_of_times_is_no_sign_of_a_decoder_and_one_of_positions_is():
    run, built = "inputs_embeds = self.language_model(inputs_embeds)", "self.language_model = build(config)"
    assert not applied(LanguageSP(), model(built, run, read="pass")).hits
    for parameters in ("x, places", "position_ids"):
        text = model(ROTARY + built, run).replace(
            "def forward(self, x, position_ids):", f"def forward(self, {parameters}):"
        )
        text = text.replace("self.inv_freq * position_ids", f"self.inv_freq * {parameters.split(', ')[-1]}")
        with pytest.raises(PassMismatch, match="Decoder takes tokens and builds a rotary embedding"):
            applied(LanguageSP(), text)


def test_positions_read_above_the_embeddings_are_those_of_what_is_given():
    above = "position_ids = self.places[: input_ids.shape[1]] if position_ids is None else position_ids"
    text = model("self.layers = nn.ModuleList([Stack(config)])")
    text = text.replace("        if inputs_embeds is None:\n", f"        {above}\n        if inputs_embeds is None:\n")
    wanted = "ops.sequence_position_ids(position_ids, inputs_embeds if input_ids is None else input_ids)"
    assert wanted in applied(LanguageSP(), text).module.text
    with pytest.raises(PassMismatch, match="below the embeddings"):
        applied(LanguageSP(), text.replace("input_ids=None, position_ids", "tokens=None, position_ids"))


SCAN = (
    (
        "    A = A.to(hidden_states.dtype) * dt.float()",
        "    A = torch.mul(A.to(hidden_states.dtype), dt.float())",
    ),
)


def test_a_scan_by_another_product_refuses_slices():
    assert "ops.refuse_slices(" in pipeline.generate(edited(load("nemotron_h"), *SCAN)).text


RULE = """
def rule(query, key, value, g, beta, chunk_size=64):
    {}
    padding = -key.shape[1] % chunk_size
    for i in range(key.shape[1] // chunk_size):
        state = state * g[:, i] + key[:, i] * beta
    return query @ state

class Mixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        return rule(x, x, x, x, x)
"""
TURNED = "query, key, value = [x.transpose(1, 2).float() for x in (query, key, value)]"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (TURNED, "delta_rule"),
        ("query, key, value = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))", "delta_rule"),
        ("batch, heads, length, width = key.shape", "unread_scan"),  # handed heads first
        (TURNED.replace("1, 2", "2, 3"), "unread_scan"),
        (
            TURNED.replace("(query, key, value)", "(query, key)").replace("query, key, value =", "query, key ="),
            "unread_scan",
        ),
    ],
)
def test_a_delta_rule_is_served_if_it_takes_tokens_first(body: str, kind: str):
    """Handed heads first, a rank would be given some tokens of all heads for all tokens of some."""
    assert sequence_operations(anatomy_of(RULE.format(body))) == {"rule": kind}
    renamed = RULE.format(body).replace("beta", "rate").replace("chunk_size", "size")
    assert sequence_operations(anatomy_of(renamed)) == {"rule": kind}
    for counted in ("for i in key:", "for i in [range][0](9):"):  # by the names of its parameters it would be one
        by_name = RULE.format(body).replace("for i in range(key.shape[1] // chunk_size):", counted)
        assert sequence_operations(anatomy_of(by_name)) == {"rule": "unread_scan"}
    written = applied(MixerSP(), RULE.format(body)).module.text
    assert ("ops.delta_rule(rule, " in written) == (kind == "delta_rule")
    assert ('ops.refuse_slices("Mixer")' in written) == (kind != "delta_rule")


@pytest.mark.parametrize(
    ("code", "noted"),
    [
        ("((x @ x.mT).softmax(-1)) @ x", True),
        ("torch.matmul(torch.softmax(torch.matmul(x, x.mT), -1), x)", True),
        ("torch.matmul(x.softmax(-1), x)", False),  # gates, which weigh no scores
        ("torch.matmul(softmax(torch.matmul(x, x.mT)), x)", False),  # which is the file's own
    ],
)
def test_attention_written_by_hand_is_noted_by_what_it_computes(code: str, noted: bool):
    own = "def softmax(x):\n    return x\n"
    text = (
        f"from torch import nn\n\n{own}\nclass Pools(nn.Module):\n    def forward(self, x):\n        return {code}\n"
    )
    notes = applied(MixerSP(), text).notes
    assert bool(notes) is noted and all(note.startswith("Pools: hand-written softmax(q k) v") for note in notes)
