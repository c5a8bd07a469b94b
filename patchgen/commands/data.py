"""data: what a recipe trains on, as text and as a page."""

from __future__ import annotations

import sys
from pathlib import Path

from patchgen.commands.console import refusing_unwritable
from patchgen.errors import ConfigError, PatchgenError


def show(path: Path, assignments: list[str], *, rows: int, html: Path | None, evaluation: bool) -> None:
    """Prints the first packed rows of a recipe, or writes them to a page."""
    try:
        from patchgen.runtime.data import DataError
        from patchgen.runtime.data.preview_page import as_page
        from patchgen.runtime.data.preview_text import as_text
        from patchgen.runtime.train import data_view
        from patchgen.runtime.train import recipe as recipes
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`patchgen data` needs the package {error.name}: `pip install 'patchgen[train]'`."
        ) from error
    try:
        recipe = recipes.load(path, recipes.parse_overrides(assignments))
        preview = data_view.preview_of_recipe(recipe, rows=rows, evaluation=evaluation)
    except recipes.RecipeError as error:
        raise ConfigError(str(error)) from error
    except DataError as error:
        raise PatchgenError(str(error)) from error
    if html is None:
        print(as_text(preview, colour=sys.stdout.isatty()), end="")
    else:
        with refusing_unwritable(html, "--html"):
            html.write_text(as_page(preview, title=recipe.name), encoding="utf-8")
        print(f"Wrote {html}.")
