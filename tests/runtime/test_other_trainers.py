"""Generated classes in the trainers of other libraries, with fused seams, beside upstream's class in the same trainer.

transformers.Trainer, PEFT in it, and TRL's three. accelerate's FSDP2 needs ranks: tests/distributed/test_accelerate.py.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rounding import require_equal_up_to_rounding
from trainer_models import LAYERS, build, counting_seams, rows, tokenizer
from transformers import PreTrainedModel, Trainer, TrainingArguments

STEPS = 2
COMMON = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
    "save_strategy": "no", "use_cpu": True, "bf16": False, "seed": 0, "disable_tqdm": True,
}  # fmt: skip


def logged(trainer: Trainer) -> list[float]:
    """The losses of a run."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS and len(set(losses)) == STEPS
    return losses


def compare(run: Callable[[PreTrainedModel], list[float]]) -> Counter:
    """`run` on upstream's class as it is, then on ours with fused seams, must give the same numbers.

    Returns:
        The calls of the seams. Those of the experts are as many as their modules were called.
    """
    expected = run(build(generated=False))
    model, modules = build(generated=True), Counter()
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda *_: modules.update(experts=1))
    with counting_seams() as calls:
        found = run(model)
    require_equal_up_to_rounding(found, expected)
    assert calls["fused_moe"] == modules["experts"] > 0
    return calls


def test_transformers_trainer(tmp_path):
    """Training is fused; prediction has the logits, as upstream's."""

    def run(model) -> list[float]:
        arguments = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, **COMMON)
        trainer = Trainer(model, arguments, train_dataset=rows())
        losses, predicted = logged(trainer), trainer.predict(rows(4))
        return [*losses, predicted.metrics["test_loss"], *predicted.predictions.flatten().tolist()]

    assert compare(run) == {"fused_moe": LAYERS * (STEPS * 2 + 1), "causal_lm_loss": STEPS * 2}


@pytest.mark.slow
def test_peft_in_transformers_trainer(tmp_path):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def run(model) -> list[float]:
        torch.manual_seed(0)
        model = get_peft_model(model, adapters)
        return logged(Trainer(model, TrainingArguments(str(tmp_path), **COMMON), train_dataset=rows()))

    assert compare(run) == {"fused_moe": LAYERS * STEPS, "causal_lm_loss": STEPS}


# ------------------------------------------------------------------ TRL, whose trainers have a loss of their own


def test_trl_sft(tmp_path):
    from trl import SFTConfig, SFTTrainer

    texts = {"prompt": ["red green", "one two", "sea sun"] * 2, "completion": [" blue", " three", " tree cat"] * 2}
    data, words = Dataset.from_dict(texts), tokenizer()

    def run(model) -> list[float]:
        return logged(
            SFTTrainer(model, SFTConfig(str(tmp_path), **COMMON), train_dataset=data, processing_class=words)
        )

    compare(run)


@pytest.mark.slow
def test_trl_dpo(tmp_path):
    from trl import DPOConfig, DPOTrainer

    texts = {"prompt": ["red green", "one"], "chosen": [" blue", " three"], "rejected": [" cat dog", " house"]}
    data, words = Dataset.from_dict({name: column * 3 for name, column in texts.items()}), tokenizer()

    def run(model) -> list[float]:
        arguments, reference = DPOConfig(str(tmp_path), **COMMON), copy.deepcopy(model)
        return logged(DPOTrainer(model, reference, arguments, train_dataset=data, processing_class=words))

    compare(run)


@pytest.mark.slow
def test_trl_grpo(tmp_path):
    """Completions are generated with upstream's attention: the same seed gives the same ones."""
    from trl import GRPOConfig, GRPOTrainer

    data, words = Dataset.from_dict({"prompt": ["red green", "one two", "sea", "sun cat"]}), tokenizer()
    told: list[list[str]] = []

    def reward(completions: list[str], **_) -> list[float]:
        told[-1].extend(completions)
        return [float(sum(len(word) for word in completion.split())) for completion in completions]

    def run(model) -> list[float]:
        told.append([])
        arguments = GRPOConfig(str(tmp_path), num_generations=2, max_completion_length=6, **COMMON)
        return logged(GRPOTrainer(model, reward, args=arguments, train_dataset=data, processing_class=words))

    compare(run)
    assert told[0] == told[1] and len(set(told[0])) > 1
