"""Weights from every layout into one process; what does not fit is listed whole."""

from __future__ import annotations

import pytest
import small_models
import torch
import yaml
from typer.testing import CliRunner

from patchgen import cli
from patchgen.runtime.checkpoint import (
    CheckpointError,
    convert,
    export_pretrained,
    file_reader,
    fingerprint,
    load,
    load_pretrained,
)
from patchgen.runtime.checkpoint.layout import Origin
from patchgen.runtime.parallel import sharding


@pytest.fixture(scope="module")
def original():
    """A model of the generated class with weights of its own."""
    return small_models.build(small_models.generated_class(), small_models.moe_config())


@pytest.fixture(scope="module")
def checkpoint(original, tmp_path_factory):
    """Its weights as upstream saves them: one key per expert, several files."""
    from transformers import Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("upstream")
    upstream = small_models.build(Qwen3MoeForCausalLM, small_models.moe_config())
    upstream.load_state_dict(original.state_dict())
    upstream.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def empty(dtype=None, **more):
    """A generated model on the meta device."""
    model = small_models.build(small_models.generated_class(), small_models.moe_config(**more), device="meta")
    return model.to(dtype) if dtype else model


def require_equal(model, expected, dtype=torch.float32):
    wanted = expected.state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor, wanted[name].to(dtype)), name
    buffers = dict(expected.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)


@pytest.mark.parametrize("layout", small_models.LAYOUTS)
def test_every_layout(layout, original, checkpoint, tmp_path):
    folder = small_models.rewrite(checkpoint, tmp_path / layout, small_models.LAYOUTS[layout])
    model = empty()
    report = load_pretrained(model, folder)
    require_equal(model, original)
    assert report.num_tensors == len(model.state_dict())
    assert report.num_bytes == sum(t.numel() * 4 for t in model.state_dict().values())


