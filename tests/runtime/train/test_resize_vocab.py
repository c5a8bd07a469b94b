"""`model.resize_vocab` and `model.ignore_keys` before a run: sizes, refusals, and what is told."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_tokenizers import of_words
from transformers import AutoConfig

from patchgen.runtime import attention, registry
from patchgen.runtime.checkpoint import CheckpointError, load_pretrained
from patchgen.runtime.checkpoint.vocabulary import vocabulary_names
from patchgen.runtime.train import checks, first_loss, memory, model, resize_vocab, run_plan, setup
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.verify.small_config import small_config

HEADS = [
    (generated, head)
    for generated in registry.generated_models(registry.installed_directory())
    for head in generated.heads
]
ROWS, TOKENS = 120, 125
SMALL = {
    "vocab_size": ROWS, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights for 120 tokens, and a tokenizer of 125."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    place = tmp_path_factory.mktemp("grown")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL)).save_pretrained(place)
    of_words(*(f"word{index}" for index in range(TOKENS))).save_pretrained(place)
    (place / "text.jsonl").write_text(json.dumps({"text": "word1 word124"}) + "\n")
    return place


def recipe_of(folder, section=None, **sections):
    data = {"sources": [{"path": str(folder / "text.jsonl")}], "tokens_per_batch": 32}
    values = {"model": {"source": str(folder), "resize_vocab": section}, "data": data}
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return from_dict(values)


@pytest.mark.parametrize(
    ("section", "size"),
    [
        ({}, TOKENS),
        ({"multiple_of": 16}, 128),
        ({"to": 130}, 130),
        ({"to": 130, "multiple_of": 64}, 192),
        ({"to": ROWS, "multiple_of": 1}, ROWS),
    ],
)
def test_the_size_is_that_of_the_tokenizer_or_the_given_one_rounded_up(section, size, folder):
    assert model.read_config(recipe_of(folder, section).model).vocab_size == size


def test_a_vocabulary_is_never_cut_and_one_that_is_large_enough_stays(folder, tmp_path):
    with pytest.raises(RecipeError, match=r"resize_vocab\.to = 119 is less than the vocab_size 120.*never shrunk"):
        model.read_config(recipe_of(folder, {"to": 119}).model)
    for section in ({}, {"multiple_of": 64}):
        padded = recipe_of(folder, section, model={"overrides": {"vocab_size": 140}})
        assert model.read_config(padded.model).vocab_size == 140, "more rows than tokens stay as they are"
    with pytest.raises(RecipeError, match="'qwen3_moe' is a model type.*set vocab_size in model.overrides"):
        model.read_config(from_dict({"model": {"source": "qwen3_moe", "resize_vocab": {}}, "data": {}}).model)


def test_tokens_without_rows_are_refused_with_the_setting_that_gives_them_some(folder):
    with pytest.raises(
        RecipeError, match=r"5 tokens have no embedding \('word120' = 120.*set model\.resize_vocab: \{\}"
    ):
        checks.build_runnable(recipe_of(folder), 1)
    with pytest.raises(RecipeError, match=r"2 tokens have no embedding"):
        setup.data_parts(recipe_of(folder, {"to": 123}))


def test_a_config_that_is_larger_than_its_weights_is_refused_with_the_setting(folder):
    """What edited config.json without the weights; with the setting the rows are filled."""
    overrides = {"overrides": {"vocab_size": TOKENS}}
    with pytest.raises(
        CheckpointError, match=r"120 rows in the checkpoint.*vocab_size is 125.*model\.resize_vocab: \{\}"
    ):
        checks.build_runnable(recipe_of(folder, model=overrides), 1)
    checks.build_runnable(recipe_of(folder, {}, model=overrides), 1)


def test_a_dry_run_counts_the_new_rows_and_tells_them(folder):
    recipe = recipe_of(folder, {"multiple_of": 64, "new_rows": "random"})
    blueprint = checks.build_runnable(recipe, 1)
    text = run_plan.describe(recipe, blueprint, 1)
    assert (
        "vocabulary   lm_head.weight from 120 to 128 rows, model.embed_tokens.weight from 120 to 128 rows; new rows: random"
        in text
    )
    layout = model.parallel_config(recipe.parallel, 1)
    sizes = [
        memory.estimate(checks.build_runnable(recipe_of(folder, {"to": rows}), 1), recipe, layout, None, {})
        for rows in (TOKENS, TOKENS + 10)
    ]
    assert sizes[1].parameters - sizes[0].parameters == 2 * 10 * SMALL["hidden_size"] * 4
    assert sizes[1].loss - sizes[0].loss == 32 * 10 * 8
    assert first_loss.expected(recipe, blueprint) == first_loss.Expected(128, None, is_trained=True)
    assert "nothing grows: the weights have 120 rows" in run_plan.describe(
        *(lambda same: (same, model.build_on_meta(same), 1))(recipe_of(folder, {"to": ROWS}))
    )


def test_equal_rows_that_nothing_trains_are_refused(folder):
    frozen = {"model": {"freeze": ["model.embed_tokens.*"]}}
    for sections, told in (
        ({"lora": {"rank": 2}}, "the section lora"),
        (frozen, r"model\.freeze = \['model\.embed_tokens"),
    ):
        with pytest.raises(RecipeError, match=rf"new_rows = mean with {told}.*set new_rows: random"):
            checks.build_runnable(recipe_of(folder, {}, **sections), 1)
        checks.build_runnable(recipe_of(folder, {"new_rows": "random"}, **sections), 1)


@pytest.mark.parametrize(("generated", "head"), HEADS, ids=[f"{model.name}-{head}" for model, head in HEADS])
def test_in_every_committed_model_embeddings_and_head_follow_the_nested_vocab_size(generated, head):
    """And nothing else does, but DeepSeek V4's table from tokens to experts, whose growth is refused; ids of media tokens stay."""
    attention.register()
    cls = getattr(generated.load(), head)
    shapes, fields = [], []
    for added in (0, 13):
        config = small_config(cls.config_class).config
        config.get_text_config().vocab_size += added
        with torch.device("meta"):
            built = cls._from_config(config, attn_implementation="eager")
        shapes.append({name: tuple(tensor.shape) for name, tensor in built.state_dict().items()})
        fields.append({name: value for name, value in vars(built.config).items() if name.endswith("token_id")})
    different = {name for name in shapes[0] if shapes[0][name] != shapes[1][name]}
    assert {name for name in different if not name.endswith("tid2eid")} == vocabulary_names(built)
    assert fields[0] == fields[1]


