"""Releases that differ from the installed one in planted places: folders of links, with the changed files as copies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from patchgen import source, upstream
from patchgen.upgrade.findings import ModelUpgrade, Site
from patchgen.upgrade.reach import is_config
from patchgen.upgrade.symbols import symbols_of

MODEL = "qwen3_moe"
FILE = f"models/{MODEL}/modeling_{MODEL}.py"


@dataclass(frozen=True)
class Drift:
    """A change of one symbol of a file, and what must be reported of it."""

    file: str  # inside the package
    symbol: str
    old: str
    new: str
    passes: tuple[str, ...] = ()
    verdict: int = 10
    kind: str = "changed"

    @property
    def id(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.symbol}"


def planted(folder: Path, drifts: Iterable[Drift]) -> Path:
    """A folder with a package `transformers` that is the installed one but for the drifts."""
    release = upstream.open_release()
    installed = Path(str(release._root))
    texts: dict[str, str] = {}
    for drift in drifts:
        texts[drift.file] = changed(texts.get(drift.file) or release.read(drift.file), drift)
    _link(installed, folder / "transformers", texts)
    return folder


def _link(original: Path, copy: Path, texts: dict[str, str], inside: str = "") -> None:
    copy.mkdir(parents=True)
    for entry in original.iterdir():
        path = f"{inside}{entry.name}"
        if path in texts:
            (copy / entry.name).write_text(texts[path], encoding="utf-8")
        elif any(file.startswith(f"{path}/") for file in texts) or path == "models":
            _link(entry, copy / entry.name, texts, f"{path}/")
        else:
            (copy / entry.name).symlink_to(entry)


def changed(text: str, drift: Drift) -> str:
    """The text with the drift in its symbol; one that is not there once would plant something else, so it is an error."""
    symbol = symbols_of(text, is_config=is_config(drift.file)).get(drift.symbol)
    is_imported = symbol is None and "." not in drift.symbol
    if is_imported:
        assert text.count(drift.old) == 1, f"{drift.id}: {drift.old!r} should stand there once"
        return text.replace(drift.old, drift.new)
    if symbol is None or symbol.nodes[0].end_lineno is None:  # a whole class, or something new: by its block
        block = source.parse(text).block(drift.symbol.partition(".")[0])
        segment = block.text
    else:
        lines = text.splitlines(keepends=True)
        node = symbol.nodes[0]
        start = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        segment = "".join(lines[start - 1 : node.end_lineno])
    assert segment.count(drift.old) == 1, f"{drift.id}: {drift.old!r} stands {segment.count(drift.old)} times in it"
    assert text.count(segment) == 1
    return text.replace(segment, segment.replace(drift.old, drift.new))


def site_of(found: ModelUpgrade, drift: Drift) -> Site:
    """The site that reports the drift."""
    sites = [site for site in found.sites if (site.file, site.symbol) == (f"transformers/{drift.file}", drift.symbol)]
    assert sites, f"{drift.id} is not reported: {[site.symbol for site in found.sites]}"
    return sites[0]


def check_reported(found: ModelUpgrade, drift: Drift) -> None:
    """The drift is reported with its kind, passes, verdict and both sources."""
    site = site_of(found, drift)
    assert (site.kind, site.passes, site.verdict) == (drift.kind, drift.passes, drift.verdict), site.reason
    if drift.kind in ("added", "gone"):
        assert site.new_upstream.strip() in drift.new and site.old_upstream.strip() in drift.old
    elif "@" in drift.old + drift.new:  # a decorator is reported with the whole head
        assert site.old_upstream != site.new_upstream
    else:
        assert drift.old.strip() in site.old_upstream and drift.new.strip() in site.new_upstream
