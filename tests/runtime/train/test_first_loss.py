"""The first loss is judged before the optimizer has moved anything."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from patchgen.runtime import launch
from patchgen.runtime.data import DataConfig, SourceConfig, train_tokenizer
from patchgen.runtime.train import first_loss
from patchgen.runtime.train.recipe import from_dict
from patchgen.runtime.train.records import Listener, StepRecord, TrainingStopped
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


class Kernels(Listener):
    """What is told of kernels, and when."""

    def __init__(self) -> None:
        self.told = []

    def on_kernels(self, taken: list[str]) -> None:
        self.told += taken

    def on_step(self, record: StepRecord) -> None:
        self.told.append(record.step)


def test_a_recipe_may_believe_more_and_kernels_are_told_once(scaled_head, tmp_path):
    listener, train = Kernels(), {"steps": 2, "first_loss_limit": 1e6}
    values = {**scaled_head, "train": train, "log": {"directory": str(tmp_path / "run")}}
    with launch.process_group() as device:
        assert Trainer(from_dict(values), device, (listener,)).run().steps == 2
    taken, *steps = listener.told
    assert re.fullmatch(r"causal_lm_loss auto: (linear|chunked) 1 x \[1, \d+, 32\]", taken)
    assert steps == [1, 2]
