"""train: reads the recipe, then prints it, its plan or a start script, or starts its ranks."""

from __future__ import annotations

import os
import re
import shlex
import sysconfig
from pathlib import Path

from patchgen.errors import ConfigError, PatchgenError
from patchgen.templates import render

SCRIPTS = ("slurm", "ssh")
SSH_PORT = 29_500  # of the rendezvous, on the first machine


def train(
    recipe_path: Path,
    settings: list[str],
    *,
    processes: int,
    nodes: str,
    rdzv_endpoint: str,
    fresh: bool,
    dry_run: bool,
    device: str | None = None,
    verbose: bool,
    print_config: bool,
    script: str | None,
) -> int:
    """Trains a recipe, or only prints its config, its plan or a start script; returns an exit status: 0, or that of `launch`.

    Args:
        settings: `KEY=VALUE`, as given to `--set`.
        device: with `dry_run`, the kind to plan for, one of `planned_device.NAMES`; None: that of this machine.
        script: the kind of start script to print, one of `SCRIPTS`.
    """
    if device is not None and not dry_run:
        raise ConfigError(
            "--device is what --dry-run plans for; a run takes what its machine has. To fix: add --dry-run."
        )
    if script is not None and fresh:
        raise ConfigError(
            "--fresh is not for --script: its machines would race to move the earlier run aside, and a requeued job would "
            "lose its own checkpoints. To fix: omit --fresh, and name another folder: --set log.directory=runs/NEW."
        )
    try:
        from patchgen.runtime import hub_access
        from patchgen.runtime.train import recipe as recipes
    except ModuleNotFoundError as error:
        raise ConfigError(f"Training needs the package {error.name}: `pip install 'patchgen[train]'`.") from error
    try:
        recipe = recipes.load(recipe_path, recipes.parse_overrides(settings))
        if print_config:
            print(recipes.to_yaml(recipe), end="")
            return 0
        if script is not None:
            from patchgen.runtime import launch
            from patchgen.runtime.train import run_plan

            run_plan.require_layout(recipe, processes * launch.parse_nodes(nodes)[0])
            print(start_script(script, recipe_path, recipe.name, settings, processes, nodes), end="")
            return 0
        if recipes.reads_hub(recipe):
            hub_access.use_cache_if_silent()
        from patchgen.runtime import launch
        from patchgen.runtime.checkpoint import CheckpointError
        from patchgen.runtime.data import DataError
        from patchgen.runtime.parallel.gradients import NonFiniteGradient
        from patchgen.runtime.train import checks, data_check, planned_device, preflight, run_plan
        from patchgen.runtime.train.trainer import TrainingStopped

        try:
            if dry_run:
                is_rank = launch.is_rank(processes, nodes, rdzv_endpoint)
                world = int(os.environ["WORLD_SIZE"]) if is_rank else processes * launch.parse_nodes(nodes)[0]
                if device is not None and device not in planned_device.NAMES:
                    raise ConfigError(f"--device must be one of {', '.join(planned_device.NAMES)}, not '{device}'.")
                planned = planned_device.planned(device)
                recipe, unchecked = planned_device.plannable(recipe, planned)
                run_plan.require_valid(recipe, world)
                recipe = preflight.decide_trainable(recipe, world)
                print(run_plan.describe(recipe, checks.build_runnable(recipe, world), world, planned, unchecked))
                print(f"\n{data_check.describe_first_samples(recipe)}")
                if verbose:
                    print(f"\n{recipes.to_yaml(recipe)}", end="")
                return 0
            return launch.launch(recipe, processes=processes, nodes=nodes, rdzv_endpoint=rdzv_endpoint, fresh=fresh)
        except (launch.LaunchFailed, CheckpointError, DataError, TrainingStopped, NonFiniteGradient) as error:
            raise PatchgenError(str(error)) from error
    except recipes.RecipeError as error:
        raise ConfigError(str(error)) from error


def start_script(kind: str, recipe_path: Path, job_name: str, settings: list[str], processes: int, nodes: str) -> str:
    """A script that starts the recipe on several machines: for Slurm, or with plain SSH."""
    if kind not in SCRIPTS:
        raise ConfigError(f"--script must be one of {', '.join(SCRIPTS)}, not '{kind}'.")
    from patchgen.runtime import launch

    min_nodes, max_nodes = launch.parse_nodes(nodes)
    if min_nodes != max_nodes:
        raise ConfigError(f"--script needs a fixed number of machines (--nnodes), not '{nodes}'.")
    command = ["patchgen", "train", str(recipe_path), "--nproc", str(processes), "--nnodes", str(min_nodes)]
    command_line = shlex.join([*command, *(word for setting in settings for word in ("--set", setting))])
    environment = shlex.quote(sysconfig.get_path("scripts"))  # a batch job or `ssh HOST COMMAND` activates none
    if kind == "ssh":  # the template puts both within double quotes
        environment = f'export PATH={environment}:"$PATH"'
        command_line, environment = (re.sub(r'(["$`\\])', r"\\\1", text) for text in (command_line, environment))
    job_name = re.sub(r"[^\w.-]+", "_", job_name)
    return render(
        f"{kind}.jinja",
        command_line=command_line,
        environment=environment,
        job_name=job_name,
        processes=processes,
        nodes=min_nodes,
        port=SSH_PORT,
    )
