"""Starts the ranks of a run: in this process, under torchrun, or by torch's own elastic agent.

    launch(recipe, processes=8)                                             # this machine
    launch(recipe, processes=8, nodes="4", rdzv_endpoint="node0:29500")     # the same command on each of four
    torchrun --nproc-per-node 8 -m patchgen.cli train RECIPE                # somebody else's agent: found by its variables

One rank without restarts runs in this process. Otherwise the agent starts the ranks, and starts them again, from the
last checkpoint, as often as `train.restarts` says.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shutil
import sys
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
from patchgen.runtime.train import architecture
from patchgen.runtime.train.recipe import Recipe, RecipeError, from_dict, to_dict
from patchgen.runtime.train.run_log import read_summary

# A rank that was asked to stop finishes its step and saves; only then is it ended by force.
SHUTDOWN_SECONDS = "900"
STOPPED = 130  # the exit status of a run that was asked to stop, and has saved
MEANT_FOR_READERS = ("RecipeError", "DataError", "CheckpointError", "TrainingStopped")
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
    """Runs a recipe to its end on all ranks of this machine; returns an exit status: 0, or `STOPPED`.

    Args:
        processes: ranks on this machine.
        nodes: machines, or "min:max" of them.
        rdzv_endpoint: host:port of the machine where they meet; needed for more than one.
        fresh: moves an earlier run out of the directory instead of continuing it.

    Raises:
        LaunchFailed: the ranks failed.
        RecipeError, DataError, CheckpointError: the arguments contradict each other, or the run cannot be: told before any
            rank starts.
    """
    from patchgen.runtime.train import checks, continuing, preflight, run_lock
    from patchgen.runtime.train.run_plan import require_valid

    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        if fresh:
            raise RecipeError("--fresh works where this command starts the ranks itself: name another log.directory.")
        return STOPPED if worker(to_dict(recipe), decided=False) == "stop" else 0
    least, _, most = nodes.partition(":")
    most = most or least
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise RecipeError(f"--nnodes takes a number or min:max, not '{nodes}'.")
    if int(most) > 1 and not rdzv_endpoint:
        raise RecipeError("More than one machine needs --rdzv-endpoint HOST:PORT, the same on all of them.")
    if processes < 1:
        raise RecipeError(f"--nproc must be at least 1, not {processes}.")
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise RecipeError(
            f"--nproc {processes}, but this machine has {torch.cuda.device_count()} GPUs: one rank each."
        )
    require_valid(recipe, world=processes * int(least))
    if int(most) == 1:  # of several machines one may be the first to have started it
        run_lock.require_free(recipe.directory)
    if not fresh:
        continuing.changes(recipe)
    recipe = preflight.require_trainable(recipe)
    checks.require_runnable(recipe, world=processes * int(least))
    if fresh:
        if int(most) > 1:
            raise RecipeError("--fresh is for one machine: several would race. Name another log.directory.")
        move_away(recipe.directory)
    if processes == 1 and int(most) == 1 and recipe.train.restarts == 0:
        return STOPPED if worker(to_dict(recipe)) == "stop" else 0
    return _run_agent(recipe, processes, int(least), int(most), rdzv_endpoint)


def _run_agent(recipe: Recipe, processes: int, least: int, most: int, endpoint: str) -> int:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # As torchrun does: ranks that each start a thread per core only fight for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    # A store per start: in one that outlives them, ranks that start again find addresses of those that are gone.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # told below, once
    if (place := architecture.import_path(recipe.model)) is not None:  # this process may have found it by other means
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))
    config = LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=processes,
        run_id=recipe.name,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint or "localhost:0",
        max_restarts=recipe.train.restarts,
        monitor_interval=0.5,
    )
    try:
        # A command, not a function: spawned functions wait for an agent that was asked to stop, and it for them.
        elastic_launch(config, sys.executable)("-m", "patchgen.runtime.launch", json.dumps(to_dict(recipe)))
    except SignalException:
        return STOPPED  # by now the ranks have saved and left: the agent handed the signal on and waited
    except RendezvousError as error:
        raise LaunchFailed(
            f"The {most} machines did not meet at {endpoint}: {type(error).__name__}: {error} Start the same command on all of "
            "them, with a port that they all reach on the machine that --rdzv-endpoint names."
        ) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told = f"Rank {rank} failed first (exit {failure.exitcode}).\n{_reason(failure)}"
        if most > 1:
            told += (
                "\nThis is what this machine saw. If a connection was lost here, look at the messages of the others."
            )
        raise LaunchFailed(told) from error
    summary = read_summary(recipe.directory)
    return STOPPED if summary is not None and summary["reason"] == "stop" else 0


def _reason(failure: Any) -> str:
    """What the rank left behind: the message, and the traceback if it was not written for a reader."""
    content = failure.message
    if not isinstance(content, dict):
        return str(content)
    kind, _, message = content.get("message", "").partition(": ")
    if kind in MEANT_FOR_READERS:
        return message
    return content.get("extraInfo", {}).get("py_callstack", "").strip() or f"{kind}: {message}"


@record
def worker(values: dict[str, Any], *, decided: bool = True) -> str:
    """One rank: process group, device, trainer; returns why the run ended (`Summary.reason`).

    Args:
        values: a recipe as a dict, for it crosses a process border.
        decided: whether `launch` has looked that the model can train; if not, rank 0 looks for all.
    """
    recipe = from_dict(values)
    outcome = None if decided or os.environ["RANK"] != "0" else _decide(recipe)  # before there are groups
    # Row counts that differ from step to step leave holes between segments of fixed size (docs/parallel.md has figures).
    # torch reads it before it first allocates; either name may hold the user's own choice.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with process_group() as device:
        from patchgen.runtime.train import setup
        from patchgen.runtime.train.run_plan import require_valid
        from patchgen.runtime.train.trainer import Trainer

        # Here too: torchrun starts ranks without `launch` having looked, and an elastic agent other numbers of them.
        require_valid(recipe, world=dist.get_world_size())
        if not decided:
            recipe = _agreed(outcome)
        return Trainer(recipe, device, setup.listeners(recipe)).run().reason


def _decide(recipe: Recipe) -> tuple[dict[str, Any] | None, str]:
    """The recipe that trains, as a dict, or why none does."""
    from patchgen.runtime.train import checks, preflight, run_lock

    try:
        run_lock.require_free(recipe.directory)
        recipe = preflight.require_trainable(recipe)
        checks.require_runnable(recipe, world=int(os.environ["WORLD_SIZE"]))
        return to_dict(recipe), ""
    except (RecipeError, DataError, CheckpointError) as error:
        return None, str(error)


def _agreed(outcome: tuple[dict[str, Any] | None, str] | None) -> Recipe:
    """What rank 0 decided; every rank must call it.

    Raises:
        RecipeError: on all ranks, the model cannot train.
    """
    decided = broadcast_object(outcome)
    assert decided is not None, "rank 0 has decided"
    values, refusal = decided
    if values is None:
        raise RecipeError(refusal)
    return from_dict(values)


@contextlib.contextmanager
def process_group():
    """torch.distributed for this rank, from the agent's variables or for one rank alone; yields the device.

    Collectives of the host go over gloo beside the device's own: what ranks agree on needs no wait for a device.
    """
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented there, not exported by type
        alone = {"store": store, "rank": 0, "world_size": 1}
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    gloo_groups.use_one_worker()
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **alone)
    try:
        yield device
    except BaseException:
        if alone:  # other ranks may never come to this
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def main() -> None:
    """One rank, as the agent starts it: the recipe is the only argument, as JSON."""
    try:
        worker(json.loads(sys.argv[1]))
    except Exception:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        sys.exit(1)  # `record` has written it down: the agent tells the first of all ranks, once


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
