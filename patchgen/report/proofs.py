"""The recorded proofs of a committed model, as tables for its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchgen.runtime.verify import records
from patchgen.runtime.verify.committed_models import CommittedModel
from patchgen.runtime.verify.observe.facts import ALLOWS

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import (
        CaseRecord,
        DifferenceRecord,
        FactRecord,
        LayoutRecord,
        ProofRecord,
        TrainingRecord,
    )

NOT_PROVEN, OUTDATED = "not proven", "outdated"


@dataclass(frozen=True)
class Table:
    """A table of a page."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def verdict(model: CommittedModel) -> str:
    """The status of the proof in one process; outdated if the file or the sources of the proof have changed since."""
    proof = model.current_proof
    if proof is None:
        return OUTDATED if model.proof else NOT_PROVEN
    return proof["status"] if records.proof_holds(model.name, key=records.required_key()) else OUTDATED


def releases(model: CommittedModel) -> list[str]:
    """The releases of transformers that the current file was proven with."""
    proof = model.current_proof
    return proof.get("transformers", []) if proof else []


def tables(model: CommittedModel) -> list[Table]:
    """The records of the present file; those of a changed file are left out: `verdict` calls them outdated."""
    proof, rank_proofs = model.current_proof, model.current_rank_proofs
    found = [] if proof is None else _in_one_process(proof)
    if rank_proofs:
        rows = tuple(_layout(model, name, layout_proof) for name, layout_proof in rank_proofs.items())
        found.append(Table("on ranks", "On ranks", ("layout", "inputs", "loss", "gradient", "towers", "holds"), rows))
    return found


def _in_one_process(proof: ProofRecord) -> list[Table]:
    tables = [_eager_form(proof)]
    if training := proof.get("training"):
        tables.append(_as_a_run_computes(training))
        tables += _observed(training)
    seams = tuple(
        (s["seam"], s["implementation"], s["status"], str(s["calls"]), _difference([s["gradient"]]), s["reason"])
        for s in proof["seams"]
    )
    columns = ("operation", "kernel", "status", "calls", "gradients", "reason")
    tables += [Table("kernels", "Kernels", columns, seams)] if seams else []
    left_out = {
        **proof.get("not_compared", {}),
        **proof.get("refused_inputs", {}),
        **proof.get("refused_variants", {}),
        **{f"case {name}": reason for name, reason in proof.get("left_out", {}).items()},
    }
    if changed := proof.get("changed_inputs"):
        left_out["the caller's batch"] = f"a step changes {', '.join(changed)} in place, as upstream's does"
    if not_run := proof.get("not_run"):
        left_out["lines that no proof ran"] = ", ".join(not_run)
    rows = (
        *((name, str(why)) for name, why in left_out.items()),
        *(("failed", str(failure)) for failure in proof["failures"]),
    )
    return [*tables, Table("not compared", "Not compared", ("what", "why"), rows)] if rows else tables


def _eager_form(proof: ProofRecord) -> Table:
    cases: dict[str, list[CaseRecord]] = {}
    for case in proof["cases"]:
        cases.setdefault(case["case"], []).append(case)
    columns = ("input", "variants", "loss", "logits", "all outputs", "gradients")
    rows = tuple(
        (
            name,
            str(len(found)),
            _difference([case["loss"] for case in found]),
            _difference([case["logits"] for case in found]),
            _difference([case["outputs"] for case in found]),
            _difference([case["gradient"] for case in found]),
        )
        for name, found in cases.items()
    )
    return Table("eager form", f"{proof['head']} against upstream, in eager form", columns, rows)


def _as_a_run_computes(training: TrainingRecord) -> Table:
    checks = tuple(
        (
            name,
            _shown_difference(check.get("loss")),
            _shown_difference(check.get("logits")),
            _shown_difference(check.get("gradient")),
        )
        for name, check in training.get("checks", {}).items()
    )
    seams = ", ".join(f"{seam} {kernel}" for seam, kernel in training.get("seams", {}).items()) or "no seams"
    caption = f"As a run computes: {training.get('attention')}, {seams}"
    return Table("as a run computes", caption, ("check", "loss", "logits", "gradients"), checks)


def _observed(training: TrainingRecord) -> list[Table]:
    """What was observed in steps, and the layouts that it leaves."""
    facts = training.get("observed", [])
    rows = tuple(
        (str(fact["line"] or ""), fact["code"], fact["what"], fact["effect"], _allows(fact)) for fact in facts
    )
    columns = ("line", "code", "observed", "effect", "allows")
    return [Table("observed", "Observed in a step", columns, rows)] if rows else []


def _allows(fact: FactRecord) -> str:
    return ALLOWS.get(fact["kind"], "") if fact["effect"] else "all layouts"


def _difference(parts: Sequence[DifferenceRecord]) -> str:
    """The largest relative difference of several comparisons, or "equal"."""
    return "equal" if all(part["equal"] for part in parts) else max((p["relative"] for p in parts), key=float)


def _shown_difference(text: str | None) -> str:
    """A recorded difference as the tables show it: "equal" for 0, empty for none."""
    return "" if text is None else "equal" if float(text) == 0 else text


def _layout(model: CommittedModel, name: str, proof: LayoutRecord) -> tuple[str, ...]:
    cases = proof["cases"]
    failed = [case for case, found in cases.items() if "failed" in found]
    differences = ([found["loss"] for found in cases.values()], [found["gradient"] for found in cases.values()])
    worst = [_shown_difference(max(found, key=float, default=None)) for found in differences]
    towers = "; ".join(f"{tower}: {how}" for tower, how in proof.get("towers", {}).items())
    holds = records.proof_holds(model.name, name, records.required_key())
    outcome = f"{len(failed)} of {len(cases)} failed: {', '.join(failed)}" if failed else f"{len(cases)} equal"
    return (name, outcome, *worst, towers, "yes" if holds else OUTDATED)
