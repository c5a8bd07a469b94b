"""Initial values of models without a checkpoint: everything that a checkpoint would hold gets them."""

from __future__ import annotations

import torch

from patchgen.runtime import registry
from patchgen.runtime.checkpoint.initialise import initialise
from patchgen.runtime.parallel import sharding
from patchgen.runtime.train.model import initial_names
from patchgen.runtime.verify.small_config import small_config


def test_persistent_buffers_get_upstreams_values_too():
    """Memory that held other values before: no trace of them is left in the state of a model (router biases)."""
    found = registry.find_model("deepseek_v3")
    cls = getattr(found.load(), found.heads[0])
    with torch.device("meta"):
        model = cls._from_config(small_config(cls.config_class).config)
    sharding.materialise(model, "cpu")
    state = model.state_dict()
    for tensor in state.values():
        tensor.fill_(123)
    names = initial_names(model)
    assert set(names) == set(state)
    assert any(name.endswith("e_score_correction_bias") for name in names)
    initialise(model, names, seed=0)
    assert [name for name, tensor in state.items() if (tensor == 123).any()] == []
    biases = [tensor for name, tensor in state.items() if name.endswith("e_score_correction_bias")]
    assert all(torch.equal(bias, torch.zeros_like(bias)) for bias in biases)
