"""Starts the ranks of a run: in this process, under torchrun, or by torch's own elastic agent.

    launch(recipe, processes=8)                                             # this machine
    launch(recipe, processes=8, nodes="4", rdzv_endpoint="node0:29500")     # the same command on each of four
    torchrun --nproc-per-node 8 -m patchgen.cli train RECIPE                # another agent, detected by its variables

One rank without restarts runs in this process. Otherwise the agent starts the ranks, and restarts them from the last
checkpoint up to `train.restarts` times. Ranks end with their agent (`parent_process.py`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.parallel import gloo_groups
from patchgen.runtime.parallel.collectives import broadcast_object
from patchgen.runtime.parent_process import PARENT, end_with_parent, parent_of_ranks
from patchgen.runtime.process_exit import end_process
from patchgen.runtime.train import architecture, compiled_kernels, start_times
from patchgen.runtime.train.recipe import Recipe, RecipeError, from_dict, to_dict
from patchgen.runtime.train.records import Summary
from patchgen.runtime.train.run_log import read_summary

# Time for a rank that was asked to stop to finish its step and save, before it is killed.
SHUTDOWN_SECONDS = "900"
STOPPED = 130  # the exit status of a run that was asked to stop, after saving
SKIPPED = 3  # of one that has taken its steps, but more than this share of them changed no weight
SKIPPED_SHARE = 0.01
# Reported without a traceback.
USER_ERRORS = ("RecipeError", "DataError", "CheckpointError", "TrainingStopped", "NonFiniteGradient")
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun, and by nobody else
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


class LaunchFailed(RuntimeError):
    """Ranks failed more often than they may be restarted; the message has the first failure."""


def launch(
    recipe: Recipe,
    *,
    processes: int = 1,
    nodes: str = "1",
    rdzv_endpoint: str = "",
    fresh: bool = False,
) -> int:
    """Runs a recipe to its end on all ranks of this machine (under torchrun on this rank); returns an `exit_status`.

    Args:
        processes: ranks on this machine.
        nodes: number of machines, or "min:max".
        rdzv_endpoint: host:port for rendezvous; needed for more than one machine.
        fresh: moves an earlier run out of the directory instead of continuing it.

    Raises:
        LaunchFailed: the ranks failed.
        RecipeError, DataError, CheckpointError: the arguments contradict each other, or the run is impossible; raised before
            any rank starts, except under torchrun.
    """
    from patchgen.runtime.train import checks, preflight, resume_changes, run_lock
    from patchgen.runtime.train.run_plan import require_valid

    if is_rank(processes, nodes, rdzv_endpoint):
        if fresh:
            raise RecipeError(
                "--fresh works only if this command starts the ranks, not under torchrun. To fix: name another log.directory."
            )
        if TORCHRUN in os.environ:  # the parent is its agent
            end_with_parent()
        # Nothing else but a stop: an agent would start ranks again that have trained to their end.
        return STOPPED if exit_status(worker(to_dict(recipe), is_checked=False)) == STOPPED else 0
    min_nodes, max_nodes = parse_nodes(nodes)
    if max_nodes > 1 and not rdzv_endpoint:
        raise RecipeError("More than one machine needs --rdzv-endpoint HOST:PORT, the same on all of them.")
    if max_nodes > 1 and fresh:
        raise RecipeError(
            "--fresh is for one machine: several would race to move the earlier run. To fix: name another log.directory."
        )
    if processes < 1:
        raise RecipeError(f"--nproc must be at least 1, not {processes}.")
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise RecipeError(
            f"--nproc must be at most {torch.cuda.device_count()}, one rank per GPU of this machine, not {processes}."
        )
    for name in RANK_VARIABLES:  # of something else; here they would be taken for this run's
        os.environ.pop(name, None)
    require_valid(recipe, world_size=processes * min_nodes)
    if max_nodes == 1:  # with several machines, another one may have started this run already
        run_lock.require_free(recipe.directory)
    if not fresh:
        resume_changes.require_resumable(recipe)
    recipe = preflight.decide_trainable(recipe, world=processes * max_nodes)
    checks.build_runnable(recipe, world=processes * min_nodes)
    if fresh:
        move_away(recipe.directory)
    if processes == 1 and max_nodes == 1 and recipe.train.restarts == 0:
        return exit_status(worker(to_dict(recipe)))
    return _run_agent(recipe, processes, min_nodes, max_nodes, rdzv_endpoint)


def is_rank(processes: int = 1, nodes: str = "1", rdzv_endpoint: str = "") -> bool:
    """Whether this process was started as one rank of several: by torchrun, or by a scheduler that sets torch's variables for each.

    Where it was not, `RANK` and `WORLD_SIZE` are of something else: of a pod, or left by an earlier command.

    Args:
        processes, nodes, rdzv_endpoint: of `launch`; with any of them, this command starts the ranks.

    Raises:
        RecipeError: they contradict torchrun, or the variables of a rank are incomplete.
    """
    options = {"--nproc": (processes, 1), "--nnodes": (nodes, "1"), "--rdzv-endpoint": (rdzv_endpoint, "")}
    given = [f"{name} {value}" for name, (value, default) in options.items() if value != default]
    if TORCHRUN in os.environ:
        if given:
            raise RecipeError(
                f"{' and '.join(given)} would start ranks, but torchrun has started this process as rank {os.environ.get('RANK')} "
                f"of {os.environ.get('WORLD_SIZE')}. To fix: give these numbers to torchrun, or run patchgen without it."
            )
        return True
    if given or "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise RecipeError(
            f"RANK = {os.environ['RANK']} and WORLD_SIZE = {os.environ['WORLD_SIZE']} say that this process is one of several "
            f"ranks, but not where they meet ({' and '.join(missing)}). To fix: unset both and let --nproc start the ranks, "
            "or start them with torchrun."
        )
    return True


def parse_nodes(nodes: str) -> tuple[int, int]:
    """The smallest and the largest number of machines of a run.

    Raises:
        RecipeError: `nodes` is neither a number nor min:max.
    """
    min_nodes, colon, max_nodes = nodes.partition(":")
    max_nodes = max_nodes if colon else min_nodes
    if not (min_nodes.isdecimal() and max_nodes.isdecimal() and 1 <= int(min_nodes) <= int(max_nodes)):
        raise RecipeError(
            f"--nnodes must be a number of machines, at least 1, or min:max, as 2 or 2:4, not '{nodes}'."
        )
    return int(min_nodes), int(max_nodes)


def _run_agent(recipe: Recipe, processes: int, min_nodes: int, max_nodes: int, endpoint: str) -> int:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # As torchrun does: a thread per core in each rank would oversubscribe the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[start_times.STARTED] = str(start_times.process_started())
    os.environ[start_times.LAUNCHED] = str(time.time())
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    os.environ[PARENT] = str(os.getpid())
    # A new store per start: in a shared one restarted ranks would find the addresses of dead ones.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # reported below
    if (folder := architecture.import_path(recipe.model)) is not None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    config = LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=processes,
        run_id=recipe.name,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint or "localhost:0",
        max_restarts=recipe.train.restarts,
        monitor_interval=0.5,
    )
    try:
        # A command, not a function: when asked to stop, the agent and spawned functions would wait for each other.
        elastic_launch(config, sys.executable)("-m", "patchgen.runtime.launch", json.dumps(to_dict(recipe)))
    except SignalException:
        return STOPPED  # the agent forwarded the signal and waited until the ranks had saved and exited
    except RendezvousError as error:
        advice = (
            "start the same command on all of them, with a port that all can reach on the machine that --rdzv-endpoint names"
            if max_nodes > 1
            else "see whether a firewall or a full table of ports keeps processes of this machine from `localhost`"
        )
        raise LaunchFailed(
            f"Rendezvous of {max_nodes} machine(s) at {config.rdzv_endpoint} failed: {type(error).__name__}: {error} To fix: "
            f"{advice}."
        ) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = f"Rank {rank} failed first (exit {failure.exitcode}).\n{_reason(failure)}"
        if max_nodes > 1:
            message += (
                "\nThat is the first failure on this machine. If a connection was lost, check the other machines."
            )
        raise LaunchFailed(message) from error
    summary = read_summary(recipe.directory)
    return exit_status(Summary(**summary) if summary is not None else None)


def exit_status(summary: Summary | None) -> int:
    """0, `STOPPED` or `SKIPPED`; 0 where the ranks left no summary on this machine."""
    if summary is None:
        return 0
    if summary.reason == "stop":
        return STOPPED
    return SKIPPED if summary.skipped > SKIPPED_SHARE * summary.steps else 0


def _reason(failure: Any) -> str:
    """The message of the rank's error; the traceback if it is not a user error."""
    content = failure.message
    if not isinstance(content, dict):
        return str(content)
    kind, _, message = content.get("message", "").partition(": ")
    if kind in USER_ERRORS:
        return message
    return content.get("extraInfo", {}).get("py_callstack", "").strip() or f"{kind}: {message}"


