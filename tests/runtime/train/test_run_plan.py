"""--dry-run: what it says, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_recipe import SMALL, recipe_of

from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.checkpoint import CheckpointError
from patchgen.runtime.data import DataError
from patchgen.runtime.train import (
    attention_choice,
    checks,
    memory,
    model,
    planned_device,
    preflight,
    run_plan,
)
from patchgen.runtime.train.planned_device import PlannedDevice
from patchgen.runtime.train.recipe import ModelConfig, RecipeError
from patchgen.runtime.verify.small_config import small_config

MEDIA = {"kind": "multimodal", "sources": [{"path": "builtin:vision"}]}


def described(recipe, world: int) -> str:
    return run_plan.describe(recipe, checks.build_runnable(recipe, world), world)


def test_a_dry_run_says_what_would_run():
    text = described(recipe_of(parallel={"ep": 2, "sp": 2}), world=8)
    assert text.splitlines()[1].startswith("model        Qwen3MoeForCausalLM"), "facts first, and no recipe"
    assert "ep groups (share the experts; tokens are exchanged): [0 1] [2 3]" in text
    assert "Qwen3MoeForCausalLM, 0.1 M parameters" in text
    assert "8 batches of up to 256 tokens, 2 per batch group" in text
    assert "fused_moe    auto" in text and "rms_norm     eager" in text
    assert "3 layers" in text and "not patchgen_flash_attention_4" in text, "why no faster attention runs is told"
    assert "memory of one rank (estimate)" in text


@pytest.mark.parametrize(
    ("sections", "world", "told"),
    [
        ({"parallel": {"ep": 3}}, 3, "does not divide"),
        ({"parallel": {"ep": 16}}, 16, "parallel.ep = 16: model.layers.0.mlp.experts.gate_up_proj has 8 experts"),
        (
            {"lora": {"target_parameters": ["mlp.gate.weight"]}},
            2,
            "so on 2 ranks only stacked experts can have such adapters",
        ),
        (
            {"lora": {"target_parameters": ["experts.gate_proj"]}},
            1,
            "experts.gate_proj matches nothing in Qwen3MoeForCausalLM. Its experts have mlp.experts.down_proj, "
            "mlp.experts.gate_up_proj.",
        ),
        (
            {"lora": {"target_parameters": ["mlp.experts.down_proj"], "layers_to_transform": [9]}},
            1,
            "mlp.experts.down_proj matches nothing in Qwen3MoeForCausalLM with lora.layers_to_transform.",
        ),
        (
            {"lora": {}, "parallel": {"dp_replicate": 2}},
            4,
            "parallel.dp_replicate = 2 with lora.target_modules: PEFT would",
        ),
        (
            {"lora": {"target_parameters": ["mlp.experts.gate_up_proj"], "dropout": 0.1}},
            1,
            "refuses dropout in adapters of parameters",
        ),
        (
            {
                "data": {"sources": [{"path": "builtin:stdlib"}]},
                "eval_data": {},
                "train": {"eval_every": 2, "eval_batches": 3},
            },
            2,
            "train.eval_batches = 3 is not divisible by the 2 batch groups",
        ),
        (
            {"parallel": {"ep": 2, "expert_exchange": "peer_memory", "expert_capacity": 8}},
            2,
            "bounds the rows of an all-to-all",
        ),
        ({"parallel": {"expert_capacity": 8}}, 2, "parallel.expert_capacity is set, but parallel.ep is 1"),
        ({"parallel": {"head_groups": 2}}, 2, "parallel.head_groups is set, but parallel.sp is 1"),
        ({"model": {"attention": "patchgen_flash_attention_4"}}, 1, "cannot run here: it needs a CUDA device"),
        ({"kernels": {"rms_norm": "quack"}}, 1, "kernels.rms_norm = 'quack' cannot run here"),
        ({"parallel": {"sp": 3}}, 4, "parallel: dp_replicate * sp = 1 * 3 = 3 does not divide the number of ranks, 4"),
        ({"kernels": {"swiglu": "compiled"}}, 1, "no module of this model calls that seam"),
        ({"model": {"overrides": {"hiden_size": 64}}}, 1, "has no such field. Did you mean hidden_size"),
        (
            {"model": {"source": "gpt_oss", "overrides": {"num_hidden_layers": 2, "layer_types": ["full_attention"]}}},
            1,
            "of 'gpt_oss': `num_hidden_layers` (2) must be equal to the number of `layer_types`",
        ),
        ({"model": {"source": "qwen3_mo"}}, 1, "nor a model type"),
        ({"model": {"source": "qwen3_vl", "overrides": {}}, "data": MEDIA}, 1, "'qwen3_vl' has no usable processor"),
        (
            {"model": {"source": "qwen3_vl", "overrides": {}}, "eval_data": MEDIA, "train": {"eval_every": 1}},
            1,
            "'qwen3_vl' has no usable processor",
        ),
        ({"model": {"freeze": ["model.vision.*"]}}, 1, "'model.vision.*' matches no parameter"),
        ({"optim": {"groups": [{"pattern": "model.nope.*"}]}}, 1, "'model.nope.*' matches no trainable parameter"),
        (
            {"lora": {"target_modules": ["nope"]}},
            1,
            "lora.target_modules: nothing in Qwen3MoeForCausalLM matches nope",
        ),
    ],
)
def test_what_cannot_run_is_refused(sections, world, told, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    sections = {**sections, "train": {"batches_per_step": world * 4, **sections.get("train", {})}}
    with pytest.raises(RecipeError) as refusal:
        described(recipe_of(**sections), world)
    assert told in str(refusal.value)


def test_fields_that_the_config_class_fills_in_follow_the_overrides(tmp_path):
    """As the class itself fills them in, for a model type and for a config.json that leaves them out; given ones stay."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = model.read_config(ModelConfig(source="llama", overrides=sizes))
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    layers = {"text_config": {"num_hidden_layers": 2}}
    assert len(model.read_config(ModelConfig(source="gemma3", overrides=layers)).text_config.layer_types) == 2
    given = {"model_type": "qwen3", "num_hidden_layers": 28, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(given))
    config = model.read_config(ModelConfig(source=str(tmp_path), overrides=sizes))
    assert (len(config.layer_types), config.head_dim) == (2, 32)
    (tmp_path / "config.json").write_text(json.dumps({**given, "layer_types": None, "num_key_value_heads": None}))
    config = model.read_config(ModelConfig(source=str(tmp_path), overrides=sizes))
    assert (len(config.layer_types), config.num_key_value_heads) == (2, 4)
    flat = {"model_type": "qwen2_vl", "num_hidden_layers": 28, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    config = model.read_config(ModelConfig(source=str(tmp_path), overrides={"text_config": {"num_hidden_layers": 2}}))
    assert (len(config.text_config.layer_types), config.text_config.hidden_size) == (2, 64)
    (tmp_path / "config.json").write_text(json.dumps({**given, "layer_types": ["full_attention"] * 28}))
    with pytest.raises(RecipeError, match=r"layer_types` \(28\). To fix: override the fields that depend on them"):
        model.read_config(ModelConfig(source=str(tmp_path), overrides=sizes))


@pytest.mark.parametrize("kernel", ["triton", "fp8"])
def test_kernels_that_need_a_gpu_are_refused_without_one(kernel: str, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RecipeError, match=f"kernels.fused_moe = '{kernel}' cannot run here: it needs a CUDA device"):
        run_plan.require_valid(recipe_of(kernels={"fused_moe": kernel}), 1)


def test_a_dry_run_names_data_that_are_not_there(tmp_path):
    missing = str(tmp_path / "my.jsonl")
    with pytest.raises(DataError, match="my.jsonl"):
        described(recipe_of(data={"sources": [{"path": missing}]}), world=8)
    with pytest.raises(DataError, match="^eval_data: .*my.jsonl"):
        described(recipe_of(eval_data={"sources": [{"path": missing}]}, train={"eval_every": 1}), world=8)


def test_weights_that_do_not_fit_are_known_from_their_headers(tmp_path):
    """As are tokens without an embedding; nothing of a tensor is read."""
    recipe = recipe_of()
    whole = model.build_on_meta(recipe)
    type(whole)._from_config(whole.config).save_pretrained(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    held = load_file(weights)
    save_file({key: tensor for key, tensor in held.items() if "layers.1.mlp.gate" not in key}, weights)
    with pytest.raises(CheckpointError, match="missing: model.layers.1.mlp.gate.weight"):
        checks.build_runnable(recipe_of(model={"weights": str(tmp_path)}), 1)
    save_file(held, weights)
    checks.build_runnable(recipe_of(model={"weights": str(tmp_path)}), 1)
    with pytest.raises(RecipeError, match="has no tokenizer"):
        checks.build_runnable(recipe_of(model={"source": str(tmp_path), "overrides": {}}), 1)


@pytest.mark.parametrize("key", ["source", "weights"])
def test_weights_in_another_format_are_refused_with_the_way_to_convert_them(key, tmp_path):
    """With `auto`, too: random weights instead of them would be trained without a word."""
    given = ModelConfig(source=str(tmp_path)) if key == "source" else ModelConfig("qwen3_moe", weights=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / "training_args.bin").write_bytes(b"")
    if key == "source":
        assert model.find_weights(given) is None, "no weights"
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(
        RecipeError, match=rf"model\.{key} = .*: pytorch_model-00001.*save_pretrained.*weights: random"
    ):
        model.find_weights(given)
    assert model.find_weights(replace(given, weights="random")) is None


def test_a_folder_with_the_name_of_a_type_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.build_on_meta(recipe_of()).config.save_pretrained(tmp_path / "qwen3_moe")
    monkeypatch.setattr(checks.setup, "data_parts", lambda recipe: None)
    with pytest.warns(
        UserWarning, match=f"is a model type and also the folder {tmp_path / 'qwen3_moe'}; the folder is read"
    ):
        checks.build_runnable(recipe_of(), 1)


def test_more_ranks_may_share_a_sequence_than_a_model_has_heads():
    """The model has four: queries are divided as well."""
    assert checks.build_runnable(recipe_of(parallel={"sp": 8}), 8).config.num_attention_heads == 4


def test_large_heads_get_an_attention_that_takes_them(monkeypatch):
    """A small form of a model has small heads: those of the real one are asked for as well."""
    flash = "patchgen_flash_attention_2"
    as_on_a_gpu = replace(BACKENDS[flash], unavailable=lambda: None, has_cpu_backward=True)
    monkeypatch.setitem(BACKENDS, flash, as_on_a_gpu)
    for size, expected in ((64, flash), (512, "patchgen_sdpa")):
        recipe = recipe_of(model={"overrides": SMALL | {"head_dim": size}})
        head, config = model.find_head_and_config(model.read_config(recipe.model))
        assert attention_choice.choose(None, head, config) == expected
    with pytest.raises(RecipeError, match=f"'{flash}' cannot do heads of 512, which Qwen3MoeForCausalLM has"):
        attention_choice.choose(flash, head, config)
    towers = small_config("gemma3").config
    towers.text_config.head_dim = 512
    head_with_towers, _ = model.find_head_and_config(towers)
    key, layers = "model.attention.text_config", r"model.language_model.layers.\*.self_attn, \w+, "
    with pytest.raises(
        RecipeError, match=f"^{key} = '{flash}' cannot do heads of 512, which Gemma3.* has in {layers}"
    ):
        attention_choice.choose({"": "patchgen_sdpa", "text_config": flash}, head_with_towers, towers)
    told, *why = attention_choice.explain(head, config, "patchgen_sdpa").splitlines()
    assert told.endswith("patchgen_sdpa    3 layers: model.layers.*.self_attn (heads of 512)")
    assert [line for line in why if flash in line and line.endswith(": cannot do heads of 512")]


def test_a_run_in_float32_gets_an_attention_that_computes_in_it(monkeypatch):
    """Flash kernels compute in 16 bits alone: what layers compute in, not what weights are stored in, decides."""
    flash = "patchgen_flash_attention_4"
    monkeypatch.setitem(BACKENDS, flash, replace(BACKENDS[flash], unavailable=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    told = {}
    for dtype, expected in ((None, flash), ("float32", "patchgen_sdpa")):
        recipe = recipe_of(parallel={"param_dtype": dtype}, log={"peak_tflops": 1})
        built = model.build_on_meta(recipe)
        assert built.config._attn_implementation == expected
        assert preflight.examine(recipe).attention == expected
        told[dtype] = run_plan.describe(recipe, built, 1, PlannedDevice("NVIDIA H200", "cuda", is_here=True))
    assert [line for line in told["float32"].splitlines() if flash in line and line.endswith(": cannot do float32")]
    assert flash in told[None] and ": cannot do float32" not in told[None]
    refused = recipe_of(model={"attention": flash}, parallel={"param_dtype": "float32"})
    with pytest.raises(RecipeError, match=f"'{flash}' cannot do float32, which parallel.param_dtype needs.*eager"):
        model.build_on_meta(refused)
    assert model.compute_dtype(recipe_of(), "cuda") == torch.bfloat16
    assert model.compute_dtype(recipe_of(), "cpu") == torch.float32


def test_what_a_model_asks_for_is_why_an_attention_was_not_taken():
    head, config = model.find_head_and_config(small_config("gpt_oss").config)
    assert attention_choice.choose(None, head, config) == "patchgen_eager"
    told = attention_choice.explain(head, config, "patchgen_eager")
    reasons = [line for line in told.splitlines() if line.endswith(": cannot do sinks")]
    assert len(reasons) == 2, "one for each kind of layer"
    assert all("patchgen_sdpa" in why and "patchgen_flash_attention_2" in why for why in reasons)


def test_a_dry_run_fetches_no_weights(monkeypatch):
    def fetch(*args, **options):
        raise AssertionError("downloaded")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    config = model.read_config(recipe_of().model)
    monkeypatch.setattr(model, "read_config", lambda section: config)
    assert "weights: some/model" in described(recipe_of(model={"source": "some/model", "overrides": {}}), world=8)


def test_logits_are_counted_where_the_loss_is_eager():
    counted, fused = (
        float(described(recipe_of(kernels=kernels), world=8).partition("\n  loss ")[2].split()[0])
        for kernels in ({"causal_lm_loss": "eager"}, {})
    )
    assert counted > 1.5 * fused > 0, "of a fused loss those of a chunk, and the gradient of the head"
    assert [memory.has_fused_loss(chosen) for chosen in ({}, {"causal_lm_loss": "auto"})] == [False, True]


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"router_loss": "global"}},  # on 8 ranks
        {"train": {"router_loss": "global", "batches_per_step": 6}, "parallel": {"sp": 2, "ep": 3}},  # on 12
        {"train": {"eval_batches": 3, "batches_per_step": 6}, "parallel": {"ep": 3}, "eval_data": {}},  # on 3
    ],
)
def test_a_recipe_is_valid_on_some_ranks(sections, tmp_path):
    run_plan.require_valid_on_some_ranks(recipe_of(log={"directory": str(tmp_path / "run")}, **sections))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"parallel": {"dp_replicate": 3}}, "is not divisible by the 3 batch groups"),
        ({"parallel": {"sp": 2, "head_groups": 2, "expert_capacity": 8}}, "parallel.expert_capacity is set"),
        ({"train": {"router_loss": "global"}, "eval_data": {}, "parallel": {"ep": 3}}, "by the 3 batch groups"),
    ],
)
def test_a_recipe_that_is_valid_on_no_ranks_is_refused_as_on_the_fewest(sections, told, tmp_path):
    with pytest.raises(RecipeError, match=told):
        run_plan.require_valid_on_some_ranks(recipe_of(log={"directory": str(tmp_path / "run")}, **sections))


