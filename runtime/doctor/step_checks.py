"""A training step: its time, its memory against the estimate, and its loss and gradient norm on ranks against one rank."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING

import torch
import torch.distributed as dist

from patchgen.runtime import launch
from patchgen.runtime.doctor.finding import Check, Finding, failed, format_bytes, passed
from patchgen.runtime.doctor.patient import MissingPart
from patchgen.runtime.doctor.rank_step import StepFigures, measure_step
from patchgen.runtime.parent_process import PARENT
from patchgen.runtime.train import flops, memory
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError, to_dict

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

MAX_CPU_PARAMETERS = 100_000_000
"""The largest model that is compared on gloo ranks of the CPU."""
MAX_CPU_RANKS = 4
RANKS_TIMEOUT = 600
"""Seconds in which the ranks must have finished."""
POLL_SECONDS = 0.1
RANK_SCRIPT = "from patchgen.runtime.doctor.rank_step import main; main()"
MAX_OVER_ESTIMATE = 1.5
"""How many times its estimate the memory of a step may be."""
WORKSPACE = 2**28
"""Bytes that libraries and kernels take in addition, whatever the size of the model."""
RANK_TOLERANCE = 1e-3
"""The largest relative difference of the loss on ranks in fp32; ten times as much for the gradient norm."""
RANK_TOLERANCE_16_BIT = 3e-2


class Step(Check):
    """The time of a step on one rank, and its memory against the estimate."""

    name = "step"

    def run(self, patient: Patient) -> Finding:
        figures, estimate = single_rank_figures(patient), estimate_of(patient, 1)
        note = unexamined_options(patient.recipe, _ranks_or_one(patient))
        summary = f"A step of {figures.tokens} tokens took {figures.seconds:.2f} s"
        peak = patient.recipe.log.peak_tflops or flops.peak_tflops(patient.device)
        summary += f", {figures.flops / figures.seconds / 1e12 / peak:.0%} of the device's peak" if peak else ""
        if figures.peak_bytes is None:
            measured, estimated = figures.state_bytes, estimate.parameters + estimate.gradients + estimate.optimizer
            summary += f"; parameters, gradients and optimizer take {format_bytes(measured)}"
            if not math.isclose(measured, estimated, rel_tol=0.05, abs_tol=1 << 20):
                return failed(
                    f"{summary}, and the estimate is {format_bytes(estimated)}.{note}",
                    "The estimate of --dry-run is wrong for this model: report it, and plan with the figure measured here.",
                )
            return passed(f"{summary}, as estimated (a CPU's peak is not measured).{note}")
        summary += f" and {format_bytes(figures.peak_bytes)}; the estimate is {format_bytes(estimate.total)}"
        if figures.peak_bytes > MAX_OVER_ESTIMATE * estimate.total + WORKSPACE:
            return failed(
                f"{summary}.{note}",
                "Plan with the figure measured here; parallel.activation_checkpointing: full needs less.",
            )
        return passed(f"{summary}.{note}")


class Layout(Check):
    """The loss and the gradient norm of a step on the recipe's ranks are those on one rank."""

    name = "layout"

    def run(self, patient: Patient) -> Finding:
        ranks = ranks_for(patient)
        one_rank = single_rank_figures(patient)
        all_ranks = step_on_ranks(single_step(patient.recipe, ranks), ranks)
        tolerance = RANK_TOLERANCE if patient.dtype == torch.float32 else RANK_TOLERANCE_16_BIT
        summary = (
            f"On {ranks} ranks (sp {patient.recipe.parallel.sp}, ep {patient.recipe.parallel.ep}) the loss is {all_ranks.loss:.5f} "
            f"and the gradient norm {all_ranks.norm:.4g}; on one rank {one_rank.loss:.5f} and {one_rank.norm:.4g}."
            + unexamined_options(patient.recipe, ranks)
        )
        same_loss = math.isclose(one_rank.loss, all_ranks.loss, rel_tol=tolerance)
        if not (same_loss and math.isclose(one_rank.norm, all_ranks.norm, rel_tol=10 * tolerance)):
            return failed(
                summary,
                "Train with sp: 1 or ep: 1 (--set), whichever makes them equal, and report the model type with both figures.",
            )
        return passed(summary)


