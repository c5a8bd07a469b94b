"""The first loss is judged before the optimizer has moved anything."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from patchgen.runtime import launch
from patchgen.runtime.data import DataConfig, SourceConfig, train_tokenizer
from patchgen.runtime.train import first_loss
from patchgen.runtime.train.recipe import from_dict
from patchgen.runtime.train.records import TrainingStopped
from patchgen.runtime.train.trainer import Trainer

V = 300


def test_far_above_ln_v_is_refused_with_both_figures():
    assert first_loss.refusal(math.log(700) + 1, 700) == ""
    assert first_loss.refusal(math.log(151_936) + 5, 151_936) == ""  # random weights of a wide model
    told = first_loss.refusal(54.2, 700)
    assert "54.20" in told and "ln V = 6.55" in told and "train.first_loss_limit" in told
    assert first_loss.refusal(float("nan"), 700) == ""
    assert first_loss.refusal(54.2, 700, limit=60.0) == ""
    assert first_loss.refusal(3.0, 700, limit=2.0) != ""


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
