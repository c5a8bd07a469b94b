"""The page of one model: upstream and generated side by side, what each pass did, the census, the proofs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchgen import emit, pipeline, upstream
from patchgen.anatomy.census import COVERED
from patchgen.passes import all_passes
from patchgen.passes.base import Hit
from patchgen.pipeline import Generated
from patchgen.report import lines, proofs
from patchgen.report.sections import PLUMBING, Code, side_by_side
from patchgen.runtime.verify.committed_models import Committed
from patchgen.templates import render

GOLDEN_ANGLE = 137.508


@dataclass(frozen=True)
class Entry:
    """A line of the sidebar: what it says, where it leads (empty: nowhere)."""

    text: str
    what: str
    key: str


@dataclass(frozen=True)
class PassEntry:
    """A pass in the sidebar."""

    name: str
    purpose: str
    hue: int
    hits: list[Entry]
    upstream: list[Entry]
    notes: tuple[str, ...]


def hues() -> dict[str, int]:
    """A colour per pass, far from those of its neighbours."""
    return {kind.name: round(number * GOLDEN_ANGLE) % 360 for number, kind in enumerate(all_passes())}


def page(name: str) -> str:
    """The page of a committed model, of what generation gives now.

    Raises:
        PatchgenError: it does not generate, or the file that it was made from is not there any more.
    """
    model = Committed(name)
    generated = regenerated(model)
    facts = json.loads(generated.provenance)
    code = side_by_side(lines.follow(generated), generated.steps[0].before.text, generated.text, colours := hues())
    return render(
        "report_model.jinja",
        title=name,
        model=name,
        origin=generated.upstream.origin,
        verdict=proofs.verdict(model),
        releases=proofs.releases(model),
        changed=emit.changed_lines(generated.diff),
        differs=differing(model, generated),
        code=code,
        passes=_passes(generated, code, colours),
        census=_census(facts["census"], code),
        dropped=facts["dropped"],
        tables=proofs.tables(model),
        provenance=_provenance(facts, model),
        plumbing=PLUMBING,
    )


def regenerated(model: Committed) -> Generated:
    """What generation gives now for a committed model, from the release or the file that it was made from."""
    version, heads = model.record["upstream"]["version"], model.record.get("asked", ())
    if version is not None:
        return pipeline.generate(upstream.load(model.name, version), heads=heads)
    words = shlex.split(model.record["command"])
    return pipeline.generate(upstream.load(model.name, source=Path(words[words.index("--source") + 1])), heads=heads)


def differing(model: Committed, generated: Generated) -> list[str]:
    """The committed files that are not what generation gives now."""
    files = {model.folder / name: text for name, text in generated.files.items()}
    return [path.name for path, text in files.items() if not path.is_file() or path.read_bytes() != text.encode()]


def _passes(generated: Generated, code: Code, colours: Mapping[str, int]) -> list[PassEntry]:
    kinds = {kind.name: kind for kind in all_passes()}
    found = []
    for step in generated.steps:
        outcome = step.outcome
        if step.name in PLUMBING or not (outcome.hits or outcome.upstream or outcome.notes):
            continue
        hits = [_entry(hit, code, step.name) for hit in outcome.hits]
        served = [_entry(hit, code) for hit in outcome.upstream]
        purpose = kinds[step.name].purpose
        found.append(PassEntry(step.name, purpose, colours[step.name], hits, served, outcome.notes))
    return found


def _entry(hit: Hit, code: Code, by: str = "") -> Entry:
    """A hit with the place where it is seen: the lines that its pass changed there, else the definition."""
    changed = next((s.key for s in code.sites if by in s.passes and _holds(hit.site, s.symbol)), None)
    return Entry(hit.site, hit.what, changed or place_of(hit.site, code))


def _holds(site: str, symbol: str) -> bool:
    return symbol == site or symbol.startswith(f"{site}.") or site.startswith(f"{symbol}.")


def place_of(symbol: str, code: Code) -> str:
    """The key of a definition, of the class around it where it has none of its own; empty where there is neither."""
    return code.places.get(symbol) or code.places.get(symbol.partition(".")[0], "")


def _census(census: Mapping[str, str], code: Code) -> dict[str, list[Entry]]:
    """Reason -> the classes and functions on the way to the loss that it is given for; those in passes first."""
    groups: dict[str, list[Entry]] = {COVERED: []}
    for symbol, reason in census.items():
        kind, _, detail = reason.partition(": ")
        groups.setdefault(kind, []).append(Entry(symbol, detail, place_of(symbol, code)))
    return {kind: entries for kind, entries in groups.items() if entries}


def _provenance(facts: Mapping, model: Committed) -> dict[str, str]:
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
