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
from patchgen.runtime.parallel.undivided import local
from patchgen.runtime.train import optimizers
from patchgen.runtime.train.recipe import from_dict
from patchgen.runtime.train.records import Listener, StepRecord, TrainingStopped
from patchgen.runtime.train.trainer import Trainer

SMALL = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MESSAGE = "The gradient norm is nan. The step was not taken."


def values_of(folder, **sections: dict) -> dict:
    """A recipe of one small layer on made-up text."""
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n}."}) + "\n" for n in range(400)))
    source = SourceConfig(str(folder / "text.jsonl"))
    train_tokenizer(DataConfig((source,), cache_dir=str(folder)), vocab_size=300).save_pretrained(folder / "start")
    (folder / "start" / "config.json").write_text(json.dumps({"model_type": "qwen3", **SMALL}))
    values = {
        "model": {"source": str(folder / "start")},
        "data": {"sources": [{"path": source.path}], "tokens_per_batch": 128, "cache_dir": str(folder)},
        "log": {"directory": str(folder / "run")},
    }
    return values | sections


def test_a_step_outside_of_a_run_stops_by_name(tmp_path):
    with launch.process_group() as device:
        trainer = Trainer(from_dict(values_of(tmp_path, optim={"max_skipped": 1})), device)
        for parameter in trainer.model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        with pytest.raises(TrainingStopped, match=r"1 steps in a row .* No checkpoint was saved\."):
            trainer.update()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: local(value).detach().clone() for name, value in trainer.model.state_dict().items()}


class Kept(Listener):
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_of_a_run_that_are_skipped_leave_no_trace(optimizer, tmp_path, caplog):
    """The host reads a step's norm while the next one is computed, or before the update where the optimizer has to know. The steps
    are launched as in a run without the poison; what they leave is that of the other steps alone."""
    values = values_of(
        tmp_path,
        optim={"name": optimizer, "lr": 1e-2, "schedule": "constant"},
        train={"steps": 6},
        checkpoint={"export": False},
    )
    poisoned = {2: "model.norm.weight", 5: "model.layers.0.mlp.up_proj.weight"}  # step -> parameter; 1 is the first
    with launch.process_group() as device:
        kept = Kept()
        trainer = Trainer(from_dict(values), device, (kept,))
        assert optimizers.can_skip(trainer.optimizer, device) == (optimizer == "adamw")
        forward_backward, before = trainer.forward_backward, {}

        def poison(batches):
            share = forward_backward(batches)
            step = len(before) + 1
            before[step] = weights(trainer)
            if step in poisoned:
                local(trainer.model.get_parameter(poisoned[step]).grad).fill_(float("nan"))
            return share

        trainer.forward_backward = poison
        summary = trainer.run()
        after = before | {7: weights(trainer)}
    for step in range(1, 7):
        is_same = all(torch.equal(after[step][name], after[step + 1][name]) for name in after[step])
        assert is_same == (step in poisoned), step
    assert [record.step for record in kept.steps if record.skipped] == list(poisoned) and summary.skipped == 2
    assert [record.step for record in kept.steps] == [1, 2, 3, 4, 5, 6]
    assert {float(state["step"]) for state in trainer.optimizer.state.values() if "step" in state} == {4.0}
    for name in poisoned.values():
        assert f"not finite, or too large to be squared: {name}" in caplog.text


def test_a_run_whose_steps_are_all_skipped_ends(tmp_path):
    values = values_of(tmp_path, optim={"lr": 1e30, "max_skipped": 3}, checkpoint={"export": False})
    with (
        launch.process_group() as device,
        pytest.raises(TrainingStopped, match=r"3 steps in a row had .* the last of them step 4\."),
    ):
        Trainer(from_dict(values), device).run()


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
