"""The registry: transformers' auto classes build generated classes, and the error for an unknown model names the nearest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from recorded_facts import OF_LENGTH, OF_STATE, record
from transformers.models.auto import modeling_auto

from patchgen.runtime import registry
from patchgen.runtime.compatibility import ALLOW_VARIABLE
from patchgen.runtime.verify.slices import fake_rank
from patchgen.runtime.verify.small_config import small_config

sys.path.insert(0, str(Path(__file__).parent / "verify"))
from stand_in import write_stand_in


@pytest.fixture(autouse=True)
def restored_auto_classes():
    """Registrations last for the process; each test starts and ends with upstream's."""
    mappings = [getattr(modeling_auto, name)._model_mapping for name in registry.AUTO_CLASSES]
    before = [dict(mapping._extra_content) for mapping in mappings]
    yield
    for mapping, content in zip(mappings, before, strict=True):
        mapping._extra_content = content


@pytest.fixture
def generated_folder(tmp_path):
    for model_type in ("qwen3_moe", "mixtral", "qwen3_5"):
        write_stand_in(tmp_path, model_type)
    return tmp_path


def test_auto_classes_build_the_generated_classes(generated_folder):
    config = small_config("qwen3_moe").config
    assert type(transformers.AutoModelForCausalLM.from_config(config)).__module__.startswith("transformers.")
    models = registry.register_all(generated_folder)
    assert [model.name for model in models] == ["mixtral", "qwen3_5", "qwen3_moe"]
    for auto_class, name in (("AutoModelForCausalLM", "Qwen3MoeForCausalLM"), ("AutoModel", "Qwen3MoeModel")):
        model = getattr(transformers, auto_class).from_config(config)
        assert type(model).__name__ == name
        assert type(model).__module__ == models[2].load().__name__


def test_both_auto_classes_of_a_multimodal_config_build_generated_classes(generated_folder):
    registry.register_all(generated_folder)
    config = small_config("qwen3_5").config
    text_head = transformers.AutoModelForCausalLM.from_config(config)  # from its text config
    whole = transformers.AutoModelForImageTextToText.from_config(config)
    assert type(text_head).__name__ == "Qwen3_5ForCausalLM"
    assert type(whole).__name__ == "Qwen3_5ForConditionalGeneration"
    assert (
        type(text_head).__module__
        == type(whole).__module__
        == registry.read_model(generated_folder / "qwen3_5").load().__name__
    )


def test_a_checkpoint_of_upstream_loads_whole_into_the_generated_class(generated_folder, tmp_path):
    upstream = transformers.MixtralForCausalLM(small_config("mixtral").config)
    upstream.save_pretrained(tmp_path / "checkpoint")
    registry.register_all(generated_folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", output_loading_info=True)
    assert not type(model).__module__.startswith("transformers.")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = upstream.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_a_model_of_another_release_is_named_and_the_others_are_registered(generated_folder, monkeypatch):
    def pin_to_another_release(name: str) -> None:
        path = generated_folder / name / f"modeling_{name}.py"
        guard = 'from patchgen.runtime import ops\nops.require_transformers(__file__, made_from="4.0.0")\n'
        path.write_text(guard + path.read_text())

    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    pin_to_another_release("mixtral")
    with pytest.warns(
        RuntimeWarning, match=r"1 generated model[\s\S]*modeling_mixtral\.py[\s\S]*patchgen generate"
    ) as warned:
        models = registry.register_all(generated_folder)
    assert len(warned) == 1 and [model.name for model in models] == ["qwen3_5", "qwen3_moe"]
    pin_to_another_release("qwen3_5")
    pin_to_another_release("qwen3_moe")
    for name in [name for name in sys.modules if name.startswith("patchgen_generated_")]:
        monkeypatch.delitem(sys.modules, name)  # as in a fresh process: imported again
    with pytest.raises(ImportError, match=r"No generated model could be registered[\s\S]*modeling_qwen3_moe"):
        registry.register_all(generated_folder)


def test_build_model_takes_a_config(generated_folder):
    model = registry.build_model(small_config("mixtral").config, directory=generated_folder, dtype=torch.bfloat16)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert next(model.parameters()).dtype == torch.bfloat16


def test_a_model_whose_proof_leaves_one_rank_is_not_built_on_several(tmp_path):
    config = small_config("mixtral").config
    record(write_stand_in(tmp_path, "mixtral") / "modeling_mixtral.py", [OF_STATE])
    with fake_rank(), pytest.raises(ValueError, match="line 9, `self.seen = x`: .* it trains on one rank, not on 2"):
        registry.build_model(config, directory=tmp_path)
    assert registry.build_model(config, directory=tmp_path).config is config


def test_a_model_whose_proof_leaves_whole_sequences_is_built_on_ranks_that_may_have_them(tmp_path):
    record(write_stand_in(tmp_path, "mixtral") / "modeling_mixtral.py", [OF_LENGTH])
    with fake_rank():
        registry.build_model(small_config("mixtral").config, directory=tmp_path)


def test_an_unknown_config_names_the_nearest_and_the_command(generated_folder):
    with pytest.raises(
        registry.UnknownModelError, match=r"Qwen2MoeConfig.*\n*.*qwen3_moe(.|\n)*patchgen generate qwen2_moe"
    ):
        registry.build_model(small_config("qwen2_moe").config, directory=generated_folder)
    with pytest.raises(registry.UnknownModelError, match="Nearest of those that exist: mixtral"):
        registry.find_model("mixtrall", generated_folder)


def test_a_broken_provenance_json_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no provenance\.json"):
        registry.read_model(tmp_path)
    (tmp_path / "provenance.json").write_text(json.dumps({"model": "x"}))
    with pytest.raises(ValueError, match="lacks the field 'upstream'"):
        registry.read_model(tmp_path)
    (tmp_path / "provenance.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        registry.read_model(tmp_path)


def test_a_generated_module_is_in_sys_modules_once(generated_folder):
    model = registry.read_model(generated_folder / "mixtral")
    module = model.load()
    assert sys.modules[module.__name__] is module
    assert model.load() is module


def test_a_file_is_imported_by_its_path_where_a_folder_has_its_name(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "__init__.py").write_text("name = 'folder'\n")
    for stem in ("part", "with.dots", "1st"):
        (tmp_path / f"{stem}.py").write_text(f"name = '{stem}'\n")
        module = registry.import_file(tmp_path / f"{stem}.py")
        assert module.name == stem
