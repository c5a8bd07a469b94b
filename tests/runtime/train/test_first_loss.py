"""The first loss is judged before the optimizer has moved anything."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from patchgen.kernels import choices
from patchgen.runtime import launch
from patchgen.runtime.data import DataConfig, SourceConfig, train_tokenizer
from patchgen.runtime.train import first_loss
from patchgen.runtime.train.first_loss import Expected
from patchgen.runtime.train.recipe import from_dict
from patchgen.runtime.train.records import TrainingStopped
from patchgen.runtime.train.trainer import Trainer

V = 300


def test_far_above_ln_v_is_refused_with_both_figures():
    assert Expected(700).refusal(math.log(700) + 1) == ""
    assert Expected(151_936).refusal(math.log(151_936) + 5) == ""  # random weights of a wide model
    told = Expected(700).refusal(54.2)
    assert "54.20" in told and "ln V = 6.55" in told and "train.first_loss_limit" in told
    assert Expected(700).refusal(float("nan")) == ""
    assert Expected(700, limit=60.0).refusal(54.2) == ""
    assert Expected(700, limit=2.0).refusal(3.0) != ""


@pytest.mark.parametrize(
    ("loss", "options", "refused", "warned"),
    [
        (5.0, {"is_trained": True}, "", ""),
        (6.5, {"is_trained": True}, "", "are hardly better on these data"),
        (6.5, {}, "", ""),
        (6.5, {"is_trained": True, "limit": 7.0}, "", ""),
        (2.4, {"is_trained": True, "measured": 1.0}, "", ""),
        (2.6, {"is_trained": True, "measured": 1.0}, "`patchgen doctor` measured 1.00 with these weights", ""),
        (2.6, {"is_trained": True, "measured": 1.0, "limit": 3.0}, "", ""),
        (2.6, {"measured": 1.0}, "", ""),
        (11.0, {"is_trained": True, "measured": 30.0}, "a first loss above 10.83 is implausible", "hardly better"),
    ],
)
def test_a_checkpoint_is_held_to_its_own_level(loss, options, refused, warned):
    held_to = Expected(700, **options)
    for told, wanted in ((held_to.refusal(loss), refused), (held_to.warning(loss), warned)):
        assert wanted in told and bool(told) is bool(wanted)


@pytest.mark.parametrize(
    ("changed", "measured"),
    [
        ({"learn": "last"}, None),
        ({"max_length": 100}, None),
        ({"special_tokens": ["<|a|>"]}, None),
        ({"sources": [{"path": "builtin:chat"}]}, None),
        ({"separate_modalities": [["audio", "image"]], "cache_dir": "elsewhere", "num_workers": 2}, 1.0),
    ],
)
def test_a_measured_loss_is_that_of_the_same_rows_and_labels(changed, measured, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {"model": {"source": "qwen3"}, "data": {"kind": "chat", "sources": [{"path": "builtin:pairs"}]}}
    first_loss.save_measured(from_dict(values), 1.0)
    assert first_loss.read_measured(from_dict({**values, "data": {**values["data"], **changed}})) == measured


@pytest.mark.parametrize("text", ["[1.0]", '{"loss": null}', "{}", "1.0", "no JSON", ""])
def test_a_measurement_of_another_form_counts_as_none(text, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = from_dict({"model": {"source": "qwen3"}, "data": {"sources": [{"path": "builtin:stdlib"}]}})
    first_loss.save_measured(recipe, 1.0)
    assert first_loss.read_measured(recipe) == 1.0
    first_loss._cache_file(recipe).write_text(text)
    assert first_loss.read_measured(recipe) is None


@pytest.fixture(scope="module")
def scaled_head(tmp_path_factory):
    """A recipe whose checkpoint has a head of a hundred times its size."""
    place = tmp_path_factory.mktemp("scaled")
    (place / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} times {n} is {n * n}."}) + "\n" for n in range(40))
    )
    source = SourceConfig(str(place / "text.jsonl"))
    train_tokenizer(DataConfig((source,), cache_dir=str(place)), vocab_size=V).save_pretrained(place / "start")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, vocab_size=V, num_key_value_heads=2, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    model.save_pretrained(place / "start")
    return {
        "model": {"source": str(place / "start")},
        "data": {"sources": [{"path": source.path}], "tokens_per_batch": 128, "cache_dir": str(place)},
        "train": {"steps": 1},
        "checkpoint": {"export": False},
    }


def test_a_scaled_head_ends_the_run_before_a_weight_has_moved(scaled_head, tmp_path):
    with launch.process_group() as device:
        trainer = Trainer(from_dict({**scaled_head, "log": {"directory": str(tmp_path / "run")}}), device)
        before = {name: p.full_tensor().clone() for name, p in trainer.model.named_parameters()}
        with pytest.raises(TrainingStopped, match=r"The first loss is \d+.* ln V = 5\.70"):
            trainer.run()
        after = {name: p.full_tensor() for name, p in trainer.model.named_parameters()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_recipe_may_believe_more(scaled_head, tmp_path):
    train = {"steps": 1, "first_loss_limit": 1e6}
    with launch.process_group() as device:
        run = {**scaled_head, "train": train, "log": {"directory": str(tmp_path / "run")}}
        assert Trainer(from_dict(run), device).run().steps == 1


def trained(start: dict, place: Path) -> TrainingStopped | None:
    """One step of a recipe; what ended it before it had moved a weight."""
    with launch.process_group() as device:
        trainer = Trainer(from_dict({**start, "log": {"directory": str(place)}}), device)
        try:
            trainer.run()
        except TrainingStopped as stopped:
            return stopped
    return None


def test_a_checkpoint_that_knows_nothing_is_told_once_and_trained(scaled_head, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    start = copy.deepcopy(scaled_head)
    start["model"]["source"] = str(shutil.copytree(scaled_head["model"]["source"], tmp_path / "start"))
    file = tmp_path / "start" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] /= 100
    save_file(tensors, file, metadata={"format": "pt"})
    choices.record("causal_lm_loss", "chunked", torch.zeros(7, 11))  # as a proof in this process does
    assert trained(start, tmp_path / "run") is None
    told = capsys.readouterr().out
    assert told.count("are hardly better on these data") == 1
    assert f"auto took linear for [{V}, 32]" in told and "[11]" not in told  # the kernels of its own first step
    random = copy.deepcopy(start)
    random["model"]["weights"] = "random"
    assert trained(random, tmp_path / "random") is None
    assert "hardly better" not in capsys.readouterr().out
    first_loss.save_measured(from_dict(start), 1.0)  # as if the doctor had found it
    assert "`patchgen doctor` measured 1.00" in str(trained(start, tmp_path / "held"))
    decided = {**start["model"], "attention": "patchgen_sdpa", "separate_documents": True}  # as a proof does
    assert first_loss.read_measured(from_dict({**start, "model": decided})) == 1.0
    tensors["lm_head.weight"] *= 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(1, 1))
    assert first_loss.read_measured(from_dict(start)) is None  # it was found of other weights
