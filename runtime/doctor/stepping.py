"""A step as the trainer takes it: its time and memory against the estimate, and on ranks against one."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING

import torch

from patchgen.runtime import launch
from patchgen.runtime.doctor.finding import Check, Finding, failed, passed, told_size
from patchgen.runtime.doctor.patient import Needs
from patchgen.runtime.doctor.rank_step import StepFigures, one_step
from patchgen.runtime.train import flops, memory
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError, to_dict

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

SMALL = 100_000_000
"""Parameters of a model that is compared on gloo ranks of the CPU."""
MOST_RANKS = 4
RANKS_SECONDS = 600
POLL_SECONDS = 0.1
FAR = 1.5
"""How far over its estimate the memory of a step may be."""
WORKSPACE = 2**28
"""Bytes that libraries and kernels take beside it, whatever the size of the model."""
RANK_TOLERANCE = 1e-3
HALF_TOLERANCE = 3e-2


class Step(Check):
    """One step on one rank: what it takes, beside the estimate."""

    name = "step"

    def run(self, patient: Patient) -> Finding:
        figures, estimate = figures_of_one(patient), estimate_of(patient, 1)
        told = f"A step of {figures.tokens} tokens took {figures.seconds:.2f} s"
        peak = patient.recipe.log.peak_tflops or flops.peak_tflops(patient.device)
        told += f", {figures.flops / figures.seconds / 1e12 / peak:.0%} of the device's peak" if peak else ""
        if figures.peak_bytes is None:
            held, counted = figures.held_bytes, estimate.parameters + estimate.gradients + estimate.optimizer
            if not math.isclose(held, counted, rel_tol=0.05, abs_tol=1 << 20):
                return failed(
                    f"{told}; parameters, gradients and optimizer hold {told_size(held)}, and the estimate says "
                    f"{told_size(counted)}.",
                    "The estimate of --dry-run does not hold for this model: report it, and plan with the figure measured here.",
                )
            return passed(
                f"{told}; parameters, gradients and optimizer hold {told_size(held)}, as estimated (a CPU's peak is not measured)."
            )
        told += f" and {told_size(figures.peak_bytes)}; the estimate is {told_size(estimate.total)}"
        if figures.peak_bytes > FAR * estimate.total + WORKSPACE:
            return failed(
                f"{told}.",
                "Plan with the figure measured here; parallel.activation_checkpointing: full makes it smaller.",
            )
        return passed(f"{told}.")


class Layout(Check):
    """The loss and the gradient of a step on the recipe's ranks are those on one."""

    name = "layout"

    def run(self, patient: Patient) -> Finding:
        ranks = ranks_for(patient)
        alone = figures_of_one(patient)
        together = on_ranks(single_step(patient.recipe, ranks), ranks)
        bar = RANK_TOLERANCE if patient.dtype == torch.float32 else HALF_TOLERANCE
        told = (
            f"On {ranks} ranks (sp {patient.recipe.parallel.sp}, ep {patient.recipe.parallel.ep}) the loss is {together.loss:.5f} "
            f"and the norm of the gradient {together.norm:.4g}; on one {alone.loss:.5f} and {alone.norm:.4g}."
        )
        same_loss = math.isclose(alone.loss, together.loss, rel_tol=bar)
        if not (same_loss and math.isclose(alone.norm, together.norm, rel_tol=10 * bar)):
            return failed(
                told,
                "Train with sp: 1 or ep: 1, whichever makes them equal (--set), and report the model type with both figures.",
            )
        return passed(told)


