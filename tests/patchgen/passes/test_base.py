"""Which member of a class that holds several sites counts as rewritten: the one with the mark, and no neighbour."""

from __future__ import annotations

import pytest

from patchgen import source
from patchgen.passes.base import Site
from patchgen.passes.fused_ops import FusedOps

TEXT = """class Norm:
    note = "def forward(self): # patchgen: fused_ops"

    def prepare(self, x):
        def forward(y):
            return y
        return forward(x)

    # patchgen: fused_ops
    @decorated
    def forward(
        self, x
    ):
        return x

    def last(self):
        # patchgen: fused_ops
        return 1

    async def plain(self): return 2
"""


@pytest.mark.parametrize(
    ("member", "expected"), [("prepare", False), ("forward", True), ("last", True), ("plain", False), ("none", False)]
)
def test_a_mark_belongs_to_the_member_that_it_stands_above_or_in(member: str, expected: bool):
    block = source.parse(TEXT).block("Norm")
    assert FusedOps().is_done(block, Site(f"Norm.{member}", "Norm", 1, "a test")) is expected