@pytest.mark.parametrize("layout", ["stacked", "transposed"])
@pytest.mark.parametrize("sizes", [(24, 12), (24, 24)], ids=["2I=H", "I=H"])
def test_square_stacks_lie_as_their_siblings_do(sizes, layout, tmp_path):
    """gate_up [E, H, H] beside down [E, H, I], and down [E, H, H] beside gate_up [E, 2H, H]: in, and out again."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hidden, inner = sizes
    fields = small_models.SMALL | small_models.EXPERTS | {"hidden_size": hidden, "moe_intermediate_size": inner}
    upstream = small_models.build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**fields))
    upstream.save_pretrained(tmp_path / "upstream")
    folder = small_models.rewrite(tmp_path / "upstream", tmp_path / "in", small_models.LAYOUTS[layout])
    model = small_models.build(small_models.generated_class(), Qwen3MoeConfig(**fields), device="meta")
    load_pretrained(model, folder)
    require_equal(model, upstream)
    export_pretrained(model, tmp_path / "out")
    got, expected = small_models.tensors(tmp_path / "out"), small_models.tensors(folder)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    assert fingerprint(folder) == fingerprint(tmp_path / "upstream")


def test_files_as_upstream_shards_them(original, checkpoint):
    model = empty()
    load_pretrained(model, checkpoint)
    require_equal(model, original)


def test_into_memory_that_is_there(original, checkpoint):
    """In place: the parameters of an optimizer stay the same objects."""
    model = small_models.build(small_models.generated_class(), small_models.moe_config(), seed=5)
    before = dict(model.named_parameters())
    load_pretrained(model, checkpoint)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    require_equal(model, original)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_are_cast_to_the_dtype_of_the_model(dtype, original, checkpoint):
    model = empty(dtype)
    load_pretrained(model, checkpoint)
    wanted = original.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name].to(dtype)), name


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_tensors_that_several_threads_read_are_complete(size, original, checkpoint, monkeypatch):
    """In pieces of one row, of a few rows, and uncut; stacks too, whose rows are experts."""
    monkeypatch.setattr(load, "PIECE_BYTES", size)
    model = empty()
    report = load_pretrained(model, checkpoint)
    require_equal(model, original)
    assert report.num_bytes == sum(t.numel() * 4 for t in model.state_dict().values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("staging", [512, 1 << 20])
def test_onto_a_gpu(staging, dtype, original, checkpoint, tmp_path, monkeypatch):
    """Through pinned buffers, and cast there: bit for bit what the CPU has."""
    wanted = original.state_dict()
    # Buffers that are used again and again, and tensors that are larger than one.
    monkeypatch.setattr(file_reader, "STAGING_BYTES", staging)
    for layout in ("per-expert", "transposed"):
        folder = small_models.rewrite(checkpoint, tmp_path / layout, small_models.LAYOUTS[layout])
        model = empty(dtype)
        sharding.materialise(model, "cuda")
        load_pretrained(model, folder)
        for name, tensor in model.state_dict().items():
            assert tensor.is_cuda and torch.equal(tensor.cpu(), wanted[name].to(dtype)), name


def test_a_model_of_transformers_itself(original, checkpoint):
    from transformers import Qwen3MoeForCausalLM

    model = small_models.build(Qwen3MoeForCausalLM, small_models.moe_config(), device="meta")
    load_pretrained(model, checkpoint)
    require_equal(model, original)


def test_a_base_model_loads_the_checkpoint_of_a_head(original, checkpoint):
    from transformers import Qwen3MoeModel

    model = small_models.build(Qwen3MoeModel, small_models.moe_config(), device="meta")
    with pytest.raises(CheckpointError, match="unexpected: lm_head.weight"):
        load_pretrained(model, checkpoint)
    load_pretrained(model, checkpoint, allow_unexpected=["lm_head.*"])
    require_equal(model, original.model)


def test_everything_that_does_not_fit_is_in_one_error(checkpoint, tmp_path):
    def change(found):
        del found["model.norm.weight"]
        del found["model.layers.1.mlp.experts.2.up_proj.weight"]
        found["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(5, 16)
        found["model.extra.weight"] = torch.zeros(3)
        return found

    folder = small_models.rewrite(checkpoint, tmp_path / "broken", change)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(empty(), folder)
    text = str(caught.value)
    assert "missing: model.norm.weight [16]" in text
    assert "model.layers.1.mlp.experts.gate_up_proj cannot be built from" in text
    assert "Missing: model.layers.1.mlp.experts.2.up_proj.weight." in text
    assert "model.layers.0.self_attn.q_proj.weight is [16, 16] in the model, [5, 16] in the checkpoint" in text
    assert "unexpected: model.extra.weight [3] in model.safetensors" in text
    assert len(caught.value.problems) == 4


def test_experts_with_gaps_are_named(checkpoint, tmp_path):
    """As many as there should be, but not those: stacked by count, they would change places in silence."""

    def renumber(found):
        return {name.replace("layers.0.mlp.experts.3.", "layers.0.mlp.experts.7."): t for name, t in found.items()}

    with pytest.raises(CheckpointError, match="numbers have gaps. Missing: .*experts.3.down_proj.weight"):
        load_pretrained(empty(), small_models.rewrite(checkpoint, tmp_path / "gap", renumber))

    def shift(found):
        prefix = "model.layers.0.mlp.experts"
        found[f"{prefix}.4.gate_proj.weight"] = found.pop(f"{prefix}.0.gate_proj.weight")
        return found

    with pytest.raises(CheckpointError, match="experts.4.up_proj.weight, .*experts.0.gate_proj.weight"):
        load_pretrained(empty(), small_models.rewrite(checkpoint, tmp_path / "shifted", shift))


def test_a_failed_check_changes_nothing(checkpoint, tmp_path):
    folder = small_models.rewrite(checkpoint, tmp_path / "less", lambda found: found | {"more": torch.zeros(1)})
    model = small_models.build(small_models.generated_class(), small_models.moe_config(), seed=7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="unexpected: more"):
        load_pretrained(model, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_missing_parts_are_initialised_with_allow_missing(original, checkpoint, tmp_path):
    folder = small_models.rewrite(
        checkpoint, tmp_path / "headless", lambda found: {n: t for n, t in found.items() if n != "lm_head.weight"}
    )
    with pytest.raises(CheckpointError, match=r"(?s)missing: lm_head.weight \[31, 16\].*--allow-missing"):
        load_pretrained(empty(), folder)
    with pytest.raises(CheckpointError, match=r"allow_missing: 'score\.\*' names no parameter or buffer of the model"):
        load_pretrained(empty(), folder, allow_missing=["lm_head.*", "score.*"])
    first, second, other = empty(), empty(), empty()
    report = load_pretrained(first, folder, allow_missing=["lm_head.*"])
    load_pretrained(second, folder, allow_missing=["lm_head.*"])
    load_pretrained(other, folder, allow_missing=["lm_head.*"], seed=1)
    assert report.initialised == ("lm_head.weight",)
    assert "initialised, not loaded: lm_head.weight" in str(report)
    assert 0.01 < first.lm_head.weight.std() < 0.03  # initializer_range is 0.02
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert torch.equal(first.model.norm.weight, original.model.norm.weight)


def test_new_parts_by_the_command_line(tmp_path):
    """The patterns get into the recipe, all of them."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: {source: qwen3_moe}\ndata: {sources: [{path: 'builtin:stdlib'}]}\n")
    arguments = ["train", str(recipe), "--allow-missing", "lm_head.*", "--allow-missing", "*.score", "--print-config"]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.output)["model"]["allow_missing"] == ["lm_head.*", "*.score"]


