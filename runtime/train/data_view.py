"""The rows that a recipe trains on, for `patchgen data RECIPE`."""

from __future__ import annotations

from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.preview import Preview, make_preview
from patchgen.runtime.train import data_check, modalities, preflight, setup
from patchgen.runtime.train.recipe import Recipe, RecipeError


def preview_of_recipe(recipe: Recipe, *, rows: int, evaluation: bool = False) -> Preview:
    """The first packed rows of a run, from its own loader with one batch group.

    Of cached data these are the rows of any number of groups, which take them in turn. Of streamed and multimodal data each
    group packs its own share of the records, so with several groups the rows differ.

    Args:
        rows: how many.
        evaluation: of `eval_data` instead of `data`.

    Raises:
        RecipeError, DataError: a run would be refused for the same reason; or `evaluation` without `eval_data`.
    """
    if evaluation and recipe.eval_data is None:
        raise RecipeError(
            "The recipe has no section eval_data, which --eval shows. To fix: add it, or leave --eval out to see data."
        )
    data_check.require_data(recipe)
    given = recipe.eval_data if evaluation else recipe.data
    if given is not None and given.kind == "multimodal" and given.separate_modalities is None:
        recipe = modalities.with_separate_pairs(recipe, preflight.examine(recipe).separate_pairs)
    config, parts = recipe.evaluation_data if evaluation else recipe.data, setup.data_parts(recipe)
    assert config is not None, "a recipe without this section was refused"
    loader = setup.loader_of_group(config, parts, 0, 1)
    preparer = None
    if config.kind == "multimodal":
        preparer = PrepareMultimodal(config, parts.processor, parts.position_function)
    return make_preview(loader, config, parts.tokenizer, rows=rows, processor=parts.processor, preparer=preparer)
