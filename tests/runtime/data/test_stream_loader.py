"""Batches of streams: each token once, whatever the ranks and workers and wherever a run is resumed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from corpora import documents_of, everything_in, make_corpus, make_loaders
from hypothesis import given, settings
from hypothesis import strategies as st

from patchgen.runtime.data import Counters, DataConfig, DataError, SourceConfig, build_loader


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The corpus with a broken line at the end of each file."""
    corpus = make_corpus(tmp_path_factory.mktemp("broken"))
    for source in corpus[0].sources:
        with open(source.path, "a") as file:
            file.write('{"text": \n')
    return corpus


def drain(loader, seen):
    for batch in loader:
        seen.update(documents_of(batch))


@settings(max_examples=100)
@given(
    num_batches=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    packing=st.booleans(),
    pool=st.integers(1, 8),
    tokens=st.integers(16, 200),
    epochs=st.integers(1, 3),
)
def test_each_token_once_for_any_ranks_and_resume_points(corpus, num_batches, stops, packing, pool, tokens, epochs):
    """Each start on another number of ranks, or the same."""
    changes = {"packing": packing, "pool": pool, "tokens_per_batch": tokens, "epochs": epochs, "streaming": True}
    expected = Counter({document: count * epochs for document, count in everything_in(corpus, tokens).items()})
    seen = Counter()
    loaders = make_loaders(corpus, num_batches[0], **changes)
    for stop, ranks in zip(stops, num_batches[1:], strict=False):
        for loader in loaders:
            for _, batch in zip(range(stop), loader, strict=False):
                seen.update(documents_of(batch))
        loaders = resumed(corpus, loaders, ranks, **changes)
    for loader in loaders:
        drain(loader, seen)
    assert seen == expected


def resumed(corpus, loaders, ranks, **changes):
    """Loaders on another number of ranks, or the same, that go on where these are."""
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    after = make_loaders(corpus, ranks, **changes)
    for rank, loader in enumerate(after):
        own = states[rank] if len(states) == ranks else None
        state = json.loads(json.dumps(loader.position_of(own, lambda: states)))
        loader.load_state_dict(state)
        assert json.loads(json.dumps(loader.state_dict())) == state
        assert own is None or state == own
    return after


@settings(max_examples=20)
@given(num_batches=st.tuples(*[st.integers(1, 4)] * 3), stops=st.tuples(*[st.integers(0, 4)] * 2))
def test_samples_are_counted_once_however_many_ranks_resume(broken, num_batches, stops):
    """Bad samples, those left by a rank that was ahead of the others among them."""
    changes = {"streaming": True, "on_bad": "skip", "tokens_per_batch": 64, "pool": 1, "epochs": 2}
    loaders = make_loaders(broken, num_batches[0], **changes)
    for stop, ranks in zip(stops, num_batches[1:], strict=True):
        for number, loader in enumerate(loaders):
            list(zip(range(stop + number), loader, strict=False))
        loaders = resumed(broken, loaders, ranks, **changes)
    total = Counters()
    for loader in loaders:
        list(loader)
        total.merge(loader.counters)
    assert total.counts == {"bad": 4}
    assert len(total.places) == 4


@settings(max_examples=20)
@given(stop=st.integers(0, 12), num_batches=st.integers(1, 3), pool=st.integers(1, 4))
def test_the_next_batch_after_resuming_is_the_very_one(corpus, stop, num_batches, pool):
    changes = {"epochs": None, "tokens_per_batch": 64, "streaming": True, "pool": pool}
    ran = make_loaders(corpus, num_batches, **changes)[-1]
    for _ in range(stop):
        next(ran)
    resumed = make_loaders(corpus, num_batches, **changes)[-1]
    resumed.load_state_dict(ran.state_dict())
    for _ in range(5):
        expected, found = next(ran), next(resumed)
        assert torch.equal(expected["input_ids"], found["input_ids"])
        assert torch.equal(expected["cu_seq_lens_q"], found["cu_seq_lens_q"])


