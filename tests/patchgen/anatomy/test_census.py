"""The census of a file: what lies on the way to the loss is in a pass, or named with a reason."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from generation_cases import anatomy_of, edited, load
from planted_code import PLACES, PLANTS, planted
from typer.testing import CliRunner

from patchgen import pipeline, source
from patchgen.anatomy import study
from patchgen.anatomy.census import census, summary
from patchgen.anatomy.roles import Role
from patchgen.cli import app


def census_of(model: str, *edits: tuple[str, str], config=None) -> dict[str, str]:
    origin = edited(load(model), *edits) if edits else load(model)
    return json.loads(pipeline.generate(origin, config).provenance)["census"]


def test_every_part_of_a_model_is_in_a_pass_or_has_a_reason():
    found = census_of("qwen3_moe")
    assert found["Qwen3MoeExperts"] == "passes: stacked_experts, fused_experts"
    assert found["load_balancing_loss_func"] == "passes: router_loss"
    assert found["Qwen3MoeAttention"] == "attention: calls transformers' attention interface"
    assert found["Qwen3MoeTopKRouter"] == "a router"
    assert found["Qwen3MoeDecoderLayer"] == "runs what is listed here"
    assert all(found.values())


def test_a_class_behind_a_table_is_on_the_way():
    assert census_of("falcon")["FalconAttention"] == "attention: calls torch's scaled_dot_product_attention itself"


IMPORT = "from ...activations import ACT2FN"
NORM = "self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)"
NORMED = "hidden_states = self.norm(hidden_states)"
BY_NAME = (NORMED, "norm = self.norm\n        hidden_states = norm(hidden_states)")
MIXING = "class Mixing(nn.Module):\n    def forward(self, x):\n        return x.cumsum(1)\n\n\nclass LlamaMLP("
OUTSIDE = "another file's, which no pass reads"


@pytest.mark.parametrize(
    ("edits", "name", "reason"),
    [
        (
            ((IMPORT, f"{IMPORT}\nfrom .parts import OtherNorm"), (NORM, "self.norm = OtherNorm(config)")),
            "transformers.models.llama.parts.OtherNorm",
            OUTSIDE,
        ),
        (
            (
                (IMPORT, f"{IMPORT}\nfrom elsewhere import soften"),
                (NORMED, f"{NORMED[:-1]}.float())\n        soften()"),
            ),
            "elsewhere.soften",
            OUTSIDE,
        ),
        (((NORM, "self.norm = config.make_norm"),), "LlamaModel.norm", "not read: config.make_norm"),
        (((NORM, "self.norm = config.make_norm"), BY_NAME), "LlamaModel.norm", "not read: config.make_norm"),
        ((("class LlamaMLP(", MIXING), (NORM, "self.norm = Mixing()")), "Mixing", "not read: x.cumsum(1)"),
    ],
)
def test_what_no_pass_sees_is_named(edits, name, reason):
    config = replace(pipeline.config_for("llama"), expect={})
    assert census_of("llama", *edits, config=config)[name] == reason


upstream_of = functools.cache(load)
MODELS = list(PLACES)


@pytest.mark.parametrize(
    ("model", "name"), [(MODELS[number % len(MODELS)], name) for number, name in enumerate(PLANTS)]
)
@pytest.mark.sampled(3)
def test_what_is_handed_on_or_put_in_anothers_place_is_named(model, name):
    origin = replace(upstream_of(model), text=planted(upstream_of(model).text, model, name))
    anatomy = study(source.parse(origin.text, origin.path), origin)
    found = census(anatomy, [info.name for info in anatomy.with_role(Role.HEAD)], {})
    for wanted in PLANTS[name][-1]:
        assert any(one == wanted or (wanted[0] == "*" and one.endswith(wanted[1:])) for one in found), (wanted, found)


def test_the_eager_form_of_attention_is_named_as_that():
    assert census_of("llama")["repeat_kv"] == "attention: upstream's eager form"


def test_a_decoder_whose_layers_stand_in_a_table_is_on_the_way():
    assert census_of("jamba")["JambaMambaMixer"] == "passes: mixer_sp"


def test_a_function_with_a_backward_of_its_own_is_not_taken_for_its_forward():
    assert census_of("bloom")["GeLUFunction"] == "not read: a backward of its own"


def test_a_lambda_that_is_called_by_a_name_is_read():
    double = (NORMED, f"double = lambda x: 2 * x\n        {NORMED[:-1]}) + double(hidden_states)")
    assert census_of("llama", double)["LlamaModel"] == "passes: language_sp"


def test_it_is_one_line_and_printed():
    line = summary(census_of("llama"))
    assert line.startswith("5 of 11 classes and functions on the way to the loss in passes; ")
    assert "attention: LlamaAttention" in line
    printed = CliRunner().invoke(app, ["generate", "llama", "--dry-run"]).output
    assert "census 5 of 11" in " ".join(printed.split())


def test_attention_by_torchs_own_function_is_named():
    """No setting of the model chooses it: neither packed documents nor the ranks of a sequence reach it."""
    interface = "attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface("
    origin = load("llama")
    start = origin.text.index(interface)
    end = origin.text.index("attn_output = attn_output.reshape", start)
    call = "torch.nn.functional.scaled_dot_product_attention(query_states, key_states, value_states, is_causal=True)"
    own = f"attn_output = {call}.transpose(1, 2)\n        attn_weights = None\n        "
    generated = pipeline.generate(replace(origin, text=origin.text[:start] + own + origin.text[end:]))
    facts = json.loads(generated.provenance)
    assert facts["census"]["LlamaAttention"].endswith("calls torch's scaled_dot_product_attention itself")
    notes = [note for step in generated.steps for note in step.outcome.notes]
    assert any(n.startswith("LlamaAttention: line ") and "scaled_dot_product_attention itself" in n for n in notes), (
        notes
    )


CALLED = """
class Gate(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x)

