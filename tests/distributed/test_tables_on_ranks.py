"""Row-sharded tables on real ranks: see each test for what is compared with what."""

from __future__ import annotations

from pathlib import Path

import cases_checkpoints
import cases_models
import cases_tables as cases
import pytest
import torch
from rounding import require_equal_up_to_rounding
from safetensors.torch import load_file
from torch import nn

ALL = 1  # shard the rows of every embedding that is not tied to a head


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen4_exp_text", {}),
        ("qwen4_exp_text", {"micro_batches": 4, "checkpoint": "full", "meta": True}),
        ("qwen3", {"packed": True, "micro_batches": 4, "reduce_last": "shards too"}),
        ("qwen3", {"sp": 2, "packed": True, "checkpoint": "selective"}),
        ("qwen3", {"dp_replicate": 2, "micro_batches": 4, "reduce_last": "replicas"}),
        ("qwen3_moe", {"ep": 2, "checkpoint": "full"}),
    ],
    ids=str,
)
def test_a_model_with_row_sharded_tables_trains_as_upstream_in_one_process(name, options, two_ranks):
    """Loss, norm and every gradient of three AdamW steps, and the parameters after them, beside upstream's own class."""
    two_ranks.run(cases_models.agrees, name, shard_tables_above=ALL, **options)


@pytest.mark.parametrize("num_rows", [3, 61], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_and_gradients_are_those_of_the_whole_table(num_rows, dtype, two_ranks):
    """Bit for bit, of two look-ups with ids of all ranks, none of one rank, and the same ids on several."""
    two_ranks.run(cases.looks_up, cases.Scaled, num_rows, dtype)
    two_ranks.run(cases.looks_up, nn.Embedding, num_rows, dtype, dp_replicate=2)


def test_rows_lie_on_all_ranks_of_replicas(four_ranks):
    """Cut over both mesh dimensions, some without rows."""
    for num_rows in (3, 5, 61):
        four_ranks.run(cases.looks_up, nn.Embedding, num_rows, torch.float32, dp_replicate=2)


def test_an_id_that_is_no_row_is_an_error(two_ranks):
    """On every rank, also where only one of them looked it up: none waits for rows that do not come."""
    own = [f"Ids {ids} were looked up in 0.weight, which has 5 rows." for ids in ("-1 to 0", "0 to 5")]
    others = ["An id that is none of the 5 rows of 0.weight was looked up on rank 1."] * 2
    assert two_ranks.run(cases.refuses_what_is_no_row, everywhere=True) == [own, own]
    assert two_ranks.run(cases.refuses_what_is_no_row, everywhere=False) == [others, own]


def test_a_class_that_reads_the_dtype_of_its_weight_sees_that_of_computing(two_ranks):
    """Rows of gemma4's scaled embedding beside those with the table gathered, for a scale that bf16 rounds."""
    two_ranks.run(cases.scales_as_gathered, 6, torch.bfloat16)


def test_a_run_on_two_ranks_goes_on_on_one_and_without_row_sharded_tables(tmp_path, one_rank, two_ranks):
    """Losses beside those of the run that was left alone: rows and their optimizer states are saved as any others."""
    options = {"steps": 5, "shard_tables_above": ALL}
    expected, _ = two_ranks.run(cases_checkpoints.train, "qwen3", str(tmp_path), save_at=2, **options)[0]
    for pool, above in ((two_ranks, ALL), (one_rank, ALL), (two_ranks, None)):
        changed = options | {"shard_tables_above": above, "resume": True}
        got, first = pool.run(cases_checkpoints.train, "qwen3", str(tmp_path), **changed)[0]
        assert first == 2
        require_equal_up_to_rounding(got, expected[2:], what=f"{pool.world} ranks, tables above {above}")


def test_tables_of_n_grams_come_from_upstream_and_go_back(tmp_path, two_ranks):
    """Upstream stores a table in parts: each rank reads its bytes, and the export is upstream's checkpoint bit by bit."""
    file = cases.generated(str(tmp_path / "generated"))
    original = cases_models.build("qwen4_exp_text", generated=False, attention_name="eager")
    original.save_pretrained(tmp_path / "original", max_shard_size="50KB")
    places = str(tmp_path / "original"), str(tmp_path / "export")
    for read, own, names in two_ranks.run(cases.round_trip, "Qwen4ExpForCausalLM", str(file), *places):
        assert names == ["model.embed_tokens.weight", "model.layers.0.ple.ple_embedding.ngram_embedding.weight"]
        assert read <= 1.05 * own
    expected, got = (tensors(tmp_path / place) for place in ("original", "export"))
    assert sum("ngram_embedding.shard_" in name for name in expected) == 3
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
