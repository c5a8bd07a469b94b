"""From the recipe's section `objective` to the objective, with checks before any rank starts."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from patchgen.runtime.data.formats import PAIR_COLUMNS
from patchgen.runtime.objectives.base import NextToken, Objective
from patchgen.runtime.train.recipe import Fp8Config, ObjectiveConfig, OptimConfig, Recipe, RecipeError
from patchgen.runtime.verify.verdict import one_line_error

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from torch import nn
    from transformers import PreTrainedModel

BUILT_IN = {
    "next_token": "patchgen.runtime.objectives.base:NextToken",
    "dpo": "patchgen.runtime.objectives.dpo:DPO",
    "reward": "patchgen.runtime.objectives.reward:Reward",
    "classification": "patchgen.runtime.objectives.classification:Classification",
    "token_classification": "patchgen.runtime.objectives.tokens:TokenClassification",
    "question_answering": "patchgen.runtime.objectives.tokens:QuestionAnswering",
    "embedding": "patchgen.runtime.objectives.embedding:Embedding",
    "distillation": "patchgen.runtime.objectives.distillation:Distillation",
}


def objective_of(config: ObjectiveConfig) -> Objective:
    """The objective that a recipe names, with its options.

    Raises:
        RecipeError: an unknown name, a class that is no `Objective` or has no loss, an unknown or invalid option.
    """
    cls = _class_of(config.name)
    known = [field.name for field in dataclasses.fields(cls)]
    for name in config.options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known) or 'none'}."
            raise RecipeError(f"objective.options.{name}: {config.name} has no such option. {hint}")
    try:
        return TypeAdapter(cls).validate_python(dict(config.options))
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise RecipeError(f"objective.options of {config.name}: {problems}") from error


def _explain(problem: ErrorDetails) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{where} is required"
    if problem["type"] == "value_error":
        return str(problem.get("ctx", {})["error"])
    return f"{where}: {problem['msg'][0].lower()}{problem['msg'][1:]}, not {problem['input']!r}"


def _class_of(name: str) -> type[Objective]:
    spec = BUILT_IN.get(name, name)
    if ":" not in spec:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        raise RecipeError(
            f"objective.name = '{name}' is neither one of {', '.join(BUILT_IN)} nor a module:Class."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # for modules in the working directory
    try:
        importlib.import_module(spec.partition(":")[0])
        imported = pkgutil.resolve_name(spec)
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(
            f"objective.name = '{name}' cannot be imported: {one_line_error(error)} Modules are searched for on "
            f"Python's path and in {here}."
        ) from error
    # `dataclasses.is_dataclass` is true for an undecorated subclass, too, whose own fields would not be options.
    is_dataclass = isinstance(imported, type) and "__dataclass_params__" in vars(imported)
    if not (is_dataclass and issubclass(imported, Objective)):
        raise RecipeError(
            f"objective.name = '{name}' must be derived from patchgen.runtime.objectives.Objective and decorated with "
            "@dataclass(frozen=True)."
        )
    if imported is not NextToken and imported.loss is Objective.loss:
        raise RecipeError(f"objective.name = '{name}' has no method loss(batch).")
    return imported


def require_valid(recipe: Recipe) -> None:
    """Refuses combinations that no rank can train.

    Raises:
        RecipeError: data of another kind, a missing or unused teacher, a loss kernel that would not run, or adapters with a new
            head.
    """
    objective = objective_of(recipe.objective)
    for section, data in (("data", recipe.data), ("eval_data", recipe.eval_data)):
        if data is not None and objective.kinds and data.kind not in objective.kinds:
            raise RecipeError(
                f"objective.name = {recipe.objective.name} learns from {section}.kind = {' or '.join(objective.kinds)}, not "
                f"'{data.kind}'."
            )
        if data is not None and objective.per == "pair" and data.kind not in PAIR_COLUMNS:
            raise RecipeError(
                f"objective.name = {recipe.objective.name} is a mean over pairs (per = 'pair'), which need {section}.kind = "
                f"{' or '.join(PAIR_COLUMNS)}, not '{data.kind}'."
            )
    if objective.needs_teacher is not (recipe.teacher is not None):
        raise RecipeError(
            f"objective.name = {recipe.objective.name} needs a teacher. Add teacher: {{source: FOLDER}}."
            if objective.needs_teacher
            else f"objective.name = {recipe.objective.name} does not use the section teacher. Remove it."
        )
    if not objective.is_models_own and recipe.kernels.causal_lm_loss is not None:
        raise RecipeError(
            f"kernels.causal_lm_loss = '{recipe.kernels.causal_lm_loss}' computes the next-token loss, which "
            f"objective.name = {recipe.objective.name} does not use. Remove it."
        )
    if objective.head is not None and recipe.lora is not None:
        raise RecipeError(
            f"objective.name = {recipe.objective.name} adds a new head to the model, which lora would leave untrained. Remove "
            "the section lora."
        )


def teacher_recipe(recipe: Recipe) -> Recipe | None:
    """A recipe that builds the model of the section `teacher`; None if there is no teacher."""
    if recipe.teacher is None:
        return None
    defaults = {"objective": ObjectiveConfig(), "teacher": None, "lora": None}
    defaults["train"] = dataclasses.replace(recipe.train, precision=None, fp8=Fp8Config())
    return dataclasses.replace(recipe, model=recipe.teacher, optim=OptimConfig(), **defaults)


def require_same_vocab_size(model: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raises RecipeError for a teacher with another vocabulary size."""
    student_size, teacher_size = (
        model_or_teacher.config.get_text_config().vocab_size for model_or_teacher in (model, teacher)
    )
    if student_size != teacher_size:
        raise RecipeError(
            f"teacher: its vocab_size is {teacher_size} and that of the model {student_size}. They must have the same tokens. If "
            f"one is a grown copy of the other, set {'teacher' if teacher_size < student_size else 'model'}."
            f"resize_vocab: {{to: {max(student_size, teacher_size)}}}."
        )


def require_seam(objective: Objective, model: nn.Module, seam_users: dict) -> None:
    """Raises RecipeError if the model computes its loss without the seam that calls the objective."""
    if not objective.is_models_own and objective.head is None and "causal_lm_loss" not in seam_users:
        raise RecipeError(
            f"objective.name = {type(objective).__name__}: {type(model).__name__} computes its loss itself, not through "
            "the seam causal_lm_loss. Generate it with the pass fused_loss."
        )
