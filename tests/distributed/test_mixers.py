"""Convolutions, delta rules and state-space scans over slices of a sequence against upstream's functions, document by document."""

from __future__ import annotations

import cases_mixers as cases
import pytest


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("sp", [1, 2, 4])
def test_convolution(sp, packed, two_ranks, four_ranks):
    (four_ranks if sp == 4 else two_ranks).run(cases.convolution_agrees, packed, sp)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize(("sp", "key_heads", "value_heads"), [(1, 2, 4), (2, 2, 4), (2, 1, 4), (4, 2, 4), (4, 4, 4)])
def test_recurrence(sp, key_heads, value_heads, packed, two_ranks, four_ranks):
    (four_ranks if sp == 4 else two_ranks).run(cases.recurrence_agrees, packed, sp, key_heads, value_heads)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize(("sp", "groups"), [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_scan_by_heads(sp, groups, packed, two_ranks, four_ranks):
    (four_ranks if sp == 4 else two_ranks).run(cases.scan_by_heads_agrees, packed, sp, groups)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("sp", [1, 2])
def test_scan_by_heads_through_the_package(sp, packed, two_ranks):
    two_ranks.run(cases.scan_by_heads_agrees, packed, sp, 1, True)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("sp", [1, 2, 4])
def test_scan_by_channels(sp, packed, two_ranks, four_ranks):
    (four_ranks if sp == 4 else two_ranks).run(cases.scan_by_channels_agrees, packed, sp)


def test_kernels_of_whole_mixers(two_ranks):
    two_ranks.run(cases.kernels_of_whole_mixers_see_whole_rows)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "packages"])
@pytest.mark.sampled(2)
def test_any_number_of_documents(kernels, two_ranks):
    two_ranks.run(cases.documents_are_computed_alone, kernels, 1, 70)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "packages"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.sampled(3)
def test_any_number_of_documents_in_a_model(name, kernels, two_ranks):
    """Four value heads and 64 channels of the convolution: 3 and 63 documents have as many bounds."""
    two_ranks.run(cases.model_computes_documents_alone, name, kernels, [1, 3, 63, 70])


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "packages"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_every_number_of_documents_in_a_model(name, kernels, two_ranks):
    two_ranks.run(cases.model_computes_documents_alone, name, kernels, list(range(1, 71)), timeout=900)


def test_what_no_name_says_is_refused(two_ranks):
    unknown, heads, cache, gates, channels, slices, lengths = two_ranks.run(cases.refusals)[0]
    assert "rule takes the tensor 'decay_of_heads' of shape (4,), and it is unknown whether" in unknown
    assert "'g' of rule has the shape (1, 8, 2): expected (B, S, value heads, ...), here (1, 8, 4) first" in heads
    assert "set use_cache=False" in cache
    assert "convolution takes the tensor 'gates' of shape (4,)" in gates
    assert "'weight' of convolution has the shape (8, 3): expected (channels, ...)" in channels
    assert "cu_seq_lens_q of the full sequence" in slices
    assert "end at 6, but there are 1 rows of 8 = 8 tokens" in lengths
