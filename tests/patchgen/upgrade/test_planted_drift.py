"""Planted drift: each change is reported with its file, symbol, passes and verdict; comments and formatting never are.

Many are planted in one release: what one case must find, no other case can have caused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_releases import FILE, MODEL, Drift, check_reported, planted, site_of

from patchgen import pipeline, provenance, upstream
from patchgen.upgrade import compare_model
from patchgen.upgrade.findings import PERSON, REVIEW, SAME, ModelUpgrade

CONFIG = f"models/{MODEL}/configuration_{MODEL}.py"
BOTH = ("stacked_experts", "fused_experts")

# What regenerates: code that passes rewrite, code beside it, code that is copied.
IN_MODEL = (
    Drift(FILE, "repeat_kv", "n_rep == 1", "n_rep <= 1"),
    Drift(FILE, "eager_attention_forward", "dtype=torch.float32", "dtype=torch.float64"),
    Drift(FILE, "Qwen3MoeAttention", "@use_kernelized_func(apply_rotary_pos_emb)\n", ""),
    Drift(FILE, "Qwen3MoeAttention.__init__", "self.head_dim**-0.5", "self.head_dim**-0.25"),
    Drift(FILE, "Qwen3MoeAttention.forward", "scaling=self.scaling", "scaling=self.scaling * 2"),
    Drift(
        FILE,
        "Qwen3MoeMLP.__init__",
        "self.intermediate_size, bias=False)\n        self.up",
        "self.intermediate_size, bias=True)\n        self.up",
        ("fused_ops",),
    ),
    Drift(FILE, "Qwen3MoeTopKRouter.__init__", "torch.zeros(", "torch.ones("),
    Drift(
        FILE,
        "Qwen3MoeTopKRouter.forward",
        "torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)",
        "torch.sigmoid(router_logits.float())",
    ),
    Drift(
        FILE,
        "Qwen3MoeSparseMoeBlock.forward",
        "return final_hidden_states.reshape",
        "return 2 * final_hidden_states.reshape",
    ),
    Drift(FILE, "Qwen3MoeRMSNorm.__init__", "torch.ones(", "torch.zeros(", ("fused_ops",)),
    Drift(FILE, "Qwen3MoeRMSNorm.extra_repr", "eps=", "epsilon=", ("fused_ops",)),
    Drift(FILE, "Qwen3MoeDecoderLayer.__init__", "layer_idx + 1", "layer_idx + 2"),
    Drift(
        FILE,
        "Qwen3MoeDecoderLayer.forward",
        "hidden_states = self.mlp(hidden_states)\n        hidden_states = residual + hidden_states",
        "hidden_states = self.mlp(hidden_states)\n        hidden_states = hidden_states + 2 * residual",
    ),
    Drift(
        FILE,
        "Qwen3MoePreTrainedModel._init_weights",
        "mean=0.0, std=std)\n            init.normal_(module.down",
        "mean=1.0, std=std)\n            init.normal_(module.down",
    ),
    Drift(FILE, "Qwen3MoePreTrainedModel._can_record_outputs", "index=0", "index=1"),
    Drift(FILE, "Qwen3MoePreTrainedModel._supports_sdpa", "True", "False"),
    Drift(FILE, "Qwen3MoeRotaryEmbedding.__init__", "inv_freq, persistent=False", "inv_freq, persistent=True"),
    Drift(
        FILE,
        "Qwen3MoeRotaryEmbedding.compute_default_rope_parameters",
        "attention_factor = 1.0",
        "attention_factor = 2.0",
    ),
    Drift(FILE, "Qwen3MoeRotaryEmbedding.forward", "dim=-1", "dim=2"),
    Drift(
        FILE, "Qwen3MoeModel.__init__", "self.post_init()", "self.post_init()\n        self.eval()", ("language_sp",)
    ),
    Drift(
        FILE,
        "Qwen3MoeModel.forward",
        "self.embed_tokens(input_ids)",
        "self.embed_tokens(input_ids) * 2",
        ("language_sp",),
    ),
    Drift(FILE, "Qwen3MoeForCausalLM.__init__", "bias=False", "bias=True", ("tied_embeddings",)),
    Drift(FILE, "Qwen3MoeForCausalLM.forward", "loss += self", "loss -= self", ("router_loss", "fused_loss")),
    Drift(
        FILE,
        "Qwen3MoeForCausalLM._tied_weights_keys",
        '"lm_head.weight": ',
        '"lm_head.bias": ',
        ("tied_embeddings", "router_loss", "fused_loss", "parallel_plan"),
    ),
    Drift(
        FILE,
        "Qwen3MoeExperts.__init__",
        "self.num_experts = config.num_experts\n",
        "self.num_experts = config.num_experts + 0\n",
        BOTH,
    ),
)
BESIDE = (
    Drift(CONFIG, "Qwen3MoeConfig.norm_topk_prob", "False", "True"),
    Drift(CONFIG, "Qwen3MoeConfig.rms_norm_eps", "1e-6", "1e-5"),
    Drift(
        CONFIG,
        "Qwen3MoeConfig.router_scale",
        "    vocab_size: int = 151936\n",
        "    vocab_size: int = 151936\n    router_scale: float = 1.0\n",
        kind="added",
    ),
    Drift(CONFIG, "Qwen3MoeConfig.initializer_range", "    initializer_range: float = 0.02\n", "", kind="gone"),
    Drift(CONFIG, "Qwen3MoeConfig.attribute_map", '"num_local_experts"', '"n_experts"'),
    Drift("masking_utils.py", "create_causal_mask", "use_vmap = False", "use_vmap = None"),
    Drift("masking_utils.py", "causal_mask_function", "kv_idx <= q_idx", "kv_idx < q_idx"),
    Drift("integrations/sdpa_attention.py", "repeat_kv", "n_rep == 1", "n_rep <= 1"),
    Drift("modeling_utils.py", "PreTrainedModel.post_init", "self.init_weights()", "self.init_weights(), self.eval()"),
    Drift("activations.py", "SiLUActivation.forward", "nn.functional.silu(input)", "nn.functional.gelu(input)"),
    Drift(
        "modeling_rope_utils.py",
        "_compute_yarn_parameters",
        "def _compute_yarn_parameters(",
        "@torch.no_grad()\ndef _compute_yarn_parameters(",
    ),
    Drift("modeling_layers.py", "GradientCheckpointingLayer.gradient_checkpointing", "False", "True"),
    Drift("loss/loss_utils.py", "ForCausalLMLoss", "logits.float()", "logits.double()"),
)
REBOUND = (  # the code is the same, and a name in it stands for something else
    Drift(FILE, "ACT2FN", "import ACT2FN\n", "import ACT2CLS as ACT2FN\n"),
    Drift(
        "masking_utils.py",
        "is_torch_xpu_available",
        "import is_torch_xpu_available",
        "import is_torch_npu_available as is_torch_xpu_available",
    ),
)
NOT_OF_THE_MODEL = (  # its class has another entry in the table of losses
    Drift("loss/loss_utils.py", "ForTokenClassification", "logits.float()", "logits.double()"),
)
NO_DRIFT = (
    Drift(FILE, "rotate_half", "x1 = x[", "# one half\n    x1 = x["),
    Drift(
        FILE,
        "rotate_half",
        '"""Rotates half the hidden dims of the input."""',
        '"""Turns one half of the dimensions."""',
    ),
    Drift(FILE, "Qwen3MoeMLP.forward", "return down_proj", "return (down_proj)"),
    Drift(
        FILE,
        "Qwen3MoeTopKRouter.forward",
        "dtype=torch.float, dim=-1",
        "\n            dtype=torch.float,\n            dim=-1,\n        ",
    ),
    Drift(
        FILE,
        "Qwen3MoeRMSNorm.extra_repr",
        'return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"',
        "return (\n            f\"{tuple(self.weight.shape)}, \"\n            f'eps={self.variance_epsilon}'\n        )",
    ),
    Drift(FILE, "Qwen3MoePreTrainedModel.base_model_prefix", '"model"', "'model'"),
    Drift(
        FILE,
        "",
        "class Qwen3MoeMLP(nn.Module):\n",
        "\n\n\n# The MLP.\nclass Qwen3MoeMLP(nn.Module):\n    # of one expert\n",
    ),
    Drift(CONFIG, "Qwen3MoeConfig.rms_norm_eps", "1e-6", "0.000001  # as ever"),
    Drift(CONFIG, "", "The frequency of the MoE layer.", "How often a layer has experts."),
    Drift(
        "masking_utils.py", "causal_mask_function", "return kv_idx <= q_idx", "# causal\n    return (kv_idx <= q_idx)"
    ),
)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of generated models, generated now: whether the committed files are current is tested elsewhere."""
    root = tmp_path_factory.mktemp("committed")
    provenance.write(pipeline.generate(upstream.load(MODEL)), root / MODEL)
    return root


