"""An adapter merged into files: what PEFT makes of the model in memory, and nothing else changed."""

from __future__ import annotations

import copy
import inspect
import json
import re
import shutil
from pathlib import Path

import omni_models
import peft
import pytest
import small_models
import torch
from safetensors.torch import load_file, save_file
from test_untrained_part import same
from typer.testing import CliRunner

from patchgen.cli import app
from patchgen.runtime import project, registry
from patchgen.runtime.checkpoint import (
    CheckpointError,
    adapter_options,
    load_pretrained,
    merge_adapter,
    untrained_part,
)
from patchgen.runtime.verify.small_config import small_config

LINEAR = {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 2}, "use_rslora": True}
EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CLOSE = {"rtol": 4 * torch.finfo(torch.float32).eps, "atol": 1e-7}


def adapt(model, folder, **fields):
    """PEFT's adapter with random factors, saved; the model after PEFT has merged it."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **fields))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted.merge_and_unload()


def moe():
    from transformers import Qwen3MoeForCausalLM

    return small_models.build(Qwen3MoeForCausalLM, small_models.moe_config())


@pytest.mark.parametrize("layout", ["per-expert", "stacked", "transposed", "merged"])
@pytest.mark.parametrize("fields", [LINEAR, EXPERTS], ids=["linear", "experts"])
def test_merged_files_equal_the_model_that_peft_merges(fields, layout, tmp_path):
    model = moe()
    model.save_pretrained(tmp_path / "plain")
    source = small_models.rewrite(tmp_path / "plain", tmp_path / "source", small_models.LAYOUTS[layout])
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = adapt(model, tmp_path / "adapter", **fields)
    done = CliRunner().invoke(
        app, ["merge", str(tmp_path / "adapter"), "--source", str(source), "--output", str(tmp_path / "out")]
    )
    assert done.exit_code == 0 and "4 parameters changed" in done.output, done.output
    before, got = small_models.tensors(source), small_models.tensors(tmp_path / "out")
    if layout != "merged":  # a layout that nobody loads goes back to single experts
        assert got.keys() == before.keys()
        touched = [
            n for n in before if any(part in n for part in (("q_proj", "o_proj"), (".experts.",))[fields is EXPERTS])
        ]
        assert same(got, before, before.keys() - {*touched})
    loaded = moe()
    load_pretrained(loaded, tmp_path / "out")
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, **CLOSE)
    assert sum(not torch.equal(tensor, plain[name]) for name, tensor in merged.state_dict().items()) == 4


def scale_factors(adapter, by):
    factors = load_file(adapter / "adapter_model.safetensors")
    scaled = {name: tensor * by if "q_proj" in name else tensor for name, tensor in factors.items()}
    save_file(scaled, adapter / "adapter_model.safetensors")


def test_a_sum_that_the_dtype_cannot_represent_is_refused(tmp_path):
    model = moe()
    model.save_pretrained(tmp_path / "source")
    adapt(model, tmp_path / "adapter", **LINEAR)
    scale_factors(tmp_path / "adapter", 1e4)
    with pytest.raises(
        CheckpointError, match=r"q_proj.weight is .* after the merge, which torch.float16 cannot represent"
    ):
        merge_adapter(tmp_path / "adapter", tmp_path / "source", tmp_path / "out", dtype=torch.float16)
    merge_adapter(tmp_path / "adapter", tmp_path / "source", tmp_path / "wide")
    merge_adapter(tmp_path / "adapter", tmp_path / "source", tmp_path / "out", dtype=torch.bfloat16)
    sums, got = small_models.tensors(tmp_path / "wide"), small_models.tensors(tmp_path / "out")
    assert max(tensor.max() for tensor in sums.values()) > torch.finfo(torch.float16).max
    assert got.keys() == sums.keys() and same(got, {name: tensor.bfloat16() for name, tensor in sums.items()}, sums)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("by", [1e30, float("nan")])
def test_a_sum_that_is_not_finite_in_fp32_is_refused(by, dtype, tmp_path):
    """It was written: only finite sums were compared with the range of the dtype, and none in fp32."""
    model = moe()
    model.save_pretrained(tmp_path / "source")
    adapt(model, tmp_path / "adapter", **LINEAR)
    scale_factors(tmp_path / "adapter", by)
    with pytest.raises(
        CheckpointError, match=r"q_proj.weight is (-?inf|nan) after the merge, which is computed in fp32"
    ):
        merge_adapter(tmp_path / "adapter", tmp_path / "source", tmp_path / "out", dtype=dtype)


def test_into_a_larger_checkpoint_than_the_adapted_model(tmp_path, monkeypatch):
    """The thinker's adapter into the whole that speaks; its talker has modules of the same names, and keeps them."""
    config = omni_models.qwen3_omni()
    whole = omni_models.save_whole(config, tmp_path / "source", dtype=torch.bfloat16)
    merged = adapt(whole.thinker.float(), tmp_path / "adapter", **LINEAR)
    monkeypatch.setattr(untrained_part, "read_folder", lambda folder: pytest.fail(f"{folder} is read again"))
    merge_adapter(tmp_path / "adapter", tmp_path / "source", tmp_path / "out")
    before, got = small_models.tensors(tmp_path / "source"), small_models.tensors(tmp_path / "out")
    weights = [f"{name}.weight" for name in LINEAR["target_modules"]]
    adapted = [name for name in before if name.endswith(tuple(weights))]
    touched = [name for name in adapted if name.startswith("thinker.")]
    assert len(adapted) > len(touched) > 0 and not any(same(got, before, [name]) for name in touched)
    assert got.keys() == before.keys() and same(got, before, before.keys() - {*touched})
    loaded = type(whole).from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in merged.state_dict().items():
        assert torch.equal(loaded.thinker.state_dict()[name], tensor.bfloat16()), name


