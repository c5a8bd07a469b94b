"""Rows in the forms that people have become the same messages; the recipes that name them are read with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from patchgen.runtime.data import formats
from patchgen.runtime.data.config import SourceConfig
from patchgen.runtime.data.transform import Transform, load
from patchgen.runtime.train import model as models
from patchgen.runtime.train import optimizers
from patchgen.runtime.train.recipe import load as load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
ANSWER = {"role": "assistant", "content": "A cat."}
PARTS = [{"type": "image"}, {"type": "text", "text": "\nWhat? "}, {"type": "audio"}]
ROWS = {
    "conversations": {
        "conversations": [{"from": "human", "value": "<image>\nWhat? <audio>"}, {"from": "gpt", "value": "A cat."}],
        "image": "a.png",
        "audios": ["a.wav"],
    },
    "marked": {
        "messages": [{"role": "user", "content": "<image>\nWhat? <audio>"}, ANSWER],
        "images": ["a.png"],
        "audio": "a.wav",
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_marks_are_the_places_of_items(name):
    transform = Transform(f"{formats.__name__}:{name}", SourceConfig("x"), "multimodal")
    assert transform("x", {**ROWS[name], "tools": [], "id": 3}) == {
        "messages": [{"role": "user", "content": PARTS}, ANSWER],
        "images": ["a.png"],
        "audios": ["a.wav"],
        "tools": [],
        "id": 3,
    }
    assert transform("x", {**ROWS[name], "system": "Be kind."})["messages"][0] == {
        "role": "system",
        "content": "Be kind.",
    }


def test_parts_of_openai_bring_their_items():
    content = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "input_audio", "input_audio": {"data": "BB", "format": "wav"}},
        {"type": "text", "text": "What is <image>?"},
    ]
    found = formats.openai({"messages": [{"role": "user", "content": content}, ANSWER], "id": 3})
    assert found["messages"][0]["content"] == [
        {"type": "image", "image": "data:image/png;base64,AA"},
        {"type": "audio", "audio": "data:audio/wav;base64,BB"},
        {"type": "text", "text": "What is <image>?"},
    ]
    assert found["messages"][1] == ANSWER


def test_a_turn_from_nobody_known_is_told():
    with pytest.raises(ValueError, match="turns from cat; known are human"):
        formats.conversations({"conversations": [{"from": "cat", "value": "Miau"}]})


@pytest.mark.parametrize(("recipe", "model_type"), [("qwen3_vl_8b", "qwen3_vl"), ("qwen3_omni_30b", "qwen3_omni_moe")])
def test_what_recipes_of_real_checkpoints_name_is_there(recipe, model_type):
    """Their transforms, and in the model of that type the parameters that they freeze."""
    found = load_recipe(RECIPES / f"{recipe}.yaml", {"model.source": model_type})
    assert all(callable(load(source.transform)) for source in found.data.sources if source.transform)
    head, config = models.find_head_and_config(models.read_config(found.model))
    with torch.device("meta"):
        model = head._from_config(config)
    optimizers.freeze(model, found.model.freeze)
    frozen = {name.split(".layers.")[0] for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen
    assert not any("language_model" in name or "lm_head" in name for name in frozen)
