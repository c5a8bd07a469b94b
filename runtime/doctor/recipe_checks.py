"""Can the recipe run, and is its model proven?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchgen.runtime.doctor.finding import Check, Finding, passed
from patchgen.runtime.train import data_check, preflight, run_plan

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient


class RecipeIsValid(Check):
    """Nothing in the recipe that `patchgen train` would refuse before any rank starts."""

    name = "recipe"

    def run(self, patient: Patient) -> Finding:
        section = patient.recipe.parallel
        run_plan.require_valid(patient.recipe, section.sp * section.dp_replicate * max(1, section.ep // section.sp))
        config = patient.config
        data_check.require_data(patient.recipe)
        _ = patient.blueprint
        return passed(
            f"{type(config).__name__} of {patient.recipe.model.source}; weights: {patient.checkpoint or 'random'}."
        )


class Proof(Check):
    """The proof that `patchgen train` requires, on a small form of the model."""

    name = "proof"

    def run(self, patient: Patient) -> Finding:
        patient.recipe, patient.proof_has_run = preflight.require_trainable(patient.recipe), True
        rows = ", each document in a row of its own" if patient.recipe.model.separate_documents else ""
        attention = patient.recipe.model.attention
        return passed(f"A small form of the model trains as upstream's, with attention '{attention}'{rows}.")
