"""Where the outputs of two models differ, and what of them was not compared."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from patchgen.runtime.doctor import plain_transformers
from patchgen.runtime.doctor.traces import ExpectedTrace, Trace


def trace(**outputs: torch.Tensor) -> Trace:
    return Trace(outputs, torch.ones(2, 3))


def test_a_finding_names_the_modules_that_could_not_be_compared():
    own = trace(gate=torch.ones(2, 4), mlp=torch.ones(2, 8), layer=torch.ones(2, 8))
    expected = ExpectedTrace(own, own, 1e-5)
    assert expected.not_compared(own) == ""
    other = trace(gate=torch.ones(2, 5), layer=torch.ones(1, 2, 8))
    assert expected.first_divergence(other) is None
    told = "Not compared: 2 of 3 modules have no output of that size there (gate, mlp)."
    patient = SimpleNamespace(dtype=torch.float32)
    assert plain_transformers._compare(patient, expected, other, "The export").summary.endswith(f"bit for bit. {told}")
    wrong = trace(gate=torch.ones(2, 5), layer=torch.zeros(2, 8))
    found = plain_transformers._compare(patient, expected, wrong, "The export").summary
    assert "layer is the first that differs" in found and found.endswith(told)
