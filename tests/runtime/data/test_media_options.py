"""`data.media` goes to the processor, and what it does not know or take is refused before any rank starts."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from small_processors import audio_processor, image_processor
from test_multimodal import loader_of, sample

from patchgen.runtime.data import DataConfig, DataError, SourceConfig
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.train.data_check import require_data
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.train.setup import load_processor


def options(processor, media):
    config = DataConfig(sources=(SourceConfig("builtin:vision"),), kind="multimodal", media=media)
    return PrepareMultimodal(config, processor, None).options


def test_templates_without_a_default_are_refused_by_name():
    processor = image_processor()
    templates = {"rag": processor.chat_template or processor.tokenizer.chat_template}
    processor.chat_template = templates
    with pytest.raises(
        DataError, match="LlavaProcessor has the chat templates rag, and .* one named default. To fix: "
    ):
        options(processor, {})
    processor.chat_template = templates | {"default": templates["rag"]}
    options(processor, {})


SIZE = {"height": 56, "width": 56}


@pytest.mark.parametrize("media", [{"size": SIZE, "crop_size": SIZE}, {"images": {"size": SIZE, "crop_size": SIZE}}])
def test_options_change_what_the_processor_makes(tmp_path, media):
    Image.new("RGB", (40, 30)).save(tmp_path / "x.png")
    (tmp_path / "data.jsonl").write_text(sample("x.png") + "\n")
    processor = image_processor()
    (plain,) = loader_of(tmp_path / "data.jsonl", processor=processor)
    (found,) = loader_of(tmp_path / "data.jsonl", processor=processor, media=media)
    assert plain["pixel_values"].shape[-2:] == (28, 28)
    assert found["pixel_values"].shape[-2:] == (56, 56)
    marks = [int((batch["input_ids"] == processor.image_token_id).sum()) for batch in (plain, found)]
    assert marks == [4, 16]


def test_the_rate_of_sounds_is_the_processor_s_unless_named():
    assert options(audio_processor(), {}).sampling_rate == 16000
    named = options(audio_processor(), {"sampling_rate": 8000})
    assert named.sampling_rate == 8000
    with pytest.raises(
        DataError, match=r"data.media = {'sampling_rate': 8000} for audios: Whisper.* refuses it: .*16000"
    ):
        named.require_accepted()
    options(audio_processor(), {"padding": "longest"}).require_accepted()


REFUSED = {
    "unknown": (
        {"max_pixel": 9},
        r"data.media.max_pixel: LlavaProcessor has no such option for images. There are: |Near: ",
    ),
    "near": ({"do_resise": True}, "data.media.do_resise: .*Near: do_resize"),
    "near, inside": ({"images": {"rescale_facto": 1}}, "data.media.images.rescale_facto: .*Near: rescale_factor"),
    "of no modality": ({"videos": {"fps": 1}}, "data.media.videos = .*LlavaProcessor takes images"),
    "no mapping": ({"images": 7}, "data.media.images = 7: LlavaProcessor takes images; each is a mapping"),
    "set here": ({"return_tensors": "np"}, "data.media.return_tensors cannot be set: batches are torch tensors"),
    "of another type": ({"do_resize": "many"}, "data.media = {'do_resize': 'many'} for images: .*bool"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_processor_does_not_know_is_refused_with_what_is_near(case):
    media, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        options(image_processor(), media)


def test_bad_options_are_errors_before_ranks_start(tmp_path):
    image_processor().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    (tmp_path / "own.py").write_text("def nothing(row): return None\n")

    def recipe(section="data", **data):
        values = {"sources": [{"path": "builtin:vision"}], "kind": "multimodal", **data}
        rest = {"eval_data": values, "train": {"eval_every": 1}} if section == "eval_data" else {}
        return from_dict({"model": {"source": str(tmp_path)}, "data": values if section == "data" else {}, **rest})

    require_data(recipe(media={"do_resize": False, "do_center_crop": False}))
    with pytest.raises(RecipeError, match="^data.media.do_resise: "):
        require_data(recipe(media={"do_resise": True}))
    with pytest.raises(RecipeError, match="^eval_data.media.do_resise: "):
        require_data(recipe("eval_data", media={"do_resise": True}))
    with pytest.raises(RecipeError, match=r"for images: CLIP\w+ refuses it: "):
        require_data(recipe(media={"image_mean": [0.5] * 7}))
    with pytest.raises(RecipeError, match="data.special_tokens names '<imag>'.*are, for example, <image>"):
        require_data(recipe(special_tokens=["<imag>"]))
    with pytest.raises(RecipeError, match="^eval_data.special_tokens names '<imag>'"):
        require_data(recipe("eval_data", special_tokens=["<imag>"]))
    with pytest.raises(RecipeError, match="^eval_data: builtin:vision, sample 1: .*returned None.* eval_data.sources"):
        require_data(
            recipe("eval_data", sources=[{"path": "builtin:vision", "transform": f"{tmp_path / 'own.py'}:nothing"}])
        )
    with pytest.raises(RecipeError, match="builtin:vision, sample 1: the transform .*own.py:nothing returned None"):
        require_data(recipe(sources=[{"path": "builtin:vision", "transform": f"{tmp_path / 'own.py'}:nothing"}]))


def test_options_without_a_processor_are_an_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    image_processor().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        RecipeError, match=r"has no usable processor, .*: transformers loads only a \w+ from its files"
    ):
        load_processor(str(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match="has no usable processor"):
        load_processor(str(tmp_path))


def test_text_has_no_media():
    with pytest.raises(ValueError, match="data.media has options of a processor, which data.kind = chat does not use"):
        DataConfig(kind="chat", media={"fps": 1})