@record
def worker(values: dict[str, Any], *, is_checked: bool = True) -> Summary:
    """One rank: process group, device, trainer; returns how the run ended.

    Args:
        values: a recipe as a dict, as passed between processes.
        is_checked: whether `launch` has checked that the model can train; if not, rank 0 checks it for all.
    """
    recipe = from_dict(values)
    # Before process groups exist.
    outcome = None if is_checked or os.environ["RANK"] != "0" else _check_on_rank_0(recipe)
    # Row counts that vary between steps fragment memory of fixed-size segments (docs/parallel.md has figures).
    # torch reads the variable before its first allocation; the user may have set either name.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    compiled_kernels.keep()
    from patchgen.runtime.train import setup
    from patchgen.runtime.train.run_plan import require_valid
    from patchgen.runtime.train.trainer import Trainer

    compiled_kernels.allow_many_shapes()
    start_times.begin()
    with process_group() as device:
        start_times.mark("ranks meet")
        # Again: torchrun starts ranks without the checks of `launch`, and elastic agents change their number.
        require_valid(recipe, world_size=dist.get_world_size())
        if not is_checked:
            recipe = _broadcast_outcome(outcome)
        return Trainer(recipe, device, setup.listeners(recipe)).run()


def _check_on_rank_0(recipe: Recipe) -> tuple[dict[str, Any] | None, str]:
    """The completed recipe as a dict, or the reason why it cannot train."""
    from patchgen.runtime.train import checks, preflight, run_lock

    try:
        run_lock.require_free(recipe.directory)
        recipe = preflight.decide_trainable(recipe, world=int(os.environ["WORLD_SIZE"]))
        checks.build_runnable(recipe, world=int(os.environ["WORLD_SIZE"]))
        return to_dict(recipe), ""
    except (RecipeError, DataError, CheckpointError) as error:
        return None, str(error)


