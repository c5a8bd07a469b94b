"""train: reads the recipe, then shows it or starts its ranks."""

from __future__ import annotations

import os
from pathlib import Path

from patchgen.errors import ConfigError


def train(
    path: Path,
    assignments: list[str],
    *,
    processes: int,
    nodes: str,
    rdzv_endpoint: str,
    fresh: bool,
    dry_run: bool,
    print_config: bool,
) -> int:
    """Trains a recipe; 0 when it ended as it should."""
    try:
        from patchgen.runtime.train import recipe as recipes
    except ModuleNotFoundError as error:
        raise ConfigError(f"Training needs the package {error.name}: `pip install 'patchgen[train]'`.") from error
    try:
        recipe = recipes.load(path, recipes.parse_overrides(assignments))
        if print_config:
            print(recipes.to_yaml(recipe), end="")
            return 0
        if dry_run:
            from patchgen.runtime.train import plan

            world = int(os.environ.get("WORLD_SIZE", processes * int(nodes.partition(":")[0])))
            print(plan.describe(recipe, world))
            return 0
        from patchgen.runtime import launch

        return launch.launch(recipe, processes=processes, nodes=nodes, rdzv_endpoint=rdzv_endpoint, fresh=fresh)
    except recipes.RecipeError as error:
        raise ConfigError(str(error)) from error
