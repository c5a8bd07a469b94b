"""The untrained part of a checkpoint is exported unchanged, and the complete model still speaks."""

from __future__ import annotations

import json
import shutil
import warnings

import omni_models
import pytest
import small_models
import torch
from typer.testing import CliRunner

from patchgen.cli import app
from patchgen.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    export_pretrained,
    export_run,
    load_pretrained,
    untrained_part,
    writing,
)
from patchgen.runtime.train.model import find_head_and_config
from patchgen.runtime.verify.small_config import small_config

CONFIGS = {"qwen3_omni_moe": omni_models.qwen3_omni, "qwen2_5_omni": omni_models.qwen2_5_omni}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def same(one: dict, other: dict, names) -> bool:
    return all(one[n].dtype == other[n].dtype and torch.equal(bits(one[n]), bits(other[n])) for n in names)


def trained_part(config, folder, **changes):
    """The head that a recipe trains of this checkpoint, loaded, with every parameter perturbed."""
    head, own = find_head_and_config(config)
    for name, value in changes.items():
        setattr(own.get_text_config(), name, value)
    with torch.device("meta"):
        model = head._from_config(own, attn_implementation="eager")
    load_pretrained(model, folder)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def omni(request, tmp_path_factory):
    """A complete checkpoint of upstream, its thinker after training, and the run that saved it."""
    place = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]()
    whole = omni_models.save_whole(config, place / "source")
    (place / "source" / "tokenizer.json").write_text("{}")
    model = trained_part(config, place / "source")
    Checkpointer(place / "run" / "checkpoints").save(1, model=model, asynchronous=False)
    return place, config, type(whole), model


@pytest.mark.parametrize("way", ["of the model", "of the run"])
@pytest.mark.sampled(3)
def test_the_export_is_its_source_but_for_what_trained_and_speaks_alike(way, omni, tmp_path):
    place, config, upstream, model = omni
    if way == "of the model":
        export_pretrained(model, tmp_path, max_file=400_000)
    else:
        done = CliRunner().invoke(app, ["export", str(place / "run"), "--output", str(tmp_path)])
        assert done.exit_code == 0, done.output
    source, got = small_models.tensors(place / "source"), small_models.tensors(tmp_path)
    beside = [name for name in source if not name.startswith("thinker.")]
    assert got.keys() == source.keys() and len(beside) > 100
    assert same(got, source, beside)
    assert not any(same(got, source, [name]) for name in source.keys() - {*beside})
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((place / "source" / name).read_text())
    assert (tmp_path / "tokenizer.json").is_file()
    loaded = upstream.from_pretrained(tmp_path)
    by_hand = upstream.from_pretrained(place / "source")
    before = omni_models.spoken(by_hand, config)
    by_hand.thinker.load_state_dict(model.state_dict())
    assert same(loaded.state_dict(), by_hand.state_dict(), by_hand.state_dict())
    expected = omni_models.spoken(by_hand, config)
    omni_models.require_same_speech(omni_models.spoken(loaded, config), expected)
    changed = [
        one.shape != other.shape or not torch.equal(one, other) for one, other in zip(before, expected, strict=True)
    ]
    assert any(changed)


def test_trained_only_exports_only_the_model(omni, tmp_path):
    place, _, _, model = omni
    export_pretrained(model, tmp_path / "model", trained_only=True)
    export_run(place / "run", tmp_path / "run", trained_only=True)
    for folder in (tmp_path / "model", tmp_path / "run"):
        got = small_models.tensors(folder)
        assert got and all(name.startswith("thinker.") for name in got)
        assert json.loads((folder / "config.json").read_text())["architectures"] == [type(model).__name__]


def test_a_missing_source_of_the_untrained_part_is_named(omni, tmp_path):
    place, _, _, model = omni
    (place / "source").rename(place / "moved")
    try:
        for work in (
            lambda: export_pretrained(model, tmp_path / "out"),
            lambda: export_run(place / "run", tmp_path / "out"),
        ):
            with pytest.raises(CheckpointError, match=r"no longer has the other tensors .*--source"):
                work()
        assert not (tmp_path / "out").exists()
        export_run(place / "run", tmp_path / "out", source=place / "moved")
        assert small_models.tensors(tmp_path / "out").keys() == small_models.tensors(place / "moved").keys()
    finally:
        (place / "moved").rename(place / "source")


