"""Which of the errors of several ranks is told: the cause, with the line of code, not what the others saw of it."""

from __future__ import annotations

from patchgen.runtime.verify.ranks import CaseFailed

WAITED = """rank 0:
Traceback (most recent call last):
  File "/files/modeling_mine.py", line 3, in forward
    dist.all_reduce(x)
RuntimeError: Connection closed by peer [127.0.0.1]

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/files/modeling_mine.py", line 4, in forward
    raise
RuntimeError: Connection reset by peer
"""
CAUSE = """rank 1:
Traceback (most recent call last):
  File "/files/modeling_mine.py", line 7, in forward
    x @ y
  File "/usr/lib/python3.11/contextlib.py", line 81, in inner
    return function()
  File "/x/site-packages/torch/nn.py", line 9, in linear
    mm(x, y)
RuntimeError: mat1 and mat2 shapes cannot be multiplied
"""


def test_the_cause_with_the_line_of_the_file():
    for text in (WAITED + CAUSE, CAUSE + WAITED):
        expected = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (modeling_mine.py line 7)"
        assert CaseFailed(text).first_error == expected


def test_what_ranks_waited_for_if_there_is_nothing_else():
    assert (
        CaseFailed(WAITED).first_error
        == "RuntimeError: Connection closed by peer [127.0.0.1] (modeling_mine.py line 3)"
    )
    assert CaseFailed("ranks [0, 1] did not end").first_error == "ranks [0, 1] did not end"
