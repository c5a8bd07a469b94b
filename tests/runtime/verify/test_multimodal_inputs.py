"""The multimodal inputs of a proof: made from the config, accepted by upstream, different from each other."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers

from patchgen.runtime.media_sizes import AUDIO, IMAGE, VIDEO, samples_per_token
from patchgen.runtime.minimal_media import minimal_inputs
from patchgen.runtime.parallel import batch_fields
from patchgen.runtime.verify import verdict
from patchgen.runtime.verify.comparison import compare_gradients, train_step
from patchgen.runtime.verify.inputs import IGNORED, text_cases
from patchgen.runtime.verify.media import MediaMaker
from patchgen.runtime.verify.media_samples import SampleBuilder
from patchgen.runtime.verify.model_pair import build_model, build_pair
from patchgen.runtime.verify.multimodal_inputs import media_cases, takes_media, without_media
from patchgen.runtime.verify.proof import Proof
from patchgen.runtime.verify.small_config import small_config

KINDS = {
    "Qwen3OmniMoeThinkerForConditionalGeneration": {
        "images", "video", "audio", "sound", "mixed", "packed media", "handed in",
    },
    "Qwen2_5_VLForConditionalGeneration": {"images", "video", "mixed", "packed media", "handed in"},
    "Gemma3ForConditionalGeneration": {"images"},
    "Dots3NoteForConditionalGeneration": {"images", "video", "audio", "mixed", "handed in"},
    "FuyuForCausalLM": {"images"},  # the model's own config says what a patch is, and patches do not say where they lie
    "Gemma4UnifiedForConditionalGeneration": {"images", "video", "audio", "mixed"},  # patches that are pooled already
    # whose videos have whole pairs of frames, and whose layers read the modality of each token
    "Ernie4_5_VLMoeForConditionalGeneration": {"images", "video", "mixed", "packed media", "handed in"},
    "VoxtralForConditionalGeneration": {"audio"},  # which groups frames; its placeholder's id is the checkpoint's
    "VibeVoiceAsrForConditionalGeneration": {"audio"},  # as it was recorded, with a channel
    "MossTranscribeDiarizeForConditionalGeneration": {"audio"},  # whose features require a mask that the head hands on
    "DeepseekVLHybridForConditionalGeneration": {"images"},  # each image twice, of which one is for a second tower
    "Kimi_K25ForConditionalGeneration": {"images", "video", "mixed", "handed in"},  # a patch is an image; clips of one frame
    "MiniCPMV4_6ForConditionalGeneration": {"images", "video", "mixed"},  # patches side by side in one image
    "MuseSparkForConditionalGeneration": {"images", "video", "audio", "mixed", "handed in"},  # sounds as they were recorded
    "Inkling2ForConditionalGeneration": {"images"},  # a patch is a whole token, and grids count tokens
    "Kosmos2ForConditionalGeneration": {"images"},  # no method computes its features, and no id marks their places
    "MllamaForConditionalGeneration": {"images"},  # beside the text, behind gates that begin at zero
    "VideoLlama3ForConditionalGeneration": {"images", "video", "mixed", "handed in"},  # each item says how it is merged
}  # fmt: skip


@functools.cache
def upstream(head: str):
    """Upstream's model of a head, and its cases."""
    model_class = getattr(transformers, head)
    model = build_model(model_class, small_config(model_class.config_class).config)
    return model, media_cases(model)


@pytest.mark.parametrize("head", KINDS)
def test_every_kind_of_input_and_none_refused(head: str) -> None:
    _, media = upstream(head)
    assert {case.name for case in media.cases} == KINDS[head]
    assert not media.refused
    assert not media.missing