@pytest.mark.parametrize("omni", ["qwen2_5_omni"], indirect=True)
def test_a_source_with_another_number_of_layers_is_not_that_of_the_untrained_part(omni, tmp_path):
    """Its keys differ by a number alone; tensors would be missing, or copied that belong to no model."""
    place, _, _, model = omni
    layers = {name.partition(".layers.")[2].partition(".")[0] for name in model.state_dict() if ".layers." in name}
    last = f".layers.{max(map(int, layers - {''}))}."
    assert last != ".layers.0."
    (place / "source").rename(place / "moved")
    try:
        changes = {
            "fewer": lambda found: {name: tensor for name, tensor in found.items() if last not in name},
            "more": lambda found: found | {name.replace(last, ".layers.9."): found[name].clone() for name in found},
        }
        for way, change in changes.items():
            source = small_models.rewrite(place / "moved", tmp_path / way, change)
            for work in (
                lambda source=source: export_pretrained(model, tmp_path / "out", source=source),
                lambda source=source: export_run(place / "run", tmp_path / "out", source=source),
            ):
                with pytest.raises(CheckpointError, match=rf"{way} is not that checkpoint.* To fix: .*--source"):
                    work()
            small_models.rewrite(place / "moved", place / "source", change)
            for work in (
                lambda: export_pretrained(model, tmp_path / "out"),
                lambda: export_run(place / "run", tmp_path / "out"),
            ):
                with pytest.raises(CheckpointError, match=r"source is not that checkpoint.* To fix: .*--source"):
                    work()
            shutil.rmtree(place / "source")
        assert not (tmp_path / "out").exists()
    finally:
        (place / "moved").rename(place / "source")


@pytest.mark.parametrize("omni", ["qwen2_5_omni"], indirect=True)
@pytest.mark.parametrize("way", ["allow_missing", "allow_unexpected"])
def test_a_part_loaded_with_a_new_layer_or_without_one_is_exported(way, omni, tmp_path):
    """Its folder was compared with the model instead of with what was loaded, so it was told to be another checkpoint."""
    place, config, _, _ = omni
    plain = small_models.tensors(place / "source")
    prefix = "thinker.model.layers."
    last = f"{prefix}{max(int(name.split('.')[3]) for name in plain if name.startswith(prefix))}."

    def change(found):
        if way == "allow_missing":
            return {name: tensor for name, tensor in found.items() if not name.startswith(last)}
        more = {name.replace(last, f"{prefix}9."): found[name].clone() for name in found if last in name}
        return found | more | {f"{prefix}9.eh_proj.weight": torch.ones(2, 2)}  # of a kind that no other layer has

    source = small_models.rewrite(place / "source", tmp_path / "source", change)
    assert small_models.tensors(source).keys() != plain.keys()
    head, own = find_head_and_config(config)
    model = head._from_config(own, attn_implementation="eager")
    allowed = {
        "allow_missing": last.replace(prefix, "model.language_model.layers."),
        "allow_unexpected": f"{prefix}9.",
    }
    load_pretrained(model, source, **{way: [f"{allowed[way]}*"]})
    Checkpointer(tmp_path / "run" / "checkpoints").save(1, model=model, asynchronous=False)
    export_pretrained(model, tmp_path / "of the model")
    export_run(tmp_path / "run", tmp_path / "of the run")
    for folder in ("of the model", "of the run"):
        got = small_models.tensors(tmp_path / folder)
        assert got.keys() == plain.keys()
        assert same(got, plain, [name for name in plain if not name.startswith(last) or way == "allow_unexpected"])


@pytest.mark.parametrize("omni", ["qwen2_5_omni"], indirect=True)
def test_a_source_that_is_another_checkpoint_is_told_where_the_original_is_taken(omni, tmp_path, monkeypatch):
    place, _, _, model = omni
    other = small_models.rewrite(
        place / "source", tmp_path / "other", lambda found: found | {"my.weight": torch.ones(1)}
    )
    with pytest.warns(UserWarning, match=r"other is not the checkpoint that .* was loaded from: .* To fix: ") as told:
        export_pretrained(model, tmp_path / "out", source=other)
    assert [warning.filename for warning in told if "is not the checkpoint" in str(warning.message)] == [__file__]
    assert small_models.tensors(tmp_path / "out").keys() == small_models.tensors(place / "source").keys()
    read, assembled = untrained_part.read_folder, untrained_part.assemble
    calls = []
    monkeypatch.setattr(untrained_part, "read_folder", lambda folder: (calls.append("read"), read(folder))[1])
    monkeypatch.setattr(untrained_part, "assemble", lambda *given: (calls.append("assembled"), assembled(*given))[1])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* is not the checkpoint")
        export_pretrained(model, tmp_path / "out", source=place / "source")
        assert calls == ["read", "assembled"]
        monkeypatch.setattr(untrained_part, "rank_and_world_size", lambda: (1, 2))
        untrained_part.find_untrained_part(model, model.checkpoint_origin, other)  # rank 0 warns


@pytest.mark.parametrize("omni", ["qwen3_omni_moe"], indirect=True)
def test_one_tensor_is_in_memory_at_a_time(omni, tmp_path, monkeypatch, request):
    """Also of the untrained part, which is larger than the trained one."""
    place, _, _, model = omni
    stored = small_models.tensors(place / "source")
    largest = max(tensor.nbytes for tensor in stored.values())
    whole = sum(tensor.nbytes for name, tensor in stored.items() if not name.startswith("thinker."))
    del stored
    held, most, write = small_models.new_bytes(request), [], writing.FolderWriter.write

    def measured(self, output, tensor):
        if isinstance(output, untrained_part.CopiedTensor) and 4 * output.num_bytes > largest:
            most.append(held())
        write(self, output, tensor)

    monkeypatch.setattr(writing.FolderWriter, "write", measured)
    export_pretrained(model, tmp_path)
    assert len(most) > 2 and 0 < max(most) <= 2 * largest < whole


