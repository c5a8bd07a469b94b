"""Steps out of finite data on one rank: none is lost, and one without a label is refused."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from patchgen.runtime import random_state
from patchgen.runtime.data import Counters, DataError
from patchgen.runtime.objectives.classification import Classification
from patchgen.runtime.parallel import ParallelConfig
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

    def load_state_dict(self, state: dict) -> None:
        self.place = state["place"]

    counters, is_sharded = Counters(), False


class State:
    sp, sp_rank, config = 1, 0, ParallelConfig()


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
    with pytest.raises(DataError, match="8 tokens and no label"):
        steps([True, True, False, False], 2)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([False, True], "eval_data: A step has 4 tokens and no label"),
        ([], r"eval_data: no sample can be used.* What was read: .*To fix: correct the samples, or raise"),
    ],
)
def test_evaluation_data_without_a_loss_are_refused_before_the_run(labels, told):
    rows = Rows(labels)
    with pytest.raises(DataError, match=told):
        feed.require_first_step(Feed(rows, State(), 1, Cost(), section="eval_data"), rows, rows.state_dict())


class Drawn(Rows):
    """Rows of a transform that draws from every generator of this process."""

    def __iter__(self):
        for row in super().__iter__():
            draw()
            yield row


def draw() -> tuple[float, float, float]:
    return random.random(), numpy.random.rand(), float(torch.rand(()))


def test_a_look_at_the_evaluation_data_leaves_loader_and_generators_where_they_were():
    state, good = random_state.capture(), Drawn([True, False])
    expected = draw()
    random_state.restore(state)
    feed.require_first_step(Feed(good, State(), 1, Cost()), good, good.state_dict())
    assert good.place == 0, "back at its start"
    assert draw() == expected


class Labelled(Rows):
    """Rows of one document, whose classes are `labels`; padding has none."""

    def __iter__(self):
        for row, label in zip(super().__iter__(), self.labels, strict=True):
            labels = torch.tensor([label, float("nan")], dtype=torch.float64)
            yield row | {"document_sources": torch.tensor([0, -1]), "document_labels": labels}


@pytest.mark.parametrize("label", [3.0, -1.0, 0.5])
def test_a_label_that_is_no_class_is_refused_before_the_step(label):
    objective = Classification(num_labels=3)
    assert isinstance(Feed(Labelled([2.0, 1.0]), State(), 2, Cost(), objective=objective).next(), StepBatches)
    with pytest.raises(DataError, match=f"has the label {label:g}; with objective.options.num_labels = 3"):
        Feed(Labelled([2.0, label]), State(), 2, Cost(), objective=objective).next()
    numbers = Classification(num_labels=1)
    assert isinstance(Feed(Labelled([2.0, label]), State(), 2, Cost(), objective=numbers).next(), StepBatches)