class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = Gate({})

    def forward(self, x):
        return self.gate(x)
"""


def test_what_a_parameter_is_stands_where_the_class_is_built():
    assert not any(
        "not read" in reason for reason in census(anatomy_of(CALLED.format("nn.Tanh()")), ["Head"], {}).values()
    )
    found = census(anatomy_of(CALLED.format("config.make_act")), ["Head"], {})
    assert found["Gate.act"] == "not read: act"


@pytest.mark.parametrize(
    "edit",
    [
        ("self.act = act", "act = act or nn.Tanh()\n        self.act = act"),
        ("class Head", "TABLE = {'gate': Gate}\n\nclass Head"),
    ],
)
def test_a_parameter_of_which_more_may_be_handed_is_named(edit: tuple[str, str]):
    handed = "config.make_act" if "or" in edit[1] else "nn.Tanh()"
    found = census(anatomy_of(CALLED.format(handed).replace(*edit, 1)), ["Head"], {})
    assert found["Gate.act"] == "not read: act"


def test_an_attribute_under_another_name_is_named_where_it_is_set():
    named = CALLED.replace("self.act = act", "self.made = config.make_act\n        self.act = self.made")
    found = census(anatomy_of(named.format("nn.Tanh()")), ["Head"], {})
    assert found["Gate.made"] == "not read: config.make_act"


@pytest.mark.parametrize(
    "code",
    [
        "for act in acts: pass",
        "with config.make_act() as act: pass",
        "act: object = config.make_act",
        "(act := config.make_act)",
    ],
)
def test_a_local_name_is_all_that_code_binds_it_to(code: str):
    text = CALLED.replace("self.act = act", f"act = nn.SiLU()\n        {code}\n        self.act = act")
    found = census(anatomy_of(text.replace("self, act)", "self, config)").format("config")), ["Head"], {})
    assert found["Gate.act"] == "not read: act"
