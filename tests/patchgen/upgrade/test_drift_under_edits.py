"""Drift that was planted under hand edits: each edit whose target changed or is gone needs a person, until it is reviewed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted_releases import FILE, MODEL, Drift, check_reported, planted, site_of

from patchgen import pipeline, provenance, upstream, wheels
from patchgen.errors import StaleFile
from patchgen.model_configs import ModelConfig
from patchgen.passes.hand_edits import (
    AddMethod,
    Drop,
    Edit,
    EditMethod,
    MendUpstream,
    OverrideMethod,
    ReplaceClass,
    ReplaceFunction,
)
from patchgen.upgrade import compare_model, releases
from patchgen.upgrade.edits import drift_under_edits
from patchgen.upgrade.findings import PERSON, REVIEW, SAME, ModelUpgrade
from patchgen.upgrade.symbols import symbols_of

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
    """The comparison with the installed release, and with one that has drift under every edit."""
    root = tmp_path_factory.mktemp("edited")
    config = with_edits(root, *(edit for edit, _ in UNDER_EDITS))
    release = planted(tmp_path_factory.mktemp("release"), (drift for _, drift in UNDER_EDITS))
    return tuple(compare_model(MODEL, to, root, config=config) for to in (wheels.installed_version(), str(release)))


@pytest.mark.parametrize(("edit", "drift"), UNDER_EDITS, ids=lambda one: getattr(one, "id", type(one).__name__))
@pytest.mark.sampled(3)
def test_drift_under_a_hand_edit_needs_a_person(edit: Edit, drift: Drift, edited: tuple[ModelUpgrade, ModelUpgrade]):
    same, moved = edited
    assert (same.verdict, same.sites) == (SAME, ())
    check_reported(moved, drift)
    site = site_of(moved, drift)
    assert moved.verdict == PERSON and REASON in site.reason
    assert site.edit == getattr(edit, "code", "") and site.old_upstream != site.new_upstream != ""
    assert site.old_line and site.new_line


def test_only_the_targets_are_reported(edited: tuple[ModelUpgrade, ModelUpgrade]):
    owners = {drift.symbol.partition(".")[0] for _, drift in UNDER_EDITS}
    assert {site.symbol.partition(".")[0] for site in edited[1].sites} == owners


def test_drift_under_a_replaced_class_is_reported_with_the_method(tmp_path: Path):
    edit, drift = REPLACED_CLASS
    config = with_edits(tmp_path, edit)
    found = compare_model(MODEL, str(planted(tmp_path / "release", [drift])), tmp_path, config=config)
    check_reported(found, drift)
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


def test_a_release_that_mended_the_statement_itself_needs_no_person(tmp_path: Path):
    """A mend of the committed file whose statement the new release does not have: it generates, and its change is reviewed."""
    mend = MendUpstream(
        "Qwen3MoeMLP.__init__", "self.hidden_size = config.hidden_size", "self.hidden_size = 1", REASON
    )
    config = with_edits(tmp_path, mend)
    drift = Drift(FILE, "Qwen3MoeMLP.__init__", "= config.hidden_size", "= int(config.hidden_size)", kind="hand edit")
    to = planted(tmp_path / "release", [drift])
    found = compare_model(MODEL, str(to), tmp_path, config=config)
    site = site_of(found, drift)
    assert (found.verdict, site.verdict) == (REVIEW, REVIEW)
    assert "mend_upstream is not needed in the new release" in site.reason and REASON in site.reason
    generated = pipeline.generate(upstream.load_from(releases.find(str(to)).release, MODEL), config)
    assert provenance.write(generated, tmp_path / MODEL), "no edit hides what upstream changed"


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


def test_the_text_of_a_class_is_its_head_or_all_of_it():
    text = "class A(B):\n    def run(self):\n        return 1\n\n\nclass C:\n    pass\n"
    symbol = symbols_of(text)["A"]
    assert symbol.text(text) == "class A(B):\n    pass"
    assert symbol.text(text, with_members=True) == text.partition("\n\n\n")[0]


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


def test_each_of_two_edits_of_one_target_is_compared_with_itself(tmp_path: Path):
    edits = [
        {"verb": "edit_method", "target": "A.run", "edit": name, "upstream": "old"} for name in ("first", "second")
    ]
    (tmp_path / "provenance.json").write_text(json.dumps({"edits": edits}))
    now = [{**edits[0], "upstream": "new"}, {**edits[1], "edit": "changed", "upstream": "new"}]
    generated = SimpleNamespace(provenance=json.dumps({"edits": now}))
    assert provenance.drifted_edits(tmp_path, generated) == ["A.run"]


def test_an_edit_that_was_changed_was_read_against_its_target(tmp_path: Path):
    edit, drift = UNDER_EDITS[0]
    with_edits(tmp_path, edit)
    release = releases.find(str(planted(tmp_path / "release", [drift]))).release
    other = replace(edit, code=edit.code.replace("super()", "None"))
    drifted = pipeline.generate(upstream.load_from(release, MODEL), ModelConfig(MODEL, edits=(other,)))
    assert provenance.drifted_edits(tmp_path / MODEL, drifted) == []
