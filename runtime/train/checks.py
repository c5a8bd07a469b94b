"""Checks of a run before its ranks start, for `patchgen train` and `--dry-run`.

Shapes come from the model on the meta device, weight names from the file headers: nothing is allocated.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import CONFIG_MAPPING

from patchgen.runtime.checkpoint.load import match_checkpoint
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.objectives import choose
from patchgen.runtime.parallel import sharding
from patchgen.runtime.train import captured, data_check, lora, lora_targets, reading, router_balance, run_plan, setup
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_runnable(recipe: Recipe, world: int) -> PreTrainedModel:
    """The recipe's model on the meta device, after checking, as far as possible here, what `world` ranks would refuse.

    Raises:
        RecipeError, DataError, CheckpointError: the layout does not divide the model, a kernel cannot run here or the
            model does not call it, data or weights are missing or do not fit.
    """
    run_plan.require_valid(recipe, world)
    folder = Path(recipe.model.source)
    if folder.is_dir() and recipe.model.source in CONFIG_MAPPING and not models.is_model_type(recipe.model.source):
        warnings.warn(
            f"model.source = '{folder}' is a model type and also the folder {folder.resolve()}; the folder is read. Write "
            f"./{folder} to mean the folder, or start from another directory to mean the type.",
            stacklevel=2,
        )
    if recipe.has_media and models.is_model_type(recipe.model.source):
        setup.load_processor(recipe.model.source)  # a bare model type has no processor: this raises, as on the ranks
    for section, data in (("data", recipe.data), ("eval_data", recipe.eval_data)):
        with reading.naming_section(section):
            for source in data.sources if data else ():
                open_source(source)
    model = models.build_on_meta(recipe)
    models.configure_seams(recipe, model)
    router_balance.require_possible(recipe, model)
    if recipe.train.cuda_graph:
        captured.require_no_tables(recipe, model, world=world)
    if (teacher_recipe := choose.teacher_recipe(recipe)) is not None:
        teacher = models.build_on_meta(teacher_recipe)
        choose.require_same_vocab_size(model, teacher)
        setup.require_same_token_ids(recipe.model.source, teacher_recipe.model.source)
        _require_weights(teacher_recipe, teacher)
    if recipe.lora is not None:
        lora.require_trainable_on(lora_targets.find_targets(model, recipe.lora), world)
    layout = models.parallel_config(recipe.parallel, world)
    if layout.ep > 1:
        with _as_recipe_error(f"parallel.ep = {layout.ep}"):
            sharding.check_plan(model, sharding.expert_paths(model), layout.ep)
    _require_weights(recipe, model)
    if folder.is_dir():
        parts = setup.data_parts(recipe)  # refuses a missing tokenizer and tokens without an embedding
        data_check.require_lengths(recipe, parts)
    return model


def _require_weights(recipe: Recipe, model: PreTrainedModel) -> None:
    weights = models.find_weights(recipe.model)
    if isinstance(weights, Path):
        match = match_checkpoint(model, weights, **models.allowed_differences(recipe, model))
        models.require_effective(recipe, model, match)


@contextlib.contextmanager
def _as_recipe_error(setting: str) -> Iterator[None]:
    """Turns a ValueError into a RecipeError that names the recipe's key."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{setting}: {error}") from error
