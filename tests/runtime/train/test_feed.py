"""Steps out of finite data on one rank: none is lost, and one without a label is refused."""

from __future__ import annotations

import pytest
import torch

from patchgen.runtime.data import DataError
from patchgen.runtime.train import feed
from patchgen.runtime.train.feed import End, Feed, StepBatches


class Rows:
    """A loader of rows of four tokens, each a document."""

    def __init__(self, labels: list[bool]) -> None:
        self.labels, self.place = labels, 0

    def __iter__(self):
        for labelled in self.labels:
            self.place += 1
            ids = torch.arange(4)[None]
            yield {"input_ids": ids, "labels": ids if labelled else torch.full_like(ids, -100)}

    def state_dict(self) -> dict:
        return {"place": self.place}


class State:
    sp, sp_rank = 1, 0


class Cost:
    def flops(self, lengths) -> float:
        return float(sum(lengths))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(feed, "all_reduce", lambda tensor, operation: tensor)


def steps(labels: list[bool], per_step: int) -> list[int]:
    found, source = [], Feed(Rows(labels), State(), per_step, Cost())
    while isinstance(step := source.next(), StepBatches):
        assert step.position == {"place": sum(found) + len(step.micro_batches)}
        found.append(len(step.micro_batches))
    assert step == End("data")
    return found


@pytest.mark.parametrize(
    ("rows", "per_step", "expected"), [(3, 8, [3]), (7, 3, [3, 3, 1]), (4, 2, [2, 2]), (0, 2, [])]
)
def test_every_row_is_in_a_step(rows, per_step, expected):
    assert steps([True] * rows, per_step) == expected


def test_a_whole_step_without_a_label_is_refused_and_a_rest_without_one_is_the_end():
    assert steps([True, False, False], 2) == [2]
    with pytest.raises(DataError, match="8 tokens and not one label"):
        steps([True, True, False, False], 2)
