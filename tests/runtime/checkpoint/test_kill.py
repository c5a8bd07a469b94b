"""A run that is killed, again and again, against one that never was: every loss that was ever logged, bit for bit."""

from __future__ import annotations

import random
import time

import killed_run
import pytest

from patchgen.runtime.checkpoint.saved_steps import SavedSteps


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """Losses of runs that are left alone, and how long their training takes, by number of ranks."""
    made = {}

    def of(world: int):
        if world not in made:
            directory = tmp_path_factory.mktemp(f"untouched-{world}")
            run = killed_run.Run(directory, world)
            while run.is_running() and not (directory / "losses.jsonl").exists():
                time.sleep(0.005)
            started = time.monotonic()
            run.finish()
            made[world] = killed_run.losses(directory), time.monotonic() - started
        return made[world]

    return of


def kill_at_random(directory, world: int, seconds: float, numbers: random.Random) -> str:
    """One attempt, killed at a random moment, or in the midst of a save; says where."""
    run = killed_run.Run(directory, world)
    log = directory / "losses.jsonl"
    before = log.stat().st_size if log.exists() else 0
    while run.is_running() and not (log.exists() and log.stat().st_size > before):
        time.sleep(0.002)
    in_a_save = numbers.random() < 0.5
    if in_a_save:
        while run.is_running() and not run.is_saving():
            time.sleep(0.0005)
        time.sleep(numbers.random() * 0.02)
    else:
        time.sleep(numbers.random() * seconds)
    was_saving = run.is_saving()
    if not run.kill():
        return "too late"
    return "in a save" if was_saving else "between saves"


def require_unharmed(directory, world: int, kills: int, untouched, seed: int) -> list[str]:
    """Kills a run `kills` times, lets it end, and compares."""
    expected, seconds = untouched(world)
    numbers = random.Random(seed)
    moments: list[str] = []
    part = 0
    while len([moment for moment in moments if moment != "too late"]) < kills:
        attempt = directory / str(part)
        moments.append(kill_at_random(attempt, world, seconds, numbers))
        whole = SavedSteps(attempt / "checkpoints").complete_steps()
        if moments[-1] == "too late" or (whole and whole[-1] >= killed_run.STEPS - 2):
            require_equal(attempt, world, expected)
            part += 1
    require_equal(directory / str(part), world, expected)
    return moments


def require_equal(directory, world: int, expected) -> None:
    killed_run.Run(directory, world).finish()
    got = killed_run.losses(directory)
    assert got == expected
    assert all(len(values) == 1 for values in got.values())


def test_killed_three_times(tmp_path, untouched):
    moments = require_unharmed(tmp_path, 1, 3, untouched, seed=0)
    assert len(moments) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kills", "seed"), [(1, 15, 1), (2, 15, 2)])
def test_killed_thirty_times(tmp_path, untouched, world, kills, seed):
    moments = require_unharmed(tmp_path, world, kills, untouched, seed)
    print({moment: moments.count(moment) for moment in sorted(set(moments))})
    assert moments.count("in a save") >= 2
