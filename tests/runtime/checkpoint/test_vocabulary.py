"""A vocabulary that grows while it is loaded: rows, errors, exports, on one process; on ranks in tests/distributed."""

from __future__ import annotations

import math
import re

import pytest
import small_models
import torch
from safetensors.torch import save_file

from patchgen.runtime.checkpoint import CheckpointError, export_pretrained, load_pretrained
from patchgen.runtime.checkpoint.incremental_load import IncrementalLoader
from patchgen.runtime.checkpoint.vocabulary import fill_new_rows

STORED, GROWN = small_models.SMALL["vocab_size"], 40


def empty(vocab_size: int = GROWN, **more):
    """A generated model on the meta device with another vocabulary."""
    config = small_models.moe_config(**more)
    config.vocab_size = vocab_size
    return small_models.build(small_models.generated_class(), config, device="meta")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_mean_is_that_of_the_stored_rows_and_the_stored_rows_stay(tied, tmp_path):
    """Compared with transformers' `resize_token_embeddings`, whose draws have this mean and a variance of 1e-9 of the rows'."""
    from transformers import Qwen3MoeForCausalLM

    upstream = small_models.build(Qwen3MoeForCausalLM, small_models.moe_config(tie_word_embeddings=tied))
    upstream.save_pretrained(tmp_path / "in")
    model = empty(tie_word_embeddings=tied)
    report = load_pretrained(model, tmp_path / "in", new_rows="mean")
    stored = {name: tensor.clone() for name, tensor in upstream.state_dict().items()}
    upstream.resize_token_embeddings(GROWN)
    resized, loaded = upstream.state_dict(), model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(loaded[name][:STORED], stored[name])
        expected = stored[name].double().mean(0).float().expand(GROWN - STORED, -1)
        torch.testing.assert_close(loaded[name][STORED:], expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(loaded[name], resized[name], rtol=0, atol=1e-3)
    names = ["model.embed_tokens.weight"] if tied else ["model.embed_tokens.weight", "lm_head.weight"]
    assert dict(report.grown) == dict.fromkeys(names, (STORED, GROWN))
    assert f"model.embed_tokens.weight from {STORED} to {GROWN} rows" in str(report) and "the mean" in str(report)


def test_the_mean_has_no_rounding_error_of_an_order(tmp_path):
    """Values of very different sizes in any order: the same mean, bit for bit, and the one of exact fractions."""
    from fractions import Fraction

    rows = torch.randn(1000, 3) * torch.logspace(-6, 3, 1000)[:, None]
    exact = [float(sum(map(Fraction, column.tolist())) / 1000) for column in rows.T]
    for order in (torch.arange(1000), torch.randperm(1000), torch.randperm(1000)):
        table = torch.cat([rows[order], torch.zeros(5, 3)])
        fill_new_rows(table, 1000)
        assert torch.equal(table[1000:], torch.tensor(exact).expand(5, 3))
    table = torch.zeros(4, 3)
    fill_new_rows(table, 2)
    assert not table.any()


def test_random_rows_are_upstreams_initial_values_and_differ(tmp_path):
    original = small_models.build(small_models.generated_class(), small_models.moe_config())
    export_pretrained(original, tmp_path / "in")
    drawn = []
    for seed in (0, 0, 1):
        model = empty(initializer_range=0.5)
        assert "random" in str(load_pretrained(model, tmp_path / "in", new_rows="random", seed=seed))
        assert torch.equal(model.lm_head.weight[:STORED], original.lm_head.weight)
        drawn.append(model.lm_head.weight[STORED:].clone())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert len(drawn[0].unique(dim=0)) == GROWN - STORED and 0.3 < drawn[0].std() < 0.7


def test_a_smaller_vocabulary_is_an_error_that_names_the_setting_and_a_larger_one_is_never_cut(tmp_path):
    export_pretrained(small_models.build(small_models.generated_class(), small_models.moe_config()), tmp_path / "in")
    with pytest.raises(
        CheckpointError, match=r"31 rows in the checkpoint.*vocab_size is 40.*model\.resize_vocab"
    ) as told:
        load_pretrained(empty(), tmp_path / "in")
    assert "shrunk" not in str(told.value)
    for new_rows in (None, "mean"):
        with pytest.raises(CheckpointError, match=r"31 rows in the checkpoint.*never shrunk.*set vocab_size to 31"):
            load_pretrained(empty(24), tmp_path / "in", new_rows=new_rows)


def test_a_head_with_a_bias_grows_and_what_else_is_sized_by_the_vocabulary_is_refused(tmp_path):
    """DeepSeek V4's table from tokens to experts has a row per token, and is no embedding."""
    from patchgen.runtime import attention, registry
    from patchgen.runtime.verify.small_config import small_config

    attention.register()
    original = small_models.build(small_models.generated_class(), small_models.moe_config())
    original.lm_head.bias = torch.nn.Parameter(torch.randn(STORED))
    (tmp_path / "in").mkdir()
    save_file({k: v.contiguous() for k, v in original.state_dict().items()}, tmp_path / "in" / "model.safetensors")
    model = empty()
    model.lm_head.bias = torch.nn.Parameter(torch.empty(GROWN, device="meta"))
    load_pretrained(model, tmp_path / "in", new_rows="mean")
    torch.testing.assert_close(model.lm_head.bias[STORED:], original.lm_head.bias.mean().expand(GROWN - STORED))

    head = registry.find_model("deepseek_v4").load().DeepseekV4ForCausalLM
    config = small_config(head.config_class).config
    export_pretrained(small_models.build(head, config), tmp_path / "table")
    config.vocab_size += 8
    with pytest.raises(
        CheckpointError, match=r"tid2eid is \[136, 2\] in the model, \[128, 2\][^$]*cannot grow"
    ) as told:
        load_pretrained(small_models.build(head, config, device="meta"), tmp_path / "table", new_rows="mean")
    assert "set model.resize_vocab" not in str(told.value)


def test_a_load_in_parts_gives_the_same_rows_and_exports_what_was_stored(tmp_path):
    """As the doctor loads what is larger than memory."""
    export_pretrained(small_models.build(small_models.generated_class(), small_models.moe_config()), tmp_path / "in")
    for new_rows in ("mean", "random"):
        whole, parts = empty(), empty()
        load_pretrained(whole, tmp_path / "in", new_rows=new_rows, seed=3)
        loader = IncrementalLoader(parts, tmp_path / "in", new_rows=new_rows, seed=3)
        parts.to_empty(device="cpu")
        state = parts.state_dict()
        for name in state:
            loader.read({name: state[name]})
        for name, tensor in whole.state_dict().items():
            assert torch.equal(state[name], tensor), name
        assert not list(loader.export_differences())


def test_the_export_of_a_grown_model_gives_its_logits_in_plain_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    export_pretrained(small_models.build(small_models.generated_class(), small_models.moe_config()), tmp_path / "in")
    model = empty()
    load_pretrained(model, tmp_path / "in", new_rows="mean")
    export_pretrained(model, tmp_path / "out", source=tmp_path / "in")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert plain.config.vocab_size == GROWN
    ids = torch.tensor([[1, 5, STORED, GROWN - 1]])
    logits = model.eval()(input_ids=ids).logits
    assert logits.shape[-1] == GROWN and torch.equal(plain(input_ids=ids).logits, logits)


def test_mean_rows_raise_the_loss_of_old_tokens_by_at_most_the_log_of_the_growth(tmp_path):
    """A new logit is the mean of the old ones, whose exponential is at most the mean of theirs: ln(1 + new / old)."""
    original = small_models.build(small_models.generated_class(), small_models.moe_config())
    export_pretrained(original, tmp_path / "in")
    model = empty()
    load_pretrained(model, tmp_path / "in", new_rows="mean")
    ids = torch.randint(0, STORED, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = (one.eval()(input_ids=ids).logits for one in (original, model))
    assert torch.equal(after[..., :STORED], before)
    rise = after.logsumexp(-1) - before.logsumexp(-1)
    assert (rise > 0).all() and (rise < math.log(GROWN / STORED) + 1e-6).all()


def test_a_copy_of_a_tied_tensor_with_other_rows_is_named(tmp_path):
    original = small_models.build(small_models.generated_class(), small_models.moe_config(tie_word_embeddings=True))
    (tmp_path / "in").mkdir()
    state = {name: tensor.contiguous().clone() for name, tensor in original.state_dict().items()}
    state["lm_head.weight"] = torch.cat([state["lm_head.weight"], torch.ones(2, small_models.SMALL["hidden_size"])])
    save_file(state, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape("lm_head.weight and model.embed_tokens.weight are one tied")):
        load_pretrained(empty(tie_word_embeddings=True), tmp_path / "in", new_rows="mean")
