"""What `patchgen verify` prints of a proof: a table of its cases, what failed, and the verdict.

Only commands import it, so how a result is printed is no part of what a record depends on.
"""

from __future__ import annotations

import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from patchgen.runtime.verify import verdict
from patchgen.runtime.verify.comparison import Difference
from patchgen.runtime.verify.proof import Proof
from patchgen.runtime.verify.seam_proof import FAILED, PASSED
from patchgen.runtime.verify.training_path import TrainingPath


def print_proof(proof: Proof, console: Console | None = None) -> None:
    """Prints the small config, every case and seam, what failed, the training path, and the verdict."""
    console = console or Console()
    against = "the file that it was generated from, with " if proof.upstream_version is None else ""
    console.print(f"[bold]{proof.model}[/bold] {proof.head} against {against}transformers {transformers.__version__}")
    console.print(f"small config: {_describe_overrides(proof.overrides)}", style="dim", highlight=False)
    table = Table("case", "variant", "loss", "logits", "all outputs", "gradients", "gradients compared")
    for case in proof.cases:
        live = case.num_parameters - len(case.without_gradient)
        differences = (case.loss, case.logits, case.outputs, case.gradient)
        table.add_row(case.name, case.variant, *map(_cell, differences), f"{live} of {case.num_parameters}")
    console.print(table)
    if proof.seams:
        seam_table = Table("seam", "implementation", "status", "calls", "loss", "gradients", "reason")
        for seam in proof.seams:
            ran = seam.status in (PASSED, FAILED)
            numbers = (_cell(seam.loss), _cell(seam.gradient)) if ran else ("", "")
            seam_table.add_row(seam.seam, seam.implementation, seam.status, str(seam.calls), *numbers, seam.reason)
        console.print(seam_table)
    if proof.without_gradient:
        names = ", ".join(proof.without_gradient[:5]) + (", ..." if len(proof.without_gradient) > 5 else "")
        console.print(
            f"{len(proof.without_gradient)} parameters have no gradient in any case: {names}", style="yellow"
        )
    if proof.unclassified:
        console.print(f"config fields left at upstream's size: {', '.join(proof.unclassified)}", style="yellow")
    for variant, reason in proof.refused_variants.items():
        console.print(f"upstream's config refuses the variant {variant}: {reason}", style="yellow", markup=False)
    for name, reason in proof.refused_inputs.items():
        console.print(f"upstream refuses the input {name}: {reason}", style="yellow", markup=False)
    for name, reason in proof.left_out.items():
        console.print(f"not compared: case {name}: {reason}", style="yellow", markup=False)
    for name in proof.changed_inputs:
        console.print(f"a step changes its caller's '{name}' in place, as upstream's does", style="yellow")
    for kind, reason in proof.not_compared.items():
        console.print(f"not compared: {kind}: {reason}", style="red", markup=False)
    for name in proof.foreign_classes:
        console.print(f"built from another upstream model: {name}", style="dim")
    for failure in proof.failures:
        console.print(f"FAILED {failure}", style="red", markup=False, highlight=False)
    if proof.training is not None:
        _print_training(proof.training, console)
    for name, found in (proof.two_ranks or {}).items():
        if found.applies:
            told = f"[green]{found.difference or 0.0:.1e}[/green]" if not found.reason else escape(found.reason)
            console.print(f"two ranks, {verdict.IN_WORDS[name]}: {told}", highlight=False)
    if proof.not_run:
        console.print(f"lines that no proof ran: {', '.join(proof.not_run)}", style="dim", highlight=False)
    result = verdict.of(proof)
    console.print(result.words, style="green" if result.status == verdict.PROVEN else "red", markup=False)


def _print_training(path: TrainingPath, console: Console) -> None:
    kernels = ", ".join(f"{seam}={implementation}" for seam, implementation in path.seams.items()) or "no seams"
    replaced = path.compared_attention != path.attention
    replacement = f" (compared with {path.compared_attention}, which runs on the CPU)" if replaced else ""
    console.print(f"training path: {path.attention}{replacement}, {kernels}", style="dim", highlight=False)
    table = Table("training path", "loss", "logits", "gradients")
    for check in path.checks:
        table.add_row(check.name, *map(_cell, (check.loss, check.logits, check.gradient)))
    console.print(table)
    for fact in path.facts:
        console.print(
            f"observed: {fact.sentence}", style="yellow" if fact.effect else "dim", markup=False, highlight=False
        )
    for name, reason in path.left_out.items():
        console.print(f"not compared: {name}: {reason}", style="yellow", markup=False, highlight=False)
    for failure in path.failures:
        console.print(f"FAILED {failure}", style="red", markup=False, highlight=False)


def _cell(difference: Difference) -> str:
    return (
        "[green]equal[/green]"
        if difference.is_equal
        else f"{difference.absolute:.1e} ({difference.relative:.1e} rel.)"
    )


def _describe_overrides(overrides: object) -> str:
    if not isinstance(overrides, dict):
        return str(overrides)
    return " ".join(
        f"{key}=({_describe_overrides(value)})" if isinstance(value, dict) else f"{key}={value}"
        for key, value in overrides.items()
    )
