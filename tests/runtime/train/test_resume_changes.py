"""What has changed since a checkpoint, in the words of a recipe, whatever release saved it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from patchgen.runtime.checkpoint.saved_steps import SavedSteps
from patchgen.runtime.train import resume_changes
from patchgen.runtime.train.recipe import RecipeError, from_dict, to_dict


@pytest.fixture
def values(tmp_path, monkeypatch) -> dict:
    monkeypatch.setattr(SavedSteps, "complete_steps", lambda self: [4, 6])
    return {"model": {"source": "qwen3"}, "data": {}, "lora": {"rank": 4}, "log": {"directory": str(tmp_path)}}


def save(values: dict, step: int, *missing: str) -> None:
    """Saves a recipe as an earlier release did, which lacked some keys."""
    saved, folder = to_dict(from_dict(values)), Path(values["log"]["directory"], "checkpoints")
    for key in missing:
        section, _, name = key.partition(".")
        saved[section].pop(name) if name else saved.pop(section)
    folder = folder / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / resume_changes.RECIPE_FILE).write_text(yaml.safe_dump(saved))


def test_a_key_that_a_saved_recipe_lacks_had_its_default(values):
    save(values, 6, "lora.rslora", "lora.layers_to_transform", "objective", "train.cuda_graph", "eval_data")
    assert resume_changes.since(from_dict(values)).description == ""
    other = {**values, "lora": {"rank": 4, "rslora": True}}
    with pytest.raises(RecipeError, match=r"(?s)cannot be resumed .*lora.rslora: False -> True\n"):
        resume_changes.require_resumable(from_dict(other))


def test_a_key_of_a_source_that_a_saved_recipe_lacks_had_its_default_and_an_outdated_recipe_too(values):
    recipe = from_dict(values | {"data": {"sources": [{"path": "text.jsonl"}]}})
    save(to_dict(recipe), 6)
    file = Path(values["log"]["directory"], "checkpoints", "step-00000006", resume_changes.RECIPE_FILE)
    saved = yaml.safe_load(file.read_text())
    del saved["data"]["sources"][0]["weight"], saved["train"]["cuda_graph"]
    file.write_text(yaml.safe_dump(saved))
    assert resume_changes.since(recipe).description == ""
    saved["data"]["sources"][0]["retired"] = saved["train"]["retired"] = True
    saved["parallel"]["param_dtype"], saved["model"]["attention"] = "float8", 3
    file.write_text(yaml.safe_dump(saved | {"no_section": {"inner": 1}}))
    assert set(resume_changes.since(recipe).description.splitlines()[1:]) == {
        "  data.sources.0.retired: True -> not set",
        "  train.retired: True -> not set",
        "  parallel.param_dtype: 'float8' -> None",
        "  model.attention: 3 -> None",
        "  no_section.inner: 1 -> not set",
    }


def test_a_recipe_that_lacks_what_has_no_default_differs_in_every_key_that_it_lacks(values):
    save(values, 6)
    file = Path(values["log"]["directory"], "checkpoints", "step-00000006", resume_changes.RECIPE_FILE)
    file.write_text(yaml.safe_dump({"name": "recipe", "retired": 1}))
    told = resume_changes.since(from_dict(values)).description
    assert "\n  model.source: not set -> 'qwen3'" in told and "\n  retired: 1 -> not set" in told


def test_a_run_from_before_muon_stepped_experts_had_adamw_for_them(values):
    """Their moments are no momentum: the run continues as it began, or is refused with the key."""
    values = {**values, "lora": None, "optim": {"name": "muon"}}
    save(values, 6, "optim.muon_experts")
    with pytest.raises(RecipeError, match=r"(?s)cannot be resumed .*optim.muon_experts: False -> True\n"):
        resume_changes.require_resumable(from_dict(values))
    resume_changes.require_resumable(from_dict({**values, "optim": {"name": "muon", "muon_experts": False}}))


def test_a_run_from_before_there_were_adapters_had_none(values):
    whole = {name: section for name, section in values.items() if name != "lora"}
    save(whole, 6, "lora", "teacher")
    assert resume_changes.since(from_dict(whole)).description == ""
    with pytest.raises(RecipeError, match="cannot be resumed .* adapters"):
        resume_changes.require_resumable(from_dict(values))


def test_changes_are_those_since_the_checkpoint_that_is_named(values):
    save(values | {"optim": {"lr": 1.0}}, 4)
    save(values | {"optim": {"lr": 2.0}}, 6)
    recipe = from_dict(values | {"optim": {"lr": 3.0}})
    assert resume_changes.since(recipe).description.endswith("from step-00000006's:\n  optim.lr: 2.0 -> 3.0")
    assert resume_changes.since(recipe, 4).description.endswith("from step-00000004's:\n  optim.lr: 1.0 -> 3.0")
