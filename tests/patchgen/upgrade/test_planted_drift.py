"""Drift that was planted: each is told with its file, symbol, pass and verdict; comments and formatting are told of never.

Many are planted in one release: what one case must find, no other case can have caused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planted_releases import Drift, planted

from patchgen import pipeline, provenance, upstream, wheels
from patchgen.errors import StaleFile
from patchgen.model_configs import ModelConfig
from patchgen.passes.hand_edits import AddMethod, Drop, Edit, EditMethod, OverrideMethod, ReplaceClass, ReplaceFunction
from patchgen.upgrade import compare_model, releases
from patchgen.upgrade.edits import drift_under_edits
from patchgen.upgrade.findings import PERSON, REVIEW, SAME, ModelUpgrade, Site
from patchgen.upgrade.symbols import symbols_of

MODEL = "qwen3_moe"
FILE = f"models/{MODEL}/modeling_{MODEL}.py"
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
    """A folder of generated models, generated now: whether the committed files are current is not the matter."""
    root = tmp_path_factory.mktemp("committed")
    provenance.write(pipeline.generate(upstream.load(MODEL)), root / MODEL)
    return root


def site_of(found: ModelUpgrade, drift: Drift) -> Site:
    sites = [site for site in found.sites if (site.file, site.symbol) == (f"transformers/{drift.file}", drift.symbol)]
    assert sites, f"nothing is said of {drift.id}: {[site.symbol for site in found.sites]}"
    return sites[0]


@pytest.mark.parametrize("drift", REBOUND, ids=lambda drift: drift.id)
def test_a_name_that_is_imported_from_elsewhere_is_told(drift: Drift, reviewed: ModelUpgrade):
    site = site_of(reviewed, drift)
    assert (site.kind, site.verdict, site.place) == ("changed", REVIEW, "model" if drift.file == FILE else "helper")
    assert drift.old.split()[-1] in site.old_upstream and drift.new.split()[-3] in site.new_upstream


def is_told(found: ModelUpgrade, drift: Drift) -> None:
    site = site_of(found, drift)
    assert (site.kind, site.passes, site.verdict) == (drift.kind, drift.passes, drift.verdict), site.reason
    if drift.kind in ("added", "gone"):
        assert site.new_upstream.strip() in drift.new and site.old_upstream.strip() in drift.old
    elif "@" in drift.old + drift.new:  # of a decorator the head is told, as Python reads it
        assert site.old_upstream != site.new_upstream
    else:
        assert drift.old.strip() in site.old_upstream and drift.new.strip() in site.new_upstream


@pytest.fixture(scope="module")
def reviewed(committed: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelUpgrade:
    release = planted(tmp_path_factory.mktemp("release"), (*IN_MODEL, *BESIDE, *REBOUND, *NOT_OF_THE_MODEL))
    return compare_model(MODEL, str(release), committed)


@pytest.mark.parametrize("drift", IN_MODEL, ids=lambda drift: drift.id)
def test_drift_in_the_modeling_file_is_told_with_its_passes(drift: Drift, reviewed: ModelUpgrade):
    is_told(reviewed, drift)


@pytest.mark.parametrize("drift", BESIDE, ids=lambda drift: drift.id)
def test_drift_in_a_configuration_or_an_imported_helper_is_told(drift: Drift, reviewed: ModelUpgrade):
    is_told(reviewed, drift)
    assert site_of(reviewed, drift).place == ("config" if drift.file == CONFIG else "helper")


def test_nothing_else_is_told_and_all_of_it_regenerates(reviewed: ModelUpgrade):
    expected = {(f"transformers/{drift.file}", drift.symbol) for drift in (*IN_MODEL, *BESIDE, *REBOUND)}
    assert {(site.file, site.symbol) for site in reviewed.sites if site.kind not in ("hits", "census")} == expected
    assert reviewed.verdict == REVIEW and reviewed.generated_then


@pytest.fixture(scope="module")
def unchanged(committed: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelUpgrade:
    return compare_model(MODEL, str(planted(tmp_path_factory.mktemp("release"), NO_DRIFT)), committed)


@pytest.mark.parametrize("drift", NO_DRIFT, ids=lambda drift: drift.id)
def test_comments_and_formatting_are_no_drift(drift: Drift, unchanged: ModelUpgrade):
    assert drift.symbol not in {site.symbol for site in unchanged.sites}


def test_comments_and_formatting_need_nobody(unchanged: ModelUpgrade):
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
        "Qwen3MoeExperts.forward",
        "self.act_fn(gate) * up",
        "self.act_fn(gate) * up + gate",
        ("stacked_experts",),
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
        "census": ("Qwen3MoeRMSNorm", "census: passes: fused_ops -> each token by itself"),
    }


# ------------------------------------------------------------------------------------------------ under hand edits


REASON = "a test: nothing of it runs"


def override(target: str, arguments: str = "self, *args, **kwargs") -> OverrideMethod:
    code = f"def {target.partition('.')[2]}({arguments}):\n    return super()"
    return OverrideMethod(target, code, REASON)


# No pass has its sites in these, so that what was edited generates; the last three take what others name.
UNDER_EDITS: tuple[tuple[Edit, Drift], ...] = tuple(
    (edit, Drift(FILE, edit.target, old, new, ("hand_edits",), PERSON, "hand edit"))
    for edit, old, new in (
        (
            override("Qwen3MoeTopKRouter.forward"),
            "softmax(router_logits, dtype=torch.float, dim=-1)",
            "sigmoid(router_logits)",
        ),
        (override("Qwen3MoeTopKRouter.__init__"), "torch.zeros(", "torch.ones("),
        (
            override("Qwen3MoeDecoderLayer.forward"),
            "hidden_states = self.mlp(hidden_states)",
            "hidden_states = self.mlp(2 * hidden_states)",
        ),
        (override("Qwen3MoeRMSNorm.extra_repr"), "eps=", "epsilon="),
        (
            override("Qwen3MoePreTrainedModel._init_weights"),
            "init.normal_(module.weight, mean=0.0",
            "init.normal_(module.weight, mean=1.0",
        ),
        (override("Qwen3MoeAttention.__init__"), "self.head_dim**-0.5", "self.head_dim**-0.25"),
        (override("Qwen3MoeSparseMoeBlock.forward"), "self.gate(hidden_states_reshaped)", "self.gate(hidden_states)"),
        (
            EditMethod("Qwen3MoeModel.__init__", "self.gradient_checkpointing = False", "self.seen = 0", REASON),
            "self.vocab_size = config.vocab_size",
            "self.vocab_size = config.padded_vocab_size",
        ),
        (
            EditMethod(
                "Qwen3MoeRMSNorm.__init__", "self.variance_epsilon = eps", "self.size = hidden_size", REASON, "after"
            ),
            "torch.ones(",
            "torch.zeros(",
        ),
        (
            EditMethod("Qwen3MoeMLP.__init__", "self.config = config", "self.seen = 0", REASON),
            "config.hidden_act",
            "config.activation",
        ),
        (
            EditMethod("Qwen3MoeForCausalLM.__init__", "self.post_init()", "self.seen = 0", REASON),
            "bias=False",
            "bias=True",
        ),
        (
            EditMethod(
                "Qwen3MoeDecoderLayer.__init__", "self.hidden_size = config.hidden_size", "self.seen = 0", REASON
            ),
            "layer_idx + 1",
            "layer_idx + 2",
        ),
        (
            EditMethod("Qwen3MoeRotaryEmbedding.__init__", "self.config = config", "self.seen = 0", REASON),
            "inv_freq, persistent=False",
            "inv_freq, persistent=True",
        ),
        (
            EditMethod("Qwen3MoeAttention.forward", "cos, sin = position_embeddings", "self.seen = 0", REASON),
            "scaling=self.scaling",
            "scaling=self.scaling * 2",
        ),
        (
            ReplaceFunction("repeat_kv", "def repeat_kv(hidden_states, n_rep):\n    return hidden_states", REASON),
            "n_rep == 1",
            "n_rep <= 1",
        ),
        (
            ReplaceFunction(
                "eager_attention_forward",
                "def eager_attention_forward(*args, **kwargs):\n    return repeat_kv(*args)",
                REASON,
            ),
            "dtype=torch.float32",
            "dtype=torch.float64",
        ),
        (ReplaceFunction("rotate_half", "def rotate_half(x):\n    return x", REASON), "(-x2, x1)", "(x2, -x1)"),
        (Drop("Qwen3MoeForTokenClassification", REASON), "pass", "dropout = 0.5"),
        (
            Drop("Qwen3MoeForQuestionAnswering", REASON),
            'base_model_prefix = "transformer"',
            'base_model_prefix = "model"',
        ),
        (Drop("Qwen3MoeForSequenceClassification", REASON), "pass", "dropout = 0.5"),
    )
)
REPLACED_CLASS = (
    ReplaceClass("Qwen3MoeTopKRouter", "class Qwen3MoeTopKRouter(nn.Module):\n    pass", REASON),
    Drift(
        FILE,
        "Qwen3MoeTopKRouter",
        "if self.norm_topk_prob:",
        "if not self.norm_topk_prob:",
        ("hand_edits",),
        PERSON,
        "hand edit",
    ),
)


def with_edits(root: Path, *edits: Edit) -> ModelConfig:
    """A config with these edits, and its committed model: generated, so that its record has their targets."""
    config = ModelConfig(MODEL, edits=edits)
    provenance.write(pipeline.generate(upstream.load(MODEL), config), root / MODEL)
    return config


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelUpgrade, ModelUpgrade]:
    """What is said of the installed release, and of one with drift under every edit."""
    root = tmp_path_factory.mktemp("edited")
    config = with_edits(root, *(edit for edit, _ in UNDER_EDITS))
    release = planted(tmp_path_factory.mktemp("release"), (drift for _, drift in UNDER_EDITS))
    return tuple(compare_model(MODEL, to, root, config=config) for to in (wheels.installed_version(), str(release)))


@pytest.mark.parametrize(("edit", "drift"), UNDER_EDITS, ids=lambda one: getattr(one, "id", type(one).__name__))
def test_drift_under_a_hand_edit_needs_a_person(edit: Edit, drift: Drift, edited: tuple[ModelUpgrade, ModelUpgrade]):
    same, moved = edited
    assert (same.verdict, same.sites) == (SAME, ())
    is_told(moved, drift)
    site = site_of(moved, drift)
    assert moved.verdict == PERSON and REASON in site.reason
    assert site.edit == getattr(edit, "code", "") and site.old_upstream != site.new_upstream != ""
    assert site.old_line and site.new_line


def test_only_the_targets_are_told(edited: tuple[ModelUpgrade, ModelUpgrade]):
    owners = {drift.symbol.partition(".")[0] for _, drift in UNDER_EDITS}
    assert {site.symbol.partition(".")[0] for site in edited[1].sites} == owners


def test_drift_under_a_replaced_class_is_told_with_the_method(tmp_path: Path):
    edit, drift = REPLACED_CLASS
    config = with_edits(tmp_path, edit)
    found = compare_model(MODEL, str(planted(tmp_path / "release", [drift])), tmp_path, config=config)
    is_told(found, drift)
    (method,) = (site for site in found.sites if site.symbol == "Qwen3MoeTopKRouter.forward")
    assert (method.kind, method.passes, method.verdict) == ("changed", ("hand_edits",), PERSON)


def test_a_target_that_is_gone_needs_a_person_and_a_reviewed_one_does_not(tmp_path: Path):
    config = with_edits(tmp_path, override("Qwen3MoeRMSNorm.extra_repr"))
    gone = Drift(FILE, "Qwen3MoeRMSNorm.extra_repr", "def extra_repr", "def extra_representation")
    found = compare_model(MODEL, str(planted(tmp_path / "gone", [gone])), tmp_path, config=config)
    site = next(site for site in found.sites if site.kind == "hand edit")
    assert (found.verdict, site.symbol, site.new_upstream) == (
        PERSON,
        gone.symbol,
        "",
    ) and "does not have" in site.reason
    assert not [site for site in found.sites if site.kind == "refused"]  # the same, once
    release = str(planted(tmp_path / "changed", [Drift(FILE, gone.symbol, "eps=", "epsilon=")]))
    assert compare_model(MODEL, release, tmp_path, config=config).verdict == PERSON
    assert compare_model(MODEL, release, tmp_path, [gone.symbol], config).verdict == REVIEW


def test_a_method_that_an_edit_adds_and_upstream_has_now_needs_a_person():
    old = upstream.load(MODEL)
    edit = AddMethod("Qwen3MoeRMSNorm.extra", "def extra(self):\n    return 2", REASON)
    new = replace(
        old,
        text=old.text.replace("    def extra_repr", "    def extra(self):\n        return 1\n\n    def extra_repr"),
    )
    (site,) = drift_under_edits((edit,), {}, old, new, ())
    assert (site.kind, site.symbol, site.verdict, site.old_upstream) == ("hand edit", edit.target, PERSON, "")
    assert "return 1" in site.new_upstream and "return 2" in site.edit and site.new_line
    assert not list(drift_under_edits((edit,), {}, old, old, ()))


def test_of_a_class_that_changed_its_head_is_told_and_of_one_that_came_or_went_all_of_it():
    text = "class A(B):\n    def run(self):\n        return 1\n\n\nclass C:\n    pass\n"
    symbol = symbols_of(text)["A"]
    assert symbol.text(text) == "class A(B):\n    pass"
    assert symbol.text(text, whole=True) == text.partition("\n\n\n")[0]


def test_generate_refuses_to_hide_drift_until_it_was_reviewed(tmp_path: Path):
    edit, drift = UNDER_EDITS[0]
    with_edits(tmp_path, edit)
    before = {path: path.read_bytes() for path in (tmp_path / MODEL).iterdir()}
    release = releases.find(str(planted(tmp_path / "release", [drift]))).release
    drifted = pipeline.generate(upstream.load_from(release, MODEL), ModelConfig(MODEL, edits=(edit,)))
    with pytest.raises(StaleFile, match=r"Qwen3MoeTopKRouter\.forward.*(?s:.*)--reviewed Qwen3MoeTopKRouter\.forward"):
        provenance.write(drifted, tmp_path / MODEL, force=True)
    assert {path: path.read_bytes() for path in (tmp_path / MODEL).iterdir()} == before
    assert provenance.write(drifted, tmp_path / MODEL, reviewed=[edit.target])
    assert provenance.drifted_edits(tmp_path / MODEL, drifted) == []


def test_an_edit_that_was_changed_was_read_against_its_target(tmp_path: Path):
    edit, drift = UNDER_EDITS[0]
    with_edits(tmp_path, edit)
    release = releases.find(str(planted(tmp_path / "release", [drift]))).release
    other = replace(edit, code=edit.code.replace("super()", "None"))
    drifted = pipeline.generate(upstream.load_from(release, MODEL), ModelConfig(MODEL, edits=(other,)))
    assert provenance.drifted_edits(tmp_path / MODEL, drifted) == []