def single_step(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe with steps of one batch per rank, which divide over any number of them."""
    train = replace(recipe.train, batches_per_step=max(ranks, 1), profile_steps=0, profile_start=10)
    return replace(recipe, train=train)


def estimate_of(patient: Patient, world: int) -> memory.Estimate:
    """What `--dry-run` says of a rank."""
    alone = replace(patient.recipe, parallel=replace(patient.recipe.parallel, sp=1, ep=1, dp_replicate=1))
    layout = models.parallel_config(alone.parallel, world)
    options = models.sharding_options(alone.parallel, patient.device)
    fused_loss = "causal_lm_loss" in patient.made.get("kernels", ())
    return memory.estimate(patient.blueprint, alone, layout, options.param_dtype, fused_loss)


def figures_of_one(patient: Patient) -> StepFigures:
    """A step of one rank in this process; kept, for two checks ask for it."""
    if "step" not in patient.made:
        patient.release()
        gc.collect()
        estimate = estimate_of(patient, 1)
        patient.require_room(estimate.total, "parameters, gradients, optimizer and activations of one rank")
        section = replace(patient.recipe.parallel, sp=1, ep=1, dp_replicate=1)
        ranks = _ranks_or_one(patient)
        recipe = replace(single_step(patient.recipe, ranks), parallel=section)
        groups = models.parallel_config(patient.recipe.parallel, ranks).num_batches if ranks > 1 else 1
        with launch.process_group() as device:
            patient.made["step"] = one_step(recipe, device, patient.scratch, groups=groups)
    return patient.made["step"]


def _ranks_or_one(patient: Patient) -> int:
    try:
        return ranks_for(patient)
    except Needs:
        return 1


def ranks_for(patient: Patient) -> int:
    """How many ranks the layout is compared on.

    Raises:
        Needs: this machine has too few devices, or the model is too large for ranks of its CPU.
    """
    section = patient.recipe.parallel
    least = max(2, section.sp * section.dp_replicate, section.ep, section.sp)
    while least <= MOST_RANKS or least <= torch.cuda.device_count():
        try:
            models.parallel_config(section, least)
            break
        except RecipeError:
            least += 1
    else:
        raise Needs(f"the layout (sp {section.sp}, ep {section.ep}) needs more ranks than are compared here.")
    if patient.device.type == "cuda":
        if torch.cuda.device_count() < least:
            raise Needs(f"the layout needs {least} GPUs, and this machine has {torch.cuda.device_count()}.")
        return least
    size = sum(p.numel() for p in patient.blueprint.parameters())
    if size > SMALL:
        raise Needs(f"the model has {size / 1e6:.0f} M parameters: ranks on a CPU are for up to {SMALL / 1e6:.0f} M.")
    return least


def on_ranks(recipe: Recipe, ranks: int) -> StepFigures:
    """A step on ranks of this machine, each a process.

    Raises:
        RuntimeError: a rank failed, with its last words.
    """
    command = [sys.executable, "-m", "patchgen.runtime.doctor.rank_step", json.dumps(to_dict(recipe))]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environments = [
        {**os.environ, **place, **threads, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]
    lines = [line for line in run_ranks(command, environments, RANKS_SECONDS).splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"A step on {ranks} ranks failed: rank 0 ended without its figures.")
    return StepFigures(**json.loads(lines[-1]))


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]], seconds: float) -> str:
    """What the first of some processes prints, all of which end well. At the first that fails the others, which may wait
    for it, are ended.

    Raises:
        RuntimeError: one failed, or they took longer than `seconds`, with the last error of each.
    """
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in environments]
        running = [
            subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            for (out, err), environment in zip(files, environments, strict=True)
        ]
        try:
            failed_first = _wait(running, seconds)
        finally:
            for process in running:
                process.kill()
                process.wait()
        if failed_first:
            errors = (f"rank {rank}: {_last_error(_text(err))}" for rank, (_, err) in enumerate(files))
            raise RuntimeError(f"A step on {len(running)} ranks failed: {failed_first} ({' / '.join(errors)})")
        return _text(files[0][0])


def _wait(running: Sequence[subprocess.Popen], seconds: float) -> str:
    """Waits until all have ended; returns which failed first, or that they did not end; empty: all ended well."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in running]
        if ended_badly := [rank for rank, code in enumerate(codes) if code]:
            return f"rank {ended_badly[0]} was the first to end, with exit status {codes[ended_badly[0]]}"
        if None not in codes:
            return ""
        time.sleep(POLL_SECONDS)
    return f"after {seconds:.0f} s not all had ended"


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line]
    return lines[-1] if lines else text[-500:].strip() or "no error"
