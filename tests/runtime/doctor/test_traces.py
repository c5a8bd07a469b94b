"""Where the outputs of two models differ, and what of them was not compared."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from patchgen.runtime.doctor import plain_transformers
from patchgen.runtime.doctor.traces import ExpectedTrace, Trace


def trace(**outputs: torch.Tensor) -> Trace:
    return Trace(outputs, torch.ones(2, 3))


def test_a_finding_names_the_modules_that_could_not_be_compared():
    generated = trace(gate=torch.ones(2, 4), mlp=torch.ones(2, 8), layer=torch.ones(2, 8))
    expected = ExpectedTrace(generated, generated, 1e-5)
    assert expected.not_compared(generated) == ""
    # (1, 2, 8) has as many values as (2, 8), so `layer` is compared; `gate` has another size, and `mlp` is missing.
    upstream = trace(gate=torch.ones(2, 5), layer=torch.ones(1, 2, 8))
    assert expected.first_divergence(upstream) is None
    not_compared = (
        "2 of 3 modules were not compared: the two sides have no output of the same size for them (gate, mlp)."
    )
    patient = SimpleNamespace(dtype=torch.float32)
    assert plain_transformers._compare(patient, expected, upstream, "The export").summary.endswith(
        f"bit for bit. {not_compared}"
    )
    wrong_upstream = trace(gate=torch.ones(2, 5), layer=torch.zeros(2, 8))
    summary = plain_transformers._compare(patient, expected, wrong_upstream, "The export").summary
    assert "layer is the first that differs" in summary and summary.endswith(not_compared)
