"""Implementations of seams that serve one block only."""

from __future__ import annotations

import pytest

from patchgen.runtime import seams


def test_a_registered_implementation_is_gone_after_its_block():
    before = seams.implementations("rotary")
    with seams.registered({"rotary": abs}, "absolute"), seams.using(rotary="absolute"):
        assert seams.implementation("rotary") is abs
    assert seams.implementations("rotary") == before
    with seams.registered({"rotary": abs}, before[-1]):
        assert seams.implementations("rotary") == before
    assert seams._seam("rotary").implementations[before[-1]] is not abs, "it is what it was"
    with pytest.raises(ValueError, match="no seam 'nope'"), seams.registered({"rotary": abs, "nope": abs}, "absolute"):
        pass
    with pytest.raises(ZeroDivisionError), seams.registered({"rotary": abs}, "absolute"):
        raise ZeroDivisionError
    assert seams.implementations("rotary") == before
