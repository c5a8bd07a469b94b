"""Which heads have output embeddings to tie: by what their linear layers are made of, not by words in the source."""

from __future__ import annotations

import pytest
from generation_cases import applied

from patchgen.passes.tied_embeddings import TiedEmbeddings

HEAD = """
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

class LinearAttention(nn.Module):
    pass

class Projection(nn.Linear):
    pass

class ExampleForCausalLM(PreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.num_words = config.vocab_size
        self.part = {}

    def forward(self, input_ids, labels=None):
        return self.part(input_ids, labels=labels)
"""


@pytest.mark.parametrize(
    ("part", "is_projection"),
    [
        ("nn.Linear(8, config.vocab_size)", True),
        ("nn.Linear(8, self.num_words)", True),
        ("Projection(8, self.num_words)", True),
        ("nn.Sequential(nn.Linear(8, 8), nn.Linear(8, config.vocab_size))", True),
        ("LinearAttention(config.vocab_size, 1)", False),
        ("nn.Linear(config.vocab_size, 8)", False),
        ("nn.Linear(8, config.num_labels)", False),
    ],
)
def test_a_projection_is_a_linear_layer_to_as_many_rows_as_there_are_words(part: str, is_projection: bool):
    outcome = applied(TiedEmbeddings(), HEAD.replace("{}", part))
    assert ("self.config.tie_word_embeddings = False" in outcome.module.text) is not is_projection
    assert [hit.what for hit in outcome.upstream] == ["projects with self.part"] * is_projection
