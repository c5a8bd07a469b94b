"""Forms that older releases have, written into today's source: what is made of them, and what a refusal names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from generation_cases import edited, load

from patchgen import pipeline, provenance
from patchgen.runtime import parallel, registry
from patchgen.runtime.parallel import loss
from patchgen.runtime.parallel.config import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.small_config import small_config

HANDED_ON = ("vocab_size=self.config.vocab_size, **kwargs)", "vocab_size=self.config.vocab_size)")
BY_HAND = (
    "loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)",
    "loss_fct = nn.CrossEntropyLoss()\n            loss = loss_fct(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
)


@pytest.fixture
def state():
    """Of one rank by itself."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield ParallelState.create(ParallelConfig.for_world(1), "cpu")
    dist.destroy_process_group()


def test_a_step_says_which_labels_count_where_upstream_hands_nothing_to_its_loss(tmp_path, state):
    """Else the first token of a document is learned from the last of the one before it in the row."""
    generated = pipeline.generate(edited(load("llama"), HANDED_ON))
    provenance.write(generated, tmp_path / "llama")
    head = registry.read_model(tmp_path / "llama").load().LlamaForCausalLM
    torch.manual_seed(0)
    model = head(small_config(head.config_class).config).train()
    ids = torch.randint(1, 90, (1, 12))
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].clone()
    shifted[0, 5] = -100  # the end of a document
    row = {"input_ids": ids, "labels": ids, "use_cache": False}
    logits = model(**row).logits
    expected = torch.nn.functional.cross_entropy(logits[0], shifted[0])
    alone = model(**row, shift_labels=shifted).loss
    with parallel.using(state), loss.step(torch.tensor(10), 1):
        found = model(**row, shift_labels=shifted, num_items_in_batch=torch.tensor(10)).loss
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(alone, torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))  # upstream's


def test_a_loss_written_out_has_the_seam():
    assert "loss_function=ops.shifted_cross_entropy" in pipeline.generate(edited(load("llama"), BY_HAND)).text