@pytest.mark.parametrize("said", ["project", "option", "nothing", "gone"])
def test_the_adapted_part_is_of_a_model_that_only_the_project_has(said, tmp_path, monkeypatch):
    """In an installation without the model: what `patchgen.toml` or `--generated` names is looked at, and before the rest."""
    monkeypatch.setattr(project, "_ADDED", {})
    omni = registry.find_model("qwen3_omni_moe").directory
    shutil.copytree(omni, tmp_path / "mine" / "models" / omni.name)
    (tmp_path / "installed").mkdir()
    monkeypatch.setattr(registry, "installed_directory", lambda: tmp_path / "installed")
    whole = omni_models.save_whole(omni_models.qwen3_omni(), tmp_path / "source")
    adapt(whole.thinker, tmp_path / "adapter", **LINEAR)
    monkeypatch.chdir(tmp_path / "mine")
    if said in ("project", "gone"):
        Path("patchgen.toml").write_text(f'generated = "{"models" if said == "project" else "gone"}"\n')
    command = ["merge", str(tmp_path / "adapter"), "--source", str(tmp_path / "source"), "--output", "out"]
    done = CliRunner().invoke(app, [*command, *(["--generated", "models"] if said == "option" else [])])
    told = {"nothing": "a generated part of it", "gone": "patchgen.toml: generated = 'gone' is not a folder"}
    assert told.get(said, "parameters changed") in f"{done.output}{done.exception}"
    assert (done.exit_code == 0) == (said in ("project", "option")) == Path("out").exists()