def test_updates_that_would_round_to_nothing_are_told():
    with pytest.warns(UserWarning, match="most updates round to nothing"):
        run_plan.require_valid(recipe_of(model={"dtype": "bfloat16"}), world_size=1)


def planned(recipe, world: int, name: str | None) -> str:
    device = planned_device.planned(name)
    recipe, unchecked = planned_device.plannable(recipe, device)
    return run_plan.describe(recipe, checks.build_runnable(recipe, world), world, device, unchecked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="plans for this machine's GPU")
def test_a_plan_says_for_which_device_it_is():
    recipe = recipe_of(kernels={"fused_moe": "sonic"}, model={"attention": "patchgen_flash_attention_4"})
    text = planned(recipe, 8, "h200")
    assert text.startswith("planned for  8 x NVIDIA H200, 140 GiB, which is not in this machine")
    assert (
        "kernels.fused_moe = sonic, model.attention = patchgen_flash_attention_4: only a machine with that device"
        in text
    )
    assert "% of the 140 GiB of a device" in text and "s at 40 % MFU" in text, "memory and peak of that GPU"
    here, cpu = planned(recipe_of(), 8, None), planned(recipe_of(), 8, "cpu")
    assert (
        here.startswith("planned for  8 x the CPU, for this machine has no GPU; --device h100") and "MFU" not in here
    )
    assert cpu.startswith("planned for  8 x the CPU\n")
    sizes = [float(one.partition("gathered")[2].split()[0]) for one in (text, here)]
    assert sizes[0] == pytest.approx(sizes[1] / 2, abs=0.01), "on a GPU layers are gathered in bfloat16"


