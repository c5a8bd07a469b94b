"""Passes over towers: forms beyond their examples, what they leave alone and say so, and upstream's own files."""

from __future__ import annotations

import functools

import pytest
from generation_cases import applied

from patchgen import pipeline, upstream
from patchgen.anatomy.media import same_features
from patchgen.commands.models_page import models_page
from patchgen.errors import PassMismatch
from patchgen.passes.attention_kwargs import AttentionKwargs
from patchgen.passes.dummy_forward import DummyForward
from patchgen.passes.host_sync_lint import HostSyncLint
from patchgen.passes.max_seqlen import MaxSeqlen
from patchgen.passes.position_id_func import PositionIdFunc
from patchgen.passes.vision_sp import VisionSP
from patchgen.provenance import generated_root


@functools.cache
def generated(model: str) -> pipeline.Generated:
    return pipeline.generate(upstream.load(model))


def outcome_of(model: str, name: str):
    return next(step.outcome for step in generated(model).steps if step.name == name)


# ------------------------------------------------------------------------------------------ dummy_forward

FUSION = """
class ExampleModel(ExamplePreTrainedModel):
    def get_image_features(self, pixel_values, image_grid_thw, **kwargs):
        return self.visual(pixel_values, image_grid_thw, **kwargs)

    def get_video_features(self, pixel_values_videos, video_grid_thw, **kwargs):
        {video}

    def forward(self, input_ids, pixel_values=None, image_grid_thw=None, pixel_values_videos=None, video_grid_thw=None,
                mm_encoder_outputs=None, **kwargs):
        inputs_embeds = self.get_input_embeddings()(input_ids)
        mm_encoder_outputs = mm_encoder_outputs or {{}}
        if mm_encoder_outputs.get("image") is None and pixel_values is not None:
            mm_encoder_outputs["image"] = self.get_image_features(pixel_values, image_grid_thw, return_dict=True, **kwargs)
        if mm_encoder_outputs.get("video") is None and pixel_values_videos is not None:
            mm_encoder_outputs["video"] = self.get_video_features(pixel_values_videos, video_grid_thw, return_dict=True, **kwargs)
        return self.language_model(self.merge(inputs_embeds, mm_encoder_outputs))
"""
SAME = "return self.visual(pixel_values_videos, video_grid_thw, **kwargs)"
CALLS = "return self.get_image_features(pixel_values_videos, video_grid_thw, **kwargs)"
OTHER = "return self.visual(pixel_values_videos, video_grid_thw[:, 1:], **kwargs)"


@pytest.mark.parametrize("video", [SAME, CALLS])
def test_images_and_videos_that_one_code_serves_go_together(video: str) -> None:
    text = applied(DummyForward(), FUSION.format(video=video)).module.text
    assert text.count("ops.encode_vision(") == 1
    assert "ops.absent_tower(" not in text and 'mm_encoder_outputs["' not in text, (
        "it is in the place of both branches"
    )


def test_videos_that_go_another_way_have_a_minimal_pass_of_their_own() -> None:
    text = applied(DummyForward(), FUSION.format(video=OTHER)).module.text
    assert "ops.encode_vision(" not in text
    image, video = (
        text.index(f"ops.absent_tower(inputs_embeds, {name}, ") for name in ("pixel_values", "pixel_values_videos")
    )
    guards = [text.index(f"{name} is not None:") for name in ("pixel_values", "pixel_values_videos")]
    assert image < guards[0] < video < guards[1], "in the place of the real pass, so that ranks agree on the order"


def test_branches_that_do_more_than_encode_stay() -> None:
    more = FUSION.replace('mm_encoder_outputs["video"] = self', 'mm_encoder_outputs["video"] = 2 * self')
    text = applied(DummyForward(), more.format(video=SAME)).module.text
    assert "ops.encode_vision(" not in text and text.count("ops.absent_tower(") == 2


def test_glm_flattens_videos_so_they_go_alone() -> None:
    assert not same_features(
        generated("glm4v_moe").anatomy, "Glm4vMoeModel", "get_image_features", "get_video_features"
    )
    assert same_features(generated("qwen3_vl").anatomy, "Qwen3VLModel", "get_image_features", "get_video_features")


@pytest.mark.parametrize(
    ("model", "says"), [("idefics", "goes to vision_model"), ("florence2", "above the embeddings")]
)
def test_what_is_left_alone_is_said(model: str, says: str) -> None:
    origin = upstream.load(model)
    outcome = applied(DummyForward(), origin.text)
    assert not outcome.hits
    assert any(says in note and "every rank must hold it" in note for note in outcome.notes)


# ------------------------------------------------------------------------- attention_kwargs and max_seqlen

