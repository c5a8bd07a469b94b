"""One committed model between two releases: what changed upstream, under which pass, and in the generated file."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen import pipeline, provenance
from patchgen.errors import PassMismatch, PatchgenError, UpstreamNotFound
from patchgen.model_configs import ModelConfig, config_for
from patchgen.passes import pass_named
from patchgen.passes.base import SitePass
from patchgen.upgrade import releases
from patchgen.upgrade.edits import drift_under_edits
from patchgen.upgrade.findings import PERSON, REVIEW, SAME, VERDICT_NAMES, ModelUpgrade, Site
from patchgen.upgrade.helpers import drift_of_helpers, missing_imports
from patchgen.upgrade.reach import Library
from patchgen.upgrade.symbols import OTHER, Symbol, symbols_of
from patchgen.upstream import Upstream, load, load_from

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import Provenance

PLUMBING = ("prune", "absolute_imports", "hand_edits")


@dataclass(frozen=True)
class Texts:
    """The four texts of a model: upstream's file of the old and new release, and the generated file now and after the move."""

    old: Upstream
    new: Upstream
    now: str
    then: str  # the text after the move; empty if generation refuses

    def of(self, symbol: str, *, with_members: bool = True) -> dict[str, Any]:
        """Arguments of `Site`: the source of one symbol in the four texts, and its line in upstream's files.

        Args:
            with_members: for a class, its whole source rather than only its head.
        """
        sides = {"old_upstream": self.old.text, "new_upstream": self.new.text}
        sides |= {"generated_now": self.now, "generated_then": self.then}
        symbols_and_texts = {name: (symbols_of(text).get(symbol), text) for name, text in sides.items()}
        texts = {
            name: symbol_of_side.text(text, with_members=with_members) if symbol_of_side else ""
            for name, (symbol_of_side, text) in symbols_and_texts.items()
        }
        lines = {
            f"{side}_line": symbol_of_side.line if (symbol_of_side := symbols_and_texts[f"{side}_upstream"][0]) else 0
            for side in ("old", "new")
        }
        return texts | lines


@functools.lru_cache(maxsize=4)
def library(release: str) -> Library:
    """The files of a release, cached per process."""
    return Library(releases.find(release).release)


def compare_model(
    model: str, to: str, root: Path, reviewed: Collection[str] = (), config: ModelConfig | None = None
) -> ModelUpgrade:
    """Compares a committed model with the one generated from release `to`. Writes nothing.

    Args:
        model: the name of its folder in `root`.
        to: a version, a wheel or a folder.
        reviewed: targets of hand edits that a person compared with the new release.
        config: the model's config; by default its file in `model_configs`.

    Raises:
        PatchgenError: a release, or the record of the model, cannot be read.
    """
    record = provenance.read(root / model)
    now = (root / model / f"modeling_{model}.py").read_text(encoding="utf-8")
    old, before = _old_upstream(model, record)
    after = library(to)
    versions = (before.release.version, after.release.version)
    try:
        new = load_from(after.release, model) if record["upstream"]["version"] else old
    except UpstreamNotFound as error:
        site = Site("model", "gone", old.path, "", (), PERSON, str(error), old_upstream=old.text)
        return ModelUpgrade(model, *versions, PERSON, str(error), (site,))
    config = config or config_for(model)
    generated, refusal = _generated(new, config, record.get("asked", ()))
    texts = Texts(old, new, now, generated.text if generated else "")
    then: Provenance | None = json.loads(generated.provenance) if generated else None
    sites = _drift_of_model(texts, record, then, config)
    sites = _with_edits(sites, list(drift_under_edits(config.edits, record, old, new, reviewed)), texts)
    if refusal is not None:
        sites += _refused(refusal, sites, texts)
    if then is not None:
        sites += _changed_hits(record, then, texts)
        sites += _differently_generated(sites, texts)
        sites += missing_imports(texts.then, after, new.path)
    kept_symbols = (set(record["symbols"]), set((then or record)["symbols"]))
    sites += drift_of_helpers(before, after, old, new, kept_symbols)
    verdict = max((site.verdict for site in sites), default=SAME)
    reason = next((site.reason for site in sites if site.verdict == PERSON), VERDICT_NAMES[verdict])
    return ModelUpgrade(model, *versions, verdict, reason, tuple(sites), now, texts.then)


def _old_upstream(model: str, record: Provenance) -> tuple[Upstream, Library]:
    """The file that the committed one was generated from, and its release, or the installed one for a user's file."""
    version = record["upstream"]["version"]
    if version is not None:
        before = library(version)
        return load_from(before.release, model), before
    return load(model, source=releases.user_source(model, record)), library(releases.installed())


def _generated(
    new: Upstream, config: ModelConfig, heads: Sequence[str]
) -> tuple[pipeline.Generated | None, PatchgenError | None]:
    try:
        return pipeline.generate(new, config, heads), None
    except PatchgenError as error:
        return None, error


# --------------------------------------------------------------------------------------------------- the model's file


