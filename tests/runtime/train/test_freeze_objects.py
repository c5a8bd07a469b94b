"""What lives when a run has begun is left out of later collections; what comes after is not."""

from __future__ import annotations

import gc
import weakref

from patchgen.runtime.train.trainer import freeze_objects


class Node:
    pass


def cycle() -> weakref.ref:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


def test_objects_that_stay_are_frozen_and_later_ones_collected():
    before, dropped = gc.get_freeze_count(), cycle()
    try:
        freeze_objects()
        assert dropped() is None, "what nobody holds is collected first"
        assert gc.get_freeze_count() > before
        later = cycle()
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