def test_a_nested_vocabulary_grows_and_image_tokens_stay(tmp_path):
    """The config of a vision model, with its pad token among the new ones."""
    attention.register()
    head = registry.find_model("qwen3_vl").load().Qwen3VLForConditionalGeneration
    config = small_config(head.config_class).config
    size, image = config.text_config.vocab_size, config.image_token_id
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head._from_config(config).save_pretrained(tmp_path)
    of_words(*(f"word{index}" for index in range(size + 3))).save_pretrained(tmp_path)
    overrides = {"text_config": {"pad_token_id": size + 1}}
    recipe = from_dict({"model": {"source": str(tmp_path), "resize_vocab": {}, "overrides": overrides}, "data": {}})
    built = model.build_on_meta(recipe)
    report = load_pretrained(built, tmp_path, **model.allowed_differences(recipe, built))
    assert built.config.text_config.vocab_size == size + 3 and built.config.image_token_id == image
    weight = built.get_input_embeddings().weight
    torch.testing.assert_close(weight[size:], weight[:size].mean(0).expand(3, -1))
    assert "language_model.embed_tokens.weight" in str(report)


def test_embeddings_that_the_vocab_size_does_not_size_are_refused(folder):
    blueprint = model.build_on_meta(recipe_of(folder, {}))
    resize_vocab.require_resized(blueprint)
    blueprint.config.vocab_size = TOKENS + 1
    with pytest.raises(RecipeError, match=r"lm_head\.weight has 125 rows.*vocab_size is 126: it does not size"):
        resize_vocab.require_resized(blueprint)


def test_keys_of_another_head_are_left_out_by_the_recipe_and_told(folder, tmp_path):
    """The value head of a model from PPO: named with the setting, left out with it, and not exported."""
    from patchgen.runtime.checkpoint import export_pretrained

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    held = load_file(folder / "model.safetensors")
    head = {"v_head.summary.weight": torch.ones(1, 16), "v_head.summary.bias": torch.ones(1)}
    save_file(held | head, tmp_path / "model.safetensors")
    recipe = recipe_of(folder, {}, model={"weights": str(tmp_path)})
    with pytest.raises(
        CheckpointError, match=r"unexpected: v_head\.summary\.bias[^$]*model\.ignore_keys: \[PATTERN\]"
    ):
        checks.build_runnable(recipe, 1)
    recipe = recipe_of(folder, {}, model={"weights": str(tmp_path), "ignore_keys": ["v_head.*"]})
    built = checks.build_runnable(recipe, 1)
    report = load_pretrained(built, tmp_path, **model.allowed_differences(recipe, built))
    model.require_effective(recipe, built, report)
    assert "model.ignore_keys): v_head.summary.bias, v_head.summary.weight" in str(report)
    export_pretrained(built, tmp_path / "out", source=tmp_path)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == held.keys()
    for pattern in ("v_heads.*", "lm_head.*"):  # a key that is not there, and one that the model needs
        recipe = recipe_of(folder, {}, model={"weights": str(tmp_path), "ignore_keys": ["v_head.*", pattern]})
        with pytest.raises(RecipeError, match=f"model.ignore_keys: '{pattern[:-1]}.*matches no key of the checkpoint"):
            checks.build_runnable(recipe, 1)


def test_a_teacher_of_another_size_is_told_how_it_grows(folder):
    recipe = recipe_of(folder, {}, teacher={"source": str(folder)}, objective={"name": "distillation"})
    with pytest.raises(RecipeError, match=r"teacher\.resize_vocab: \{to: 125\}"):
        checks.build_runnable(recipe, 1)
    assert AutoConfig.from_pretrained(folder).vocab_size == ROWS, "the source stays as it is"
