"""Heads that are asked for by name: one file with all of them, each around the model of that file."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from generation_cases import applied, edited, load
from invoked import invoke
from rounding import require_equal_up_to_rounding
from transformers.models.auto import modeling_auto

from patchgen import pipeline, provenance, upstream
from patchgen.commands import generation
from patchgen.errors import ConfigError, PassMismatch
from patchgen.model_configs import ModelConfig
from patchgen.passes.generic_heads import GenericHeads
from patchgen.runtime import attention, registry
from patchgen.runtime.checkpoint import export_pretrained
from patchgen.runtime.objectives.heads import head_over
from patchgen.runtime.train import recipe as recipes
from patchgen.runtime.train.model import build_on_meta
from patchgen.runtime.verify import head_kinds, verdict
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.verify_model import judge, verify_model

GENERIC = ("LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaForQuestionAnswering")
HEADS = (*GENERIC, "LlamaModel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """llama with four heads, as a user makes it."""
    root = tmp_path_factory.mktemp("heads")
    invoke("generate", "llama", *(word for head in HEADS for word in ("--head", head)), "--output", str(root))
    return root / "llama"


def test_one_file_holds_all_heads_that_were_asked_for(folder):
    record = registry.read_model(folder)
    assert record.heads == HEADS
    assert "LlamaForCausalLM" not in record.classes
    assert "AutoModel" not in record.file.read_text()
    assert "--head LlamaForQuestionAnswering" in provenance.read(folder)["command"]


def test_the_census_goes_through_a_generic_head(folder):
    census = provenance.read(folder)["census"]
    assert census["LlamaForSequenceClassification"] == "passes: generic_heads, parallel_plan"
    assert "language_sp" in census["LlamaModel"]


def test_a_recorded_symbol_is_upstreams(folder):
    default = json.loads(
        pipeline.generate(load("llama"), ModelConfig("llama", roots=("LlamaForCausalLM", *HEADS[3:]))).provenance
    )
    whole = provenance.read(folder)["symbols"]
    assert whole["LlamaModel"] == default["symbols"]["LlamaModel"]
    other = edited(
        load("llama"),
        (
            "(GenericForTokenClassification, LlamaPreTrainedModel): ...",
            "(GenericForTokenClassification, LlamaPreTrainedModel):\n    added = 1",
        ),
    )
    changed = json.loads(pipeline.generate(other, ModelConfig("llama"), GENERIC).provenance)["symbols"]
    assert changed["LlamaForTokenClassification"] != whole["LlamaForTokenClassification"]
    assert changed["LlamaForQuestionAnswering"] == whole["LlamaForQuestionAnswering"]


def test_a_head_whose_forward_nobody_reads_is_refused():
    """Upstream's body around upstream's model would train, and no pass would act in it."""
    other = edited(
        load("llama"), ("LlamaForTokenClassification(GenericForTokenClassification, ", "LlamaForTokenClassification(")
    )
    with pytest.raises(
        ConfigError, match="LlamaForTokenClassification of .* no class of this file gives it a forward"
    ):
        pipeline.generate(other, ModelConfig("llama"), GENERIC)


@pytest.mark.parametrize("head", HEADS)
def test_it_is_proven_eager_and_as_a_run_computes(folder, head):
    found, proof = judge(folder, head=head, implementations=())
    assert (found.status, found.reason) == (verdict.PROVEN, "")
    assert {case.name for case in proof.cases} == {
        "plain",
        "padded",
        "packed",
        "other caller",
        "large weights",
        "bf16",
    }
    assert {"packed", "leak", "padded left"} <= {check.name for check in proof.training.checks}


def test_a_head_around_upstreams_model_is_no_proof(folder, tmp_path):
    """What came out before: all numbers agree, and no pass acts in the body."""
    record = provenance.read(folder)
    other = tmp_path / "llama"
    other.mkdir()
    text = (folder / "modeling_llama.py").read_text()
    hollow = text.replace("LlamaModel._from_config(config)", "transformers.AutoModel.from_config(config)")
    (other / "modeling_llama.py").write_text(
        hollow.replace("from patchgen.runtime import ops\n", "import transformers\nfrom patchgen.runtime import ops\n")
    )
    (other / "provenance.json").write_text(json.dumps(record))
    proof = verify_model(other, head=GENERIC[0], implementations=(), training_path=False)
    assert "is upstream's LlamaModel" in proof.failures[0]


def test_a_fault_in_a_head_is_found(folder, tmp_path):
    other = tmp_path / "llama"
    other.mkdir()
    text = (folder / "modeling_llama.py").read_text()
    wrong = re.sub(r"logits = self.score\(sequence_output\)", "logits = self.score(sequence_output) * 1.001", text)
    assert wrong != text
    (other / "modeling_llama.py").write_text(wrong)
    (other / "provenance.json").write_text((folder / "provenance.json").read_text())
    proof = verify_model(other, head="LlamaForTokenClassification", implementations=(), training_path=False)
    assert "output 'loss' differs" in " ".join(proof.failures)


@pytest.mark.parametrize(
    ("head", "right"),
    [
        ("LlamaForSequenceClassification", "labels=labels, pooled_logits=pooled_logits, config=self.config)"),
        ("LlamaForTokenClassification", "loss = self.loss_function(logits, labels, self.config)"),
        ("LlamaForQuestionAnswering", "start_logits, end_logits, start_positions, end_positions, **kwargs)"),
    ],
)
def test_a_loss_that_is_wrong_with_the_attention_of_a_run_is_found(folder, tmp_path, head, right):
    """With eager attention it is upstream's: the comparison as a run computes must be of the head's own loss."""
    other = tmp_path / "llama"
    other.mkdir()
    text = (folder / "modeling_llama.py").read_text()
    assert text.count(right) == 1
    wrong = text.replace(right, f"{right} * (1.0 if self.config._attn_implementation == 'eager' else 1.01)")
    (other / "modeling_llama.py").write_text(wrong)
    (other / "provenance.json").write_text((folder / "provenance.json").read_text())
    proof = verify_model(other, head=head, implementations=())
    assert proof.is_equal and not proof.is_proven
    assert "loss differs" in proof.training.reason


def test_a_committed_file_is_made_again_with_its_heads(folder, monkeypatch, capsys):
    monkeypatch.setattr(provenance, "generated_root", lambda: folder.parent)
    assert generation._state("llama") == generation.CURRENT
    invoke("generate", "--all")
    assert registry.read_model(folder).heads == HEADS


def test_auto_classes_build_it(folder):
    mappings = [getattr(modeling_auto, name)._model_mapping for name in registry.AUTO_CLASSES]
    before = [dict(mapping._extra_content) for mapping in mappings]
    try:
        registry.register_all(folder.parent)
        config = small_config("llama").config
        for auto_class, head in zip(tuple(upstream.AUTO_CLASS_MAPPINGS)[4:7], GENERIC, strict=True):
            model = getattr(transformers, auto_class).from_config(config)
            assert (type(model).__name__, type(model).__module__) == (
                head,
                registry.read_model(folder).load().__name__,
            )
            assert type(model.base_model).__module__ == type(model).__module__
    finally:
        for mapping, content in zip(mappings, before, strict=True):
            mapping._extra_content = content


def test_the_same_auto_classes_are_read_and_served():
    assert tuple(upstream.AUTO_CLASS_MAPPINGS) == registry.AUTO_CLASSES


@pytest.mark.parametrize(
    ("model", "head", "told"),
    [
        ("llama", "LlamaForSequenceClasification", "has no model LlamaForSequenceClasification"),
        ("llama", "LlamaMLP", "has no model LlamaMLP"),
        (
            "qwen2_5_omni",
            "Qwen2_5OmniTalkerForConditionalGeneration",
            "no Auto class builds it, and its forward takes no labels",
        ),
        ("qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration", "no class of this file gives it a forward"),
        (
            "qwen3_omni_moe",
            "Qwen3OmniMoeTalkerForConditionalGeneration",
            "trained nor proven: no Auto class builds it \\(AutoModel,",
        ),
        ("diffusion_gemma", "DiffusionGemmaForBlockDiffusion", "trained nor proven: its forward takes no labels"),
    ],
)
def test_what_is_no_head_is_refused_by_name(model, head, told):
    with pytest.raises(ConfigError, match=told):
        invoke("generate", model, "--head", head, "--dry-run")


def test_heads_are_of_one_model():
    with pytest.raises(ConfigError, match="--head LlamaModel belongs to one model, but 2 were given"):
        invoke("generate", "llama", "mistral", "--head", "LlamaModel", "--dry-run")


def test_a_member_that_calls_the_generic_one_is_a_miss():
    member = "    def forward(self, **kwargs):\n        return super().forward(**kwargs)\n"
    bases = "GenericForTokenClassification, LlamaPreTrainedModel):"
    origin = edited(load("llama"), (f"{bases} ...\n", f"{bases}\n{member}"))
    with pytest.raises(PassMismatch, match="no member that calls GenericForTokenClassification's by super"):
        pipeline.generate(origin, ModelConfig("llama"), ["LlamaForTokenClassification"])


def test_the_config_of_a_model_lists_heads():
    config = ModelConfig("llama", heads=("LlamaForCausalLM", "LlamaModel"))
    generated = pipeline.generate(load("llama"), config)
    assert json.loads(generated.provenance)["heads"] == ["LlamaForCausalLM", "LlamaModel"]
    assert "asked" not in json.loads(generated.provenance)


def test_kinds_follow_from_the_mappings():
    kinds = {name: head_kinds.kind_of(name) for name in (*HEADS, "LlamaForCausalLM", "BertForTokenClassification")}
    assert list(kinds.values()) == ["classification", "token", "answers", "base", None, "token"]


def test_a_classifier_trains_by_its_objective_and_exports(folder, tmp_path, monkeypatch):
    """The class that a recipe with objective.name = classification trains, over the generated file's own model."""
    attention.register()
    monkeypatch.setattr(registry, "generated_models", lambda directory=None: (registry.read_model(folder),))
    config = small_config("llama").config
    head = registry.find_head(config)
    kind = head_over("classification", head, config)
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    assert type(model.model).__module__ == head.__module__
    export_pretrained(model, tmp_path)
    plain, told = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert type(plain).__module__.startswith("transformers.") and not any(told.values()), told
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        require_equal_up_to_rounding(model(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)


def test_a_head_without_an_objective_is_refused_before_ranks_start(folder, monkeypatch):
    monkeypatch.setattr(registry, "generated_models", lambda directory=None: (registry.read_model(folder),))
    recipe = recipes.from_dict({"model": {"source": "llama"}, "data": {}})
    with pytest.raises(
        recipes.RecipeError,
        match="next_token trains .* generated for LlamaForSequenceClassification, a sequence classifier",
    ):
        build_on_meta(recipe)


def test_a_recipe_takes_the_language_model_of_a_file_with_several_heads(tmp_path, monkeypatch):
    generated = pipeline.generate(load("llama"), ModelConfig("llama"), (GENERIC[0], "LlamaForCausalLM"))
    provenance.write(generated, tmp_path / "llama")
    monkeypatch.setattr(
        registry, "generated_models", lambda directory=None: (registry.read_model(tmp_path / "llama"),)
    )
    assert registry.find_head(small_config("llama").config).__name__ == "LlamaForCausalLM"


def test_what_the_generic_code_names_and_the_file_lacks_comes_along():
    """mistral's file has no logger of its own."""
    text = pipeline.generate(load("mistral"), heads=["MistralForSequenceClassification"]).text
    assert "from transformers.utils import logging" in text and "logger = logging.get_logger(__name__)" in text


def test_a_function_of_the_generic_code_comes_along_unless_the_file_has_another(tmp_path):
    dropped, above = "sequence_output = self.dropout(sequence_output)", "class GenericForTokenClassification:"
    layers = upstream.open_release().read("modeling_layers.py") or ""
    assert dropped in layers and above in layers
    layers = layers.replace(dropped, "sequence_output = soften(sequence_output)")
    (tmp_path / "modeling_layers.py").write_text(layers.replace(above, f"def soften(x):\n    return x\n\n\n{above}"))
    release, text = upstream.Release(tmp_path, "0"), GenericHeads.EXAMPLES[0].before
    assert "def soften(x):" in applied(GenericHeads(), text, release=release).module.text
    with pytest.raises(
        PassMismatch, match=r"soften of transformers\.modeling_layers, for which this file has another"
    ):
        applied(GenericHeads(), f"{text}\n\ndef soften(x):\n    return 2 * x\n", release=release)
