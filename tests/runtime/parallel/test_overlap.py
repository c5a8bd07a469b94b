"""Computations that may run while an exchange is in flight."""

from __future__ import annotations

import pytest
import torch

from patchgen.runtime.parallel.overlap import Deferred


@pytest.mark.parametrize("args", [(), (torch.ones(2),)])
def test_an_announced_computation_runs_once_and_is_taken_once(args):
    computed = []
    deferred = Deferred(lambda *given: computed.append(given) or torch.zeros(2), *args)
    deferred.compute()
    assert not deferred().any()
    with pytest.raises(RuntimeError, match="requested twice"):
        deferred()
    assert len(computed) == 1