@pytest.mark.parametrize("drift", REBOUND, ids=lambda drift: drift.id)
def test_a_name_that_is_imported_from_elsewhere_is_reported(drift: Drift, reviewed: ModelUpgrade):
    site = site_of(reviewed, drift)
    assert (site.kind, site.verdict, site.place) == ("changed", REVIEW, "model" if drift.file == FILE else "helper")
    assert drift.old.split()[-1] in site.old_upstream and drift.new.split()[-3] in site.new_upstream


@pytest.fixture(scope="module")
def reviewed(committed: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelUpgrade:
    release = planted(tmp_path_factory.mktemp("release"), (*IN_MODEL, *BESIDE, *REBOUND, *NOT_OF_THE_MODEL))
    return compare_model(MODEL, str(release), committed)


@pytest.mark.parametrize("drift", IN_MODEL, ids=lambda drift: drift.id)
def test_drift_in_the_modeling_file_is_reported_with_its_passes(drift: Drift, reviewed: ModelUpgrade):
    check_reported(reviewed, drift)


@pytest.mark.parametrize("drift", BESIDE, ids=lambda drift: drift.id)
def test_drift_in_a_configuration_or_an_imported_helper_is_reported(drift: Drift, reviewed: ModelUpgrade):
    check_reported(reviewed, drift)
    assert site_of(reviewed, drift).place == ("config" if drift.file == CONFIG else "helper")


def test_nothing_else_is_reported_and_all_of_it_regenerates(reviewed: ModelUpgrade):
    expected = {(f"transformers/{drift.file}", drift.symbol) for drift in (*IN_MODEL, *BESIDE, *REBOUND)}
    assert {(site.file, site.symbol) for site in reviewed.sites if site.kind not in ("hits", "census")} == expected
    assert reviewed.verdict == REVIEW and reviewed.generated_then


@pytest.fixture(scope="module")
def unchanged(committed: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelUpgrade:
    return compare_model(MODEL, str(planted(tmp_path_factory.mktemp("release"), NO_DRIFT)), committed)


@pytest.mark.parametrize("drift", NO_DRIFT, ids=lambda drift: drift.id)
def test_comments_and_formatting_are_no_drift(drift: Drift, unchanged: ModelUpgrade):
    assert drift.symbol not in {site.symbol for site in unchanged.sites}


def test_comments_and_formatting_need_no_review(unchanged: ModelUpgrade):
    assert (unchanged.verdict, unchanged.sites) == (SAME, ())
    assert unchanged.generated_then != unchanged.generated_now  # the comments are in it


# ------------------------------------------------------------------------------------------------ what is refused

REFUSED = (
    Drift(
        FILE,
        "load_balancing_loss_func",
        "overall_loss * num_experts",
        "overall_loss * num_experts * 2",
        ("router_loss",),
        PERSON,
        "refused",
    ),
    Drift(
        FILE,
        "Qwen3MoeForCausalLM.forward",
        "loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)",
        "loss = self.criterion(logits, labels)",
        ("fused_loss",),
        PERSON,
        "refused",
    ),
)


@pytest.mark.parametrize("drift", REFUSED, ids=lambda drift: drift.id)
def test_what_a_pass_refuses_needs_a_person(drift: Drift, committed: Path, tmp_path: Path):
    found = compare_model(MODEL, str(planted(tmp_path / "release", [drift])), committed)
    (refused,) = (site for site in found.sites if site.kind == "refused")
    assert (refused.file, refused.symbol, refused.passes) == (f"transformers/{FILE}", drift.symbol, drift.passes)
    assert found.verdict == PERSON and found.generated_then == "" and drift.passes[0] in found.reason
    assert any(site.symbol == drift.symbol and site.kind == "changed" for site in found.sites)


def test_a_seam_that_is_lost_without_a_refusal_needs_a_review(committed: Path, tmp_path: Path):
    """No config pins a number of hits: what was a seam and what the census says now are compared."""
    mean, quotient = "hidden_states.pow(2).mean(-1, keepdim=True)", "hidden_states.pow(2).sum(-1, keepdim=True) / 8"
    drift = Drift(FILE, "Qwen3MoeRMSNorm.forward", mean, quotient)
    found = compare_model(MODEL, str(planted(tmp_path / "release", [drift])), committed)
    told = {site.kind: (site.symbol, site.reason) for site in found.sites if site.kind != "changed"}
    assert found.verdict == REVIEW and told == {
        "hits": ("Qwen3MoeRMSNorm.forward", "fused_ops at Qwen3MoeRMSNorm.forward: rms_norm seam -> nothing"),
        "census": ("Qwen3MoeRMSNorm", "census: passes: fused_ops -> as upstream wrote it"),
    }