@pytest.mark.parametrize("head", KINDS)
def test_every_name_that_is_handed_over_has_a_rule(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proven is packed and sliced in a run, and never meets a name that nothing says how to.

    What a caller computed beforehand ("handed in") is made of a whole batch, and no field of a sample.
    """
    model, media = upstream(head)
    for name in ("RULES", "_INFERRED"):
        monkeypatch.setattr(batch_fields, name, getattr(batch_fields, name).copy())
    batch_fields.infer_item_fields(type(model))
    batches = [case.batch for case in media.cases if case.name != "handed in"]
    names = {name for batch in batches for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert len(names) > 3
    for name in names:
        batch_fields.rule_of(name)


def test_images_of_one_area_may_take_different_numbers_of_tokens() -> None:
    """A token at the end of each row: two rows of three are eight, three rows of two are nine, and two around them."""
    model, media = upstream("HunYuanVLForConditionalGeneration")
    assert "images" in {case.name for case in media.cases}
    maker = MediaMaker(model, torch.Generator())
    counts = [maker.count(maker.patches(IMAGE, grid)) for grid in ((1, 2, 3), (1, 3, 2))]
    assert counts[1] == counts[0] + 1


def test_the_modality_of_a_token_reaches_the_layers_that_read_it() -> None:
    """Else the experts of images and video are compared with no token."""
    _, media = upstream("Ernie4_5_VLMoeForConditionalGeneration")
    images = next(case for case in media.cases if case.name == "images").batch
    assert images["moe_mm_token_type_ids"].any()
    assert batch_fields.rule_of("moe_mm_token_type_ids").sliced  # as the hidden states are


def test_a_sound_as_it_was_recorded_has_whole_tokens() -> None:
    model, media = upstream("VibeVoiceAsrForConditionalGeneration")
    batch = media.cases[0].batch
    hop = samples_per_token(model.config)
    assert batch["input_values"].shape == (3, 1, 7 * hop)
    assert batch["padding_mask"].sum(-1).tolist() == [3 * hop, 7 * hop, 5 * hop]
    smallest = minimal_inputs(model.model.get_audio_features, sp=1, like=torch.zeros(1))
    assert smallest["input_values"].shape == (1, 1, hop)


def test_an_input_that_upstream_refuses_is_told() -> None:
    """Glm4v marks images and frames with the same token, so that both in one batch are too many of each."""
    _, media = upstream("Glm4vMoeForConditionalGeneration")
    assert set(media.refused) == {"mixed"}
    assert "do not match" in media.refused["mixed"]


def test_a_modality_that_no_case_holds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and video are compared; what is said of them says nothing of sounds."""

    def fails(self: MediaMaker, number: int) -> None:
        raise ValueError("sounds of this kind are not known")

    monkeypatch.setattr(MediaMaker, "_audio", fails)
    model, _ = upstream("Dots3NoteForConditionalGeneration")
    media = media_cases(model)
    assert {"images", "video"} <= {case.name for case in media.cases}
    assert media.missing == {AUDIO: "ValueError: sounds of this kind are not known"}
    proof = Proof("dots3_note", "", cases=[None], not_compared=media.missing)
    assert not proof.is_proven
    assert (
        verdict.of(proof).words == "generated: audio was not compared: ValueError: sounds of this kind are not known"
    )


def test_text_alone_is_no_case_where_upstream_refuses_it() -> None:
    """In its own words; a model that takes it keeps every case."""
    for head, refusal in (("Kosmos2ForConditionalGeneration", "You have to specify either"), ("FuyuForCausalLM", "")):
        model, _ = upstream(head)
        texts = text_cases(model.config, type(model))
        kept, told = without_media(model, texts)
        assert refusal in told
        assert tuple(kept) == (() if refusal else texts)


def test_an_image_that_no_logit_tells_from_another_is_no_case() -> None:
    """Rows are accepted, but nothing of the image reaches the logits: that would be a hollow proof."""
    model = copy.deepcopy(upstream("Kosmos2ForConditionalGeneration")[0])
    projection = model.image_to_text_projection.forward
    model.image_to_text_projection.forward = lambda features: projection(torch.ones_like(features))
    media = media_cases(model)
    assert media.cases == ()
    assert "whatever the image is" in media.missing[IMAGE]


def test_an_image_beside_the_text_stands_in_each_row() -> None:
    _, media = upstream("MllamaForConditionalGeneration")
    batch = media.cases[0].batch
    assert len(batch["pixel_values"]) == len(batch["input_ids"])
    assert batch["cross_attention_mask"].shape[:2] == batch["input_ids"].shape


@pytest.mark.parametrize("head", ["Kosmos2ForConditionalGeneration", "Kosmos2_5ForConditionalGeneration"])
def test_a_method_of_features_needs_no_placeholder_that_the_config_names(head: str) -> None:
    """From 5.24.0 on these have the method, and their configs still name no token."""
    model_class = getattr(transformers, head)

    def get_image_features(self, pixel_values=None, flattened_patches=None):
        values = (
            {"pixel_values": pixel_values} if flattened_patches is None else {"flattened_patches": flattened_patches}
        )
        return self.image_to_text_projection(self.vision_model(**values).last_hidden_state)[0]

    later = type(
        head, (model_class,), {"get_image_features": get_image_features, "__module__": model_class.__module__}
    )
    config = small_config(model_class.config_class).config
    for kept in (model_class, later):
        builder = SampleBuilder(build_model(kept, config))
        assert builder.layouts.keys() == {IMAGE} and not builder.refused


def test_an_argument_of_which_no_input_is_made_is_a_modality_too() -> None:
    class Inkling:
        def forward(self, input_ids, pixel_values=None, audio_input_ids=None): ...

    assert MediaMaker.media_arguments(Inkling) == {IMAGE: "pixel_values", AUDIO: "audio_input_ids"}


def test_placeholders_are_as_many_as_features_and_carry_no_label() -> None:
    model, media = upstream("Qwen3OmniMoeThinkerForConditionalGeneration")
    mixed = next(case.batch for case in media.cases if case.name == "mixed")
    images = mixed["input_ids"] == model.config.image_token_id
    assert images.sum() == (mixed["image_grid_thw"].prod(-1) // 4).sum()
    for token in (model.config.image_token_id, model.config.video_token_id, model.config.audio_token_id):
        assert (mixed["labels"][mixed["input_ids"] == token] == IGNORED).all()
    assert len(set(map(tuple, mixed["image_grid_thw"].tolist()))) == 2
    assert (mixed["attention_mask"].sum(-1) < mixed["input_ids"].shape[1]).any()


def test_the_labels_are_those_of_the_head_that_takes_them() -> None:
    """A class per row and a class per token; a model without a head takes the same images."""
    found = {}
    for head in ("ForSequenceClassification", "ForTokenClassification", "Model"):
        _, media = upstream(f"ModernVBert{head}")
        assert [case.name for case in media.cases] == ["images"] and not media.missing, media.refused
        found[head] = media.cases[0].batch
    rows, tokens, base = found.values()
    assert rows["labels"].shape == rows["input_ids"].shape[:1]
    assert tokens["labels"].shape == tokens["input_ids"].shape
    assert (tokens["labels"] != IGNORED).any() and tokens["labels"].max() < 2
    assert "labels" not in base and base["pixel_values"].shape == rows["pixel_values"].shape


def test_frames_stand_apart_where_upstream_wants_them_to() -> None:
    """Upstream decides: Qwen3-VL counts positions frame by frame, Qwen2.5-VL clip by clip."""
    per_frame = {
        head: SampleBuilder(upstream(head)[0]).layouts[VIDEO].per_frame
        for head in ("Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
    }
    assert list(per_frame.values()) == [True, False]


def test_same_seed_same_inputs() -> None:
    model, media = upstream("Qwen2_5_VLForConditionalGeneration")
    again = media_cases(model).cases
    for one, other in zip(media.cases, again, strict=True):
        for name, value in one.batch.items():
            same = (
                torch.equal(value, other.batch[name])
                if isinstance(value, torch.Tensor)
                else value == other.batch[name]
            )
            assert same, f"{one.name}: {name}"


def test_modalities_are_told_by_the_forward() -> None:
    assert takes_media(transformers.Qwen2VLForConditionalGeneration)
    assert not takes_media(transformers.LlamaForCausalLM)
    builder = SampleBuilder(upstream("Qwen3OmniMoeThinkerForConditionalGeneration")[0])
    assert set(builder.layouts) == {IMAGE, VIDEO, AUDIO}


def test_a_tower_that_computes_something_else_is_seen() -> None:
    """Only the multimodal cases reach the tower: one weight of it is moved in one of two equal models."""
    head = transformers.Qwen2VLForConditionalGeneration
    pair = build_pair(head, head, small_config(head.config_class).config)
    with torch.no_grad():
        pair.generated.model.visual.blocks[0].attn.proj.bias[0] += 1e-3
    case = next(case for case in media_cases(pair.upstream).cases if case.name == "images")
    differences = compare_gradients(train_step(pair.generated, case), train_step(pair.upstream, case))
    assert not all(found.is_equal for found in differences.values())
