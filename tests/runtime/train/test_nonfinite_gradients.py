"""Gradients that are not finite end a run with a sentence, with or without checkpoints and on any number of ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import yaml

from patchgen.commands import training
from patchgen.errors import PatchgenError
from patchgen.runtime import launch
from patchgen.runtime.data import DataConfig, SourceConfig, train_tokenizer
from patchgen.runtime.parallel.gradients import NonFiniteGradient
from patchgen.runtime.train.recipe import from_dict
from patchgen.runtime.train.records import TrainingStopped
from patchgen.runtime.train.trainer import Trainer

SMALL = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MESSAGE = "The gradient norm is nan. The step was not taken."


def test_a_step_outside_of_a_run_stops_by_name(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n}."}) + "\n" for n in range(40)))
    source = SourceConfig(str(tmp_path / "text.jsonl"))
    train_tokenizer(DataConfig((source,), cache_dir=str(tmp_path)), vocab_size=300).save_pretrained(tmp_path / "start")
    (tmp_path / "start" / "config.json").write_text(json.dumps({"model_type": "qwen3", **SMALL}))
    values = {
        "model": {"source": str(tmp_path / "start")},
        "data": {"sources": [{"path": source.path}], "tokens_per_batch": 128, "cache_dir": str(tmp_path)},
        "optim": {"max_skipped": 1},
        "log": {"directory": str(tmp_path / "run")},
    }
    with launch.process_group() as device:
        trainer = Trainer(from_dict(values), device)
        for parameter in trainer.model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        with pytest.raises(TrainingStopped, match=r"1 steps in a row .* No checkpoint was saved\."):
            trainer.update()


def test_the_command_ends_in_a_sentence(tmp_path, monkeypatch):
    def stop(*args: object, **options: object) -> int:
        raise NonFiniteGradient(MESSAGE)

    monkeypatch.setattr(launch, "launch", stop)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": {"source": "qwen3"}, "data": {}}))
    options = {"nodes": "1", "rdzv_endpoint": "", "fresh": False, "dry_run": False, "verbose": False}
    with pytest.raises(PatchgenError, match="The gradient norm is nan"):
        training.train(tmp_path / "mine.yaml", [], processes=1, print_config=False, script=None, **options)


def test_the_agent_reports_it_without_a_traceback():
    content = {"message": f"NonFiniteGradient: {MESSAGE}", "extraInfo": {"py_callstack": "Traceback"}}
    assert launch._reason(SimpleNamespace(message=content)) == MESSAGE
