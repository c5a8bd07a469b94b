"""Drift outside the modeling file: in its configuration, and in the imported code that it uses, directly or indirectly."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from patchgen.upgrade.findings import PERSON, REVIEW, Site
from patchgen.upgrade.reach import File, Library, SymbolPlace, exported, is_config, read_file
from patchgen.upgrade.symbols import Symbol
from patchgen.upgrade.training import training_follows
from patchgen.upstream import Upstream


def drift_of_helpers(
    before: Library, after: Library, old: Upstream, new: Upstream, kept: tuple[set[str], set[str]]
) -> list[Site]:
    """Changed symbols of configurations and imported files that the kept code leads to, and names that imports bind to
    something else. Symbols that training does not run are included, with `Site.is_run` False.

    Args:
        kept: the classes and functions that generation keeps, of the old modeling file and of the new one.
    """
    reached, run = (
        [
            library.helpers_of(_path_in_package(upstream), upstream.text, names, follows)
            for library, upstream, names in zip((before, after), (old, new), kept, strict=True)
        ]
        for follows in (None, training_follows)
    )
    sides = [_symbols(library, found) for library, found in zip((before, after), reached, strict=True)]
    moved = _only_moved(*sides)
    found: list[Site] = []

    def is_same(place: SymbolPlace) -> bool:
        a, b = (_symbol(library, place) for library in (before, after))
        return place in moved or (a is not None and b is not None and a.same_as(b))

    for place in dict.fromkeys((*reached[0], *reached[1])):
        a, b = (_symbol(library, place) for library in (before, after))
        if is_same(place) or _is_listed_with_its_class(place, a, b, before, after):
            continue
        if a is None and not is_config(place[0]) and "." not in place[1]:
            continue  # new code is reached from changed code, which is listed
        is_run = place in run[0] or place in run[1]
        via = run[0].get(place) if b is None else None  # removed code was reached from changed code, which is listed
        is_run &= (via is None or is_same(via)) and not _differs_in_annotation_only(place, a, b)
        site = _site(place, a, b, before, after, _route(place, run if is_run else reached))
        found.append(replace(site, is_run=is_run or site.place == "config"))
    found += _rebound_names(before, after, old, new, reached, run, kept)
    order = ("model", "config", "helper")
    return sorted(found, key=lambda site: (order.index(site.place), site.reason.count("->"), site.file, site.symbol))


def _path_in_package(upstream: Upstream) -> str:
    """The file's path in the package; a user's file gets one as if it were in the folder of its model."""
    path = upstream.path.removeprefix("transformers/")
    return path if "/" in path else f"models/{upstream.model}/{path}"


def _symbol(library: Library, place: SymbolPlace) -> Symbol | None:
    file = library.file(place[0])
    return file.symbols.get(place[1]) if file else None


def _symbols(library: Library, places: dict[SymbolPlace, SymbolPlace | None]) -> dict[SymbolPlace, Symbol]:
    return {place: found for place in places if (found := _symbol(library, place)) is not None}


def _only_moved(old: dict[SymbolPlace, Symbol], new: dict[SymbolPlace, Symbol]) -> set[SymbolPlace]:
    """The old and the new place of each symbol that is unchanged but in another file now."""
    added: dict[str, list[SymbolPlace]] = {}
    for place in new:
        if place not in old:
            added.setdefault(place[1], []).append(place)
    moved: set[SymbolPlace] = set()
    for place in old:
        for other in added.get(place[1], ()) if place not in new else ():
            if old[place].same_as(new[other]):
                moved |= {place, other}
    return moved


def _is_listed_with_its_class(
    place: SymbolPlace, a: Symbol | None, b: Symbol | None, before: Library, after: Library
) -> bool:
    """Whether a member was added or removed together with its class, which is listed itself."""
    owner, _, member = place[1].partition(".")
    if not member or (a is not None and b is not None):
        return False
    return _symbol(before, (place[0], owner)) is None or _symbol(after, (place[0], owner)) is None


def _differs_in_annotation_only(place: SymbolPlace, a: Symbol | None, b: Symbol | None) -> bool:
    """Whether only a field's annotation changed, outside configurations, whose values are checked against their annotations."""
    is_checked = place[0].rpartition("/")[2].startswith("configuration_")
    return not is_checked and a is not None and b is not None and a.fingerprint == b.fingerprint


def _route(place: SymbolPlace, reached: list[dict[SymbolPlace, SymbolPlace | None]]) -> str:
    """How the model's file leads to a symbol: `create_causal_mask -> sdpa_mask`."""
    predecessors = reached[0] if place in reached[0] else reached[1]
    names = [place[1]]
    while (via := predecessors[place]) is not None:
        names.append(via[1])
        place = via
    return " -> ".join(reversed(names))