FILTERED = """
class ExampleModel(ExamplePreTrainedModel):
    @accepts_precomputed_kwargs(modality="image")
    def get_image_features(self, pixel_values, **kwargs):
        return self.visual(pixel_values, **kwargs)

    def forward(self, input_ids, pixel_values=None, **kwargs):
        return self.merge(self.embed_tokens(input_ids), self.get_image_features(pixel_values, **kwargs))
"""


class ReleaseWithFilter:
    """A release whose decorator does, or does not, drop the packing arguments."""

    version = "0"

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, path: str) -> str:
        assert path == "utils/generic.py"
        return self.text


DROPS = upstream.open_release().read("utils/generic.py") or ""
LEAKS = (
    ("            translated = {}\n", "            translated = dict(kwargs)\n"),
    ("return func(*args, **translated)", "return func(*args, **kwargs)"),
    ("return func(*args, **translated)", "return func(*args, **{**kwargs, **translated})"),
    ("elif k in _FLASH_VARLEN_KWARGS and", "elif k in _KNOWN_MODALITIES and"),
    ("elif k in _FLASH_VARLEN_KWARGS and", 'elif modality == "audio" and'),
    ("k in _FLASH_VARLEN_KWARGS and k not in existing_params", "k in _FLASH_VARLEN_KWARGS and k not in kwargs"),
    ('_FLASH_VARLEN_KWARGS = ("cu_seq_lens_q", ', "_FLASH_VARLEN_KWARGS = ("),
)


def test_upstreams_filter_is_believed_only_where_the_release_drops_them() -> None:
    dropped = applied(AttentionKwargs(), FILTERED, release=ReleaseWithFilter(DROPS))
    assert not dropped.hits
    assert "accepts_precomputed_kwargs" in dropped.upstream[0].what
    kept = applied(AttentionKwargs(), FILTERED, release=ReleaseWithFilter("accepts_precomputed_kwargs = None"))
    assert WITHHELD in kept.module.text


WITHHELD = "self.get_image_features(pixel_values, **ops.tower_kwargs(kwargs))"


@pytest.mark.parametrize(("dropped", "leaks"), LEAKS)
def test_a_filter_of_another_form_is_not_believed(dropped: str, leaks: str) -> None:
    assert DROPS.count(dropped) == 1
    found = applied(AttentionKwargs(), FILTERED, release=ReleaseWithFilter(DROPS.replace(dropped, leaks)))
    assert WITHHELD in found.module.text


def test_packing_arguments_do_not_reach_a_tower_in_another_form() -> None:
    example = AttentionKwargs.EXAMPLES[0].before
    call = "self.get_image_features(pixel_values, **kwargs)"
    text = example.replace(call, "self.get_image_features(pixel_values, **{**kwargs, 'a': 1})")
    assert "**ops.tower_kwargs({**kwargs, 'a': 1})" in applied(AttentionKwargs(), text).module.text
    named = example.replace(call, "self.get_image_features(pixel_values, cu_seq_lens_q=kwargs['cu_seq_lens_q'])")
    with pytest.raises(
        PassMismatch, match="a tower call without cu_seq_lens_q/k and max_length_q/k as explicit arguments"
    ):
        applied(AttentionKwargs(), named)


def test_the_choice_of_lengths_in_a_tower_is_known_by_its_import() -> None:
    imported = "from transformers.modeling_flash_attention_utils import is_flash_attention_requested as by_lengths\n"
    text = imported + VisionSP.EXAMPLES[0].before.replace("is_flash_attention_requested", "by_lengths")
    assert "if ops.attends_by_lengths(self.config):" in applied(VisionSP(), text).module.text


def test_upstreams_filter_is_known_by_its_import() -> None:
    renamed = FILTERED.replace("@accepts_precomputed_kwargs", "@drops")
    release = ReleaseWithFilter(DROPS)
    for module, is_filtered in (("transformers.utils.generic", True), ("elsewhere", False)):
        for text, alias in ((renamed, " as drops"), (FILTERED, "")):
            text = f"from {module} import accepts_precomputed_kwargs{alias}\n{text}"
            assert bool(applied(AttentionKwargs(), text, release=release).upstream) == is_filtered


def test_a_maximum_of_another_form_is_a_miss() -> None:
    text = """
class ExampleVisionAttention(nn.Module):
    def forward(self, x, cu_seqlens):
        longest = torch.diff(cu_seqlens).max().item() + 1
        return attend(x, cu_seqlens, longest)
"""
    with pytest.raises(PassMismatch, match="max_seqlen"):
        applied(MaxSeqlen(), text)


ASKS = """
{above}

class ExampleTower(nn.Module):
    def forward(self, x, cu_seqlens):
        for layer in self.layers:
            x = layer(x, {call})
        return x
"""


