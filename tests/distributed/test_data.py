"""Loaders on real ranks: all end together, however unevenly the data fall."""

from __future__ import annotations

import json

import cases_data
import pytest


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("lengths", [(60,), (1, 1, 1, 90), (5, 200, 5)])
def test_ranks_with_uneven_data_end_together(two_ranks, tmp_path, streaming, lengths):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    found = two_ranks.run(cases_data.batches_of, str(path), str(tmp_path), streaming=streaming, timeout=60)
    assert len(found[0]) == len(found[1])
    assert all(tokens <= 32 for batches in found for tokens, _ in batches)
    assert sum(learned for batches in found for _, learned in batches) == sum(length + 1 for length in lengths)


def test_all_ranks_refuse_cached_data_together(two_ranks, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(
        AssertionError, match=r"(?s)rank 0:.*data.jsonl:2: not readable.*rank 1:.*data.jsonl:2: not readable"
    ):
        two_ranks.run(cases_data.batches_of, str(path), str(tmp_path), streaming=False, timeout=60)


def test_bad_samples_of_all_ranks_are_counted_and_those_of_a_group_once(two_ranks, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "good"}\n{"text": \n{"text": "good"}\n{"other": 1}\n{"text": 7}\n{"text": "good"}\n')
    for shared in (False, True):
        found = two_ranks.run(cases_data.counted, str(path), str(tmp_path), shared=shared, timeout=60)
        own = [sum(mine["counts"].values()) for mine, _ in found]
        assert sum(own) == 3
        assert min(own) > 0
        assert found[0][1] == found[1][1]
        assert found[0][1]["counts"] == {"bad": own[1] if shared else 3}