def _site(place: SymbolPlace, a: Symbol | None, b: Symbol | None, before: Library, after: Library, route: str) -> Site:
    path, name = place
    kind = "added" if a is None else "gone" if b is None else "changed"
    with_members = kind != "changed"
    reason = f"the file's configuration: {route}" if is_config(path) else f"the file leads to it: {route}"
    return Site(
        place="config" if is_config(path) else "helper",
        kind=kind,
        file=f"transformers/{path}",
        symbol=name,
        passes=(),
        verdict=REVIEW,
        reason=reason,
        old_upstream=a.text(before.require_file(path).text, with_members=with_members) if a else "",
        new_upstream=b.text(after.require_file(path).text, with_members=with_members) if b else "",
        old_line=a.line if a else 0,
        new_line=b.line if b else 0,
    )


def _rebound_names(
    before: Library,
    after: Library,
    old: Upstream,
    new: Upstream,
    reached: list[dict[SymbolPlace, SymbolPlace | None]],
    run: list[dict[SymbolPlace, SymbolPlace | None]],
    kept: tuple[set[str], set[str]],
) -> Iterator[Site]:
    """Names that code reads and an import now binds to something else, in the modeling file and in the files it leads to."""
    explanation = "the code that reads it is unchanged, but an import binds it to something else"
    old_file, new_file = (read_file(_path_in_package(upstream), upstream.text) for upstream in (old, new))
    for name, texts in _rebound(old_file, new_file, before, after):
        if any(reader.partition(".")[0] in kept[0] & kept[1] for reader in _readers(name, new_file)):
            yield Site("model", "changed", new.path, name, (), REVIEW, explanation, *texts)
    for path in sorted({path for path, _ in reached[0].keys() & reached[1].keys()}):
        files, place = (before.require_file(path), after.require_file(path)), "config" if is_config(path) else "helper"
        for name, texts in _rebound(*files, before, after) if files[0] is not files[1] else ():
            readers = [(path, reader) for reader in _readers(name, files[1])]
            routes = [_route(reader, reached) for reader in readers if reader in reached[0] and reader in reached[1]]
            if routes:
                route = min(routes, key=lambda route_text: route_text.count("->"))
                reason = f"{explanation}; the file leads to it: {route} -> {name}"
                site = Site(place, "changed", f"transformers/{path}", name, (), REVIEW, reason, *texts)
                is_run = place == "config" or any(
                    reader_place in run[0] and reader_place in run[1] for reader_place in readers
                )
                yield replace(site, is_run=is_run)


def _rebound(old_file: File, new_file: File, before: Library, after: Library) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each name that imports bind to something else now -> what they bind it to, as text: old and new."""
    for name in sorted(old_file.names.origins.keys() & new_file.names.origins.keys()):
        old, new = (set(file.names.origins[name]) for file in (old_file, new_file))
        if old != new and not _only_moved_elsewhere(old, new, before, after):
            yield name, (f"{name}: {', '.join(sorted(old))}", f"{name}: {', '.join(sorted(new))}")


def _only_moved_elsewhere(old: set[str], new: set[str], before: Library, after: Library) -> bool:
    """Whether the imported symbols are unchanged, but in another file now."""
    contents: list[set[tuple[str, str]]] = []
    for library, names in ((before, old), (after, new)):
        places = [library.locate(name) for name in names]
        symbols = [
            _symbol(library, (located[0], located[1][0])) if located and located[1] else None for located in places
        ]
        contents.append(
            {
                (name.rpartition(".")[2], symbol.fingerprint if symbol else name)
                for name, symbol in zip(names, symbols, strict=True)
            }
        )
    return contents[0] == contents[1]


def _readers(name: str, file: File) -> list[str]:
    """The symbols of a file that read a name."""
    return [
        key
        for key, symbol in file.symbols.items()
        if any(isinstance(child, ast.Name) and child.id == name for node in symbol.nodes for child in ast.walk(node))
    ]


def missing_imports(generated: str, library: Library, path: str) -> Iterator[Site]:
    """Names that the generated file would import but the release does not have: those of a hand edit, for example."""
    for node in ast.walk(ast.parse(generated)):
        module, names = (node.module or "", node.names) if isinstance(node, ast.ImportFrom) else ("", [])
        for alias in names if module.partition(".")[0] == "transformers" else ():
            if alias.name != "*" and _is_missing(f"{module}.{alias.name}", module, library):
                reason = f"the generated file imports {alias.name} from {module}, but {library.release.origin} has no such name"
                yield Site("helper", "gone", path, alias.name, (), PERSON, reason)


def _is_missing(dotted: str, module: str, library: Library) -> bool:
    if library.locate(dotted) is not None:
        return False
    base = "/".join(module.split(".")[1:])
    files = (library.file(f"{base}.py"), library.file(f"{base}/__init__.py".lstrip("/")))
    file = next((candidate for candidate in files if candidate is not None), None)
    return file is None or (not _has_unlisted_names(file) and dotted.rpartition(".")[2] not in exported(file))


def _has_unlisted_names(file: File) -> bool:
    """Whether a file can define names that its text does not show: by a star import or as a lazy module."""
    has_star_import = any(
        isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in ast.walk(ast.parse(file.text))
    )
    return has_star_import or "__getattr__" in file.symbols or "_LazyModule" in file.text
