"""Which committed models the dear tests take: few, that together have every kind of site that any of them has.

What is asked of the others is cheap (bytes, imports, records, sizes); `make test-models` asks the dear questions of all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

import pytest

from patchgen.runtime.verify.committed_models import CommittedModel, committed

OF_EVERY_FILE = ("prune", "absolute_imports", "checkpoint_mapping")
OF_ONE_FILE = ("hand_edits",)


@functools.cache
def kinds(name: str) -> frozenset[str]:
    """What passes did to a model, in the words of `provenance.json` without the names of its own classes."""
    record = CommittedModel(name).record
    found = {"parts"} if record.get("parts") else set()
    for step in record["passes"]:
        for hit in step["hits"] if step["name"] not in (*OF_EVERY_FILE, *OF_ONE_FILE) else ():
            words = (word for word in re.findall(r"\w+", hit["what"]) if word not in record["symbols"])
            found.add(" ".join((step["name"], *words)))
    return frozenset(found)


def few(names: Iterable[str]) -> list[str]:
    """A few of the models that have all the kinds; a small file rather than a long one."""
    folders = {name: CommittedModel(name).folder / f"modeling_{name}.py" for name in names}
    return cover(
        {name: kinds(name) for name in folders}, {name: file.stat().st_size for name, file in folders.items()}
    )


def cover(kinds_of: Mapping[str, Iterable[str]], cost: Mapping[str, int]) -> list[str]:
    """Names whose kinds are all kinds: each time the one that brings most for its cost, then without the needless ones."""
    wanted, chosen = set().union(*kinds_of.values()), []
    while missing := wanted.difference(*(kinds_of[name] for name in chosen)):
        chosen.append(max(sorted(kinds_of), key=lambda name: len(missing & set(kinds_of[name])) / cost[name]))
    for name in list(chosen):
        if wanted == set().union(*(kinds_of[other] for other in chosen if other != name)):
            chosen.remove(name)
    return chosen


def models(names: Iterable[str]) -> list:
    """The models for `parametrize`: all but a few are slow."""
    names = list(names)
    quick = few(names)
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def heads(names: Iterable[str]) -> list:
    """The same of (model, head), of every head."""
    return [
        pytest.param(*one.values, head, marks=one.marks)
        for one in models(names)
        for head in CommittedModel(*one.values).record["heads"]
    ]


def with_hits(step: str) -> list[str]:
    """The committed models that a pass rewrites."""
    records = ((name, CommittedModel(name).record["passes"]) for name in committed())
    return [name for name, passes in records if any(one["name"] == step and one["hits"] for one in passes)]