def single_step(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe with one batch per rank and step. To compare, one rank takes those of all as micro-batches, so what needs a
    single one is switched off: a captured graph, and a global router loss."""
    router_loss = "row" if ranks > 1 else recipe.train.router_loss
    train = replace(recipe.train, batches_per_step=max(ranks, 1), cuda_graph=False, router_loss=router_loss)
    return replace(recipe, train=replace(train, profile_steps=0, profile_start=10))


def unexamined_options(recipe: Recipe, ranks: int) -> str:
    """Sentences, to append to a finding, about options of a run that `single_step` switched off; empty if there are none."""
    step, sentences = single_step(recipe, ranks).train, []
    if recipe.train.cuda_graph:
        sentences.append(" train.cuda_graph was off: capture was not examined.")
    if recipe.train.router_loss != step.router_loss:
        sentences.append(
            f" train.router_loss was '{step.router_loss}', because one rank took the batches of {ranks}: "
            f"'{recipe.train.router_loss}' was not examined."
        )
    return "".join(sentences)


def estimate_of(patient: Patient, world_size: int) -> memory.Estimate:
    """The memory estimate of `--dry-run` for one of `world_size` ranks, without sp, ep and replicas."""
    recipe = replace(patient.recipe, parallel=replace(patient.recipe.parallel, sp=1, ep=1, dp_replicate=1))
    layout = models.parallel_config(recipe.parallel, world_size)
    options = models.sharding_options(recipe.parallel, patient.device)
    chosen = patient.built.get("kernels", {})
    return memory.estimate(
        patient.blueprint, recipe, layout, options.param_dtype, chosen, device_type=patient.device.type
    )


def single_rank_figures(patient: Patient) -> StepFigures:
    """A step on one rank in this process, measured once for both checks."""
    if "step" not in patient.built:
        patient.release()
        gc.collect()
        estimate = estimate_of(patient, 1)
        patient.require_memory(estimate.total, "parameters, gradients, optimizer and activations of one rank")
        one_rank = replace(patient.recipe.parallel, sp=1, ep=1, dp_replicate=1)
        ranks = _ranks_or_one(patient)
        recipe = replace(single_step(patient.recipe, ranks), parallel=one_rank)
        groups = models.parallel_config(patient.recipe.parallel, ranks).num_batches if ranks > 1 else 1
        with launch.process_group() as device:
            patient.built["step"] = measure_step(recipe, device, patient.scratch, groups=groups)
    return patient.built["step"]


def _ranks_or_one(patient: Patient) -> int:
    try:
        return ranks_for(patient)
    except MissingPart:
        return 1


def ranks_for(patient: Patient) -> int:
    """On how many ranks the layout is compared: the fewest that it allows, at least two.

    Raises:
        MissingPart: this machine has too few devices, or the model is too large for ranks of its CPU.
    """
    parallel = patient.recipe.parallel
    ranks = max(2, parallel.sp * parallel.dp_replicate, parallel.ep, parallel.sp)
    while ranks <= MAX_CPU_RANKS or ranks <= torch.cuda.device_count():
        try:
            models.parallel_config(parallel, ranks)
            break
        except RecipeError:
            ranks += 1
    else:
        raise MissingPart(
            f"the layout (sp {parallel.sp}, ep {parallel.ep}) needs more ranks than this check can start."
        )
    if patient.device.type == "cuda":
        if torch.cuda.device_count() < ranks:
            raise MissingPart(f"the layout needs {ranks} GPUs, and this machine has {torch.cuda.device_count()}.")
        return ranks
    size = sum(p.numel() for p in patient.blueprint.parameters())
    if size > MAX_CPU_PARAMETERS:
        limit = MAX_CPU_PARAMETERS / 1e6
        raise MissingPart(f"the model has {size / 1e6:.0f} M parameters; ranks on a CPU take at most {limit:.0f} M.")
    return ranks


def step_on_ranks(recipe: Recipe, ranks: int) -> StepFigures:
    """A step on several ranks, each a process on this machine.

    Raises:
        RuntimeError: a rank failed; with the last error of each.
    """
    # This process keeps the store, at a port that the system chose: one that was looked up and closed may be taken a moment later.
    # The ranks connect to it as to that of torchrun's agent.
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # documented there
        "localhost", 0, is_master=True, wait_for_workers=False
    )
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", PARENT: str(os.getpid())}
    common = {"OMP_NUM_THREADS": "1", **os.environ, **address, **agent}
    environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    with tempfile.TemporaryDirectory(prefix="patchgen-step-") as scratch:  # deleted here: ranks may be killed
        command = [sys.executable, "-c", RANK_SCRIPT, json.dumps(to_dict(recipe)), scratch]
        printed = run_ranks(command, environments, RANKS_TIMEOUT)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"A step on {ranks} ranks failed: rank 0 printed no figures.")
    return StepFigures(**json.loads(lines[-1]))


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]], timeout: float) -> str:
    """Runs a command as several ranks and returns the output of rank 0. When one fails, the others, which may wait for it, are
    killed.

    Raises:
        RuntimeError: one failed, or they took longer than `timeout` seconds; with the last error of each.
    """
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in environments]
        running = [
            subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            for (out, err), environment in zip(files, environments, strict=True)
        ]
        try:
            failure = _wait(running, timeout)
            failed_before_others = sorted(range(len(running)), key=lambda rank: not running[rank].returncode)
        finally:
            for process in running:
                process.kill()
                process.wait()
        if failure:
            errors = (f"rank {rank}: {_last_error(_text(files[rank][1]))}" for rank in failed_before_others)
            raise RuntimeError(f"A step on {len(running)} ranks failed: {failure} ({' / '.join(errors)})")
        return _text(files[0][0])


def _wait(running: Sequence[subprocess.Popen], timeout: float) -> str:
    """Waits until all ranks have ended; returns which failed first, or that they timed out; empty: all succeeded."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in running]
        failed_ranks = {rank: code for rank, code in enumerate(codes) if code}
        if len(failed_ranks) > 1:  # which of them made the others fail is not known
            ended = ", ".join(f"rank {rank} with exit status {code}" for rank, code in failed_ranks.items())
            return f"{ended} were the first to end, within {POLL_SECONDS} s of each other"
        for rank, code in failed_ranks.items():
            return f"rank {rank} was the first to end, with exit status {code}"
        if None not in codes:
            return ""
        time.sleep(POLL_SECONDS)
    return f"some were still running after {timeout:.0f} s"


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line]
    return lines[-1] if lines else text[-500:].strip() or "no error"
