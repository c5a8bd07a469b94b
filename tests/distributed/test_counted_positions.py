"""Positions that a decoder counts along its rows itself, on ranks that share a sequence."""

from __future__ import annotations

import pytest

from patchgen import pipeline, provenance, upstream
from patchgen.runtime.verify.layout import TWO_RANKS
from patchgen.runtime.verify.two_ranks import compare

HEADS = {
    "bart": "BartForCausalLM",  # learned; its table adds a dimension to the positions that the decoder gives it
    "marian": "MarianForCausalLM",  # sinusoidal
    "trocr": "TrOCRForCausalLM",  # its decoder gives the table no positions, and gets no bounds of documents
}


@pytest.mark.parametrize("name", sorted(HEADS))
def test_counted_positions_agree_with_upstream_on_one_rank(two_ranks, tmp_path, name):
    """Loss and every gathered gradient of two slices, plain and packed, against upstream's class on each document alone."""
    provenance.write(pipeline.generate(upstream.load(name)), tmp_path)
    row, _ = two_ranks.run(compare, tmp_path, HEADS[name], TWO_RANKS["sp2"])
    assert row.get("reason", "") == "" and max(row["gradients"], row["packed_gradients"]) < 1e-4, row