def test_tied_weights(original, checkpoint, tmp_path):
    """One of the two suffices; two that differ are no tied model."""

    def untie(found):
        return {name: tensor for name, tensor in found.items() if name != "lm_head.weight"}

    folder = small_models.rewrite(checkpoint, tmp_path / "tied", untie)
    model = empty(tie_word_embeddings=True)
    load_pretrained(model, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, original.model.embed_tokens.weight)

    def only_head(found):
        found = dict(found)
        found["lm_head.weight"] = found.pop("model.embed_tokens.weight")
        return found

    model = empty(tie_word_embeddings=True)
    load_pretrained(model, small_models.rewrite(checkpoint, tmp_path / "head", only_head))
    assert torch.equal(model.model.embed_tokens.weight, original.model.embed_tokens.weight)
    with pytest.raises(CheckpointError, match="lm_head.weight and model.embed_tokens.weight are one tied"):
        load_pretrained(empty(tie_word_embeddings=True), checkpoint)


@pytest.mark.parametrize(("share", "keeps"), [(0, False), (1, True)])
def test_files_larger_than_a_share_of_memory_do_not_stay_in_the_page_cache(
    share, keeps, original, checkpoint, monkeypatch
):
    monkeypatch.setattr(load, "MAX_CACHED_SHARE", share)
    made = []

    class Recorded(file_reader.FileReader):
        def __init__(self, *, keeps_pages: bool, **options) -> None:
            made.append(keeps_pages)
            super().__init__(keeps_pages=keeps_pages, **options)

    monkeypatch.setattr(load, "FileReader", Recorded)
    model = empty()
    load_pretrained(model, checkpoint)
    assert made == [keeps]
    require_equal(model, original)


def test_a_file_that_shrinks_names_each_key_once(checkpoint, tmp_path, monkeypatch):
    """However many pieces of a tensor are missing."""
    folder = small_models.rewrite(checkpoint, tmp_path / "cut", dict)
    file = folder / "model.safetensors"
    fit = load.match_checkpoint

    def fit_then_cut(*arguments):
        found = fit(*arguments)
        with file.open("r+b") as stream:
            stream.truncate(5000)
        return found

    monkeypatch.setattr(load, "match_checkpoint", fit_then_cut)
    monkeypatch.setattr(load, "PIECE_BYTES", 100)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(empty(), folder)
    keys = [problem.split(" cannot be read")[0] for problem in caught.value.problems]
    assert len(keys) == len(set(keys)) > 10


