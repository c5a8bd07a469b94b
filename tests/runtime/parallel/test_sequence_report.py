"""What the report of a start says of attention on ranks that share a sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from patchgen.runtime.parallel import report
from patchgen.runtime.parallel.media import mark_replicated


@pytest.mark.parametrize(
    ("heads", "sp", "told"),
    [
        (4, 1, "eager"),
        (4, 4, "eager around an exchange of heads over sp 4"),
        (6, 4, "eager around an exchange of heads over 2 of sp 4, keys gathered over 2"),
        (1, 4, "eager around an exchange of heads over 1 of sp 4, keys gathered over 4"),
    ],
)
def test_what_ranks_exchange_follows_from_their_number_and_the_heads(heads, sp, told):
    config = LlamaConfig(
        vocab_size=8, hidden_size=8 * heads, intermediate_size=8, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = SimpleNamespace(sp=sp)
    assert report.attention_users(model, state) == {f"attention:{told}": {"LlamaAttention": 2}}
    mark_replicated([model.model.layers[1]])
    if sp > 1:
        assert report.attention_users(model, state)["attention:eager on whole inputs on every rank"].total() == 1
