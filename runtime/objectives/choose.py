"""From the section `objective` of a recipe to the objective, and what can be refused before any rank starts."""

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
from patchgen.runtime.train.recipe import ObjectiveConfig, OptimConfig, Recipe, RecipeError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from torch import nn
    from transformers import PreTrainedModel

SHIPPED = {
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
        RecipeError: there is none of that name, it is no `Objective` or has no loss, or an option does not exist or fit.
    """
    kind = _class_of(config.name)
    known = [field.name for field in dataclasses.fields(kind)]
    for name in config.options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            there_are = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known) or 'none'}."
            raise RecipeError(f"objective.options.{name}: {config.name} has no such option. {there_are}")
    try:
        return TypeAdapter(kind).validate_python(dict(config.options))
    except ValidationError as error:
        told = "; ".join(_explain(problem) for problem in error.errors())
        raise RecipeError(f"objective.options of {config.name}: {told}") from error


def _explain(problem: ErrorDetails) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{where} must be given"
    if problem["type"] == "value_error":
        return str(problem.get("ctx", {})["error"])
    return f"{where}: {problem['msg'][0].lower()}{problem['msg'][1:]}, not {problem['input']!r}"


def _class_of(name: str) -> type[Objective]:
    spec = SHIPPED.get(name, name)
    if ":" not in spec:
        near = difflib.get_close_matches(name, SHIPPED, n=1)
        raise RecipeError(
            f"objective.name = '{name}' is none of {', '.join(SHIPPED)}, and no module:Class."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # a module of the folder that the run was started in
    try:
        importlib.import_module(spec.partition(":")[0])
        found = pkgutil.resolve_name(spec)
    except Exception as error:  # code of the user's own runs here
        raise RecipeError(
            f"objective.name = '{name}' cannot be imported: {type(error).__name__}: {error}. A module is looked for where "
            f"Python looks and in {here}."
        ) from error
    # Its own mark: `is_dataclass` sees that of a parent, too, and the fields of such a class are not options.
    is_dataclass = isinstance(found, type) and "__dataclass_params__" in vars(found)
    if not (is_dataclass and issubclass(found, Objective)):
        raise RecipeError(
            f"objective.name = '{name}' must be a dataclass derived from patchgen.runtime.objectives.Objective, with a "
            "@dataclass(frozen=True) of its own."
        )
    if found is not NextToken and found.loss is Objective.loss:
        raise RecipeError(f"objective.name = '{name}' has no method loss(batch), which computes what the run learns.")
    return found


def require_valid(recipe: Recipe) -> None:
    """Refuses what no rank could train.

    Raises:
        RecipeError: data of another kind, a kernel of the loss that would not run, or adapters beside a new head.
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
                f"objective.name = {recipe.objective.name} is a mean over pairs (per), which {section}.kind = "
                f"{' or '.join(PAIR_COLUMNS)} has, not '{data.kind}'."
            )
    if objective.needs_teacher is not (recipe.teacher is not None):
        raise RecipeError(
            f"objective.name = {recipe.objective.name} learns from a teacher: name it, teacher: {{source: FOLDER}}."
            if objective.needs_teacher
            else f"There is a section teacher, which objective.name = {recipe.objective.name} would not ask."
        )
    if not objective.is_models_own and recipe.kernels.causal_lm_loss is not None:
        raise RecipeError(
            f"kernels.causal_lm_loss = '{recipe.kernels.causal_lm_loss}' serves the loss of the next token, which "
            f"objective.name = {recipe.objective.name} does not compute. Leave it out."
        )
    if objective.head is not None and recipe.lora is not None:
        raise RecipeError(
            f"objective.name = {recipe.objective.name} puts another head on the model, which adapters would leave untrained. "
            "Train it without the section lora."
        )


def teacher_recipe(recipe: Recipe) -> Recipe | None:
    """A recipe of the section `teacher`, to be built as any model is; None where there is none."""
    if recipe.teacher is None:
        return None
    alone = {"objective": ObjectiveConfig(), "teacher": None, "lora": None}
    return dataclasses.replace(recipe, model=recipe.teacher, optim=OptimConfig(), **alone)


def require_same_tokens(model: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Refuses a teacher with another vocabulary.

    Raises:
        RecipeError: with both sizes.
    """
    own, others = (one.config.get_text_config().vocab_size for one in (model, teacher))
    if own != others:
        raise RecipeError(
            f"teacher: its vocab_size is {others} and that of the model {own}. They must have the same tokens."
        )


def require_seam(objective: Objective, model: nn.Module, users: dict) -> None:
    """Refuses a model that an objective would not be asked by.

    Raises:
        RecipeError: the model's head computes its loss without the seam.
    """
    if not objective.is_models_own and objective.head is None and "causal_lm_loss" not in users:
        raise RecipeError(
            f"objective.name = {type(objective).__name__}: {type(model).__name__} computes its loss by itself, not through "
            "the seam causal_lm_loss. Generate it with the pass fused_loss."
        )