def test_what_is_no_product_of_two_factors_is_refused(tmp_path):
    model = moe()
    model.save_pretrained(tmp_path / "source")
    for number, (fields, told) in enumerate((
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora = True is more than a product"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] trains whole"),
        ({"target_modules": ["embed_tokens"]}, "only LoRA factors"),
    )):  # fmt: skip
        adapt(moe(), tmp_path / f"adapter{number}", **fields)
        with pytest.raises(CheckpointError, match=told):
            merge_adapter(tmp_path / f"adapter{number}", tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model_and_of_a_tied_head(tmp_path):
    from transformers import Qwen3NextForCausalLM

    moe().save_pretrained(tmp_path / "source")
    other = Qwen3NextForCausalLM._from_config(small_config("qwen3_next").config)
    adapt(other, tmp_path / "other", target_modules=["in_proj_qkvz"])
    with pytest.raises(CheckpointError, match="in_proj_qkvz.* but neither the model of .* nor a generated part of it"):
        merge_adapter(tmp_path / "other", tmp_path / "source", tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds no readable PEFT adapter .adapter_config.json"):
        merge_adapter(tmp_path / "source", tmp_path / "source", tmp_path / "out")
    tied = small_models.build(type(moe()), small_models.moe_config(tie_word_embeddings=True))
    tied.save_pretrained(tmp_path / "tied")
    adapt(tied, tmp_path / "head", target_modules=["lm_head"])
    with pytest.raises(CheckpointError, match="adapts .*, which is tied to .*: merging would"):
        merge_adapter(tmp_path / "head", tmp_path / "tied", tmp_path / "out")


def test_weights_that_do_not_fit_are_named_with_the_reason(tmp_path):
    model = moe()
    model.save_pretrained(tmp_path / "plain")
    adapt(model, tmp_path / "adapter", **LINEAR)
    norm = "model.norm.weight"
    changes = {
        "integers": (lambda tensor: tensor.to(torch.int8), f"{norm} in .* is int8; {norm} is a floating-point tensor"),
        "shape": (
            lambda tensor: torch.cat([tensor, tensor]),
            rf"(?s)does not fit Qwen3MoeForCausalLM:\n +{norm} (?!.*missing)",
        ),
    }
    for name, (change, told) in changes.items():
        source = small_models.rewrite(
            tmp_path / "plain", tmp_path / name, lambda found, change=change: found | {norm: change(found[norm])}
        )
        with pytest.raises(CheckpointError, match=told):
            merge_adapter(tmp_path / "adapter", source, tmp_path / "out")
    source = small_models.rewrite(
        tmp_path / "plain", tmp_path / "more", lambda found: found | {"my.weight": found[norm].clone()}
    )
    with pytest.raises(CheckpointError, match=r"(?s)does not fit Qwen3MoeForCausalLM:\n +unexpected: my.weight"):
        merge_adapter(tmp_path / "adapter", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


OPTIONS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"q_proj": 32}},
    "patterns by regex": {"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 3}, "alpha_pattern": {r".*\.1\..*o_proj": 1}},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*layers\.1.*(q|v)_proj"},
    "dropout": {"lora_dropout": 0.1},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "router": {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
    "router and experts": {"target_modules": ["q_proj"], "target_parameters": ["gate.weight", "experts.down_proj"]},
    "router of rank 1": {"target_modules": [], "target_parameters": ["mlp.gate.weight"], "r": 1},
    **{f"init {value}": {"init_lora_weights": value} for value in (False, "gaussian", "orthogonal", "mica", "olora", "pissa")},
    "init eva": {"init_lora_weights": "eva", "eva_config": peft.EvaConfig()},
    "pissa, rslora, patterns": {"init_lora_weights": "pissa", "use_rslora": True, "rank_pattern": {"o_proj": 2}},
    "olora, alpha": {"init_lora_weights": "olora", "lora_alpha": 3, "target_modules": ["k_proj", "lm_head"]},
    "pissa on a router": {"init_lora_weights": "pissa", "target_modules": [], "target_parameters": ["mlp.gate.weight"]},
    "olora on a router": {"init_lora_weights": "olora", "target_modules": [], "target_parameters": ["mlp.gate.weight"]},
}  # fmt: skip


def trained(model, folder, **fields):
    """An adapter as a training leaves it: what PEFT initialises, moved by random numbers, and saved by PEFT."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]} | fields
    adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (parameter for parameter in adapted.parameters() if parameter.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16 source"])
@pytest.mark.parametrize("fields", OPTIONS.values(), ids=OPTIONS)
def test_every_option_of_peft_merges_as_peft_merges_it(fields, dtype, tmp_path):
    """Against PEFT's own path for a user: base model and adapter from their folders, `merge_and_unload`, in fp32.

    PiSSA and OLoRA take a part out of the frozen weights when an adapter is made or loaded; that part stayed in the merged
    weights. An adapter of a router crashed.
    """
    moe().to(dtype).save_pretrained(tmp_path / "source")
    base = type(moe()).from_pretrained(tmp_path / "source", dtype=torch.float32)
    plain = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    trained(base, tmp_path / "adapter", **fields)
    base = type(moe()).from_pretrained(tmp_path / "source", dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    merge_adapter(tmp_path / "adapter", tmp_path / "source", tmp_path / "out", dtype=torch.float32)
    got = moe()
    load_pretrained(got, tmp_path / "out")
    assert any((expected[name] - tensor).abs().max() > 1e-3 for name, tensor in plain.items())
    for name, tensor in got.state_dict().items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-5, atol=2e-6, msg=lambda told, name=name: f"{name}: {told}"
        )


LORA_GA = {"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()}
REFUSED = {
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1]},
    "kasa_config": {"kasa_config": peft.KasaConfig()},
    "velora_config": {"velora_config": peft.VeloraConfig()},
    "monteclora_config": {"monteclora_config": peft.MontecloraConfig()},
    "init_lora_weights = 'pissa_niter_4'": {"init_lora_weights": "pissa_niter_4"},
    "init_lora_weights = 'lora_ga'": LORA_GA,
}


@pytest.mark.parametrize("told", REFUSED)
def test_other_options_of_peft_are_refused_by_name(told, tmp_path):
    moe().save_pretrained(tmp_path / "source")
    trained(moe(), tmp_path / "adapter", **REFUSED[told])
    with pytest.raises(CheckpointError, match=rf"{re.escape(told)}.*To fix: "):
        merge_adapter(tmp_path / "adapter", tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "told, changed",
    {
        "init_lora_weights = 'corda'": {"init_lora_weights": "corda"},
        "init_lora_weights = 'loftq'": {"init_lora_weights": "loftq"},
        "init_lora_weights = 'of a later PEFT'": {"init_lora_weights": "of a later PEFT"},
        "layer_replication = [[0, 2]]": {"layer_replication": [[0, 2]]},
        "use_qalora = True": {"use_qalora": True},
        "adapter of the type IA3": {"peft_type": "IA3"},
        "adapter of the type None": {"peft_type": None},
    }.items(),
)
def test_configs_that_this_machine_cannot_train_are_refused_by_name(told, changed, tmp_path):
    """CorDA and LoftQ need data or further packages to train; what refuses them is their config."""
    moe().save_pretrained(tmp_path / "source")
    trained(moe(), tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    with pytest.raises(CheckpointError, match=rf"{re.escape(told)}.*To fix: "):
        merge_adapter(tmp_path / "adapter", tmp_path / "source", tmp_path / "out")


def test_no_option_of_peft_is_left_unjudged():
    """Every initialisation and variant that the installed PEFT offers is merged or refused: none is taken for a plain one."""
    layers = inspect.getsource(peft.tuners.lora.layer)
    names = re.findall(r'init_lora_weights(?:\.lower\(\))?(?: == |\.startswith\()"(\w+)"', layers)
    assert {"pissa", "olora", "corda", "loftq", "lora_ga", "mica"} <= {*names}
    known = {*adapter_options.KEEP_WEIGHTS, *adapter_options.CHANGE_WEIGHTS, *adapter_options.NOT_REPEATABLE}
    assert {*names} <= known


def test_an_adapter_that_peft_converted_to_an_ordinary_one(tmp_path):
    """`path_initial_model_for_weight_conversion`: the adapter holds the difference, on the unchanged weights. Merged, it gives
    what the adapter gives before the conversion."""
    model = moe()
    model.save_pretrained(tmp_path / "source")
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    )
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(tmp_path / "first", save_embedding_layers=False)
    adapted.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    adapted.save_pretrained(tmp_path / "as it is", save_embedding_layers=False)
    adapted.save_pretrained(
        tmp_path / "converted",
        path_initial_model_for_weight_conversion=tmp_path / "first",
        save_embedding_layers=False,
    )
    expected = peft.PeftModel.from_pretrained(model, tmp_path / "converted").merge_and_unload().state_dict()
    for name in ("as it is", "converted"):
        merge_adapter(tmp_path / name, tmp_path / "source", tmp_path / f"{name}, merged")
        got = moe()
        load_pretrained(got, tmp_path / f"{name}, merged")
        for key, tensor in got.state_dict().items():
            torch.testing.assert_close(
                tensor, expected[key], rtol=1e-5, atol=2e-6, msg=lambda t, at=(name, key): f"{at}: {t}"
            )