def test_a_model_that_does_not_fit_is_told():
    large = {"num_hidden_layers": 2, "hidden_size": 8192, "intermediate_size": 8192, "vocab_size": 400_000}
    assert "it does not fit" in planned(recipe_of(model={"overrides": SMALL | large}), 1, "h100")


@pytest.mark.parametrize("section", ["data", "eval_data"])
def test_a_cache_folder_that_cannot_be_written_is_refused(section, tmp_path):
    (tmp_path / "file").touch()
    recipe = recipe_of(**{section: {"cache_dir": str(tmp_path / "file" / "cache")}})
    with pytest.raises(
        RecipeError, match=f"cache folder .*/file/cache cannot be written: .* another {section}.cache_dir"
    ):
        run_plan.require_valid(recipe, 1)


def test_of_many_ranks_a_plan_is_a_summary():
    recipe = recipe_of(parallel={"ep": 8, "sp": 4}, train={"batches_per_step": 256})
    text = run_plan.summary(model.parallel_config(recipe.parallel, 1024))
    assert text.startswith("1,024 ranks, each with 1/1024 of the dense parameters and of the experts: 1/8 of them")
    assert "rank r reads batch r // 4" in text and len(text.splitlines()) == 5
    assert "sp              256 x     4 ranks that share a sequence: [0-3], [4-7], ..." in text
    assert (
        "ep_shard          8 x   128 ranks that hold shards of the same experts: [0 8 ... 1016], [1 9 ... 1017]"
        in text
    )