def _drift_of_model(texts: Texts, record: Provenance, then: Provenance | None, config: ModelConfig) -> list[Site]:
    """The symbols of the modeling file that changed, without those that prune drops on both sides."""
    old, new = symbols_of(texts.old.text), symbols_of(texts.new.text)
    edited = {edit.target.partition(".")[0] for edit in config.edits}
    kept_old = set(record["symbols"]) | edited
    kept_new = set(then["symbols"]) | edited if then else kept_old | {name for name in new if name not in old}
    sites: list[Site] = []
    for name in dict.fromkeys((*old, *new)):
        owner = name.partition(".")[0]
        sides = [_kept(side, name, owner, kept) for side, kept in ((old, kept_old), (new, kept_new))]
        if sides == [None, None] or (sides[0] is not None and sides[1] is not None and sides[0].same_as(sides[1])):
            continue
        if name != owner and None in sides and (owner not in old or owner not in new):
            continue  # its class was added or is gone, and is listed itself
        kind = "added" if sides[0] is None else "gone" if sides[1] is None else "changed"
        passes, reason = _passes_at(name, owner, record, then)
        sources = texts.of(name, with_members=kind != "changed")
        sites.append(Site("model", kind, texts.new.path, name, passes, REVIEW, reason, **sources))
    return sites


def _kept(side: Mapping[str, Symbol], name: str, owner: str, kept: set[str]) -> Symbol | None:
    """The symbol, unless it is missing or belongs to a class or function that is not in `kept`."""
    symbol = side.get(name)
    is_definition = symbol is not None and any(isinstance(n, ast.ClassDef | ast.FunctionDef) for n in symbol.nodes)
    return symbol if owner in kept or not (is_definition or name != owner) else None


def _passes_at(name: str, owner: str, record: Provenance, then: Provenance | None) -> tuple[tuple[str, ...], str]:
    """The passes that have a site in a symbol, or else elsewhere in its class, and the reason to list the symbol."""
    hits = _hits(record) | (_hits(then) if then else {})
    in_symbol = dict.fromkeys(step for step, site in hits if site == name)
    if in_symbol:
        return tuple(in_symbol), f"a site of {', '.join(in_symbol)}"
    in_class = dict.fromkeys(step for step, site in hits if site.partition(".")[0] == owner)
    if in_class:
        return (
            tuple(in_class),
            f"in {owner}, where {', '.join(in_class)} {'has' if len(in_class) == 1 else 'have'} a site",
        )
    return (), "copied as upstream wrote it"


def _hits(record: Provenance) -> dict[tuple[str, str], str]:
    """(pass, site) -> what the pass did there, or found upstream doing."""
    hits: dict[tuple[str, str], str] = {}
    for step in record["passes"]:
        kind = pass_named(step["name"])
        is_site_pass = kind is not None and issubclass(kind, SitePass)
        for hit in (
            (*step["hits"], *(step["upstream"] if is_site_pass else ())) if step["name"] not in PLUMBING else ()
        ):
            hits[step["name"], hit["site"]] = hit["what"]
    return hits


def _with_edits(sites: list[Site], edits: list[Site], texts: Texts) -> list[Site]:
    """The sites of hand edits, then the others; a change in code that an edit replaces is listed with the edit's verdict."""
    targets = {edit.symbol: edit for edit in edits}
    result: list[Site] = []
    for site in sites:
        edit = targets.get(site.symbol.partition(".")[0], targets.get(site.symbol))
        if site.symbol in targets or (edit is not None and site.kind == "added"):
            continue
        if edit is not None:
            reason = f"replaced by a hand edit: {edit.reason}"
            site = replace(site, passes=("hand_edits",), verdict=edit.verdict, reason=reason)
        result.append(site)
    generated = [{k: v for k, v in texts.of(edit.symbol).items() if k.startswith("generated")} for edit in edits]
    return [replace(edit, **sides) for edit, sides in zip(edits, generated, strict=True)] + result


# -------------------------------------------------------------------------------------------------- generation


def _refused(error: PatchgenError, sites: list[Site], texts: Texts) -> list[Site]:
    """The generator's refusal, at the symbols where a pass missed its site, or else at changed symbols where it had one."""
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


def _changed_hits(record: Provenance, then: Provenance, texts: Texts) -> list[Site]:
    """Passes with more, fewer or other hits, and symbols with another reason in the census."""
    old, new = _hits(record), _hits(then)
    path, found = texts.new.path, list[Site]()
    for step, hit_site in dict.fromkeys((*old, *new)):
        before, after = (side.get((step, hit_site), "nothing") for side in (old, new))
        if before != after:
            symbol = "" if hit_site == "module" else hit_site
            reason = f"{step} at {hit_site}: {before} -> {after}"
            found.append(Site("model", "hits", path, symbol, (step,), REVIEW, reason, **texts.of(symbol)))
    for symbol, after in then["census"].items():
        before = record.get("census", {}).get(symbol, after)
        if before != after:
            reason = f"census: {before} -> {after}"
            found.append(Site("model", "census", path, symbol, (), REVIEW, reason, **texts.of(symbol)))
    return found


def _differently_generated(sites: Iterable[Site], texts: Texts) -> Iterator[Site]:
    """Symbols that are generated differently although no site so far explains it: code elsewhere changed, or the generator."""
    listed = {site.symbol for site in sites} | {site.symbol.partition(".")[0] for site in sites}
    now, then = symbols_of(texts.now), symbols_of(texts.then)
    for name in dict.fromkeys((*now, *then)):
        if name in listed or name.partition(".")[0] in listed or name == OTHER:
            continue
        if name not in now or name not in then or not now[name].same_as(then[name]):
            reason = "generated differently from the same upstream code: by a change elsewhere, or of the generator"
            sources = texts.of(name, with_members=name not in now or name not in then)
            yield Site("model", "changed", texts.new.path, name, (), REVIEW, reason, **sources)
