"""What a head builds by Auto classes of other files: language models become parts, towers stay upstream's and are named."""

from __future__ import annotations

import json

import pytest

from patchgen import pipeline, source, upstream
from patchgen.anatomy import study
from patchgen.anatomy.census import ELSEWHERE, PART
from patchgen.commands import generation
from patchgen.errors import StaleFile
from patchgen.runtime.verify import source_keys


def parts_of(model: str) -> dict[str, bool]:
    """Where a file builds a class of another one, and whether that is a part."""
    found = upstream.load(model)
    anatomy = study(source.parse(found.text, found.path), found)
    return {
        f"{info.name}.{build.attribute}": anatomy.is_part(build)
        for info in anatomy.classes.values()
        for build in info.auto_builds
        if anatomy.target_of(build) not in anatomy.classes
    }


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llava", {"LlavaModel.vision_tower": False, "LlavaModel.language_model": True}),
        (
            "glm46v",
            {"Glm46VModel.visual": False, "Glm46VModel.language_model": True},
        ),  # of a type without a causal head
        ("gemma3", {"Gemma3Model.vision_tower": False}),
        ("florence2", {"Florence2Model.language_model": False}),  # an encoder-decoder
    ],
)
def test_language_models_of_other_files_are_parts_and_towers_are_not(model, expected):
    assert parts_of(model) == expected


def test_a_model_comes_with_the_parts_that_its_default_config_names():
    head, part = pipeline.generate_whole(upstream.load("internvl"))
    assert (head.model, part.model) == ("internvl", "qwen2")
    assert part.files == pipeline.generate(upstream.load("qwen2")).files
    assert "ops.build_part(AutoModel, config.text_config, beside=__file__)" in head.text
    facts = json.loads(head.provenance)
    assert facts["parts"] == [
        {
            "site": "InternVLModel.language_model",
            "builds": "AutoModel.from_config(config.text_config)",
            "default": {"class": "Qwen2Model", "model": "qwen2"},
        }
    ]
    assert facts["census"]["Qwen2Model"] == PART
    assert "parts" not in json.loads(part.provenance)
    assert [one.model for one in pipeline.generate_whole(upstream.load("internvl"), lambda name: name == "qwen2")] == [
        "internvl"
    ]


def test_a_tower_that_stays_upstreams_is_named():
    generated = pipeline.generate(upstream.load("llava"))
    assert json.loads(generated.provenance)["census"]["CLIPVisionModel"] == ELSEWHERE
    notes = [note for step in generated.steps if step.name == "local_classes" for note in step.outcome.notes]
    assert notes == [
        "LlavaModel.vision_tower: AutoModel.from_config(config.vision_config) builds CLIPVisionModel, which is not in this file"
    ]


def test_generate_writes_a_part_once(tmp_path):
    def written(model: str) -> set[str]:
        generation.generate([model], False, None, None, tmp_path, dry_run=False, force=False)
        return {path.parent.name for path in tmp_path.glob("*/provenance.json")}

    assert written("aya_vision") == {"aya_vision", "cohere2"}
    before = (tmp_path / "cohere2" / "provenance.json").stat().st_mtime_ns
    assert written("cohere2_vision") == {"aya_vision", "cohere2", "cohere2_vision"}
    assert (tmp_path / "cohere2" / "provenance.json").stat().st_mtime_ns == before
    assert written("llava") == {"aya_vision", "cohere2", "cohere2_vision", "llava"}  # llama is in the installation


def test_a_part_that_is_refused_leaves_the_model_as_it_is(tmp_path):
    """And `--force` is for parts, too."""
    part = tmp_path / "cohere2" / "modeling_cohere2.py"
    part.parent.mkdir()
    part.write_text("by hand\n")
    for dry_run in (True, False):
        with pytest.raises(StaleFile, match="modeling_cohere2.py in cohere2/ stands there without a record"):
            generation.generate(["aya_vision"], False, None, None, tmp_path, dry_run=dry_run, force=False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [part]
    generation.generate(["aya_vision"], False, None, None, tmp_path, dry_run=False, force=True)
    assert part.read_text() != "by hand\n" and (tmp_path / "aya_vision" / "modeling_aya_vision.py").is_file()


def test_configs_of_parts_are_sources_of_a_record(monkeypatch):
    """A row of the coverage is made again when the config of a part changes; one of a model without parts is not."""
    release = upstream.open_release()
    models = ("llava", "llama")
    before = [source_keys.model_sources_hash(name, release) for name in models]
    monkeypatch.setattr(source_keys, "_every_config", lambda: "# changed\n")
    after = [source_keys.model_sources_hash(name, release) for name in models]
    assert [one != other for one, other in zip(before, after, strict=True)] == [True, False]