def test_what_trained_wider_than_the_source_keeps_its_digits_on_request(tmp_path):
    config = omni_models.qwen2_5_omni()
    upstream = type(omni_models.save_whole(config, tmp_path / "source", dtype=torch.bfloat16))
    model = trained_part(config, tmp_path / "source")
    export_pretrained(model, tmp_path / "as the source")
    export_pretrained(model, tmp_path / "out", dtype=torch.float32)
    source, got = small_models.tensors(tmp_path / "source"), small_models.tensors(tmp_path / "out")
    assert same(got, source, [name for name in source if not name.startswith("thinker.")])
    narrow = upstream.from_pretrained(tmp_path / "as the source").thinker.state_dict()
    assert same(narrow, {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}, narrow)
    loaded = upstream.from_pretrained(tmp_path / "out")
    assert same(loaded.thinker.state_dict(), model.state_dict(), model.state_dict())


def test_changes_of_the_part_are_in_the_config_of_the_complete_model(tmp_path):
    config = omni_models.qwen2_5_omni()
    omni_models.save_whole(config, tmp_path / "source")
    theta = {"rope_theta": 5e5, "rope_type": "default", "mrope_section": [2, 3, 3]}
    model = trained_part(config, tmp_path / "source", rope_parameters=theta)
    export_pretrained(model, tmp_path / "out")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "out"))
    text = after["thinker_config"]["text_config"]
    old_form = text.pop("rope_theta"), text.pop("rope_scaling")
    assert old_form == (5e5, {"rope_type": "default", "mrope_section": [2, 3, 3]})
    assert text["rope_parameters"].pop("rope_theta") == 5e5
    assert before["thinker_config"]["text_config"]["rope_parameters"].pop("rope_theta") != 5e5
    assert after == before


def test_the_text_model_of_one_that_sees(tmp_path):
    """A part that upstream loads out of a whole of another type, and that is not an omni model's."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    config = small_config(Qwen3_5ForConditionalGeneration.config_class).config
    Qwen3_5ForConditionalGeneration._from_config(config).save_pretrained(tmp_path / "source")
    model = Qwen3_5ForCausalLM._from_config(config.text_config)
    load_pretrained(model, tmp_path / "source")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    export_pretrained(model, tmp_path / "out")
    source, got = small_models.tensors(tmp_path / "source"), small_models.tensors(tmp_path / "out")
    seen = [name for name in source if ".visual." in name]
    assert got.keys() == source.keys() and seen and same(got, source, seen)
    assert not any(same(got, source, [name]) for name in source.keys() - {*seen})
    _, info = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_heads_that_upstream_leaves_out_pass_and_what_the_user_left_out_does_not(tmp_path):
    from transformers import Qwen3NextForCausalLM

    model = Qwen3NextForCausalLM._from_config(small_config(Qwen3NextForCausalLM.config_class).config)
    model.save_pretrained(tmp_path / "plain")
    head = {"mtp.layers.0.self_attn.q_proj.weight": torch.randn(8, 8).bfloat16()}
    head["mtp.norm.weight"] = torch.full((4,), float("nan"))  # whatever it holds
    mine = {"my.ema.weight": torch.randn(3)}
    folder = small_models.rewrite(tmp_path / "plain", tmp_path / "in", lambda found: found | head | mine)
    load_pretrained(model, folder, allow_unexpected=["my.*"])
    export_pretrained(model, tmp_path / "out", dtype=torch.float16)
    source, got = small_models.tensors(folder), small_models.tensors(tmp_path / "out")
    assert got.keys() == source.keys() - mine.keys() and same(got, source, head)
    assert {tensor.dtype for name, tensor in got.items() if name not in head} <= {torch.float16, torch.float32}


def test_what_the_user_left_out_of_a_larger_model_is_lost_with_its_folder(tmp_path):
    """Of a part whose class ignores no keys; keys of the model's own type are not copied, and not lost either."""
    config = omni_models.qwen3_omni()
    omni_models.save_whole(config, tmp_path / "source")
    head, own = find_head_and_config(config)
    part = head._from_config(own, attn_implementation="eager")
    part._keys_to_ignore_on_load_unexpected = None
    load_pretrained(part, tmp_path / "source", allow_unexpected=["talker.*", "code2wav.*"])
    (tmp_path / "source").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"no longer has the other tensors \(code2wav.*--source"):
        export_pretrained(part, tmp_path / "out")
    export_pretrained(part, tmp_path / "out", trained_only=True)

    plain = small_models.build(small_models.generated_class(), small_models.moe_config())
    plain.save_pretrained(tmp_path / "plain")
    mine = {"my.ema.weight": torch.randn(3)}
    folder = small_models.rewrite(tmp_path / "plain", tmp_path / "mine", lambda found: found | mine)
    load_pretrained(plain, folder, allow_unexpected=["my.*"])
    folder.rename(tmp_path / "gone")
    export_pretrained(plain, tmp_path / "plain out")
    assert small_models.tensors(tmp_path / "plain out").keys() == small_models.tensors(tmp_path / "plain").keys()
