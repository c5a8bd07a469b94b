"""One committed model between two releases: what moved upstream, under which pass, and what generation makes of it."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchgen import pipeline, provenance
from patchgen.errors import PassMismatch, PatchgenError, UpstreamNotFound
from patchgen.model_configs import ModelConfig, config_for
from patchgen.passes import pass_named
from patchgen.passes.base import SitePass
from patchgen.upgrade import releases
from patchgen.upgrade.edits import drift_under_edits
from patchgen.upgrade.findings import PERSON, REVIEW, SAME, WORDS, ModelUpgrade, Site
from patchgen.upgrade.helpers import drift_of_helpers, missing_imports
from patchgen.upgrade.reach import Library
from patchgen.upgrade.symbols import OTHER, Symbol, symbols_of
from patchgen.upstream import Upstream, load, load_from

PLUMBING = ("prune", "absolute_imports", "hand_edits")


@dataclass(frozen=True)
class Texts:
    """The four sides of a model: upstream's file and the generated one, now and then."""

    old: Upstream
    new: Upstream
    now: str
    then: str  # empty where generation refuses

    def of(self, symbol: str, *, whole: bool = True) -> dict[str, Any]:
        """The four texts of one symbol, and its lines; of a class its head alone, unless `whole`."""
        sides = {"old_upstream": self.old.text, "new_upstream": self.new.text}
        sides |= {"generated_now": self.now, "generated_then": self.then}
        found = {name: (symbols_of(text).get(symbol), text) for name, text in sides.items()}
        texts = {name: one.text(text, whole=whole) if one else "" for name, (one, text) in found.items()}
        lines = {f"{side}_line": one.line if (one := found[f"{side}_upstream"][0]) else 0 for side in ("old", "new")}
        return texts | lines


@functools.lru_cache(maxsize=4)
def library(where: str) -> Library:
    """The files of a release; one per process."""
    return Library(releases.find(where).release)


def compare_model(
    model: str, to: str, root: Path, reviewed: Collection[str] = (), config: ModelConfig | None = None
) -> ModelUpgrade:
    """Compares a committed model with what `to` would make of it. Writes nothing.

    Args:
        model: its folder in `root`.
        to: a version, a wheel or a folder.
        reviewed: targets of hand edits that a person read against the new release.
        config: what is particular to the model; by default its file in `model_configs`.

    Raises:
        PatchgenError: a release, or the record of the model, cannot be read.
    """
    record = provenance.read(root / model)
    now = (root / model / f"modeling_{model}.py").read_text(encoding="utf-8")
    old, before = _old_upstream(model, record)
    after = library(to)
    try:
        new = load_from(after.release, model) if record["upstream"]["version"] else old
    except UpstreamNotFound as error:
        site = Site("model", "gone", old.path, "", (), PERSON, str(error), old_upstream=old.text)
        return ModelUpgrade(
            model, before.release.version, after.release.version, PERSON, str(error), (site,), old.text
        )
    config = config or config_for(model)
    generated, refusal = _generated(new, config, record.get("asked", ()))
    texts = Texts(old, new, now, generated.text if generated else "")
    then = json.loads(generated.provenance) if generated else None
    sites = _drift_of_model(texts, record, then, config)
    sites = _with_edits(sites, list(drift_under_edits(config.edits, record, old, new, reviewed)), texts)
    if refusal is not None:
        sites += _refused(refusal, sites, texts)
    if then is not None:
        sites += _moved_hits(record, then, sites, texts)
        sites += _differently_generated(sites, texts)
        sites += missing_imports(texts.then, after, new.path)
    kept = (set(record["symbols"]), set((then or record)["symbols"]))
    sites += drift_of_helpers(before, after, old, new, kept)
    verdict = max((site.verdict for site in sites), default=SAME)
    reason = next((site.reason for site in sites if site.verdict == PERSON), WORDS[verdict])
    versions = (before.release.version, after.release.version)
    return ModelUpgrade(model, *versions, verdict, reason, tuple(sites), old.text, new.text, now, texts.then)


def _old_upstream(model: str, record: Mapping) -> tuple[Upstream, Library]:
    """The file that the committed one was made from, and its release."""
    version = record["upstream"]["version"]
    if version is not None:
        before = library(version)
        return load_from(before.release, model), before
    return load(model, source=releases.own_source(model, record)), library(releases.installed())


def _generated(
    new: Upstream, config: ModelConfig, heads: Sequence[str]
) -> tuple[pipeline.Generated | None, PatchgenError | None]:
    try:
        return pipeline.generate(new, config, heads), None
    except PatchgenError as error:
        return None, error


# --------------------------------------------------------------------------------------------------- the model's file


def _drift_of_model(texts: Texts, record: Mapping, then: Mapping | None, config: ModelConfig) -> list[Site]:
    """The symbols of the modeling file that are not what they were; of those that prune drops on both sides, nothing."""
    old, new = symbols_of(texts.old.text), symbols_of(texts.new.text)
    edited = {edit.target.partition(".")[0] for edit in config.edits}
    kept_old = set(record["symbols"]) | edited
    kept_new = set(then["symbols"]) | edited if then else kept_old | {name for name in new if name not in old}
    found = []
    for name in dict.fromkeys((*old, *new)):
        owner = name.partition(".")[0]
        sides = [_kept(side, name, owner, kept) for side, kept in ((old, kept_old), (new, kept_new))]
        if sides == [None, None] or (sides[0] is not None and sides[1] is not None and sides[0].same_as(sides[1])):
            continue
        if name != owner and None in sides and (owner not in old or owner not in new):
            continue  # the class came or went, and is listed itself
        kind = "added" if sides[0] is None else "gone" if sides[1] is None else "changed"
        passes, reason = _passes_at(name, owner, record, then)
        sources = texts.of(name, whole=kind != "changed")
        found.append(Site("model", kind, texts.new.path, name, passes, REVIEW, reason, **sources))
    return found


