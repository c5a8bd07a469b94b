"""Packing and mixing: nothing lost, nothing over the budget, batches full, sources at their shares."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchgen.runtime.data.batch_plan import BatchPlan
from patchgen.runtime.data.config import DataConfig, SourceConfig
from patchgen.runtime.data.order import MixedOrder
from patchgen.runtime.data.packing import Pool


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), best_fit=st.booleans())
def test_every_sample_lands_in_one_batch_within_the_budget(lengths, best_fit):
    pool = Pool(50, best_fit=best_fit)
    for key, length in enumerate(lengths):
        pool.add(key, length)
    assert pool.tokens == sum(lengths)
    batches = []
    while pool:
        oldest = next(iter(pool))
        batches.append(pool.take())
        assert batches[-1][0] == oldest
    assert sorted(key for batch in batches for key in batch) == list(range(len(lengths)))
    assert all(sum(lengths[key] for key in batch) <= 50 for batch in batches)
    assert pool.tokens == 0
    if not best_fit:
        assert [key for batch in batches for key in batch] == list(range(len(lengths)))
        for batch, later in itertools.pairwise(batches):
            assert sum(lengths[key] for key in batch) + lengths[later[0]] > 50, "the next one would have fitted"
    else:
        for number, batch in enumerate(batches):
            room = 50 - sum(lengths[key] for key in batch)
            assert all(lengths[key] > room for later in batches[number + 1 :] for key in later)


KINDS = st.frozensets(st.sampled_from(["image", "video", "audio"]), max_size=1)


@settings(max_examples=100)
@given(samples=st.lists(st.tuples(st.integers(1, 50), KINDS), min_size=1, max_size=40), best_fit=st.booleans())
def test_modalities_that_are_kept_apart_share_no_batch(samples, best_fit):
    pool = Pool(50, best_fit=best_fit, separate=[("image", "video")])
    for key, (length, kinds) in enumerate(samples):
        pool.add(key, length, kinds)
    batches = []
    while pool:
        oldest = next(iter(pool))
        batches.append(pool.take())
        assert batches[-1][0] == oldest
    assert sorted(key for batch in batches for key in batch) == list(range(len(samples)))
    for number, batch in enumerate(batches):
        held = frozenset().union(*(samples[key][1] for key in batch))
        assert not held >= {"image", "video"}
        room = 50 - sum(samples[key][0] for key in batch)
        left = [samples[key] for later in batches[number + 1 :] for key in later]
        could_have_fitted = left if best_fit else left[:1]
        assert all(length > room or held | kinds >= {"image", "video"} for length, kinds in could_have_fitted)


@pytest.mark.parametrize("length", [0, 51])
def test_a_sample_without_tokens_or_longer_than_a_batch_is_refused(length):
    with pytest.raises(ValueError, match="expected 1 to 50"):
        Pool(50).add("a", length)


@pytest.mark.parametrize("budget", [4096, 16384])
def test_batches_of_a_log_normal_mix_are_full(budget):
    lengths = np.clip(np.random.default_rng(1).lognormal(np.log(400), 1.2, 10_000), 1, budget).astype(np.int32)
    plan = BatchPlan([lengths], None, seed=0, epochs=1, pool=Pool(budget), pool_tokens=64 * budget)
    batches = 0
    while plan.next() is not None:
        batches += 1
    assert lengths.sum() / (batches * budget) >= 0.97


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    data=st.data(),
    seed=st.one_of(st.none(), st.integers(0, 5)),
    weighted=st.booleans(),
)
def test_sources_are_mixed_at_their_shares(sizes, data, seed, weighted):
    weights = [data.draw(st.floats(0.1, 5)) for _ in sizes] if weighted else None
    order = MixedOrder(sizes, weights, seed=seed, epoch=3)
    entries = list(order.after([0] * len(sizes)))
    assert len(entries) == sum(order.totals)
    for source, size in enumerate(sizes):
        numbers = [number for other, _, number in entries if other == source]
        laps = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        assert all(sorted(lap) == list(range(size)) for lap in laps if len(lap) == size)
        assert len(laps[0]) == size  # each source was gone through
        if not weighted:
            assert len(numbers) == size
        if seed is None:
            assert laps[0] == list(range(size))
    if weighted:
        shares = np.array(weights) / sum(weights)
        seen = np.zeros(len(sizes))
        for number, (source, _, _) in enumerate(entries, 1):
            seen[source] += 1
            assert (abs(seen - shares * number) <= (len(sizes) + 1) / 2 + 1e-9).all()
    cut = data.draw(st.integers(0, len(entries)))
    counts = Counter(source for source, _, _ in entries[:cut])
    assert list(order.after([counts[source] for source in range(len(sizes))])) == entries[cut:]


def test_every_epoch_and_lap_has_an_order_of_its_own():
    def numbers(epoch: int) -> list[int]:
        return [
            number
            for source, _, number in MixedOrder([50, 500], [1, 1], seed=0, epoch=epoch).after([0, 0])
            if source == 0
        ]

    first, second = numbers(0), numbers(1)
    assert first == numbers(0)
    assert first[:50] != second[:50]
    assert first[:50] != first[50:100]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "images"}, "kind is 'images'; it must be one of text, chat, multimodal"),
        ({"tokens_per_batch": 0}, "tokens_per_batch must be at least 1"),
        ({"kind": "multimodal", "video_fps": 0}, "video_fps must be above 0, not 0"),
        ({"kind": "multimodal", "video_fps": -1.0}, "video_fps must be above 0, not -1.0"),
        ({"max_length": 5000}, "does not fit into data.tokens_per_batch"),
        ({"kind": "chat", "on_long": "split"}, "split is only for plain text"),
        ({"sources": ()}, "sources is empty"),
        ({"sources": (SourceConfig("a", weight=1.0), SourceConfig("b"))}, r"\['a'\] have one, \['b'\] have none"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**changes)
