"""Comparisons of one process follow each other with one reference, and say what of a difference is rounding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from patchgen.runtime import model_calls
from patchgen.runtime.verify import media_ranks
from patchgen.runtime.verify.reference_model import ReferenceModel


def test_separate_documents_of_one_comparison_are_not_those_of_the_next(monkeypatch):
    model, separated = nn.Linear(1, 1), []
    reference = ReferenceModel.__new__(ReferenceModel)
    vars(reference).update(
        generated_class=SimpleNamespace(_from_config=lambda *_arguments, **_options: nn.Linear(1, 1)),
        correspondence=SimpleNamespace(to_generated=lambda state: state),
        builder=SimpleNamespace(layouts={}),
        model=model, config={}, attention="eager", seams={}, pad_token_id=0,
    )  # fmt: skip
    monkeypatch.setattr(model_calls, "separate_documents", lambda _model, how: separated.append(how))
    for name, value in {
        "reference_model": lambda *_arguments: reference,
        "case_names": lambda *_arguments, **_options: ["text"],
        "state_of": lambda *_arguments: None,
        "case_inputs": lambda *_arguments: ([], {}),
        "step_on_ranks": lambda *_arguments, **_options: (0.0, {}),
        "compare_steps": lambda *_arguments: {"loss": 0.0, "gradient": 0.0},
        "dist": SimpleNamespace(get_world_size=lambda: 1),
        "sharding": SimpleNamespace(shard_model=lambda *_arguments, **_options: None),
    }.items():
        monkeypatch.setattr(media_ranks, name, value)
    media_ranks.compare_all_cases("a", "Head", sp=1, ep=1, separates=True)
    media_ranks.compare("a", "Head", "text", sp=1, fsdp=False)
    assert separated == [True, False]


@pytest.mark.parametrize(
    ("of_zero", "of_small", "agrees"), [(1e-8, 1e-9, True), (1e-6, 0.0, False), (0.0, 1e-7, False)]
)
def test_sums_that_cancel_may_be_off_by_one_rounding_error_of_the_largest_gradient(of_zero, of_small, agrees):
    """The loss and its gradients depend on no weight, so perturbed weights excuse nothing."""
    expected = {"largest": torch.ones(2), "zero": torch.zeros(2), "small": torch.full((2,), 1e-5)}
    off = {"largest": 0.0, "zero": of_zero, "small": of_small}
    actual = {name: gradient + off[name] for name, gradient in expected.items()}
    row = media_ranks.compare_steps(nn.Linear(1, 1), lambda _model: (1.0, expected), (1.0, actual), floor=1e-4)
    assert ("reason" not in row) is agrees, row
