"""Which modalities a model tells apart in one row is tried with the model, and the packer follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from patchgen.runtime import registry
from patchgen.runtime.train import modalities, preflight
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.verify.media import REFUSALS
from patchgen.runtime.verify.media_samples import SampleBuilder
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.small_config import small_config

EVALUATION = {"eval_data": {"kind": "multimodal"}, "train": {"eval_every": 1}}


def classes(name: str):
    """Upstream's head, the generated one and a small config."""
    model = registry.find_model(name)
    ours = getattr(model.load(), model.heads[0])
    theirs = getattr(model.upstream(), model.heads[0])
    return theirs, ours, small_config(ours.config_class).config


@pytest.mark.parametrize(
    ("name", "expected"),
    [("glm4v_moe", (("image", "video"),)), ("qwen3_vl", ()), ("qwen2_5_omni", ()), ("gemma3", ())],
)
def test_pairs_that_a_model_cannot_tell_apart_are_found(name, expected):
    upstream, generated, config = classes(name)
    assert modalities.separate_pairs(upstream, generated, config, attention_name="patchgen_sdpa") == expected


def test_upstream_dies_on_such_a_row():
    """What `separate_pairs` is for: the day this passes, nothing needs to be kept apart."""
    upstream, _, config = classes("glm4v_moe")
    model = build_model(upstream, config)
    builder = SampleBuilder(model)
    sample = builder.sample([3, builder.maker.item("image", 0), 2, builder.maker.item("video", 0), 4])
    with torch.no_grad(), pytest.raises(REFUSALS):
        builder.run_upstream(builder.case("both", [sample]).batch)


def test_a_run_that_evaluates_on_media_alone_is_examined_with_media(monkeypatch):
    def key(head, config, attention, named, media, dtype) -> str:
        raise LookupError(f"examined with media: {media}")

    monkeypatch.setattr(preflight, "_cache_key", key)
    values = {"model": {"source": "glm4v_moe"}, "data": {}}
    with pytest.raises(LookupError, match="media: True"):
        preflight.examine(from_dict({**values, **EVALUATION}))
    with pytest.raises(LookupError, match="media: False"):
        preflight.examine(from_dict(values))


def test_a_run_packs_as_its_model_needs(tmp_path):
    _, generated, config = classes("glm4v_moe")
    found = preflight.with_modalities(preflight.Preflight("proven", "", "patchgen_sdpa"), generated, config)
    assert found.separate_pairs == (("image", "video"),)
    recipe = from_dict({"model": {"source": "glm4v_moe"}, "data": {"kind": "multimodal"}, **EVALUATION})
    packed = modalities.with_separate_pairs(recipe, found.separate_pairs)
    assert packed.data.separate_modalities == packed.eval_data.separate_modalities == (("image", "video"),)
    assert modalities.with_separate_pairs(recipe, ()) == recipe
    more = replace(recipe, data=replace(recipe.data, separate_modalities=(("video", "image"), ("image", "audio"))))
    assert modalities.with_separate_pairs(more, found.separate_pairs).data.separate_modalities == (
        ("audio", "image"),
        ("image", "video"),
    )
    none = replace(recipe, data=replace(recipe.data, separate_modalities=()))
    with pytest.raises(RecipeError, match=r"data.separate_modalities = \[\]: .* cannot distinguish image and video"):
        modalities.with_separate_pairs(none, found.separate_pairs)