def _broadcast_outcome(outcome: tuple[dict[str, Any] | None, str] | None) -> Recipe:
    """The recipe as rank 0 completed it (collective).

    Raises:
        RecipeError: on all ranks, the model cannot train.
    """
    received = broadcast_object(outcome)
    assert received is not None, "rank 0 has an outcome"
    values, refusal = received
    if values is None:
        raise RecipeError(refusal)
    return from_dict(values)


@contextlib.contextmanager
def process_group():
    """Initialises torch.distributed, from the agent's variables or for a single rank; yields the device.

    Host tensors use gloo next to the device's backend, so agreeing on host values needs no device sync.
    """
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    single_rank_args: dict[str, Any] = {}
    if "RANK" not in os.environ:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in the stubs
        single_rank_args = {"store": store, "rank": 0, "world_size": 1}
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    gloo_groups.use_one_worker()
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **single_rank_args)
    try:
        yield device
    except BaseException:
        if single_rank_args:  # with several ranks, others may never get here
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def main() -> None:
    """One rank, started by the agent with the recipe as JSON."""
    end_with_parent(parent_of_ranks())
    try:
        worker(json.loads(sys.argv[1]))
    except Exception:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        end_process(1)  # `record` has saved the error; the agent reports the first one of all ranks
    end_process(0)


def move_away(directory: Path) -> None:
    """Renames a run's directory to the first free `NAME.1`, `NAME.2`, ..."""
    if not directory.exists():
        return
    number = 1
    while (target := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    shutil.move(directory, target)
    print(f"The earlier run is now {target}.", flush=True)


if __name__ == "__main__":
    main()
