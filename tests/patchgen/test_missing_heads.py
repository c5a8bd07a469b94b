"""A file without a causal head is one error with the candidates and what to write; a head is found by what its forward does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoked import invoke
from outside_forms import TEXT

from patchgen import pipeline
from patchgen.errors import ConfigError
from patchgen.upstream import load

MODEL = TEXT.replace(
    "from .configuration_list_moe import ListMoeConfig", "from transformers import MixtralConfig as ListMoeConfig"
)
LOSS = "loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)"
CROSS_ENTROPY = "nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())"
METHOD = f"""
    def compute_loss(self, logits, labels):
        return {CROSS_ENTROPY}


__all__"""
PLAIN = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.width, config.width)

    def forward(self, x):
        return x + self.inner(x)


class Plain(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.depth)])
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids, targets=None):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss
"""
STAR = """
from transformers.models.qwen2.modeling_qwen2 import *


class StarForCausalLM(Qwen2ForCausalLM):
    pass
"""
BASE = "from .parts import PartForCausalLM\n\n\nclass WholeForCausalLM(PartForCausalLM):\n    pass\n"
WITHOUT_LABELS = MODEL.replace("labels=None, **kwargs", "target_ids=None, **kwargs").replace(
    "labels=labels", "labels=target_ids"
)
HEADLESS = MODEL[: MODEL.index("class ListMoeForCausalLM")]
# the file -> what the error says of its candidates
REFUSED = {
    "a plain module that takes targets": (
        PLAIN,
        "Plain: it is no PreTrainedModel; its forward takes `targets`, not `labels`",
    ),
    "a model that takes no labels": (
        WITHOUT_LABELS,
        "ListMoeForCausalLM: its forward takes `target_ids`, not `labels`",
    ),
    "a parent of a star import": (
        STAR,
        "StarForCausalLM: it inherits from Qwen2ForCausalLM, whose code the file neither",
    ),
    "a parent of a file beside it": (BASE, "WholeForCausalLM: it inherits from PartForCausalLM, whose code the file"),
    "no head at all": (HEADLESS, "Or generate for a model without a head: --head ListMoeModel."),
}


@pytest.mark.parametrize("form", REFUSED)
def test_a_file_without_a_head_is_refused_with_its_candidates(form: str, tmp_path: Path):
    text, told = REFUSED[form]
    (tmp_path / "modeling_headless.py").write_text(text)
    with pytest.raises(ConfigError, match="has no causal head") as refusal:
        invoke("generate", "--source", str(tmp_path), "--output", str(tmp_path / "generated"))
    assert told in str(refusal.value)
    assert "self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size" in str(refusal.value)
    assert not (tmp_path / "generated").exists()


def test_a_model_without_a_head_is_generated_by_its_name(tmp_path: Path):
    (tmp_path / "modeling_headless.py").write_text(HEADLESS)
    generated = pipeline.generate(load("headless", source=tmp_path), heads=("ListMoeModel",))
    assert json.loads(generated.provenance)["heads"] == ["ListMoeModel"]


def test_a_head_without_generation_whose_loss_is_in_a_method_is_found(tmp_path: Path):
    text = MODEL.replace("ListMoePreTrainedModel, GenerationMixin)", "ListMoePreTrainedModel)")
    text = text.replace(LOSS, "loss = self.compute_loss(logits, labels)").replace("\n\n__all__", METHOD)
    (tmp_path / "modeling_own.py").write_text(text)
    generated = pipeline.generate(load("own", source=tmp_path))
    hits = {step.name: [hit.site for hit in step.outcome.hits] for step in generated.steps}
    assert hits["parallel_plan"] == ["ListMoeForCausalLM"]
    assert json.loads(generated.provenance)["heads"] == ["ListMoeForCausalLM"]
