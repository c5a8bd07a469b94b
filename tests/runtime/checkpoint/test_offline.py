"""convert, export and fingerprint from disk to disk, by the commands."""

from __future__ import annotations

import json

import pytest
import small_models
import torch
from typer.testing import CliRunner

from patchgen import cli
from patchgen.errors import ConfigError
from patchgen.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    convert,
    export_pretrained,
    export_run,
    fingerprint,
    load_pretrained,
    offline,
)
from patchgen.runtime.verify.small_config import small_config


def run(*arguments: object):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_there_and_back(original, checkpoint, tmp_path):
    done = run("convert", checkpoint, tmp_path / "stacked", "--layout", "stacked")
    assert done.exit_code == 0 and "25 tensors" in done.output, done.output
    stacked = small_models.tensors(tmp_path / "stacked")
    expected = small_models.stacked(small_models.tensors(checkpoint))
    assert stacked.keys() == expected.keys()
    assert all(torch.equal(stacked[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "stacked" / "tokenizer.json").is_file()
    small_models.require_loads(original, tmp_path / "stacked")
    assert run("convert", tmp_path / "stacked", tmp_path / "back", "--layout", "per-expert").exit_code == 0
    back, first = small_models.tensors(tmp_path / "back"), small_models.tensors(checkpoint)
    assert back.keys() == first.keys() and all(torch.equal(back[name], first[name]) for name in first)


@pytest.mark.parametrize("layout", small_models.LAYOUTS)
def test_fingerprints_are_equal_in_every_layout(layout, checkpoint, tmp_path):
    folder = small_models.rewrite(checkpoint, tmp_path / layout, small_models.LAYOUTS[layout])
    assert fingerprint(folder) == fingerprint(checkpoint)


def test_fingerprints_depend_on_every_bit_the_dtype_and_the_order(checkpoint, tmp_path, monkeypatch):
    first = fingerprint(checkpoint)
    name = "model.layers.1.mlp.experts.down_proj"

    def flip(found):
        found["model.layers.1.mlp.experts.3.down_proj.weight"].view(torch.int32)[-1, -1] ^= 1
        return found

    changed = fingerprint(small_models.rewrite(checkpoint, tmp_path / "flip", flip))
    assert {key for key in first if first[key] != changed[key]} == {name}

    def exchange(found):
        keys = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]
        found[keys[0]], found[keys[1]] = found[keys[1]], found[keys[0]]
        return found

    assert fingerprint(small_models.rewrite(checkpoint, tmp_path / "exchange", exchange))[name] != first[name]
    convert(checkpoint, tmp_path / "half", dtype=torch.bfloat16)
    assert not set(fingerprint(tmp_path / "half").values()) & set(first.values())
    monkeypatch.setattr(offline, "CHUNK", 100)
    assert fingerprint(checkpoint) == first


def test_tied_weights_of_which_the_file_has_the_head_only(tmp_path):
    from transformers import Qwen3MoeForCausalLM

    tied = small_models.build(Qwen3MoeForCausalLM, small_models.moe_config(tie_word_embeddings=True))
    tied.save_pretrained(tmp_path / "in")

    def only_head(found):
        found["lm_head.weight"] = found.pop("model.embed_tokens.weight")
        return found

    folder = small_models.rewrite(tmp_path / "in", tmp_path / "head", only_head)
    convert(folder, tmp_path / "out")
    small_models.require_loads(tied, tmp_path / "out")
    assert fingerprint(folder) == fingerprint(tmp_path / "out") == fingerprint(tmp_path / "in")

    def both(found):
        return found | {"lm_head.weight": found["model.embed_tokens.weight"].clone()}

    assert fingerprint(small_models.rewrite(tmp_path / "in", tmp_path / "both", both)) == fingerprint(folder)

    def differ(found):
        return found | {"lm_head.weight": found["model.embed_tokens.weight"] + 1}

    folder = small_models.rewrite(tmp_path / "in", tmp_path / "differ", differ)
    for work in (lambda: convert(folder, tmp_path / "no"), lambda: fingerprint(folder)):
        with pytest.raises(CheckpointError, match="are one tied tensor in the model, and differ"):
            work()
    assert not (tmp_path / "no").exists()


def test_tensors_that_upstream_ignores_are_copied_and_listed(tmp_path):
    """Heads that predict further tokens are in releases, and not in transformers' class."""
    from transformers import Qwen3NextForCausalLM

    model = Qwen3NextForCausalLM._from_config(small_config(Qwen3NextForCausalLM.config_class).config)
    model.save_pretrained(tmp_path / "plain")
    key = "mtp.layers.0.self_attn.q_proj.weight"
    more = {key: torch.randn(8, 8).bfloat16()}
    folder = small_models.rewrite(tmp_path / "plain", tmp_path / "in", lambda found: found | more)
    done = run("convert", folder, tmp_path / "out", "--layout", "stacked", "--dtype", "float16")
    assert done.exit_code == 0 and key in done.output, done.output
    got = small_models.tensors(tmp_path / "out")[key]
    assert got.dtype == torch.bfloat16 and torch.equal(got, more[key])
    assert fingerprint(folder).keys() - fingerprint(tmp_path / "plain").keys() == {key}


def test_fingerprint_prints_a_line_per_tensor_and_one_of_all(checkpoint, tmp_path):
    done = run("fingerprint", checkpoint)
    lines = done.output.splitlines()
    assert len(lines) == 26 and lines[-1].endswith("all 25 tensors")
    convert(checkpoint, tmp_path / "stacked", layout="stacked")
    assert run("fingerprint", tmp_path / "stacked").output == done.output


def test_a_run_is_exported_in_the_layout_of_its_original(original, checkpoint, tmp_path):
    """Loaded from stacks that lay transposed, in bf16: exported the same way, with the original's tokenizer."""
    folder = small_models.rewrite(checkpoint, tmp_path / "transposed", small_models.transposed)
    (folder / "tokenizer.json").write_text("{}")
    model = small_models.build(small_models.generated_class(), small_models.moe_config(), device="meta")
    load_pretrained(model, folder)
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints")
    checkpointer.save(1, model=model, asynchronous=False)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    checkpointer.save(2, model=model, asynchronous=False)
    done = run("export", tmp_path / "run", "--output", tmp_path / "first", "--step", "1")
    assert done.exit_code == 0 and "step-00000001 ->" in done.output
    got, expected = small_models.tensors(tmp_path / "first"), small_models.tensors(folder)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    assert (tmp_path / "first" / "tokenizer.json").is_file()
    assert run("export", tmp_path / "run", "--output", tmp_path / "second").exit_code == 0
    assert torch.equal(
        small_models.tensors(tmp_path / "second")["model.norm.weight"], expected["model.norm.weight"] + 1
    )
    assert (
        run(
            "export", tmp_path / "run", "--output", tmp_path / "one", "--layout", "per-expert", "--step", "1"
        ).exit_code
        == 0
    )
    small_models.require_loads(original, tmp_path / "one")
    fingerprints = [fingerprint(path) for path in (checkpoint, tmp_path / "run" / "checkpoints" / "step-00000001")]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize("layout", small_models.LAYOUTS)
def test_export_of_a_model_follows_its_original(layout, original, checkpoint, tmp_path):
    """Each layout comes out as it went in, but for merged experts: those nobody loads."""
    folder = small_models.rewrite(checkpoint, tmp_path / "in", small_models.LAYOUTS[layout])
    model = small_models.build(small_models.generated_class(), small_models.moe_config(), device="meta")
    load_pretrained(model, folder)
    export_pretrained(model, tmp_path / "out", max_file=20_000)
    got = small_models.tensors(tmp_path / "out")
    expected = small_models.tensors(checkpoint if "merged" in layout or layout == "mixed" else folder)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def test_dtype_of_an_export(original, checkpoint, tmp_path):
    export_pretrained(original, tmp_path, dtype=torch.bfloat16, source=checkpoint)
    first = small_models.tensors(checkpoint)
    assert all(torch.equal(t, first[name].bfloat16()) for name, t in small_models.tensors(tmp_path).items())
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["Qwen3MoeForCausalLM"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_layouts_that_do_not_exist(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="There is no layout 'sideways'. Layouts: per-expert, stacked"):
        convert(checkpoint, tmp_path / "out", layout="sideways")
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **small_models.SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = small_models.build(GptOssForCausalLM, config)
    with pytest.raises(CheckpointError, match="GptOssForCausalLM has no layout with one key per expert"):
        export_pretrained(model, tmp_path / "oss", layout="per-expert")
    assert not (tmp_path / "oss").exists() and not (tmp_path / "out").exists()


def test_weights_of_three_dimensions_are_not_taken_for_experts(tmp_path):
    """A model without experts has them in convolutions; per expert, it is written as it is."""
    from transformers import Qwen3_5ForCausalLM

    model = small_models.build(Qwen3_5ForCausalLM, small_config(Qwen3_5ForCausalLM.config_class).config)
    assert any(parameter.ndim == 3 for parameter in model.parameters())
    model.save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", layout="per-expert")
    assert fingerprint(tmp_path / "out") == fingerprint(tmp_path / "in")


def test_a_tensor_that_cannot_be_built_is_one_problem(checkpoint, tmp_path):
    def change(stored):
        del stored["model.norm.weight"]
        del stored["model.layers.1.mlp.experts.2.up_proj.weight"]
        return stored | {"model.extra.weight": torch.zeros(3)}

    folder = small_models.rewrite(checkpoint, tmp_path / "broken", change)
    with pytest.raises(CheckpointError) as caught:
        fingerprint(folder)
    text = str(caught.value)
    assert "model.layers.1.mlp.experts.gate_up_proj cannot be built from" in text
    assert "missing: model.norm.weight [16]" in text
    assert "unexpected: model.extra.weight [3] in model.safetensors" in text
    assert len(caught.value.problems) == 3


def test_errors_of_commands_are_for_their_reader(original, checkpoint, tmp_path):
    """A wrong folder is told from a damaged one, with the command that it is for."""
    run_folder, pickled = tmp_path / "run", tmp_path / "pickled"
    Checkpointer(run_folder / "checkpoints").save(1, model=original, asynchronous=False)
    saved = run_folder / "checkpoints" / "step-00000001"
    pickled.mkdir()
    torch.save(original.state_dict(), pickled / "pytorch_model.bin")
    (pickled / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    for arguments, text in (
        (("fingerprint", tmp_path / "nowhere"), "nowhere holds no complete checkpoint"),
        (("convert", checkpoint, checkpoint), "is both the source and the output"),
        (("export", checkpoint, "--output", tmp_path / "x"), "is a Hugging Face checkpoint"),
        (
            ("export", run_folder, "--output", tmp_path / "x", "--step", 7),
            "no complete checkpoint of step 7, only of 1",
        ),
        (("export", run_folder, "--output", saved), "it is a training checkpoint, which this would damage"),
        (("convert", run_folder, tmp_path / "x"), f"`patchgen export {run_folder} --output DIR` writes their weights"),
        (("convert", saved, tmp_path / "x"), f"`patchgen export {saved} --output DIR` writes their weights"),
        (("convert", pickled, tmp_path / "x"), "holds weights in another format, pytorch_model.bin"),
        (("fingerprint", pickled), "holds weights in another format, pytorch_model.bin"),
        (("fingerprint", checkpoint / "config.json"), "config.json is a file: give its folder"),
        (
            ("convert", checkpoint, tmp_path / "x", "--dtype", "int4"),
            "--dtype must be one of bfloat16, float16, float32, not 'int4'",
        ),
    ):
        done = run(*arguments)
        assert isinstance(done.exception, ConfigError) and text in str(done.exception), (arguments, done.exception)


def test_a_run_whose_checkpoints_are_all_broken(original, tmp_path):
    Checkpointer(tmp_path).save(3, model=original, asynchronous=False)
    (tmp_path / "step-00000003" / ".metadata").unlink()
    with pytest.warns(UserWarning, match="incomplete"):
        done = run("export", tmp_path, "--output", tmp_path / "x")
    assert "holds no complete checkpoint:\n  step-00000003: .metadata is missing" in str(done.exception)


def test_a_single_checkpoint_and_the_step_of_another_contradict_each_other(original, tmp_path):
    Checkpointer(tmp_path).save(3, model=original, asynchronous=False)
    folder = tmp_path / "step-00000003"
    with pytest.raises(CheckpointError, match=r"is the checkpoint of step 3, not of step 4. To fix: ") as caught:
        export_run(folder, tmp_path / "out", step=4)
    assert str(tmp_path) in str(caught.value) and "no complete checkpoint" not in str(caught.value)
    assert export_run(folder, tmp_path / "out", step=3) == folder


def test_a_run_without_its_class_is_named(tmp_path, original):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model=original, asynchronous=False)
    small_models.change_config(tmp_path / "step-00000001", num_hidden_layers=1)
    fields = (tmp_path / "step-00000001" / "checkpoint.json").read_text()
    size = (tmp_path / "step-00000001" / "config.json").stat().st_size
    manifest = json.loads(fields)
    manifest["files"]["config.json"] = size
    del manifest["checksums"]["config.json"]
    (tmp_path / "step-00000001" / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="holds tensors that are not those of Qwen3MoeForCausalLM"):
        export_run(tmp_path, tmp_path / "out")


def test_the_config_names_the_dtype_of_most_weights(tmp_path, checkpoint):
    """As an export does; the first tensor may be one of the few in fp32."""

    def mostly_half(found):
        first = sorted(found)[0]
        return {name: tensor if name == first else tensor.bfloat16() for name, tensor in found.items()}

    convert(small_models.rewrite(checkpoint, tmp_path / "in", mostly_half), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
