"""Batches of streams: each token once, whatever the ranks and workers and wherever a run is resumed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from corpora import documents_of, everything_in, make_corpus, make_loaders
from hypothesis import given, settings
from hypothesis import strategies as st

from patchgen.runtime.data import DataConfig, DataError, SourceConfig, build_loader


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def drain(loader, seen):
    for batch in loader:
        seen.update(documents_of(batch))


@settings(max_examples=30, deadline=None)
@given(
    num_batches=st.integers(1, 5),
    stops=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    packing=st.booleans(),
    pool=st.integers(1, 8),
    tokens=st.integers(16, 200),
    epochs=st.integers(1, 3),
)
def test_each_token_once_for_any_ranks_and_resume_points(corpus, num_batches, stops, packing, pool, tokens, epochs):
    changes = {"packing": packing, "pool": pool, "tokens_per_batch": tokens, "epochs": epochs, "streaming": True}
    expected = Counter({document: count * epochs for document, count in everything_in(corpus, tokens).items()})
    seen = Counter()
    loaders = make_loaders(corpus, num_batches, **changes)
    for stop in stops:
        for loader in loaders:
            for _, batch in zip(range(stop), loader, strict=False):
                seen.update(documents_of(batch))
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        loaders = make_loaders(corpus, num_batches, **changes)
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
            assert json.loads(json.dumps(loader.state_dict())) == state
    for loader in loaders:
        drain(loader, seen)
    assert seen == expected


@settings(max_examples=20, deadline=None)
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


@settings(max_examples=6, deadline=None)
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
    with pytest.raises(DataError, match="batch_index: saved 0, now 1"):
        other.load_state_dict(one.state_dict())


def test_a_resumed_run_goes_on_counting(tmp_path):
    corpus = make_corpus(tmp_path)
    for source in corpus[0].sources:
        with open(source.path, "a") as file:
            file.write('{"text": \n')
    changes = {"streaming": True, "on_bad": "skip", "tokens_per_batch": 64, "pool": 1, "epochs": 2}
    (whole,) = make_loaders(corpus, 1, **changes)
    states = [whole.state_dict() for _ in whole]
    assert whole.counters.counts == {"bad": 4}
    for state in (states[0], states[len(states) // 2], states[-1]):
        (again,) = make_loaders(corpus, 1, **changes)
        again.load_state_dict(state)
        list(again)
        assert again.counters == whole.counters