def _kept(side: Mapping[str, Symbol], name: str, owner: str, kept: set[str]) -> Symbol | None:
    symbol = side.get(name)
    is_code = symbol is not None and any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in symbol.nodes)
    counts = owner in kept if is_code or name != owner else symbol is not None
    return symbol if counts else None


def _passes_at(name: str, owner: str, record: Mapping, then: Mapping | None) -> tuple[tuple[str, ...], str]:
    """The passes that have a site in a symbol; failing these, those that have one elsewhere in its class."""
    placed = _placed(record) | (_placed(then) if then else {})
    at = [step for step, site in placed if site == name]
    if at:
        return tuple(dict.fromkeys(at)), f"a site of {', '.join(dict.fromkeys(at))}"
    beside = dict.fromkeys(step for step, site in placed if site.partition(".")[0] == owner)
    if beside:
        return tuple(beside), f"in {owner}, where {', '.join(beside)} {'has' if len(beside) == 1 else 'have'} a site"
    return (), "copied as upstream wrote it"


def _placed(record: Mapping) -> dict[tuple[str, str], str]:
    """(pass, site) -> what was done there, or found done, by the passes that rewrite."""
    found = {}
    for step in record["passes"]:
        kind = pass_named(step["name"])
        rewrites = kind is not None and issubclass(kind, SitePass)
        for hit in (*step["hits"], *(step["upstream"] if rewrites else ())) if step["name"] not in PLUMBING else ():
            found[step["name"], hit["site"]] = hit["what"]
    return found


def _with_edits(sites: list[Site], edits: list[Site], texts: Texts) -> list[Site]:
    """The sites and those of hand edits: a change that a hand edit covers is the edit's to review."""
    targets = {edit.symbol: edit for edit in edits}
    found = []
    for site in sites:
        over = targets.get(site.symbol.partition(".")[0], targets.get(site.symbol))
        if site.symbol in targets or (over is not None and site.kind == "added"):
            continue
        if over is not None:
            site = replace(
                site, passes=("hand_edits",), verdict=over.verdict, reason=f"replaced by a hand edit: {over.reason}"
            )
        found.append(site)
    generated = [{k: v for k, v in texts.of(edit.symbol).items() if k.startswith("generated")} for edit in edits]
    return [replace(edit, **sides) for edit, sides in zip(edits, generated, strict=True)] + found


# -------------------------------------------------------------------------------------------------- generation


def _refused(error: PatchgenError, sites: list[Site], texts: Texts) -> list[Site]:
    """What the generator says; at the sites that a pass missed, or at the changed ones that the pass is known for."""
    name = error.pass_name if isinstance(error, PassMismatch) else ""
    if any(site.verdict == PERSON and name in site.passes for site in sites):
        return []  # a hand edit that lost its target is listed with it
    missed = error.sites if isinstance(error, PassMismatch) else ()
    missed = missed or [site.symbol for site in sites if name and name in site.passes] or [""]
    passes = (name,) if name else ()
    return [
        Site("model", "refused", texts.new.path, symbol, passes, PERSON, str(error), **texts.of(symbol))
        for symbol in missed
    ]


def _moved_hits(record: Mapping, then: Mapping, sites: Iterable[Site], texts: Texts) -> list[Site]:
    """Passes that hit more, less or otherwise, and reasons of the census that moved."""
    old, new = _placed(record), _placed(then)
    path, found = texts.new.path, []
    for step, place in dict.fromkeys((*old, *new)):
        before, after = (side.get((step, place), "nothing") for side in (old, new))
        if before != after:
            symbol = "" if place == "module" else place
            words = f"{step} at {place}: {before} -> {after}"
            found.append(Site("model", "hits", path, symbol, (step,), REVIEW, words, **texts.of(symbol)))
    for symbol, reason in then["census"].items():
        before = record.get("census", {}).get(symbol, reason)
        if before != reason:
            words = f"census: {before} -> {reason}"
            found.append(Site("model", "census", path, symbol, (), REVIEW, words, **texts.of(symbol)))
    return found


def _differently_generated(sites: Iterable[Site], texts: Texts) -> Iterator[Site]:
    """What is generated otherwise though nothing above says why: the committed file is not of this generator."""
    told = {site.symbol for site in sites} | {site.symbol.partition(".")[0] for site in sites}
    now, then = symbols_of(texts.now), symbols_of(texts.then)
    for name in dict.fromkeys((*now, *then)):
        if name in told or name.partition(".")[0] in told or name == OTHER:
            continue
        if name not in now or name not in then or not now[name].same_as(then[name]):
            words = "generated otherwise from the same upstream code: by a change beside it, or of the generator since"
            sources = texts.of(name, whole=name not in now or name not in then)
            yield Site("model", "changed", texts.new.path, name, (), REVIEW, words, **sources)
