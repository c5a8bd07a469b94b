"""Initial values of models without a checkpoint: everything that a checkpoint would hold gets them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from patchgen.runtime import registry
from patchgen.runtime.checkpoint import initialise as initialisation
from patchgen.runtime.checkpoint.initialise import initialise
from patchgen.runtime.parallel import buffers, sharding, tables
from patchgen.runtime.train.model import weight_names
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
    names = weight_names(model)
    assert set(names) == set(state)
    assert any(name.endswith("e_score_correction_bias") for name in names)
    initialise(model, names, seed=0)
    assert [name for name, tensor in state.items() if (tensor == 123).any()] == []
    biases = [tensor for name, tensor in state.items() if name.endswith("e_score_correction_bias")]
    assert all(torch.equal(bias, torch.zeros_like(bias)) for bias in biases)


class _Tables(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(length))
        self.register_buffer("angles", torch.outer(torch.arange(length), torch.arange(4)).cos(), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(length), torch.arange(length).float()), persistent=False)
        self.register_buffer("seen", torch.ones(length, length).tril().bool(), persistent=False)


class _TabledModel(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.tables = _Tables(config.hidden_size)
        self.register_buffer("steps", torch.arange(config.hidden_size), persistent=False)
        self.post_init()


def test_buffers_that_only_a_constructor_computes_get_its_values():
    """As in files that were written for transformers 4; of the meta device the values are lost."""
    config = LlamaConfig(hidden_size=8, num_attention_heads=2)
    whole = _TabledModel._from_config(config)
    expected = whole.tables
    with torch.device("meta"):
        model = _TabledModel._from_config(config)
    sharding.materialise(model, "cpu")
    assert not model.tables.scale.is_meta
    assert torch.equal(model.steps, whole.steps)
    assert torch.equal(model.tables.angles, expected.angles) and torch.equal(model.tables.seen, expected.seen)
    assert torch.equal(model.tables.turns, expected.turns)  # complex, as the rotary tables of llama4's vision tower


class _Flagged(nn.Module):
    """No transformers model, whose constructor could be asked for its buffers."""

    def __init__(self, initialised):
        super().__init__()
        self.initialised = initialised
        self.register_buffer("on", torch.tensor(True), persistent=False)
        self.register_buffer("turns", torch.tensor([True, False]), persistent=False)
        self.register_buffer("none", torch.zeros(0), persistent=False)

    def _init_weights(self, module):
        for name in self.initialised:
            module.get_buffer(name).copy_(_Flagged([]).get_buffer(name))


def test_whatever_an_initialiser_writes_into_booleans_is_seen():
    model = _Flagged(["on", "turns"]).to("meta").to_empty(device="cpu")
    buffers.compute_buffers(model)
    assert model.on and model.turns.tolist() == [True, False]
    forgetful = _Flagged(["on"]).to("meta").to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"does not initialise its non-persistent buffers \['turns'\]"):
        buffers.compute_buffers(forgetful)


def test_large_tensors_have_the_same_values_on_any_number_of_cores(monkeypatch):
    """Each part is drawn from a generator of its own; what upstream writes after drawing (the row of padding) stays."""
    monkeypatch.setattr(initialisation, "PART", 1000)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=500,
        pad_token_id=3,
    )

    def state(threads: int, seed: int = 0) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(initialisation, "_num_threads", lambda: threads)
        with torch.device("meta"):
            model = registry.build_model(config)
        sharding.materialise(model, "cpu")
        before = torch.random.get_rng_state()
        initialise(model, weight_names(model), seed=seed)
        assert torch.equal(before, torch.random.get_rng_state()), "a run's own numbers do not change"
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    one, four, other = state(1), state(4), state(4, seed=1)
    assert all(torch.equal(one[name], four[name]) for name in one)
    embeddings = one["model.embed_tokens.weight"]
    assert not embeddings[3].any() and embeddings[4].any()
    assert not torch.equal(embeddings, other["model.embed_tokens.weight"])
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight", "lm_head.weight"):
        flat = one[name].flatten()
        assert flat.std().item() == pytest.approx(config.initializer_range, rel=0.05), name
        assert len({part.sum().item() for part in flat.split(1000)}) == len(flat.split(1000)), "no part is another's"


@pytest.mark.parametrize("part", [1000, 192], ids=["parts", "parts that end within a rank's rows"])
def test_rows_of_a_table_have_the_values_of_the_whole(monkeypatch, part):
    """Each rank's rows, drawn alone, beside the table drawn whole; the row of padding is zeros."""
    monkeypatch.setattr(initialisation, "PART", part)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=500,
        pad_token_id=3,
    )
    with torch.device("meta"):
        model = registry.build_model(config)
    sharding.materialise(model, "cpu")
    initialise(model, ["model.embed_tokens.weight"], seed=0)
    table = model.model.embed_tokens
    whole = table.weight.detach().clone()
    table.__class__ = tables.ShardedTable
    for rank, (first, stop) in enumerate([(0, 167), (167, 334), (334, 500), (500, 500)]):
        monkeypatch.setattr(initialisation.dist, "get_rank", lambda group, rank=rank: rank)
        rows = torch.full((stop - first, 64), torch.nan)
        monkeypatch.setattr(initialisation, "local_tensor", lambda _, rows=rows: rows)
        table.sharded_rows = tables.ShardedRows("embed", None, (0, 167, 334, 500, 500), torch.float32)
        initialise(model, ["model.embed_tokens.weight"], seed=0)
        assert torch.equal(rows, whole[first:stop])
