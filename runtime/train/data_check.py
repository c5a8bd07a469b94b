"""Checks of a recipe's data before any rank starts: the first rows of its sources, the options of its processor."""

from __future__ import annotations

from typing import Any

from patchgen.runtime.data import DataError
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.transform import check_first_rows
from patchgen.runtime.train import architecture, setup
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError


def require_data(recipe: Recipe) -> None:
    """Refuses data that every rank would refuse.

    Raises:
        RecipeError: a transform that does not exist or returns an invalid row; rows in no format of the kind, or in
            several; an option that the processor lacks or refuses; a special token that the tokenizer lacks.
    """
    architecture.prepare(recipe)
    for name, config in (("data", recipe.data), ("eval_data", recipe.eval_data)):
        if config is None:
            continue
        try:
            check_first_rows(config, [open_source(source) for source in config.sources])
            if not config.media and not config.special_tokens:
                continue
            if config.kind != "multimodal":
                Literals(setup.data_parts(recipe).tokenizer, kept=config.special_tokens)
                continue
            prepare = PrepareMultimodal(config, _processor(recipe.model.source), None)
            if config.media:
                prepare.options.require_accepted()
        except DataError as error:
            raise RecipeError(str(error) if name == "data" else f"{name}: {error}") from error


def _processor(source: str) -> Any:
    """The processor that comes with a model; None for a bare model type."""
    return None if models.is_model_type(source) else setup.load_processor(source)
