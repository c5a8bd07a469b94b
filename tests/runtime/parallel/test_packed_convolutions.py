"""Where a generated model with eager seams is meant to differ from upstream: short convolutions over packed documents."""

from __future__ import annotations

import itertools

import pytest
import torch
from rounding import error, require_as_exact
from torch import Tensor
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ForCausalLM

from patchgen.commands import generation
from patchgen.runtime import registry

BOUNDS = (0, 3, 4, 11, 16)
CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"], "use_cache": False,
}  # fmt: skip
IDS = torch.arange(16)[None]
POSITIONS = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(BOUNDS)])[None]
LENGTHS = {"cu_seq_lens_q": torch.tensor(BOUNDS, dtype=torch.int32), "max_length_q": 7}
LENGTHS |= {"cu_seq_lens_k": LENGTHS["cu_seq_lens_q"], "max_length_k": 7}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The class, generated here: no model with short convolutions alone is committed."""
    root = tmp_path_factory.mktemp("generated")
    generation.generate(["lfm2"], False, None, None, root, dry_run=False, force=False)
    return registry.read_model(root / "lfm2").load().Lfm2ForCausalLM


def built(cls: type, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = cls._from_config(Lfm2Config(**CONFIG), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    return model.to(dtype)


def alone(model) -> Tensor:
    """The logits of each document in a call of its own."""
    return torch.cat([model(input_ids=IDS[:, a:b]).logits for a, b in itertools.pairwise(BOUNDS)], dim=1)


@torch.no_grad()
def test_packed_documents_are_those_of_each_alone_where_upstream_mixes_them(generated):
    ours, upstream = built(generated), built(Lfm2ForCausalLM)
    packed = {"input_ids": IDS, "position_ids": POSITIONS, **LENGTHS}
    require_as_exact(ours(**packed).logits, alone(upstream), alone(built(Lfm2ForCausalLM, torch.float64)))
    assert error(upstream(**packed).logits, alone(upstream)) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("inputs", [{}, {"position_ids": POSITIONS}], ids=["plain", "positions"])
def test_without_lengths_it_is_upstream_bit_for_bit(generated, inputs):
    found, expected = built(generated)(IDS, **inputs).logits, built(Lfm2ForCausalLM)(IDS, **inputs).logits
    assert torch.equal(found, expected)