def test_a_copy_that_cannot_be_read_is_not_called_different(checkpoint, tmp_path):
    def change(found):
        found = dict(found)
        found["model.embed_tokens.weight"] = found["lm_head.weight"].clone()
        found["model.embed_tokens.weight"][0, 0] = float("nan")
        return found

    folder = small_models.rewrite(checkpoint, tmp_path / "copy", change)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight in .* holds NaN") as caught:
        load_pretrained(empty(tie_word_embeddings=True), folder)
    assert "differ" not in str(caught.value)


def test_nan_is_named_with_file_and_key(checkpoint, tmp_path):
    def change(found):
        found["model.layers.0.mlp.experts.1.down_proj.weight"][3, 2] = float("nan")
        return found

    folder = small_models.rewrite(checkpoint, tmp_path / "nan", change)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(empty(), folder)
    assert f"model.layers.0.mlp.experts.1.down_proj.weight in {folder / 'model.safetensors'} holds NaN" in str(
        caught.value
    )


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinite_weight_is_named_with_file_and_key(value, checkpoint, tmp_path):
    def change(found):
        found["model.norm.weight"][3] = value
        return found

    folder = small_models.rewrite(checkpoint, tmp_path / "inf", change)
    for read in (lambda: load_pretrained(empty(), folder), lambda: convert(folder, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"model.norm.weight in .*model.safetensors holds an infinite value"):
            read()


def test_bounds_in_a_buffer_may_be_infinite(checkpoint, tmp_path):
    model = small_models.build(small_models.generated_class(), small_models.moe_config())
    model.register_buffer("bounds", torch.zeros(2))
    bounds = {"bounds": torch.tensor([float("-inf"), float("inf")])}
    load_pretrained(model, small_models.rewrite(checkpoint, tmp_path / "bounds", lambda found: found | bounds))
    assert model.bounds.isinf().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_integers_for_a_floating_point_weight_are_refused(dtype, checkpoint, tmp_path):
    key = "model.layers.0.self_attn.q_proj.weight"
    folder = small_models.rewrite(checkpoint, tmp_path / "whole", lambda found: found | {key: found[key].to(dtype)})
    kind = str(dtype).removeprefix("torch.")
    for read in (lambda: load_pretrained(empty(), folder), lambda: convert(folder, tmp_path / "out")):
        with pytest.raises(
            CheckpointError, match=f"{key} in model.safetensors is {kind}; {key} is a floating-point tensor"
        ):
            read()


def test_another_model_type_is_refused(checkpoint, tmp_path):
    folder = small_models.rewrite(checkpoint, tmp_path / "other", lambda found: found)
    small_models.change_config(folder, model_type="llama")
    with pytest.raises(CheckpointError, match="is of model type 'llama'; Qwen3MoeForCausalLM is of type 'qwen3_moe'"):
        load_pretrained(empty(), folder)


def test_the_same_weights_given_twice(checkpoint, tmp_path):
    folder = small_models.rewrite(checkpoint, tmp_path / "twice", lambda found: found | small_models.stacked(found))
    with pytest.raises(CheckpointError, match="experts.gate_up_proj appears twice: in .* and in"):
        load_pretrained(empty(), folder)


def test_the_origin_keeps_one_key_of_a_kind():
    keys = {
        f"model.layers.{layer}.experts.{expert}.w{part}": (2, 3)
        for layer in (0, 1)
        for expert in (0, 1)
        for part in (1, 2)
    }
    origin = Origin.of("there", keys)
    assert origin.shapes == {"model.layers.0.experts.0.w1": (2, 3), "model.layers.0.experts.0.w2": (2, 3)}
    assert Origin.from_json(origin.to_json()) == origin
