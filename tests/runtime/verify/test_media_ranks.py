"""Comparisons of one process follow each other with one reference: what one is told does not reach the next."""

from __future__ import annotations

from types import SimpleNamespace

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
