"""What a recipe's objective may be, and what is refused before any rank starts."""

from __future__ import annotations

import pytest
import torch

from patchgen.runtime.objectives import NextToken, choose
from patchgen.runtime.objectives.dpo import DPO
from patchgen.runtime.train import checks, run_plan
from patchgen.runtime.train.recipe import ObjectiveConfig, RecipeError, from_dict

SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
OWN = """
from dataclasses import dataclass
from patchgen.runtime.objectives import NextToken, Objective

@dataclass(frozen=True)
class Mine(Objective):
    strength: float = 1.0

    def loss(self, batch):
        return batch.token_log_probs().sum()

class Other: ...

class Bare(Mine):
    stronger: float = 1.0

@dataclass(frozen=True)
class Lossless(NextToken): ...

@dataclass(frozen=True)
class Weighted(NextToken):
    def loss(self, batch):
        return batch.token_log_probs().sum()

@dataclass(frozen=True)
class Paired(Weighted):
    kinds = ()
    per = "pair"
"""


def recipe_of(name: str, kind: str, **sections):
    values = {
        "model": {"source": "qwen3_moe", "overrides": SMALL},
        "data": {"sources": [{"path": "builtin:pairs" if kind == "preference" else "builtin:labels"}], "kind": kind},
        "objective": {"name": name},
    }
    return from_dict({**values, **sections})


def test_options_are_those_of_the_class():
    assert choose.objective_of(ObjectiveConfig()) == NextToken()
    assert choose.objective_of(ObjectiveConfig(name="dpo", options={"beta": 0.5})) == DPO(beta=0.5)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("dop", {}, "Did you mean dpo"),
        ("dpo", {"betta": 1}, "no such option. Did you mean beta"),
        ("dpo", {"beta": -1}, "beta must be above 0, not -1"),
        ("dpo", {"beta": "much"}, "beta: input should be a valid number"),
        ("next_token", {"beta": 1}, "There are: none"),
        ("nowhere:Mine", {}, "cannot be imported: ModuleNotFoundError"),
        ("mine:None_", {}, "cannot be imported: AttributeError"),
        ("mine:Other", {}, "must be derived from patchgen.runtime.objectives.Objective"),
        ("mine:Bare", {"stronger": 2}, "decorated with @dataclass.frozen=True"),
        ("mine:Lossless", {}, "has no method loss"),
        ("mine:Mine", {"strong": 2}, "Did you mean strength"),
    ],
)
def test_what_is_no_objective_is_refused(name, options, told, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=told):
        choose.objective_of(ObjectiveConfig(name=name, options=options))


def test_an_error_of_the_users_module_is_quoted_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "several_lines.py").write_text('raise RuntimeError("first,\\nthen second.")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match="cannot be imported: RuntimeError: first, then second. Modules are"):
        choose.objective_of(ObjectiveConfig(name="several_lines:Mine"))


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (recipe_of("dpo", "classification"), "learns from data.kind = preference, not 'classification'"),
        (recipe_of("next_token", "preference"), "learns from data.kind = text or chat or multimodal"),
        (recipe_of("dpo", "preference", kernels={"causal_lm_loss": "chunked"}), "computes the next-token loss"),
        (recipe_of("reward", "preference", lora={"rank": 4}), "which lora would leave untrained"),
        (recipe_of("distillation", "classification"), "needs a teacher. Add teacher"),
        (recipe_of("dpo", "preference", teacher={"source": "qwen3_moe"}), "does not use the section teacher"),
    ],
)
def test_what_no_rank_could_train_is_refused(recipe, told):
    with pytest.raises(RecipeError, match=told):
        run_plan.require_valid(recipe, world_size=1)


def test_a_class_derived_from_next_token_computes_its_own_loss(tmp_path, monkeypatch):
    (tmp_path / "derived.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = choose.objective_of(ObjectiveConfig(name="derived:Weighted"))
    assert NextToken().is_models_own and not own.is_models_own and not DPO().is_models_own
    recipe = recipe_of("derived:Weighted", "text", kernels={"causal_lm_loss": "chunked"})
    with pytest.raises(RecipeError, match="computes the next-token loss"):
        choose.require_valid(recipe)
    alone = torch.nn.Linear(1, 1)  # it has no seam
    choose.require_seam(NextToken(), alone, {})
    with pytest.raises(RecipeError, match="Weighted: Linear computes its loss itself"):
        choose.require_seam(own, alone, {})


def test_pairs_come_from_preferences_alone(tmp_path, monkeypatch):
    (tmp_path / "paired.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    choose.require_valid(recipe_of("paired:Paired", "preference"))
    with pytest.raises(
        RecipeError, match="pairs .per = 'pair'., which need data.kind = preference or similar, not 'classification'"
    ):
        choose.require_valid(recipe_of("paired:Paired", "classification"))
    evaluated = {"sources": [{"path": "builtin:labels"}], "kind": "classification"}
    with pytest.raises(RecipeError, match="which need eval_data.kind = preference or similar"):
        choose.require_valid(recipe_of("paired:Paired", "preference", eval_data=evaluated))


def test_a_model_without_a_classifier_of_upstreams_is_refused():
    recipe = recipe_of("reward", "preference", model={"source": "qwen2_vl"})
    with pytest.raises(
        RecipeError, match="objective.name = reward: transformers has no sequence classifier for a Qwen2VL"
    ):
        checks.build_runnable(recipe, 1)


def test_a_dry_run_says_what_is_learned():
    recipe = recipe_of("reward", "preference")
    text = run_plan.describe(recipe, checks.build_runnable(recipe, 1), 1)
    assert "Qwen3MoeForSequenceClassification" in text and "objective    reward" in text
    assert "causal_lm_loss" not in text
    recipe = recipe_of("dpo", "preference")
    text = run_plan.describe(recipe, checks.build_runnable(recipe, 1), 1)
    assert "causal_lm_loss by the objective, in chunks" in text


def test_a_teacher_has_the_same_tokens():
    teacher = {"source": "qwen3_moe", "overrides": SMALL}
    recipe = recipe_of("distillation", "classification", teacher=teacher)
    assert "teacher      qwen3_moe" in run_plan.describe(recipe, checks.build_runnable(recipe, 1), 1)
    other = teacher | {"overrides": SMALL | {"vocab_size": 384}}
    with pytest.raises(RecipeError, match="its vocab_size is 384 and that of the model 320"):
        checks.build_runnable(recipe_of("distillation", "classification", teacher=other), 1)
