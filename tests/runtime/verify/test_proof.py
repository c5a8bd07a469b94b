"""The proof passes on upstream's own file made standalone, and fails on every defect that is planted in it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from stand_in import upstream_head, write_stand_in

from patchgen.runtime import registry, seams
from patchgen.runtime.verify import seam_proof, verdict
from patchgen.runtime.verify.comparison import compare_gradients, train_step
from patchgen.runtime.verify.inputs import IGNORED, drawable_ids, text_cases
from patchgen.runtime.verify.model_pair import build_model, build_pair, perturb
from patchgen.runtime.verify.proof import prove
from patchgen.runtime.verify.seam_proof import ABSENT, FAILED, PASSED, all_eager
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.verify_model import judge, verify_model

LOGITS = ("logits = self.lm_head(hidden_states)\n\n        loss = None", "logits = {}\n\n        loss = None")
EXPERTS_BODY = "        final_hidden_states = torch.zeros_like(hidden_states)\n        with torch.no_grad():"
SEAM = """        if {guard}:
            return ops.fused_moe(
                hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj,
                num_experts=self.num_experts, activation=self.act_fn{extra}
            )
"""


def with_seam(guard: str = 'ops.serves("fused_moe")', extra: str = "") -> tuple[tuple[str, str], ...]:
    """The edit that makes the experts a seam, as the generator writes it."""
    return ((EXPERTS_BODY, SEAM.format(guard=guard, extra=extra) + EXPERTS_BODY),)


def prove_with(tmp_path, model_type, *edits, **options):
    options.setdefault("implementations", ())
    options.setdefault("variants", ("base",))
    return verify_model(write_stand_in(tmp_path, model_type, edits=edits), **options)


# ------------------------------------------------------------------------------------------------- it passes


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "gpt2"]
)
@pytest.mark.sampled(3)
def test_the_same_code_is_proven_in_every_variant(tmp_path, model_type):
    proof = prove_with(tmp_path, model_type, variants=None)
    assert proof.failures == []
    assert proof.is_equal
    in_every_variant = {"plain", "padded", "packed", "step"}
    in_the_first = {"other caller", "large weights", "bf16"}
    assert {case.name for case in proof.cases} == in_every_variant | in_the_first
    assert {case.variant for case in proof.cases if case.name in in_the_first} == {"base"}
    assert {"base", "checkpointing"} <= {case.variant for case in proof.cases}
    assert all(case.gradient.is_equal and case.outputs.is_equal for case in proof.cases)


def test_the_variants_of_qwen3_moe_are_those_its_config_knows(tmp_path):
    proof = prove_with(tmp_path, "qwen3_moe", variants=None)
    assert {case.variant for case in proof.cases} == {"base", "router_logits", "tied", "window", "checkpointing"}
    assert proof.without_gradient == ()


@pytest.mark.slow
def test_a_thinker_is_proven_from_its_own_config_with_text(tmp_path):
    head = "Qwen3OmniMoeThinkerForConditionalGeneration"
    folder = write_stand_in(tmp_path, "qwen3_omni_moe", head=head)
    proof = verify_model(folder, implementations=())
    assert proof.failures == []
    assert proof.is_equal
    text = [name for name in proof.without_gradient if "audio_tower" not in name and "visual" not in name]
    assert text == []  # the whole language model took part


def test_upstreams_class_itself_proves_nothing():
    upstream, config = upstream_head("llama"), small_config("llama").config
    proof = prove(upstream, upstream, config, text_cases(config, upstream))
    assert not proof.is_equal
    assert not proof.is_proven
    assert len(proof.failures) == 1  # the outermost module, not each of them
    assert "is upstream's LlamaForCausalLM" in proof.failures[0]


def test_a_variant_that_upstream_refuses_is_reported(tmp_path):
    proof = prove_with(tmp_path, "dbrx", variants=("base", "tied"))
    assert proof.is_equal
    assert "tie_word_embeddings is not supported" in proof.refused_variants["tied"]


# ------------------------------------------------------------------------------------ planted defects are seen


def test_a_defect_in_the_masked_branch_of_the_router_loss_is_seen(tmp_path):
    edit = ("total_rows = total_rows + flat_mask.sum()", "total_rows = total_rows + 1.01 * flat_mask.sum()")
    proof = prove_with(tmp_path, "qwen3_moe", edit, variants=("base", "router_logits"))
    assert proof.failures and all("case padded, variant router_logits" in failure for failure in proof.failures)


@pytest.mark.parametrize(
    ("model_type", "edit", "expected"),
    [
        pytest.param(
            "qwen3_moe", (LOGITS[0], LOGITS[1].format("self.lm_head(hidden_states) * 1.000001")),
            "output 'logits' differs",
            id="logits-scaled",
        ),
        pytest.param(
            "qwen3_moe", ("gate, up = nn.functional.linear(", "up, gate = nn.functional.linear("),
            "output 'loss' differs",
            id="gate-and-up-swapped",
        ),
        pytest.param(
            "gpt_oss", (" + self.down_proj_bias[expert_idx]", ""),
            "down_proj_bias' differs: it exists on one side only",
            id="bias-unused",
        ),
        pytest.param(
            "qwen2",
            ("self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=True)",
             "self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)"),
            "lacks parameter 'model.layers.0.self_attn.q_proj.bias'",
            id="bias-dropped",
        ),
        pytest.param(
            "qwen3_moe", ("F.linear(hidden_states, self.weight)", "F.linear(hidden_states, self.weight.detach())"),
            "mlp.gate.weight' differs: it exists on one side only",
            id="gradient-missing",
        ),
        pytest.param(
            "qwen3_moe",
            ("F.linear(hidden_states, self.weight)",
             "F.linear(hidden_states, self.weight.detach() + 0 * self.weight)"),
            "mlp.gate.weight' differs: absolute",
            id="gradient-zero",
        ),
        pytest.param(
            "llama",
            ("self.model = LlamaModel(config)\n        self.vocab_size",
             "import transformers\n        self.model = transformers.AutoModel.from_config(config)\n"
             "        self.vocab_size"),
            "is upstream's LlamaModel",
            id="nested-upstream-class",
        ),
        pytest.param(
            "llama",
            ('base = config.rope_parameters["rope_theta"]', 'base = config.rope_parameters["rope_theta"] + 1'),
            "Buffer 'model.rotary_emb.inv_freq' has other values",
            id="derived-buffer",
        ),
    ],
)  # fmt: skip
def test_a_defect_fails_the_proof_and_is_named(tmp_path, model_type, edit, expected):
    proof = prove_with(tmp_path, model_type, edit)
    assert not proof.is_equal
    assert not proof.is_proven
    assert any(expected in failure for failure in proof.failures), proof.failures


FORGOTTEN = """
import sys
from pathlib import Path
from patchgen.runtime.verify.verify_model import verify_model
proof = verify_model(Path(sys.argv[1]), variants=("base",), implementations=())
assert proof.cases and all(case.gradient.is_equal for case in proof.cases)  # no number shows it
print(*proof.failures, sep="\\n")
"""


def test_a_checkpoint_mapping_that_was_forgotten_fails_the_round_trip(tmp_path):
    folder = write_stand_in(tmp_path, "mixtral", has_checkpoint_mapping=False)
    # in a process of its own: registrations are by class name and last
    run = subprocess.run([sys.executable, "-c", FORGOTTEN, str(folder)], capture_output=True, text=True, check=True)
    assert "loaded by generated: missing keys" in run.stdout, run.stdout


def test_a_defect_behind_a_variant_is_seen_in_that_variant_only(tmp_path):
    edit = ("loss += self.router_aux_loss_coef * aux_loss", "loss += 2 * self.router_aux_loss_coef * aux_loss")
    proof = prove_with(tmp_path, "qwen3_moe", edit, variants=("base", "router_logits"))
    assert proof.failures
    assert all("variant router_logits" in failure for failure in proof.failures)


def no_memory(*_arguments, **_options):
    raise torch.OutOfMemoryError("none left")


def a_shape(*_arguments, **_options):
    raise RuntimeError("a shape")


def test_a_device_that_fails_gives_no_verdict_on_a_model(tmp_path, monkeypatch):
    folder = write_stand_in(tmp_path, "llama")
    monkeypatch.setattr(module := sys.modules[verify_model.__module__], "verify_model", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        judge(folder, head=None)
    monkeypatch.setattr(module, "verify_model", a_shape)
    assert judge(folder, head=None)[0].status == verdict.GENERATED
    monkeypatch.setattr(module, "build_model", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        judge(folder, head=None)


# ------------------------------------------------------------------------------------------------ fused seams


def test_a_seam_is_compared_and_its_calls_are_counted(tmp_path):
    proof = prove_with(tmp_path, "qwen3_moe", *with_seam(), implementations=None)
    experts = next(result for result in proof.seams if (result.seam, result.implementation) == ("fused_moe", "torch"))
    assert (experts.status, experts.calls) == (PASSED, 3)  # one of the four layers is dense
    assert not experts.gradient.is_equal and experts.gradient.relative < 1e-5  # another order of additions
    assert proof.is_equal
    assert all(result.status == ABSENT for result in proof.seams if result.seam != "fused_moe")
    assert set(seams.selected().values()) == {seams.EAGER}


def test_a_seam_that_is_never_called_has_not_passed(tmp_path):
    proof = prove_with(
        tmp_path,
        "qwen3_moe",
        *with_seam(guard='ops.serves("fused_moe") and self.training is None'),
        implementations=None,
    )
    experts = next(result for result in proof.seams if result.seam == "fused_moe")
    assert (experts.status, experts.calls) == (FAILED, 0)
    assert "no call reached" in experts.reason
    assert not proof.is_equal
    assert not proof.is_proven


def test_a_seam_is_compared_in_the_mode_of_the_step_that_it_is_compared_with(tmp_path, monkeypatch):
    modes = []

    def recording(model, case, *, training=True):
        modes.append(training)
        return train_step(model, case, training=training)

    monkeypatch.setattr(seam_proof, "train_step", recording)
    prove_with(tmp_path, "qwen3_moe", *with_seam(), variants=("evaluation",), implementations=("torch",))
    assert modes and not any(modes)


def test_a_seam_with_wrong_arguments_fails(tmp_path):
    proof = prove_with(tmp_path, "qwen3_moe", *with_seam(extra=", is_interleaved=True"), implementations=None)
    experts = next(result for result in proof.seams if result.seam == "fused_moe")
    assert (experts.status, experts.calls) == (FAILED, 3)
    assert "beyond 1e-04" in experts.reason


# -------------------------------------------------------------------------------------------- what it rests on


def test_perturbation_leaves_no_constant_weight():
    model = build_model(upstream_head("qwen3_moe"), small_config("qwen3_moe").config)
    constant = [name for name, weight in model.named_parameters() if bool((weight == weight.flatten()[0]).all())]
    assert any("norm" in name for name in constant)
    perturb(model)
    assert not [name for name, weight in model.named_parameters() if bool((weight == weight.flatten()[0]).all())]


def test_both_models_of_a_pair_hold_their_own_weights(tmp_path):
    folder = write_stand_in(tmp_path, "llama")
    generated = registry.read_model(folder).load().LlamaForCausalLM
    pair = build_pair(upstream_head("llama"), generated, small_config("llama").config)
    assert pair.problems == []
    with torch.no_grad():
        pair.generated.lm_head.weight.add_(1.0)
    case = text_cases(small_config("llama").config, generated)[0]
    with all_eager():
        differences = compare_gradients(train_step(pair.generated, case), train_step(pair.upstream, case))
    assert not differences["model.embed_tokens.weight"].is_equal


def test_the_fixed_inputs_are_fixed_and_avoid_special_ids():
    config, head = small_config("qwen2_moe").config, upstream_head("qwen2_moe")
    first, second = text_cases(config, head), text_cases(config, head)
    assert [case.name for case in first] == ["plain", "padded", "packed", "step"]
    drawable = set(drawable_ids(config))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one.batch[name], other.batch[name]) for name in one.batch)
        assert set(one.batch["input_ids"].flatten().tolist()) <= drawable
        assert (one.batch["labels"] == IGNORED).any() and (one.batch["labels"] != IGNORED).any()
    padded, packed = first[1].batch, first[2].batch
    assert (padded["labels"][padded["attention_mask"] == 0] == IGNORED).all()
    assert (packed["position_ids"] == 0).sum(-1).tolist() == [2, 2]
