"""A small generated model beside upstream's with the same weights."""

from __future__ import annotations

import copy

import torch
from transformers import Qwen3MoeForCausalLM

from patchgen.runtime import attention, registry


def of_upstream(config, seed: int) -> Qwen3MoeForCausalLM:
    """Transformers' model with random weights."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)


def generated(upstream, head=None):
    """The generated model with the weights of one of transformers'."""
    head = head or registry.find_head(upstream.config)
    attention.register()
    made = {"attn_implementation": "patchgen_sdpa", "dtype": torch.float32}
    model = head._from_config(copy.deepcopy(upstream.config), **made)
    model.load_state_dict(upstream.state_dict())
    return model
