"""Which units of a sharded model use peer memory; their numbers are compared in tests/distributed/test_peer_shards.py."""

from __future__ import annotations

import pytest
from torch import nn

from patchgen.runtime.parallel import peer_units


def test_a_torch_that_rebuilt_fsdp2_gathers_by_collectives(monkeypatch):
    monkeypatch.setattr(peer_units, "IS_REBUILT", True)
    monkeypatch.setattr(nn.Module, "modules", lambda _: pytest.fail("a group is read"))
    for exchange in ("auto", "collectives"):
        assert peer_units.install(nn.Linear(1, 1), exchange) == 0
    with pytest.raises(ValueError, match=r"torch before 2\.15"):
        peer_units.install(nn.Linear(1, 1), "peer_memory")
