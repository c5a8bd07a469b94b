"""The page of one model: upstream and generated side by side, the hits of each pass, the census, the proofs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchgen import emit, pipeline, upstream
from patchgen.anatomy.census import COVERED
from patchgen.passes import all_passes
from patchgen.passes.base import Hit
from patchgen.pipeline import Generated
from patchgen.report import lines, proofs
from patchgen.report.sections import PLUMBING, Code, side_by_side
from patchgen.runtime.verify.committed_models import CommittedModel
from patchgen.templates import render
from patchgen.upgrade import releases

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import Provenance

GOLDEN_ANGLE = 137.508
"""Degrees between the hues of consecutive passes."""


@dataclass(frozen=True)
class Entry:
    """A line of the sidebar: a site or symbol, what was done there, and the anchor that it links to (empty: no link)."""

    text: str
    what: str
    anchor: str


@dataclass(frozen=True)
class PassEntry:
    """A pass in the sidebar: its hits, and the sites in `upstream` where upstream already does its work."""

    name: str
    purpose: str
    hue: int
    hits: list[Entry]
    upstream: list[Entry]
    notes: tuple[str, ...]


def hues() -> dict[str, int]:
    """The hue of each pass in degrees, far from those of its neighbours."""
    return {kind.name: round(number * GOLDEN_ANGLE) % 360 for number, kind in enumerate(all_passes())}


def page(name: str) -> str:
    """The text of `page_and_differing`."""
    return page_and_differing(name)[0]


def page_and_differing(name: str) -> tuple[str, list[str]]:
    """The page of a committed model, generated again with the present generator, and the committed files that differ.

    Raises:
        PatchgenError: generation refuses it, or the file that it was generated from no longer exists.
    """
    model = CommittedModel(name)
    generated = regenerated(model)
    facts: Provenance = json.loads(generated.provenance)
    colours = hues()
    code = side_by_side(lines.trace(generated), generated.steps[0].before.text, generated.text, colours)
    differs = differing(model, generated)
    text = render(
        "report_model.jinja",
        title=name,
        model=name,
        origin=generated.upstream.origin,
        verdict=proofs.verdict(model),
        releases=proofs.releases(model),
        changed=emit.changed_lines(generated.diff),
        differs=differs,
        code=code,
        passes=_passes(generated, code, colours),
        census=_census(facts["census"], code),
        dropped=facts["dropped"],
        tables=proofs.tables(model),
        provenance=_provenance(facts, model),
        plumbing=PLUMBING,
    )
    return text, differs


def regenerated(model: CommittedModel) -> Generated:
    """A committed model generated again, from the release or the file that it was generated from."""
    version, heads = model.record["upstream"]["version"], model.record.get("asked", ())
    if version is not None:
        return pipeline.generate(upstream.load(model.name, version), heads=heads)
    source = releases.user_source(model.name, model.record)
    return pipeline.generate(upstream.load(model.name, source=source), heads=heads)


def differing(model: CommittedModel, generated: Generated) -> list[str]:
    """The names of the committed files that differ from those generated now."""
    files = {model.folder / name: text for name, text in generated.files.items()}
    return [path.name for path, text in files.items() if not path.is_file() or path.read_bytes() != text.encode()]


def _passes(generated: Generated, code: Code, colours: Mapping[str, int]) -> list[PassEntry]:
    kinds = {kind.name: kind for kind in all_passes()}
    found: list[PassEntry] = []
    for step in generated.steps:
        outcome = step.outcome
        if step.name in PLUMBING or not (outcome.hits or outcome.upstream or outcome.notes):
            continue
        hits = [_entry(hit, code, step.name) for hit in outcome.hits]
        by_upstream = [_entry(hit, code) for hit in outcome.upstream]
        purpose = kinds[step.name].purpose
        found.append(PassEntry(step.name, purpose, colours[step.name], hits, by_upstream, outcome.notes))
    return found


def _entry(hit: Hit, code: Code, by: str = "") -> Entry:
    """A hit with a link to the lines that its pass changed there, or else to the definition."""
    changed = next((s.key for s in code.sites if by in s.passes and _overlap(hit.site, s.symbol)), None)
    return Entry(hit.site, hit.what, changed or anchor_of(hit.site, code))


def _overlap(site: str, symbol: str) -> bool:
    """Whether one is the other, or a member of it."""
    return symbol == site or symbol.startswith(f"{site}.") or site.startswith(f"{symbol}.")


def anchor_of(symbol: str, code: Code) -> str:
    """The anchor of a definition, or else of its class; empty if neither is in the code."""
    return code.anchors.get(symbol) or code.anchors.get(symbol.partition(".")[0], "")


def _census(census: Mapping[str, str], code: Code) -> dict[str, list[Entry]]:
    """Reason -> the classes and functions of the training path that have it; those that passes rewrite first."""
    groups: dict[str, list[Entry]] = {COVERED: []}
    for symbol, reason in census.items():
        kind, _, detail = reason.partition(": ")
        groups.setdefault(kind, []).append(Entry(symbol, detail, anchor_of(symbol, code)))
    return {kind: entries for kind, entries in groups.items() if entries}


def _provenance(facts: Provenance, model: CommittedModel) -> dict[str, str]:
    origin = facts["upstream"]
    return {
        "made from": f"transformers {origin['version']}" if origin["version"] else "a file",
        "file": origin["path"],
        "its sha256": origin["sha256"],
        "generated sha256": facts["generated_sha256"],
        "patchgen": facts["patchgen"],
        "command": facts["command"],
        "heads": ", ".join(facts["heads"]),
        "model types": ", ".join(facts["model_types"]),
        "proven with transformers": ", ".join(proofs.releases(model)) or "none",
    }
