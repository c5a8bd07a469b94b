"""Large weights show what a clamp, a cap or a threshold does: in the eager form, behind a kernel, and on the path of a run."""

from __future__ import annotations

import shutil

import pytest
import torch
from stand_in import upstream_head, write_stand_in

from patchgen.runtime import registry
from patchgen.runtime.verify.correspondence import Correspondence
from patchgen.runtime.verify.inputs import text_cases
from patchgen.runtime.verify.large_weights import FACTOR, large_weights, scaled_weights
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.seam_proof import FAILED
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.training_path import prove_training_path
from patchgen.runtime.verify.verify_model import verify_model

ACTIVATED = "current_hidden_states = self.act_fn(gate) * up"
CLAMPED = (ACTIVATED, "gate = gate.clamp(max=7.0)\n            " + ACTIVATED)
LIMIT = 7.0


def small_model(model_type: str):
    head = upstream_head(model_type)
    model = build_model(head, small_config(head.config_class).config)
    perturb(model)
    return model


def kinds(names) -> set[str]:
    """The names without the numbers of layers."""
    return {".".join(part for part in name.split(".") if not part.isdigit()) for name in names}


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", {f"model.layers.mlp.{name}_proj.weight" for name in ("gate", "up", "down")} | {"lm_head.weight"}),
        ("qwen3_moe", {"model.layers.mlp.experts.gate_up_proj", "model.layers.mlp.experts.down_proj", "lm_head.weight"}
         | {f"model.layers.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}),
        ("dbrx", {f"transformer.blocks.ffn.experts.mlp.{name}" for name in ("w1", "v1", "w2")} | {"lm_head.weight"}),
        ("gpt2", {"transformer.wte.weight", "transformer.h.mlp.c_fc.weight", "transformer.h.mlp.c_proj.weight"}),
        ("mamba2", {"lm_head.weight"}),  # a recurrence is no feed-forward layer
    ],
)  # fmt: skip
def test_experts_mlps_and_the_head_are_found_by_what_they_are_made_of(model_type, expected):
    assert kinds(scaled_weights(small_model(model_type))) == expected


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_what_is_activated_exceeds_a_limit_in_the_small_model_with_large_weights_only(model_type):
    model, largest = small_model(model_type), []
    case = text_cases(model.config, type(model))[0]

    def watch(function):
        def watched(first, *rest, **options):
            result = function(first, *rest, **options)
            largest.append(float(result.detach().abs().max()))
            return result

        return watched

    def largest_gate() -> float:
        largest.clear()
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            for module in model.modules():
                if {"gate_up_proj", "gate_proj"} & set(dir(module)) and hasattr(module, "act_fn"):
                    patch.setattr(module.act_fn, "forward", watch(module.act_fn.forward))
            patch.setattr(torch, "sigmoid", watch_input(torch.sigmoid, largest))
            model(**case.batch, use_cache=False)
        return max(largest)

    assert largest_gate() < LIMIT
    with large_weights(model, model, Correspondence()):
        assert largest_gate() > LIMIT


def watch_input(function, largest):
    def watched(first, *rest, **options):
        largest.append(float(first.detach().abs().max()))
        return function(first, *rest, **options)

    return watched


def test_weights_are_what_they_were_after_the_block():
    model = small_model("qwen3_moe")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with large_weights(model, model, Correspondence()):
        assert torch.equal(model.lm_head.weight, before["lm_head.weight"] * FACTOR)
        assert torch.equal(model.model.layers[1].mlp.gate.weight, before["model.layers.1.mlp.gate.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_router_with_an_activation_is_no_feed_forward_layer():
    names = scaled_weights(small_model("deepseek_v4"))
    assert any("shared_experts" in name for name in names) and not any(name.endswith("gate.weight") for name in names)


def test_a_clamp_that_upstream_lacks_is_seen_with_large_weights_alone(tmp_path):
    folder = write_stand_in(tmp_path, "qwen3_moe", edits=(CLAMPED,))
    proof = verify_model(folder, variants=("base",), implementations=(), training_path=False)
    assert proof.failures and all(failure.startswith("case large weights") for failure in proof.failures)


UNLIMITED = """

def _unlimited(experts, gate_up):
    limit, experts.limit = experts.limit, 1e6
    try:
        return experts._apply_gate(gate_up)
    finally:
        experts.limit = limit
"""


def without_limit(tmp_path):
    """The committed gpt_oss, whose call of the kernel has lost the limit: the eager form below it keeps it."""
    committed = registry.find_model("gpt_oss")
    folder = tmp_path / "gpt_oss"
    folder.mkdir()
    text, place = committed.file.read_text(), "apply_gate=self._apply_gate,"
    assert text.count(place) == 1
    changed = text.replace(place, "apply_gate=lambda gate_up: _unlimited(self, gate_up),")
    (folder / committed.file.name).write_text(changed + UNLIMITED)
    shutil.copy(committed.directory / "provenance.json", folder)
    return registry.read_model(folder)


def test_a_limit_that_a_kernel_loses_is_seen_behind_its_seam_and_on_the_path_of_a_run(tmp_path):
    generated = without_limit(tmp_path)
    proof = verify_model(generated, variants=("base",), implementations=("torch",), training_path=False)
    (experts,) = (result for result in proof.seams if result.seam == "fused_moe")
    assert experts.status == FAILED and experts.reason.startswith("beyond 1e-04")
    assert all(case.outputs.is_equal for case in proof.cases), "eager it is upstream's"
    upstream = generated.upstream().GptOssForCausalLM
    config = small_config(upstream.config_class).config
    path = prove_training_path(upstream, generated.load().GptOssForCausalLM, config)
    assert [failure.partition(":")[0] for failure in path.failures] == ["large weights"]
