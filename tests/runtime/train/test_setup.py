"""What comes with a model: its position function, processor and placeholders, and tokenizers that fit it or its teacher."""

from __future__ import annotations

import pickle

import pytest
from small_tokenizers import of_mistral, of_words
from transformers import AutoConfig

from patchgen.runtime import attention, registry
from patchgen.runtime.train import data_check, setup
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.verify.small_config import small_config

# Model -> a head with towers, and whether it has a position function of its own.
HEADS = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", True),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", True),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", True),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", True),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", True),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerForConditionalGeneration", True),
    "gemma3": ("Gemma3ForConditionalGeneration", False),
}


@pytest.mark.parametrize("model", HEADS)
def test_the_position_function_of_a_head_can_be_sent_to_data_workers(model, tmp_path, monkeypatch):
    attention.register()
    name, has_own = HEADS[model]
    head = getattr(registry.find_model(model).load(), name)
    config = small_config(head.config_class).config
    # What is read from other files than the config does not matter here.
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda source, **options: three_tokens())
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda source, **options: "processor")
    monkeypatch.setattr(setup.models, "read_config", lambda section: config)
    recipe = from_dict({"model": {"source": str(tmp_path)}, "data": {"kind": "multimodal"}})
    parts = setup.data_parts(recipe)
    assert parts.processor == "processor"
    assert (parts.position_function is not None) == has_own
    if has_own:
        pickle.loads(pickle.dumps(parts.position_function))


def test_evaluation_on_media_has_a_processor_whatever_the_run_trains_on(tmp_path, monkeypatch):
    config = small_config(registry.find_model("gemma3").load().Gemma3ForConditionalGeneration.config_class).config
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda source, **options: three_tokens())
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda source, **options: "processor")
    monkeypatch.setattr(setup.models, "read_config", lambda section: config)
    values = {"model": {"source": str(tmp_path)}, "data": {}, "train": {"eval_every": 1}}
    parts = setup.data_parts(from_dict(values | {"eval_data": {"kind": "multimodal"}}))
    assert parts.processor == "processor"
    assert setup.data_parts(from_dict(values | {"eval_data": {"kind": "text"}})).processor is None


@pytest.mark.parametrize("section", ["data", "eval_data"])
def test_a_model_type_has_no_processor(section):
    media = {"kind": "multimodal", "sources": [{"path": "builtin:vision"}], "special_tokens": ["<|box_start|>"]}
    rest = {"eval_data": media, "train": {"eval_every": 1}} if section == "eval_data" else {}
    recipe = from_dict({"model": {"source": "qwen3_vl"}, "data": media if section == "data" else {}, **rest})
    message = r"'qwen3_vl' has no usable processor.* a model type. To fix: name a checkpoint"
    for refuse in (data_check.require_data, setup.data_parts):
        with pytest.raises(RecipeError, match=message):
            refuse(recipe)


