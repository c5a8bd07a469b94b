"""Batches of cached text: each token once, whatever the ranks and wherever a run is resumed."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from corpora import documents_of, everything_in, make_corpus, make_loaders
from hypothesis import given, settings
from hypothesis import strategies as st

from patchgen.runtime.data import DataError
from patchgen.runtime.parallel.batch import IGNORED, slice_batch


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def rounds(loaders_):
    """The batches of all ranks, round by round; all ranks must end together."""
    found = list(zip(*loaders_, strict=True))
    return [[documents_of(batch) for batch in one_round] for one_round in found]


settings_ = settings(max_examples=25)


@settings_
@given(
    num_before=st.integers(1, 5),
    num_after=st.integers(1, 5),
    stop=st.integers(0, 6),
    packing=st.booleans(),
    shuffle=st.booleans(),
    pool=st.integers(1, 8),
    tokens=st.integers(16, 200),
    epochs=st.integers(1, 2),
)
def test_each_token_once_for_any_ranks_and_resume_point(
    corpus, num_before, num_after, stop, packing, shuffle, pool, tokens, epochs
):
    changes = {"packing": packing, "shuffle": shuffle, "pool": pool, "tokens_per_batch": tokens, "epochs": epochs}
    expected = Counter({document: count * epochs for document, count in everything_in(corpus, tokens).items()})

    before = make_loaders(corpus, num_before, **changes)
    seen = Counter()
    for _ in range(stop):
        batches = [next(loader, None) for loader in before]
        if batches[0] is None:
            assert batches == [None] * num_before
            break
        seen.update(document for batch in batches for document in documents_of(batch))
    states = [json.loads(json.dumps(loader.state_dict())) for loader in before]
    assert all(state == states[0] for state in states)

    after = make_loaders(corpus, num_after, **changes)
    for loader in after:
        loader.load_state_dict(states[0])
    for one_round in rounds(after):
        seen.update(document for documents_ in one_round for document in documents_)
    assert seen == expected


@settings_
@given(stop=st.integers(0, 12), num_batches=st.integers(1, 3))
def test_the_next_batch_after_resuming_is_the_very_one(corpus, stop, num_batches):
    ran = make_loaders(corpus, num_batches, epochs=None, tokens_per_batch=64)[-1]
    for _ in range(stop):
        next(ran)
    resumed = make_loaders(corpus, num_batches, epochs=None, tokens_per_batch=64)[-1]
    resumed.load_state_dict(ran.state_dict())
    for _ in range(5):
        expected, found = next(ran), next(resumed)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value


def test_a_position_of_other_settings_is_refused(corpus):
    (loader,) = make_loaders(corpus, 1)
    (other,) = make_loaders(corpus, 1, tokens_per_batch=100)
    with pytest.raises(DataError, match="tokens_per_batch: saved 128, now 100"):
        other.load_state_dict(loader.state_dict())


def test_padded_batches_have_one_shape_and_the_padding_no_labels(corpus):
    for batch in make_loaders(corpus, 1, pad_batches=True)[0]:
        assert batch["input_ids"].shape == (1, 128)
        documents_of(batch)


def test_sequence_parallel_slices_join_to_the_batch(corpus):
    batch = next(make_loaders(corpus, 1)[0])
    parts = [slice_batch(dict(batch), sp=4, sp_rank=rank) for rank in range(4)]
    length = batch["input_ids"].shape[1]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], dim=1)[:, :length], batch["input_ids"])
    shifted = torch.cat([part["shift_labels"] for part in parts], dim=1)[0]
    for start, end in zip(batch["cu_seq_lens_q"][:-1], batch["cu_seq_lens_q"][1:], strict=True):
        assert shifted[start : end - 1].tolist() == batch["labels"][0, start + 1 : end].tolist()
        assert shifted[end - 1] == IGNORED


@pytest.mark.parametrize("streaming", [False, True])
def test_a_position_is_valid_if_only_the_modification_time_changes(tmp_path, streaming):
    corpus = make_corpus(tmp_path)
    (loader,) = make_loaders(corpus, 1, streaming=streaming)
    next(loader)
    state = loader.state_dict()
    path = Path(corpus[0].sources[0].path)
    os.utime(path, ns=(1, 1))
    (again,) = make_loaders(corpus, 1, streaming=streaming)
    again.load_state_dict(state)
    assert next(again)["input_ids"].tolist() == next(loader)["input_ids"].tolist()
    path.write_text(path.read_text().replace("a0w0", "a1w0"))
    (other,) = make_loaders(corpus, 1, streaming=streaming)
    with pytest.raises(DataError, match="sources: saved"):
        other.load_state_dict(state)