@pytest.mark.parametrize(
    ("above", "call", "is_site"),
    [
        ("from transformers.vision_utils import get_max_seqlen as longest", "longest(cu_seqlens, self.config)", True),
        ("from transformers import vision_utils", "vision_utils.get_max_seqlen(cu_seqlens, self.config)", True),
        ("def get_max_seqlen(x):\n    return x.shape[0]", "get_max_seqlen(x)", False),
        ("", "torch.max(cu_seqlens[1:] - cu_seqlens[:-1])", True),
        ("", "self.max(cu_seqlens)", False),
    ],
)
def test_the_longest_sequence_is_known_by_what_is_called(above: str, call: str, is_site: bool) -> None:
    """In a loop over layers it is a miss; a function or method of the file that is called alike is no site."""
    text = ASKS.format(above=above, call=call)
    if is_site:
        with pytest.raises(PassMismatch, match="max_seqlen"):
            applied(MaxSeqlen(), text)
    else:
        assert not applied(MaxSeqlen(), text).upstream


def test_upstreams_own_computation_is_reported() -> None:
    for name in ("attention_kwargs", "max_seqlen"):
        outcome = outcome_of("qwen2_5_vl", name)
        assert not outcome.hits
        assert outcome.upstream, name


# ----------------------------------------------------------------------------------------- position_id_func


def test_a_position_function_that_reads_weights_is_a_miss() -> None:
    text = """
class ExampleModel(ExamplePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(2, 2)

    def get_rope_index(self, input_ids):
        return self.table(input_ids)
"""
    with pytest.raises(PassMismatch, match=r"self\.table"):
        applied(PositionIdFunc(), text)


# ------------------------------------------------------------------------------------------- host_sync_lint

TOWER = """
def lengths_of(grid, kwargs=None):
    if kwargs is not None and (lengths := kwargs.pop("lengths", None)) is not None:
        return lengths
    return grid.prod(-1).tolist()


def always(grid):
    return grid.max().item()


class ExampleTower(nn.Module):
    def forward(self, x, grid, position_ids=None, **kwargs):
        if position_ids is None:
            position_ids = self.positions(grid)
        return self.run(x, lengths_of(grid, kwargs=kwargs), position_ids)

    def positions(self, grid):
        return grid.cpu()

    def run(self, x, lengths, position_ids):
        return x

    def generate(self, grid):
        return grid.nonzero()
"""


def test_what_a_forward_calls_is_followed_and_what_is_handed_in_is_excused() -> None:
    outcome = applied(HostSyncLint(strict=True), TOWER)
    assert not outcome.notes
    assert [(hit.site, hit.what.rpartition(": ")[2]) for hit in outcome.upstream] == [
        ("lengths_of", "only where lengths is not handed in"),
        ("ExampleTower.positions", "only where position_ids is not handed in"),
    ]


def test_a_sync_below_a_forward_is_found_wherever_it_stands() -> None:
    text = TOWER.replace("return x\n", "return x * always(position_ids)\n")
    with pytest.raises(PassMismatch, match=r"always: `grid\.max\(\)\.item\(\)`"):
        applied(HostSyncLint(strict=True), text)
    allowed = applied(HostSyncLint({"always": "once per epoch"}, strict=True), text)
    assert any("once per epoch" in hit.what for hit in allowed.upstream)


def test_upstreams_grid_helpers_must_be_handed_what_was_computed() -> None:
    text = "from transformers.vision_utils import get_vision_position_ids\n\n\n"
    text += "class T(nn.Module):\n    def forward(self, x, grid, **kwargs):\n        return get_vision_position_ids(grid, 2)\n"
    with pytest.raises(PassMismatch, match="get_vision_position_ids"):
        applied(HostSyncLint(strict=True), text)
    assert not applied(HostSyncLint(strict=True), text.replace("grid, 2)", "grid, 2, kwargs=kwargs)")).upstream


# --------------------------------------------------------------------------------------------- docs/models.md


def test_the_page_of_models_is_what_the_records_say() -> None:
    page = generated_root().resolve().parent / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == models_page(), "write it again: patchgen verify --all"


def test_an_attention_of_two_towers_is_one_site():
    text = VisionSP.EXAMPLES[0].before
    second = text[text.index("class ExampleVision(") :].replace("ExampleVision", "ExampleSecond")
    outcome = applied(VisionSP(), f"{text}\n\n{second}")
    sites = [hit.site for hit in (*outcome.hits, *outcome.upstream)]
    assert sorted(sites) == ["ExampleAttention.forward", "ExampleSecond.forward", "ExampleVision.forward"]
