"""Models that a head builds from another file are generated ones: bound by the config, planned, loaded and refused."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlavaForConditionalGeneration

from patchgen import pipeline, provenance, upstream
from patchgen.runtime import compatibility, project, registry
from patchgen.runtime.checkpoint import load_pretrained
from patchgen.runtime.parts import UnknownPartError, part_files, parts_of
from patchgen.runtime.train import model as models
from patchgen.runtime.train import preflight
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.verify.model_pair import build_model, build_pair
from patchgen.runtime.verify.small_config import small_config

HEAD = "LlavaForConditionalGeneration"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("generated")
    provenance.write(pipeline.generate(upstream.load("llava")), root / "llava")
    return root / "llava"


@pytest.fixture(autouse=True)
def no_folders_of_other_tests(monkeypatch):
    monkeypatch.setattr(project, "_ADDED", {})


def llava_config_with(text_type: str):
    """A small Llava's config, around a language model of that type."""
    config = small_config("llava").config
    config.text_config = small_config(text_type).config
    return config


def head_in(folder: Path) -> type:
    return getattr(registry.read_model(folder).load(), HEAD)


@pytest.mark.parametrize("text_type", ["llama", "qwen3_moe"])
def test_one_file_serves_every_language_model(folder, text_type):
    config = llava_config_with(text_type)
    pair = build_pair(LlavaForConditionalGeneration, head_in(folder), config)
    assert pair.problems == []
    (path, _, file), *others = parts_of(pair.generated)
    assert (path, others) == ("model.language_model", [])
    assert file is registry.find_model(text_type).load()
    assert part_files(head_in(folder), config) == [registry.find_model(text_type).file]
    inputs = torch.arange(6)[None] + 3
    assert torch.equal(pair.generated(inputs).logits, pair.upstream(inputs).logits)


def test_a_heads_plan_lists_the_experts_of_its_part_below_the_parts_path(folder):
    config = llava_config_with("qwen3_moe")
    model = build_model(head_in(folder), config)
    alone = build_model(registry.find_head(config.text_config), config.text_config)
    expected = [
        f"model.language_model{name.removeprefix('model')}" for name in alone.get_parallel_plan().expert_parameters
    ]
    assert expected
    assert model.get_parallel_plan().expert_parameters == tuple(expected)


def test_a_checkpoint_with_one_tensor_per_expert_loads_into_the_part(folder, tmp_path):
    config = llava_config_with("mixtral")
    theirs = build_model(LlavaForConditionalGeneration, config)
    theirs.save_pretrained(tmp_path)
    head = head_in(folder)
    loaded, info = head.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ours = build_model(head, config)
    load_pretrained(ours, tmp_path)
    for one in (loaded, ours):
        state = one.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())


def test_every_weight_of_a_part_is_initialised_as_upstreams(folder):
    ours, theirs = (
        build_model(kind, llava_config_with("deepseek_v3"))
        for kind in (head_in(folder), LlavaForConditionalGeneration)
    )
    state = ours.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())


def test_a_part_without_a_generated_file_is_refused_with_the_command(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = llava_config_with("olmo2")
    with pytest.raises(UnknownPartError, match=r"type 'olmo2' \(Olmo2Model\).*\n?.*patchgen generate olmo2"):
        build_model(head_in(folder), config)
    config.save_pretrained(tmp_path / "source")
    recipe = from_dict(
        {
            "model": {"source": str(tmp_path / "source"), "generated": str(folder.parent)},
            "data": {"tokens_per_batch": 64},
            "train": {"steps": 2, "batches_per_step": 2},
            "log": {"directory": str(tmp_path / "run")},
        }
    )
    for start in (preflight.examine, models.build_on_meta):
        with pytest.raises(RecipeError, match="patchgen generate olmo2"):
            start(recipe)


def test_a_part_beside_the_head_is_taken_before_the_installations(tmp_path):
    root = tmp_path / "generated"
    for one in pipeline.generate_whole(upstream.load("llava")):
        provenance.write(one, root / one.model)
    model = build_model(head_in(root / "llava"), small_config("llava").config)
    assert sys.modules[type(model.model.language_model).__module__].__file__ == str(
        root / "llama" / "modeling_llama.py"
    )


def test_the_parts_of_a_copied_model_are_found(folder):
    copied = copy.deepcopy(build_model(head_in(folder), llava_config_with("llama")))
    assert [path for path, *_ in parts_of(copied)] == ["model.language_model"]


def test_a_proof_is_of_the_parts_too(folder, tmp_path):
    root = tmp_path / "generated"
    for one in pipeline.generate_whole(upstream.load("llava")):
        provenance.write(one, root / one.model)
    head, part = root / "llava" / "modeling_llava.py", root / "llama" / "modeling_llama.py"
    before = compatibility.digest(head)
    part.write_text(part.read_text() + "\n")
    assert compatibility.digest(head) != before
    assert compatibility.digest(folder / head.name) == before  # no part beside it: the installation's counts


def test_a_part_with_code_of_its_own_checkpoint_is_refused_until_that_code_is_generated(folder, tmp_path):
    """A part with `auto_map` in its config is never the checkpoint's own class, which no pass has rewritten."""

    class Brought(LlamaConfig):
        model_type = "brought"

    Brought.__module__ = "configuration_brought"
    config = small_config("llava").config
    fields = small_config("llama").config.to_dict()
    config.text_config = Brought(**{name: value for name, value in fields.items() if name != "model_type"})
    config.text_config.auto_map = {"AutoModel": "someone/brought--modeling_brought.LlamaModel"}
    with pytest.raises(UnknownPartError, match="patchgen generate --source modeling_brought.py"):
        build_model(head_in(folder), config)
    root = tmp_path / "generated"
    for name, source in (("llava", folder), ("brought", registry.find_model("llama").file.parent)):
        shutil.copytree(source, root / name)
    built = build_model(head_in(root / "llava"), config).model.language_model
    assert Path(sys.modules[type(built).__module__].__file__).parent == root / "brought"
