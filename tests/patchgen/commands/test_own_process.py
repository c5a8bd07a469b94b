"""Each call in a process of its own: results come as they are, an error is raised, and a crash is only its own."""

from __future__ import annotations

import os
import signal

import pytest

from patchgen.commands import own_process

LEFT: list[str] = []


def leave(name: str, factor: int) -> tuple[str, int]:
    """What this process has done before, and a product."""
    LEFT.append(name)
    return ",".join(LEFT), factor * 2


def crash(name: str, dies: bool) -> str:
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    return name


def fail(name: str) -> None:
    raise ValueError(f"{name} is wrong")


class KeywordOnly(Exception):
    """It is pickled, and not made again."""

    def __init__(self, *, layer: int) -> None:
        super().__init__(f"layer {layer} is wrong")


def fail_by_keyword(name: str) -> None:
    raise KeywordOnly(layer=3)


def fail_with_a_function(name: str) -> None:
    error = ValueError(f"{name} is wrong")
    error.cause = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    raise error


def return_a_function(name: str) -> object:
    return lambda: name


def test_a_process_knows_nothing_of_another():
    calls = {name: {"factor": factor} for factor, name in enumerate("abc")}
    assert dict(own_process.run_each(leave, calls, 2)) == {"a": ("a", 0), "b": ("b", 2), "c": ("c", 4)}


def test_a_crash_is_of_the_one_that_crashes():
    found = dict(own_process.run_each(crash, {name: {"dies": name == "b"} for name in "abc"}, 2))
    assert found["a"] == "a" and found["c"] == "c"
    assert isinstance(found["b"], own_process.ProcessDied) and str(found["b"]).startswith("b: its process died")


def test_an_error_is_raised_with_where_it_was():
    with pytest.raises(ValueError, match="a is wrong") as raised:
        list(own_process.run_each(fail, {"a": {}}, 1))
    assert "in fail" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail_by_keyword, "(?s)a raised what cannot be sent: .*in fail_by_keyword.*layer 3 is wrong"),
        (fail_with_a_function, "(?s)a raised what cannot be sent: .*in fail_with_a_function.*a is wrong"),
        (return_a_function, "(?s)a returned what cannot be sent: .*return_a_function"),
    ],
)
def test_what_cannot_be_sent_is_an_error_and_no_crash(function, message):
    with pytest.raises(RuntimeError, match=message) as raised:
        list(own_process.run_each(function, {"a": {}}, 1))
    assert not isinstance(raised.value, own_process.ProcessDied)
