"""The census of a file: what lies on the way to the loss is in a pass, or named with a reason."""

from __future__ import annotations

import json
from dataclasses import replace

from generation_cases import edited, load
from typer.testing import CliRunner

from patchgen import pipeline
from patchgen.anatomy.census import ELSEWHERE, summary
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
    assert found["Qwen3MoeDecoderLayer"] == "as upstream wrote it"
    assert found["eager_attention_forward"] == "attention: upstream's eager form"
    assert "Qwen3MoeForSequenceClassification" not in found, "the head does not reach it"


def test_a_class_behind_a_table_is_on_the_way():
    assert census_of("falcon")["FalconAttention"] == "attention: calls torch's scaled_dot_product_attention itself"


def test_a_class_of_another_file_is_named():
    imported = "from ...activations import ACT2FN"
    norm = "self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)"
    edits = (
        (imported, f"{imported}\nfrom ..mixtral.modeling_mixtral import MixtralRMSNorm"),
        (norm, norm.replace("Llama", "Mixtral")),
    )
    found = census_of("llama", *edits, config=replace(pipeline.config_for("llama"), expect={}))
    assert found["transformers.models.mixtral.modeling_mixtral.MixtralRMSNorm"] == ELSEWHERE


def test_it_is_one_line_and_printed():
    line = summary(census_of("llama"))
    assert line.startswith("5 of 11 classes and functions on the way to the loss in passes; ")
    assert "attention: eager_attention_forward, LlamaAttention" in line
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
