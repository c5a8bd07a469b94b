"""The recipe is judged as `patchgen train` would judge it, and kernels and the first loss by what a run does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patchgen.runtime.doctor import CHECKS, examination, examine
from patchgen.runtime.doctor.examination import RecipeIsValid
from patchgen.runtime.doctor.losses import FirstLoss
from patchgen.runtime.doctor.patient import MissingPart, Patient
from patchgen.runtime.parallel.gradients import NonFiniteGradient
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.train.records import TrainingStopped


def patient_of(**sections: Any) -> SimpleNamespace:
    recipe = from_dict({"model": {"source": "qwen3_moe"}, "data": {}, **sections})
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=700))
    return SimpleNamespace(recipe=recipe, config=config, blueprint=None, checkpoint=None, is_trained=True, loss=0.5)


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"router_loss": "global", "batches_per_step": 8}},
        {"parallel": {"sp": 2, "ep": 3}, "train": {"batches_per_step": 6}},
    ],
)
def test_a_recipe_that_several_ranks_can_train_is_valid(sections, tmp_path, monkeypatch):
    monkeypatch.setattr(examination.data_check, "require_data", lambda recipe: None)
    patient = patient_of(log={"directory": str(tmp_path / "run")}, **sections)
    assert RecipeIsValid().run(patient).status == "passed"


def test_a_recipe_that_no_ranks_can_train_is_refused(tmp_path):
    parallel, train = {"dp_replicate": 2}, {"router_loss": "global", "batches_per_step": 3}
    with pytest.raises(RecipeError, match="is not divisible by the 2 batch groups"):
        RecipeIsValid().run(patient_of(log={"directory": str(tmp_path / "run")}, parallel=parallel, train=train))


@pytest.mark.parametrize(
    "error", [TrainingStopped("2 steps in a row"), NonFiniteGradient("The gradient norm is nan.")]
)
def test_a_step_that_stops_a_run_is_no_error_of_the_doctor(error):
    class Stops:
        name = "step"

        def run(self, patient: object) -> None:
            raise error

    finding = examination._run_check(Stops(), patient_of())
    assert (finding.status, finding.summary) == ("failed", str(error))
    assert "would stop there, too" in finding.advice


def test_a_loss_that_cannot_be_saved_is_measured_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    finding = FirstLoss().run(patient_of())
    assert finding.status == "passed"
    assert "0.500 nats per label" in finding.summary and "it cannot be saved" in finding.summary


def test_a_seam_that_the_recipe_makes_eager_is_not_inactive(toy):
    others = [check.name for check in CHECKS if check.name != "kernels"]
    report = examine(from_dict(toy.values | {"kernels": {"causal_lm_loss": "eager"}}), skip=others)
    assert report["kernels"].status == "passed", report.text()
    assert "causal_lm_loss" not in report["kernels"].summary
    assert "no compared layer by more than" in report["kernels"].summary


def test_the_reason_why_a_model_cannot_be_built_outlives_its_release():
    patient = Patient(patient_of().recipe)
    patient.failures["model"] = "see 'weights'"
    patient.release()
    with pytest.raises(MissingPart, match="it needs the model: see 'weights'"):
        _ = patient.model
    patient.close()
    other = Patient(patient_of().recipe)
    other.release()
    with pytest.raises(MissingPart, match="its memory was freed"):
        _ = other.model
    other.close()
