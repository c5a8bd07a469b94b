"""Shows the rows that a recipe trains on: `patchgen data RECIPE`."""

from __future__ import annotations

from dataclasses import replace

from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.preview import Preview, make_preview
from patchgen.runtime.train import data_check, modalities, preflight, setup
from patchgen.runtime.train.recipe import Recipe, RecipeError


def view(recipe: Recipe, *, rows: int, evaluation: bool = False) -> Preview:
    """The first packed rows of a run from its own loader, in the order in which ranks take them.

    Args:
        rows: how many.
        evaluation: show `eval_data`.

    Raises:
        RecipeError, DataError: a run would be refused for the same reason.
    """
    if evaluation and recipe.eval_data is None:
        raise RecipeError("The recipe has no section eval_data.")
    data_check.require_data(recipe)
    section = recipe.eval_data if evaluation else recipe.data
    if section is not None and section.kind == "multimodal" and section.separate_modalities is None:
        recipe = modalities.with_separate_pairs(recipe, preflight.examine(recipe).separate_pairs)
    config, parts = recipe.evaluation_data if evaluation else recipe.data, setup.data_parts(recipe)
    assert config is not None, "a recipe without this section was refused"
    loader = setup.loader_of_group(config, parts, 0, 1)
    prepare = None
    if config.kind == "multimodal":
        prepare = PrepareMultimodal(replace(config, num_workers=0), parts.processor, parts.position_function)
    return make_preview(loader, config, parts.tokenizer, rows=rows, processor=parts.processor, prepare=prepare)
