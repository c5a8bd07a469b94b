"""doctor: checks of a recipe with its checkpoint and data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.errors import ConfigError

if TYPE_CHECKING:
    from patchgen.runtime.doctor.examination import Entry


def doctor(path: Path, assignments: list[str], *, skip: list[str], as_json: bool, memory: float | None = None) -> int:
    """Checks a recipe with its checkpoint and data; 0 if no check failed. `memory` is in GiB."""
    try:
        from patchgen.runtime import hub_access
        from patchgen.runtime.train import recipe as recipes
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`patchgen doctor` needs the package {error.name}: `pip install 'patchgen[train]'`."
        ) from error
    try:
        recipe = recipes.load(path, recipes.parse_overrides(assignments))
        if recipes.reads_hub(recipe):
            hub_access.use_cache_if_silent()
        from transformers.utils import logging

        from patchgen.runtime.doctor import examine, format_entry

        logging.disable_progress_bar()

        def on_entry(entry: Entry) -> None:
            if not as_json:
                print(format_entry(entry), flush=True)

        report = examine(recipe, skip=skip, memory=None if memory is None else int(memory * 2**30), on_entry=on_entry)
    except recipes.RecipeError as error:
        raise ConfigError(str(error)) from error
    print(json.dumps(report.as_json(), indent=1) if as_json else report.details())
    return report.exit_status
