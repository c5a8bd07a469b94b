"""Attention that a model computes by its own code, on ranks that share a sequence."""

from __future__ import annotations

from patchgen import pipeline, provenance, upstream
from patchgen.runtime.verify.parallel_coverage import compare


def test_attention_written_by_hand_agrees_with_upstream_on_one_rank(two_ranks, tmp_path):
    """Loss and every gathered gradient, plain and packed."""
    folder = tmp_path / "gpt_neo"
    provenance.write(pipeline.generate(upstream.load("gpt_neo")), folder)
    file = str(folder / "modeling_gpt_neo.py")
    row, _ = two_ranks.run(compare, "gpt_neo", "GPTNeoForCausalLM", file, 2, 1, False)
    assert row.get("reason", "") == "" and row["packed_gradients"] < 1e-4, row
