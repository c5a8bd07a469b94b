"""The recorded proofs of a committed model, as tables for its page."""

# pyright: basic
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patchgen.runtime.verify import records
from patchgen.runtime.verify.committed_models import IN_ONE_PROCESS, Committed

NOT_PROVEN, OUTDATED = "not proven", "outdated"


@dataclass(frozen=True)
class Table:
    """A table of a page."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def verdict(model: Committed) -> str:
    """The status of the proof in one process; outdated if it is of another text, or made with other sources."""
    proof = model.present_proofs.get(IN_ONE_PROCESS)
    if proof is None:
        return OUTDATED if IN_ONE_PROCESS in model.proofs else NOT_PROVEN
    return proof["status"] if records.proof_holds(model.name, key=records.wanted_key()) else OUTDATED


def releases(model: Committed) -> list[str]:
    """The releases of transformers that the present file was proven with."""
    return model.present_proofs.get(IN_ONE_PROCESS, {}).get("transformers", [])


def tables(model: Committed) -> list[Table]:
    """The records of the present file; `verdict` reports a proof of another text."""
    proofs = dict(model.present_proofs)
    one = proofs.pop(IN_ONE_PROCESS, None)
    found = [] if one is None else _in_one_process(one)
    if proofs:
        rows = tuple(_layout(model, name, proof) for name, proof in proofs.items())
        found.append(Table("on ranks", "On ranks", ("layout", "inputs", "loss", "gradient", "towers", "holds"), rows))
    return found


def _in_one_process(proof: Mapping) -> list[Table]:
    cases: dict[str, list[dict]] = {}
    for case in proof["cases"]:
        cases.setdefault(case["case"], []).append(case)
    columns = ("input", "variants", "loss", "logits", "all outputs", "gradients")
    parts = ("loss", "logits", "outputs", "gradient")
    rows = tuple(
        (name, str(len(found)), *(_difference([case[part] for case in found]) for part in parts))
        for name, found in cases.items()
    )
    tables = [Table("eager form", f"{proof['head']} against upstream, in eager form", columns, rows)]
    if path := proof.get("training"):
        checks = tuple(
            (name, *(_number(check.get(part)) for part in ("loss", "logits", "gradient")))
            for name, check in path.get("checks", {}).items()
        )
        seams = ", ".join(f"{seam} {kernel}" for seam, kernel in path.get("seams", {}).items()) or "no seams"
        caption = f"As a run computes: {path.get('attention')}, {seams}"
        tables.append(Table("as a run computes", caption, ("check", "loss", "logits", "gradients"), checks))
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
    }
    rows = (
        *((name, str(why)) for name, why in left_out.items()),
        *(("failed", str(one)) for one in proof["failures"]),
    )
    return [*tables, Table("not compared", "Not compared", ("what", "why"), rows)] if rows else tables


def _difference(parts: Sequence[Mapping | None]) -> str:
    """The largest relative difference of several comparisons."""
    compared = [part for part in parts if part]
    if not compared:
        return ""
    return "equal" if all(part["equal"] for part in compared) else max((p["relative"] for p in compared), key=float)


def _number(text: str | None) -> str:
    return "" if text is None else "equal" if float(text) == 0 else text


def _layout(model: Committed, name: str, proof: Mapping) -> tuple[str, ...]:
    cases = proof["cases"]
    failed = [case for case, found in cases.items() if "failed" in found]
    worst = [
        _number(max((found[part] for found in cases.values() if part in found), key=float, default=None))
        for part in ("loss", "gradient")
    ]
    towers = "; ".join(f"{tower}: {how}" for tower, how in proof.get("towers", {}).items())
    holds = records.proof_holds(model.name, name, records.wanted_key())
    outcome = f"{len(failed)} of {len(cases)} failed: {', '.join(failed)}" if failed else f"{len(cases)} equal"
    return (name, outcome, *worst, towers, "yes" if holds else OUTDATED)