@settings(max_examples=6)
@given(
    num_batches=st.integers(1, 3),
    workers=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    stop=st.integers(0, 5),
    tokens=st.integers(16, 100),
)
def test_workers_change_nothing(corpus, num_batches, workers, stop, tokens):
    """Neither what comes nor where a run can be resumed, with other workers too."""
    changes = {"tokens_per_batch": tokens, "streaming": True, "epochs": 2}
    seen = Counter()
    for rank in range(num_batches):
        alone = make_loaders(corpus, num_batches, **changes)[rank]
        helped, resumed = (make_loaders(corpus, num_batches, num_workers=count, **changes)[rank] for count in workers)
        for _, expected, found in zip(range(stop), alone, helped, strict=False):
            assert torch.equal(expected["input_ids"], found["input_ids"])
            seen.update(documents_of(found))
        assert alone.state_dict() == helped.state_dict()
        resumed.load_state_dict(helped.state_dict())
        for expected, found in zip(alone, resumed, strict=True):
            assert torch.equal(expected["input_ids"], found["input_ids"])
            seen.update(documents_of(found))
    assert seen == Counter({document: 2 * count for document, count in everything_in(corpus, tokens).items()})


def test_weights_set_the_shares_and_no_source_is_left_out(corpus):
    sources = [
        SourceConfig(source.path, weight=weight, streaming=True)
        for source, weight in zip(corpus[0].sources, (1, 3), strict=True)
    ]
    config = DataConfig(**{**vars(corpus[0]), "sources": tuple(sources)})
    loader = build_loader(config, tokenizer=corpus[1], batch_index=0, num_batches=1)
    seen = Counter()
    drain(loader, seen)
    expected = everything_in(corpus, 128)
    assert set(seen) == set(expected)
    first, second = (everything_in((DataConfig(sources=(source,)), corpus[1]), 128) for source in sources)
    assert {seen[document] for document in first} == {1}
    assert {seen[document] for document in second} == {8, 9}  # 34 of them come before the 12th of the other source


def test_a_position_of_another_rank_is_refused(corpus):
    one, other = make_loaders(corpus, 2, streaming=True)
    with pytest.raises(DataError, match="is of share 0 of 2 of the samples, and this rank reads share 1 of 2"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(DataError, match=r"of 2 shares of the samples, but those of \[1\] are missing"):
        other.position_of(None, lambda: [one.state_dict()])
    (different,) = make_loaders(corpus, 1, streaming=True, tokens_per_batch=64)
    with pytest.raises(DataError, match="tokens_per_batch: saved 128, now 64"):
        different.position_of(None, lambda: [one.state_dict(), other.state_dict()])


def test_a_seed_matters_to_a_position_only_where_something_is_shuffled(corpus):
    (first,) = make_loaders(corpus, 1, streaming=True)
    next(first)
    state = first.state_dict()
    older = {**state, "settings": {**state["settings"], "seed": 0}}
    for saved in (state, older):
        (other,) = make_loaders(corpus, 1, streaming=True, seed=5)
        other.load_state_dict(saved)
    sources = (corpus[0].sources[0], SourceConfig(corpus[0].sources[1].path, streaming=True))
    (shuffled,) = make_loaders(corpus, 1, sources=sources)
    (reseeded,) = make_loaders(corpus, 1, sources=sources, seed=5)
    with pytest.raises(DataError, match="seed: saved 0, now 5"):
        reseeded.load_state_dict(shuffled.state_dict())


def test_ranks_that_share_sequences_count_once_among_the_positions(corpus):
    """Two SP groups of two ranks become four groups: each sample once."""
    pairs = [make_loaders(corpus, 2, streaming=True, tokens_per_batch=64, pool=1) for _ in range(2)]
    seen = Counter()
    for twins in zip(*pairs, strict=True):
        found = [next(loader) for loader in twins]
        assert torch.equal(found[0]["input_ids"], found[1]["input_ids"])
        seen.update(documents_of(found[0]))
    ranks = [twin for twins in zip(*pairs, strict=True) for twin in twins]
    after = make_loaders(corpus, 4, streaming=True, tokens_per_batch=64, pool=1)
    for loader, rank in zip(after, ranks, strict=True):
        # The number of ranks is the same, so each has a position of its own, of another share.
        loader.load_state_dict(loader.position_of(rank.state_dict(), lambda: [one.state_dict() for one in ranks]))
        drain(loader, seen)
    assert seen == everything_in(corpus, 64)


def test_a_resumed_run_goes_on_counting(broken):
    changes = {"streaming": True, "on_bad": "skip", "tokens_per_batch": 64, "pool": 1, "epochs": 2}
    (whole,) = make_loaders(broken, 1, **changes)
    states = [whole.state_dict() for _ in whole]
    assert whole.counters.counts == {"bad": 4}
    for state in (states[0], states[len(states) // 2], states[-1]):
        (again,) = make_loaders(broken, 1, **changes)
        again.load_state_dict(state)
        list(again)
        assert again.counters == whole.counters
