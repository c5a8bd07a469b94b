"""A file as people publish it beside their weights: a list of experts, a cross entropy that the head writes out, attention of
its own, and a forward that takes no further arguments. Against the file itself: in one process as a run computes, and on ranks
that share its experts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from patchgen.commands import generation
from patchgen.runtime import registry
from patchgen.runtime.verify import media_ranks, verdict
from patchgen.runtime.verify.verify_model import verify_model

SOURCE = Path(__file__).parents[1] / "patchgen" / "data" / "list_moe"
PLANTED = (
    (
        "labels=None, **kwargs):",
        "attention_mask=None, position_ids=None, labels=None, use_cache=None):",
    ),
    (
        "loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)",
        "shift_logits = logits[..., :-1, :].contiguous()\n"
        "            shift_labels = labels[..., 1:].contiguous()\n"
        "            loss = nn.CrossEntropyLoss()(shift_logits.view(-1, self.vocab_size), shift_labels.view(-1))",
    ),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> registry.GeneratedModel:
    root = tmp_path_factory.mktemp("outside")
    code = shutil.copytree(SOURCE, root / "list_moe", ignore=shutil.ignore_patterns("__pycache__"))
    file = code / "modeling_list_moe.py"
    text = file.read_text()
    for before, after in PLANTED:
        assert text.count(before) == 1
        text = text.replace(before, after)
    file.write_text(text)
    generation.generate(["list_moe"], False, None, code, root / "generated", dry_run=False, force=False)
    found = registry.read_model(root / "generated" / "list_moe")
    return replace(found, source=found.find_source(code))


def test_its_documents_are_computed_in_rows_of_their_own(made):
    """Packed rows, chunks and accumulation are those of each document alone: nothing was handed over that it does not take."""
    notes = [
        note
        for step in json.loads((made.directory / "provenance.json").read_text())["passes"]
        for note in step["notes"]
    ]
    assert any("ListMoeForCausalLM.forward takes no further arguments" in note for note in notes)
    proof = verify_model(made, variants=("base",), implementations=())
    assert verdict.of(proof).status == verdict.PROVEN, proof.training and proof.training.failures
    assert proof.training.separates_documents is True
    assert {"packed", "leak", "accumulation"} <= {check.name for check in proof.training.checks}


def test_ranks_share_its_experts_and_its_sequences(made, two_ranks):
    """Its hand-written attention takes no bounds of documents: it gets each in its own row."""
    results = media_ranks.verify_on_ranks(made, two_ranks, sp=1, ep=2, fsdp=True, cases=("text", "packed"))
    assert [(one.case, one.reason) for one in results] == [("text", ""), ("packed", "")]
    sliced = media_ranks.verify_on_ranks(made, two_ranks, sp=2, fsdp=True, cases=("text", "packed"))
    assert [(one.case, one.reason) for one in sliced] == [("text", ""), ("packed", "")]
