"""Which embeddings are row-sharded; what they compute is tested on real ranks, in tests/distributed/test_tables_on_ranks.py."""

import torch
from torch import nn

from patchgen.runtime.parallel import tables
from patchgen.runtime.parallel.sharding import ShardingOptions
from patchgen.runtime.parallel_plan import parallel_plan
from patchgen.runtime.train.sections import ParallelSection


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


class LooksUpItself(nn.Embedding):
    def forward(self, input):
        return self.weight[input]


def test_tables_are_embeddings_that_only_nn_embedding_looks_up():
    """Of any size; the others are named with the reason."""
    found = nn.ModuleDict(
        {
            "plain": nn.Embedding(4, 2),
            "scaled": Scaled(4, 2),
            "tied": nn.Embedding(4, 2),
            "head": nn.Linear(2, 4, bias=False),
            "bounded": nn.Embedding(4, 2, max_norm=1.0),
            "by_frequency": nn.Embedding(4, 2, scale_grad_by_freq=True),
            "sparse": nn.Embedding(4, 2, sparse=True),
            "itself": LooksUpItself(4, 2),
        }
    )
    found["head"].weight = found["tied"].weight
    plan = parallel_plan(found, {})
    gathered = plan.tables_left_alone
    assert plan.tables == ("plain.weight", "scaled.weight")
    assert gathered.keys() == {f"{name}.weight" for name in ("tied", "bounded", "by_frequency", "sparse", "itself")}
    assert "a head tied to it" in gathered["tied.weight"]
    assert gathered["itself.weight"].startswith("LooksUpItself looks rows up itself")


def test_the_n_gram_tables_of_qwen4_exp_are_row_sharded_by_default():
    """With upstream's own sizes, on the meta device: 51 billion parameters that no rank gathers, and nothing else."""
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    config = Qwen4ExpTextConfig(ple_layer_ids=[1], eos_token_id=5)
    with torch.device("meta"):
        layer = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0)
        model = nn.ModuleDict({"tokens": nn.Embedding(config.vocab_size, config.hidden_size), "layer": layer})
    assert ParallelSection().shard_tables_above == tables.ABOVE == ShardingOptions().shard_tables_above
    names, gathered = tables.choose(model, tables.ABOVE, world=2)
    assert names == ["layer.ngram_embedding.weight"] and not gathered
    assert layer.ngram_embedding.weight.numel() > 4e10
    assert tables.choose(model, 1, world=2)[0] == ["tokens.weight", *names]
    assert tables.choose(model, None, world=2) == tables.choose(model, 1, world=1) == ([], {})
