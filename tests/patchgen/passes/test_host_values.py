"""Sizes handed in for images stay the images', also where videos go through the same method."""

from __future__ import annotations

import textwrap

import pytest
import torch
from generation_cases import applied, load

from patchgen import pipeline
from patchgen.errors import PassMismatch
from patchgen.passes.host_values import HostValues

MODEL = """
class ExampleModel(ExamplePreTrainedModel):
    def get_image_features(self, pixel_values, image_grid_thw, **kwargs):
        split_sizes = image_grid_thw.prod(-1).tolist()
        return torch.split(pixel_values, split_sizes)

    def get_video_features(self, pixel_values_videos, video_grid_thw, **kwargs):
        return self.get_image_features(pixel_values_videos, video_grid_thw, **kwargs)
"""


@pytest.fixture
def model():
    text = applied(HostValues(), MODEL).module.block("ExampleModel").text
    space = {"torch": torch, "ExamplePreTrainedModel": object}
    exec(textwrap.dedent(text), space)
    return space["ExampleModel"]()


@pytest.mark.parametrize(
    "handed", [{}, {"image_split_sizes": [1, 2]}, {"image_split_sizes": [1, 2], "video_split_sizes": [4, 2]}]
)
def test_each_modality_is_split_by_its_own_sizes(model, handed):
    images, videos = torch.tensor([[1, 1, 1], [1, 2, 1]]), torch.tensor([[2, 2, 1], [1, 2, 1]])
    assert [len(part) for part in model.get_image_features(torch.zeros(3), images, **handed)] == [1, 2]
    assert [len(part) for part in model.get_video_features(torch.zeros(6), videos, **handed)] == [4, 2]


def test_upstreams_decorator_does_the_same_where_it_stands():
    text = pipeline.generate(load("qwen3_vl")).text
    assert (
        text.count("split_sizes: list[int] | None = None") == text.count("split_sizes (`list[int]`, *optional*)") == 1
    )
    assert "video_split_sizes" not in text


def test_sizes_that_share_their_line_are_missed():
    """What stands behind them on the line would go with them."""
    with pytest.raises(PassMismatch, match="a statement on lines of its own"):
        applied(HostValues(), MODEL.replace(".tolist()", ".tolist(); pixel_values = pixel_values * 2"))


def test_sizes_under_two_names_are_left_alone():
    """Handed in under the one, the other would have no value."""
    outcome = applied(HostValues(), MODEL.replace("split_sizes = image", "split_sizes = sizes = image"))
    assert not outcome.hits and "_sizes or" not in outcome.module.text


def test_a_method_that_takes_its_sizes_already_is_named_as_such():
    written = applied(HostValues(), MODEL).module.text.replace("# patchgen: host_values", "# as upstream writes it")
    again = applied(HostValues(), written)
    assert again.hits == ()
    assert [(hit.site, hit.what) for hit in again.upstream] == [
        ("ExampleModel.get_image_features", "takes the sizes as arguments")
    ]
    other = MODEL.replace("image_grid_thw.prod(-1).tolist()", "kwargs.pop('sizes', None)")
    assert applied(HostValues(), other).upstream == ()


def test_a_decorator_of_another_modality_is_left_alone():
    decorated = MODEL.replace(
        "    def get_image", '    @accepts_precomputed_kwargs(modality="video")\n    def get_image'
    )
    outcome = applied(HostValues(), decorated)
    assert not outcome.hits and "belongs to video" in outcome.notes[0]


def test_a_method_that_one_forward_calls_for_images_and_videos_is_left_alone():
    """With the images' sizes it would split the videos."""
    forward = (
        "\n    def forward(self, pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, **kwargs):\n"
        "        images = self.get_image_features(pixel_values, image_grid_thw, **kwargs)\n"
        "        return images, self.get_image_features(pixel_values_videos, video_grid_thw, **kwargs)\n"
    )
    outcome = applied(HostValues(), MODEL[: MODEL.index("    def get_video")] + forward)
    assert not outcome.hits and "ExampleModel.forward calls it for several media" in outcome.notes[0]


@pytest.mark.parametrize(("read", "hits"), [("config.spatial_merge_size", 1), ("config.pool_size", 0)])
def test_sizes_are_those_of_a_collator_by_what_the_config_calls_the_mergers_side(read: str, hits: int):
    """Whatever the tower calls it; another number of the config under a merger's name is another formula."""
    tower = f"class ExampleTower(nn.Module):\n    def __init__(self, config):\n        self.merge_size = {read}\n\n\n"
    init = "    def __init__(self, config):\n        self.visual = ExampleTower(config)\n\n    def get_image"
    merged = MODEL.replace("image_grid_thw.prod(-1)", "(image_grid_thw.prod(-1) // self.visual.merge_size**2)")
    assert len(applied(HostValues(), tower + merged.replace("    def get_image", init, 1)).hits) == hits


@pytest.mark.parametrize(
    ("decorator", "lines"),
    [
        ('@accepts_precomputed_kwargs(modality="image")', "split_sizes = image_sizes.prod(-1)"),
        ("", "image_split_sizes = split_sizes = image_sizes.prod(-1)"),
        ("", "import image_split_sizes; split_sizes = image_sizes"),
        ("", "split_sizes = image_sizes.tolist()"),
        ("", "split_sizes = image_split_sizes(image_sizes)"),
    ],
)
def test_a_parameter_takes_no_name_that_holds_something_else(decorator: str, lines: str):
    """`split_sizes or ...` would ask for the truth of upstream's tensor, or give two lines one value."""
    text = f"""
class ExampleModel(ExamplePreTrainedModel):
    {decorator}
    def get_image_features(self, pixel_values, image_sizes, **kwargs):
        {lines}
        split_sizes = (split_sizes // 4).tolist()
        return torch.split(pixel_values, split_sizes)
"""
    outcome = applied(HostValues(), text)
    assert not outcome.hits and "split_sizes has another meaning in it" in outcome.notes[0]


@pytest.mark.parametrize(
    "docstring", ['"Doc \\\\ of it."', '("Doc \\\\ "\n         "of it.")', '"""Doc \\\\ of it."""']
)
def test_a_docstring_of_one_line_is_continued(docstring: str):
    documented = MODEL.replace("    def get_image", "    @auto_docstring\n    def get_image")
    documented = documented.replace("**kwargs):\n", f"**kwargs):\n        {docstring}\n", 1)
    space = {"torch": torch, "ExamplePreTrainedModel": object, "auto_docstring": lambda function: function}
    exec(applied(HostValues(), documented).module.block("ExampleModel").text, space)
    told = space["ExampleModel"].get_image_features.__doc__.split("\n")
    assert told[0] == "Doc \\ of it." and told[1].strip().startswith("image_split_sizes (`list[int]`, *optional*)")


def test_a_default_of_another_kind_is_no_size():
    other = MODEL.replace(
        "split_sizes = image_grid_thw.prod(-1).tolist()", "pixel_values = pixel_values or image_grid_thw"
    )
    assert applied(HostValues(), other).upstream == ()
