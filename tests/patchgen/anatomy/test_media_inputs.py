"""Where images, videos and audio enter a model, and by which call."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.media import FeatureCall, feature_calls, optional_media, same_features, takes_media

FILE = """
from torch import nn
from transformers import PreTrainedModel

class Inner(PreTrainedModel):
    def get_image_features(self, pixels, grid, **kwargs):
        return self.visual(pixels, grid, **kwargs)

    def get_video_features(self, pixels, grid, **kwargs):
        return self.get_image_features(pixels, grid, **kwargs)

    def get_audio_features(self, sound, lengths, **kwargs):
        return self.visual(sound, lengths, **kwargs)

    def get_speech_features(self, sound, lengths, **kwargs):
        return self.tower(sound, lengths, **kwargs)

    def get_one_features(self, pixels):
        return self.visual(pixels)

    def get_same_features(self, pixels):
        return self.visual(pixels)

    def forward(self, input_ids, pixel_values, pixel_values_videos=None, *, input_features, feature_attention_mask=None):
        embeds = self.embed(input_ids)
        features = self.get_image_features(pixel_values.float(), None)
        other = self.tower(self.prepare(pixel_values))
        again = self.project(self.get_image_features(pixel_values, None))
        videos = self.get_video_features(pixels=pixel_values_videos, grid=None)
        self.part.run(input_features)
        run(input_features)
        return embeds

class Outer(PreTrainedModel):
    def __init__(self, config):
        self.model = Inner(config)
        self.other = Inner(config)

    def forward(self, inputs_embeds, pixel_values=None, input_features=1, labels=None):
        hidden = self.model(inputs_embeds, pixel_values=pixel_values)
        return self.other(hidden, input_features)

class Tower(PreTrainedModel):
    def forward(self, pixel_values):
        return self.layers(pixel_values)

class Plain(nn.Module):
    def forward(self, input_ids, pixel_values):
        return self.layers(pixel_values)
"""
ANATOMY = anatomy_of(FILE)


def test_who_gets_the_media_of_a_model_that_takes_tokens_too():
    assert takes_media(ANATOMY, "Inner") == {
        "pixel_values": ["get_image_features", "prepare"],
        "pixel_values_videos": ["get_video_features"],
        "input_features": [],
    }
    assert takes_media(ANATOMY, "Outer") == {"pixel_values": [], "input_features": ["other"]}
    assert takes_media(ANATOMY, "Tower") == takes_media(ANATOMY, "Plain") == {}


def test_media_that_are_fused_are_optional_if_they_have_a_default():
    assert optional_media(ANATOMY, "Inner") == ["pixel_values_videos"]  # pixel_values has none
    assert optional_media(ANATOMY, "Outer") == []  # has other media, which it does not fuse


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("a = self.get_image_features(pixel_values, grid, **kwargs)", ("get_image_features", "image", "pixel_values", "grid", "**kwargs")),
        ("a = self.get_video_features(pixel_values_videos, grid)[0]", ("get_video_features", "video", "pixel_values_videos", "grid", None)),
        ("a = self.get_audio_features(input_features=input_features)", ("get_audio_features", "audio", "input_features", None, None)),
        ("a = self.get_image_features(pixel_values.to(x), grid, **(a | b))", ("get_image_features", "image", "pixel_values", None, "**a | b")),
        ("a = self.get_image_features(pixel_values, grid, third)", ("get_image_features", "image", "pixel_values", None, None)),
        ("a = self.get_image_features(pixel_values, grid, third=third)", ("get_image_features", "image", "pixel_values", "grid", None)),
        ("a = self.get_image_features(grid, pixel_values)", ("get_image_features", "image", "pixel_values", None, None)),
        ("a = self.get_image_features(unknown, grid)", None),
        ("a = self.get_text_features(pixel_values, grid)", None),
        ("a = model.get_image_features(pixel_values, grid)", None),
        ("a = self.image_features", None),
    ],
)  # fmt: skip
def test_the_call_that_makes_features(code: str, found: tuple | None):
    body = ast.parse(f"before = 1\n{code}\n").body
    assert feature_calls(body) == ([FeatureCall(1, *found)] if found else [])


@pytest.mark.parametrize(
    ("image", "video", "same"),
    [
        ("get_image_features", "get_video_features", True),  # it calls the other one
        ("get_image_features", "get_audio_features", True),  # the same body
        ("get_image_features", "get_speech_features", False),
        ("get_audio_features", "get_video_features", False),
        ("get_one_features", "get_same_features", False),  # not of media and their sizes
        ("get_image_features", "get_nothing", False),
        ("get_nothing", "get_image_features", False),
    ],
)
def test_videos_are_computed_like_images(image: str, video: str, same: bool):
    assert same_features(ANATOMY, "Inner", image, video) is same
