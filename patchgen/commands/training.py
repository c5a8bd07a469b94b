"""train: reads the recipe, then prints it or starts its ranks."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from patchgen.errors import ConfigError, PatchgenError
from patchgen.templates import render

SCRIPTS = ("slurm", "ssh")


def train(
    path: Path,
    assignments: list[str],
    *,
    processes: int,
    nodes: str,
    rdzv_endpoint: str,
    fresh: bool,
    dry_run: bool,
    verbose: bool,
    print_config: bool,
    script: str | None,
) -> int:
    """Trains a recipe, or only prints its config, its plan or a start script; 0 on success."""
    if script is not None and fresh:
        raise ConfigError(
            "--fresh is not for --script: its machines would race to move the earlier run aside, and a requeued job would "
            "lose its own checkpoints. To fix: omit --fresh, and name another folder: --set log.directory=runs/NEW."
        )
    try:
        from patchgen.runtime.train import recipe as recipes
    except ModuleNotFoundError as error:
        raise ConfigError(f"Training needs the package {error.name}: `pip install 'patchgen[train]'`.") from error
    try:
        recipe = recipes.load(path, recipes.parse_overrides(assignments))
        if print_config:
            print(recipes.to_yaml(recipe), end="")
            return 0
        if script is not None:
            print(start_script(script, path, recipe.name, assignments, processes, nodes), end="")
            return 0
        from patchgen.runtime import launch
        from patchgen.runtime.checkpoint import CheckpointError
        from patchgen.runtime.data import DataError
        from patchgen.runtime.parallel.gradients import NonFiniteGradient
        from patchgen.runtime.train import checks, preflight, run_plan
        from patchgen.runtime.train.trainer import TrainingStopped

        try:
            if dry_run:
                world = int(os.environ.get("WORLD_SIZE", processes * launch.parse_nodes(nodes)[0]))
                run_plan.require_valid(recipe, world)
                recipe = preflight.require_trainable(recipe)
                print(run_plan.describe(recipe, checks.require_runnable(recipe, world), world))
                if verbose:
                    print(f"\n{recipes.to_yaml(recipe)}", end="")
                return 0
            return launch.launch(recipe, processes=processes, nodes=nodes, rdzv_endpoint=rdzv_endpoint, fresh=fresh)
        except (launch.LaunchFailed, CheckpointError, DataError, TrainingStopped, NonFiniteGradient) as error:
            raise PatchgenError(str(error)) from error
    except recipes.RecipeError as error:
        raise ConfigError(str(error)) from error


def start_script(kind: str, path: Path, name: str, assignments: list[str], processes: int, nodes: str) -> str:
    """A script that starts the recipe on several machines: for Slurm, or with plain SSH."""
    if kind not in SCRIPTS:
        raise ConfigError(f"--script must be one of {', '.join(SCRIPTS)}, not '{kind}'.")
    from patchgen.runtime import launch

    count, most = launch.parse_nodes(nodes)
    if count != most:
        raise ConfigError(f"--script needs a fixed number of machines (--nnodes), not '{nodes}'.")
    command = ["patchgen", "train", str(path), "--nproc", str(processes), "--nnodes", str(count)]
    start = shlex.join([*command, *(word for assignment in assignments for word in ("--set", assignment))])
    if kind == "ssh":  # the template puts it within double quotes
        start = re.sub(r'(["$`\\])', r"\\\1", start)
    name = re.sub(r"[^\w.-]+", "_", name)
    return render(f"{kind}.jinja", start=start, name=name, processes=processes, nodes=count, port=29_500)
