"""A training step: its time, its memory against the estimate, and its loss and gradient norm on ranks against one rank."""

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
from patchgen.runtime.doctor.finding import Check, Finding, failed, format_bytes, passed
from patchgen.runtime.doctor.patient import MissingPart
from patchgen.runtime.doctor.rank_step import StepFigures, one_step
from patchgen.runtime.train import flops, memory
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError, to_dict

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

MAX_CPU_PARAMETERS = 100_000_000
"""The largest model that is compared on gloo ranks of the CPU."""
MAX_CPU_RANKS = 4
RANKS_SECONDS = 600
POLL_SECONDS = 0.1
MAX_OVER_ESTIMATE = 1.5
"""How far over its estimate the memory of a step may be."""
WORKSPACE = 2**28
"""Bytes that libraries and kernels take in addition, whatever the size of the model."""
RANK_TOLERANCE = 1e-3
HALF_TOLERANCE = 3e-2


class Step(Check):
    """The time of a step on one rank, and its memory against the estimate."""

    name = "step"

    def run(self, patient: Patient) -> Finding:
        figures, estimate = single_rank_figures(patient), estimate_of(patient, 1)
        unexamined = left_out(patient.recipe, _ranks_or_one(patient))
        summary = f"A step of {figures.tokens} tokens took {figures.seconds:.2f} s"
        peak = patient.recipe.log.peak_tflops or flops.peak_tflops(patient.device)
        summary += f", {figures.flops / figures.seconds / 1e12 / peak:.0%} of the device's peak" if peak else ""
        if figures.peak_bytes is None:
            measured, estimated = figures.state_bytes, estimate.parameters + estimate.gradients + estimate.optimizer
            summary += f"; parameters, gradients and optimizer take {format_bytes(measured)}"
            if not math.isclose(measured, estimated, rel_tol=0.05, abs_tol=1 << 20):
                return failed(
                    f"{summary}, and the estimate is {format_bytes(estimated)}.{unexamined}",
                    "The estimate of --dry-run is wrong for this model: report it, and plan with the figure measured here.",
                )
            return passed(f"{summary}, as estimated (a CPU's peak is not measured).{unexamined}")
        summary += f" and {format_bytes(figures.peak_bytes)}; the estimate is {format_bytes(estimate.total)}"
        if figures.peak_bytes > MAX_OVER_ESTIMATE * estimate.total + WORKSPACE:
            return failed(
                f"{summary}.{unexamined}",
                "Plan with the figure measured here; parallel.activation_checkpointing: full needs less.",
            )
        return passed(f"{summary}.{unexamined}")


class Layout(Check):
    """The loss and the gradient norm of a step on the recipe's ranks are those on one rank."""

    name = "layout"

    def run(self, patient: Patient) -> Finding:
        ranks = ranks_for(patient)
        one_rank = single_rank_figures(patient)
        all_ranks = step_on_ranks(single_step(patient.recipe, ranks), ranks)
        tolerance = RANK_TOLERANCE if patient.dtype == torch.float32 else HALF_TOLERANCE
        summary = (
            f"On {ranks} ranks (sp {patient.recipe.parallel.sp}, ep {patient.recipe.parallel.ep}) the loss is {all_ranks.loss:.5f} "
            f"and the norm of the gradient {all_ranks.norm:.4g}; on one {one_rank.loss:.5f} and {one_rank.norm:.4g}."
            + left_out(patient.recipe, ranks)
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


def left_out(recipe: Recipe, ranks: int) -> str:
    """What `single_step` switched off and a run has, as sentences that follow a finding's; empty if it is nothing."""
    step, sentences = single_step(recipe, ranks).train, []
    if recipe.train.cuda_graph:
        sentences.append(" train.cuda_graph was off: capture was not examined.")
    if recipe.train.router_loss != step.router_loss:
        sentences.append(
            f" train.router_loss was '{step.router_loss}', because one rank took the batches of {ranks}: "
            f"'{recipe.train.router_loss}' was not examined."
        )
    return "".join(sentences)


def estimate_of(patient: Patient, world: int) -> memory.Estimate:
    """The memory estimate of `--dry-run` for one of `world` ranks, without sp, ep and replicas."""
    recipe = replace(patient.recipe, parallel=replace(patient.recipe.parallel, sp=1, ep=1, dp_replicate=1))
    layout = models.parallel_config(recipe.parallel, world)
    options = models.sharding_options(recipe.parallel, patient.device)
    fused_loss = memory.has_fused_loss(patient.made.get("kernels", {}))
    return memory.estimate(patient.blueprint, recipe, layout, options.param_dtype, fused_loss)


def single_rank_figures(patient: Patient) -> StepFigures:
    """A step on one rank in this process, cached for two checks."""
    if "step" not in patient.made:
        patient.release()
        gc.collect()
        estimate = estimate_of(patient, 1)
        patient.require_memory(estimate.total, "parameters, gradients, optimizer and activations of one rank")
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
    except MissingPart:
        return 1


def ranks_for(patient: Patient) -> int:
    """How many ranks the layout is compared on.

    Raises:
        MissingPart: this machine has too few devices, or the model is too large for ranks of its CPU.
    """
    section = patient.recipe.parallel
    least = max(2, section.sp * section.dp_replicate, section.ep, section.sp)
    while least <= MAX_CPU_RANKS or least <= torch.cuda.device_count():
        try:
            models.parallel_config(section, least)
            break
        except RecipeError:
            least += 1
    else:
        raise MissingPart(f"the layout (sp {section.sp}, ep {section.ep}) needs more ranks than this check can start.")
    if patient.device.type == "cuda":
        if torch.cuda.device_count() < least:
            raise MissingPart(f"the layout needs {least} GPUs, and this machine has {torch.cuda.device_count()}.")
        return least
    size = sum(p.numel() for p in patient.blueprint.parameters())
    if size > MAX_CPU_PARAMETERS:
        limit = MAX_CPU_PARAMETERS / 1e6
        raise MissingPart(f"the model has {size / 1e6:.0f} M parameters; ranks on a CPU take at most {limit:.0f} M.")
    return least


def step_on_ranks(recipe: Recipe, ranks: int) -> StepFigures:
    """A step on ranks of this machine, each a process.

    Raises:
        RuntimeError: a rank failed, with its last error.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    common = {"OMP_NUM_THREADS": "1", **os.environ, **common}
    environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    with tempfile.TemporaryDirectory(prefix="patchgen-step-") as scratch:  # deleted here: ranks may be killed
        command = [sys.executable, "-m", "patchgen.runtime.doctor.rank_step", json.dumps(to_dict(recipe)), scratch]
        printed = run_ranks(command, environments, RANKS_SECONDS)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"A step on {ranks} ranks failed: rank 0 printed no figures.")
    return StepFigures(**json.loads(lines[-1]))


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]], seconds: float) -> str:
    """The output of the first of several processes. When one fails, the others, which may wait for it, are killed.

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
    """Waits until all have ended; returns which failed first, or that they timed out; empty: all succeeded."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in running]
        if failed_ranks := [rank for rank, code in enumerate(codes) if code]:
            return f"rank {failed_ranks[0]} was the first to end, with exit status {codes[failed_ranks[0]]}"
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