def test_a_folder_named_as_a_model_type_hides_the_type_and_a_plain_file_does_not(tmp_path, monkeypatch):
    (tmp_path / "qwen3_moe").write_text("notes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup, "train_tokenizer", lambda data, vocab_size: vocab_size)
    recipe = from_dict({"model": {"source": "qwen3_moe"}, "data": {}})
    config = setup.models.read_config(recipe.model)
    assert setup.data_parts(recipe).tokenizer == config.vocab_size
    assert setup.models.find_weights(recipe.model) is None
    (tmp_path / "llama").mkdir()
    assert not setup.models.is_model_type("llama")


def test_a_folder_of_code_does_not_hide_the_type_that_it_defines_but_a_checkpoint_with_code_does(
    tmp_path, monkeypatch
):
    """`model: {source: TYPE, code: TYPE}` means random weights."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "modeling_llama.py").write_text("")
    recipe = from_dict({"model": {"source": "llama"}, "data": {}})
    assert setup.models.is_model_type("llama")
    assert setup.models.read_config(recipe.model).model_type == "llama"
    assert setup.models.find_weights(recipe.model) is None
    (folder / "config.json").write_text("{}")
    assert not setup.models.is_model_type("llama")


def three_tokens():
    return of_words("<pad>", "one", "two")


class Config:
    """What is read of a config."""

    sub_configs = {}

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def get_text_config(self):
        return self


def test_a_tokenizer_must_have_tokens_and_the_model_embeddings_for_them():
    with pytest.raises(RecipeError, match="'folder' has no tokenizer: .* has 1 tokens, all of them special"):
        setup.require_fitting(of_words("<pad>"), Config(300), "folder")
    with pytest.raises(RecipeError, match=r"has 3 tokens, but the model has a vocab_size of 2: 1 tokens .*'two' = 2"):
        setup.require_fitting(three_tokens(), Config(2), "folder")
    setup.require_fitting(three_tokens(), Config(3), "folder")
    with_images = Config(2)
    with_images.image_token_id = 2  # a placeholder needs no embedding, unless its id is a token of text too
    setup.require_fitting(three_tokens(), with_images, "folder")
    with_images.eos_token_id = [1, 2]
    with pytest.raises(RecipeError, match=r"1 tokens have no embedding \('two' = 2\)"):
        setup.require_fitting(three_tokens(), with_images, "folder")


def test_placeholders_are_padding_and_media_tokens_that_no_text_has():
    config = AutoConfig.for_model("qwen3_omni_moe")
    ids, thinker = setup.placeholder_ids(config), config.thinker_config
    chat = ("im_start", "im_end", "system", "user", "assistant")
    assert not ids & {getattr(config, f"{name}_token_id") for name in chat}
    assert ids >= {
        thinker.image_token_id,
        thinker.video_token_id,
        thinker.audio_token_id,
        thinker.audio_start_token_id,
    }
    config.pad_token_id, config.eos_token_id = 5, [6]
    assert 5 in setup.placeholder_ids(config)
    config.eos_token_id = [6, 5]
    assert 5 not in setup.placeholder_ids(config)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gemma3", ("image_token_index", "boi_token_index", "eoi_token_index")),
        (
            "gemma4",
            ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id"),
        ),
        ("llama4", ("image_token_index", "boi_token_index", "eoi_token_index")),
        ("llava_onevision", ("image_token_index", "video_token_index")),
        ("qwen2_5_vl", ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")),
        ("glm4v_moe", ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")),
    ],
)
def test_every_media_token_of_a_model_is_a_placeholder(model, names):
    config = AutoConfig.for_model(model)
    assert setup.placeholder_ids(config) >= {getattr(config, name) for name in names}


@pytest.mark.parametrize("model", ["blip-2", "instructblip", "granite_speech"])
def test_the_padding_of_another_vocabulary_is_a_token_of_text(model):
    config = AutoConfig.for_model(model)
    inner = config.projector_config if model == "granite_speech" else config.qformer_config
    assert inner.pad_token_id == 0 and 0 not in setup.placeholder_ids(config)
    config.get_text_config().pad_token_id = 7
    assert 7 in setup.placeholder_ids(config)


def save_tokenizer(folder, *tokens: str) -> str:
    """Saves the tokenizer of these tokens; returns its folder."""
    of_words(*tokens).save_pretrained(folder)
    return str(folder)


def test_a_teacher_that_exchanges_two_tokens_is_refused_with_both_and_one_with_more_is_not(tmp_path):
    own = save_tokenizer(tmp_path / "own", "<pad>", "one", "two")
    exchanged = save_tokenizer(tmp_path / "exchanged", "<pad>", "two", "one")
    with pytest.raises(
        RecipeError, match=r"of 3 ids 2 mean another token \(1 is 'one' and 'two', 2 is 'two' and 'one'\)"
    ):
        setup.require_same_token_ids(own, exchanged)
    setup.require_same_token_ids(own, save_tokenizer(tmp_path / "more", "<pad>", "one", "two", "three"))
    setup.require_same_token_ids(
        own, save_tokenizer(tmp_path / "renamed", "<reserved>", "one", "two")
    )  # a special token
    (tmp_path / "none").mkdir()  # without a tokenizer nothing is compared, nor for a bare model type
    setup.require_same_token_ids(own, str(tmp_path / "none"))
    setup.require_same_token_ids("qwen3_moe", exchanged)


def test_tokens_of_a_tokenizer_that_names_its_special_ones_by_their_ids_alone_are_compared():
    own, other = of_mistral("<s>", "one", "two"), of_mistral("<pad>", "one", "three")
    assert setup.differing_ids(own, other) == {2: ("two", "three")}


def test_a_tokenizer_without_the_characters_of_tokens_is_refused_with_the_package_that_it_is_loaded_by():
    with pytest.raises(
        RecipeError, match="model.source = 'folder' is a MistralCommonBackend.* uninstall .*mistral-common"
    ):
        setup.require_fitting(of_mistral("<s>", "one", "two"), Config(3), "folder")


def test_a_package_that_a_tokenizer_needs_is_named_with_the_key_of_its_source(tmp_path, monkeypatch):
    def needs_a_package(source, **options):
        raise ImportError("You need sentencepiece.")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", needs_a_package)
    config = small_config("qwen3").config
    monkeypatch.setattr(setup.models, "read_config", lambda section: config)
    recipe = from_dict({"model": {"source": str(tmp_path)}, "data": {}})
    with pytest.raises(RecipeError, match="model.source = .* has no tokenizer .* You need sentencepiece"):
        setup.data_parts(recipe)
    with pytest.raises(RecipeError, match="model.source = .* You need sentencepiece"):
        setup.require_same_token_ids(str(tmp_path), str(tmp_path))
