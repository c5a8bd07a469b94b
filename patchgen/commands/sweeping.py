"""sweep: generate and prove every model type of a family, one row each in docs/coverage.md and records/coverage.json."""

from __future__ import annotations

import difflib
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import track

from patchgen import source, upstream
from patchgen.anatomy import Anatomy, Role, media, study
from patchgen.anatomy.roles import AUDIO_INPUTS
from patchgen.commands import own_process, support_matrix
from patchgen.commands.console import console
from patchgen.commands.examination import (
    CAUSAL_MAP,
    EAGER_ONLY,
    FAILED,
    GENERATED,
    PROVEN,
    TEXT,
    Examined,
    examine,
    row,
)
from patchgen.errors import ConfigError
from patchgen.model_configs import config_for
from patchgen.passes.hand_edits import MendUpstream, mended_methods
from patchgen.runtime.verify import records, source_keys
from patchgen.runtime.verify.committed_models import page_of
from patchgen.runtime.verify.layout import TWO_RANKS, Layout

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import CoverageRow, RankCell

VISION, AUDIO, OMNI = "vision", "audio", "omni"
MEDIA = (VISION, AUDIO, OMNI)
FAMILIES = (TEXT, "moe", *MEDIA, "media")
MEDIA_MAPS = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")


def sweep(family: str, jobs: int, version: str | None, only: list[str], output: Path | None, *, fresh: bool) -> int:
    """Sweeps a family; 0 if some type is proven and every type that generates is, at least eagerly; with `only`, if each is proven.

    1 also if a proven type has an input that no packing rule covers, or a process died: its type has no new row, and the next
    sweep examines it again. Current rows (`records`) are kept; an interrupted sweep resumes. Rows of other types stay in the
    record unchanged.

    Raises:
        ConfigError: no such family, or it has no such type.
    """
    takes_media, release = _takes_media(family), upstream.open_release(version)
    wanted = _requested_types(only, release, takes_media=takes_media) or types_of(family, release)
    path, key = records.path_in(output), records.current_key() | {"transformers": release.version}
    rows = records.read(path)
    known = {
        model_type: "" if fresh else _current_digest(rows.get((takes_media, model_type)), key) for model_type in wanted
    }
    sources = {model_type: source_keys.model_sources_hash(model_type, release) for model_type in wanted}
    todo = [
        model_type
        for model_type in wanted
        if not known[model_type] or rows[takes_media, model_type].get("sources") != sources[model_type]
    ]
    examined: set[str] = set()
    results = _examine_all(
        {model_type: known[model_type] for model_type in todo}, release.version, jobs, takes_media=takes_media
    )
    for found in track(results, "sweeping", len(todo), console=console, disable=not console.is_terminal):
        model_type = found.model_type
        examined.add(model_type)
        new = _merged(rows.get((takes_media, model_type)), found, key)
        new["family"] = _family(model_type, release) if takes_media else TEXT
        new["sources"] = sources[model_type]
        new.pop("mended", None)
        if mended := _mended_methods(model_type, release):
            new["mended"] = mended
        if found.row is not None:
            new["made_with"] = records.row_made_with(found.generated_digest, found.code, key)
        if not records.needs_ranks(new):
            new.pop("ranks", None)
        rows[takes_media, model_type] = new
        records.write(path, rows)
        if not console.is_terminal:
            outcome = f"{new['status']} {new['reason']}" if found.row else "unchanged"
            console.print(f"{model_type}: {outcome}", soft_wrap=True, markup=False)
    records.write(path, rows)
    if output is None:
        support_matrix.write()
    died = {*todo} - examined
    swept = [rows[takes_media, model_type] for model_type in wanted if model_type not in died]
    return max(_print_summary(swept, path, names_given=bool(only)), int(bool(died)))


def _takes_media(family: str) -> bool:
    """Whether the heads of a family take media.

    Raises:
        ConfigError: no such family.
    """
    if family not in FAMILIES:
        raise ConfigError(
            f"There is no family '{family}'. Families: {', '.join(FAMILIES)}; without --sp and --ep also heads."
        )
    return family in (*MEDIA, "media")


def _merged(before: CoverageRow | None, found: Examined, key: Mapping[str, str]) -> CoverageRow:
    """The new row of a type, with the comparisons on ranks that hold; or the one before with what generation gives now."""
    if found.row is None:
        assert before is not None, "only the text of a current row is known"
        return {**before, **found.facts}
    cells = records.cells_that_hold(before, key, found.generated_digest) if before else {}
    return {"ranks": cells, **found.row}


def _mended_methods(model_type: str, release: upstream.Release) -> list[str]:
    """What the config of a type mends in this release for the proof: "Class.method"."""
    edits, path = config_for(model_type).edits, release.file_of(model_type)
    if path is None or not any(isinstance(edit, MendUpstream) for edit in edits):
        return []
    return mended_methods(edits, source.parse(release.read(path) or "", path))


def _current_digest(row: CoverageRow | None, key: Mapping[str, str]) -> str:
    """The digest of the generated text that a row, of whatever status, is about; empty if the row is missing or stale."""
    generated = records.recorded_digest(row) if row else None
    return generated if generated and records.holds(row, key, generated) else ""


def _print_summary(swept: Sequence[CoverageRow], path: Path, *, names_given: bool) -> int:
    statuses = (PROVEN, EAGER_ONLY, GENERATED, FAILED)
    counts = {status: sum(one["status"] == status for one in swept) for status in statuses}
    moe = sum(one["status"] == PROVEN and one["moe"] for one in swept)
    others = ", ".join(f"{counts[status]} {status}" for status in statuses[1:])
    on_ranks = sum(records.with_ranks(one)["status"] == PROVEN for one in swept)
    console.print(
        f"{counts[PROVEN]} proven in one process ({moe} MoE), {on_ranks} of them also on two ranks; {others}"
    )
    console.print(f"written: {path} and {page_of(path)}", soft_wrap=True)
    uncovered = [one for one in swept if one["status"] == PROVEN and one.get("inputs_without_rule")]
    for one in uncovered:
        names = ", ".join(one["inputs_without_rule"])
        console.print(f"error: {one['model_type']} is proven, but no packing rule covers {names}", soft_wrap=True)
    passed = counts[PROVEN] == len(swept) if names_given else counts[PROVEN] and not counts[GENERATED]
    return 0 if passed and not uncovered else 1


def sweep_ranks(
    family: str, only: list[str], layouts: Mapping[str, Layout], output: Path | None, *, fresh: bool
) -> int:
    """Compares the types of a family on gloo ranks with upstream on one, into the same table; 0 if in every layout any agrees, or,
    with `only`, if all do. Current comparisons are kept; types that were swept and are not proven on one rank are left out.

    Args:
        layouts: by their keys in a row, all of as many ranks.

    Raises:
        ConfigError: no such family, or it has no such type.
    """
    release, takes_media = upstream.open_release(None), _takes_media(family)
    types = _requested_types(only, release, takes_media=takes_media) or types_of(family, release)
    from patchgen.runtime.verify import parallel_coverage

    path, key = records.path_in(output), records.current_key()
    rows = records.read(path)
    places = [(takes_media, model_type) for model_type in types]
    for place in places:
        of_family = _family(place[1], release) if takes_media else TEXT
        rows.setdefault(place, row(place[1], GENERATED, "not swept in one process", family=of_family))
    wanted = [place for place in places if records.needs_ranks(rows[place])]
    current = records.current_digests([rows[place] for place in wanted], release, jobs=2)
    tasks: list[parallel_coverage.Task] = []
    for place in wanted:
        todo = {
            name: layout
            for name, layout in layouts.items()
            if fresh or not records.cell_holds(rows[place], name, key, current[place[1]])
        }
        if todo:
            tasks.append(parallel_coverage.Task(place[1], todo, records.separates_documents(rows[place])))
    world = next(iter(layouts.values())).ranks
    for found in parallel_coverage.sweep(tasks, takes_media=takes_media, world=world) if tasks else ():
        cell: RankCell = {
            "difference": found.result.difference,
            "reason": found.result.reason,
            "applies": found.result.applies,
            "made_with": records.cell_made_with(found.generated_digest, found.code, key, found.separates),
        }
        rows[takes_media, found.model_type].setdefault("ranks", {})[found.layout] = cell
        records.write(path, rows)
    records.write(path, rows)
    if output is None:
        support_matrix.write()
    passed = True
    for name in layouts:
        cells = [rows[place].get("ranks", {}).get(name) for place in wanted]
        passed &= _print_agreement(name, [cell for cell in cells if cell], types, path, world, all_must=bool(only))
        passed &= all(cells)
    return 0 if passed else 1


def _print_agreement(
    layout: str, cells: Sequence[RankCell], types: Sequence[str], path: Path, world: int, *, all_must: bool
) -> bool:
    """Prints how many types agree in a layout; whether any does, or all of them."""
    compared = [cell for cell in cells if cell["applies"]]
    if not compared:
        named = f"{', '.join(types[:5])}{', ...' if len(types) > 5 else ''}"
        console.print(f"None of {named} can be compared with {layout}: see the reasons in {path}", soft_wrap=True)
        return False
    agreeing = sum(not cell["reason"] for cell in compared)
    console.print(
        f"{agreeing} of {len(compared)} agree on {world} ranks with {layout}; written: {path}", soft_wrap=True
    )
    return agreeing == len(compared) if all_must else agreeing > 0


def layouts_of(sp: int, ep: int, world: int) -> dict[str, Layout]:
    """The layouts of a sweep on ranks, by their keys in a row: the one of these sizes; without sizes, all that pages show.

    Raises:
        ConfigError: the sizes do not divide the number of ranks, or there are none for other than two ranks.
    """
    if sp == ep == 1:
        if world != 2:
            raise ConfigError(
                f"--world {world} alone is no layout; --world 2 compares every type with FSDP, shared experts and a shared "
                "sequence. To fix: give --sp or --ep with it, or --world 2."
            )
        return TWO_RANKS
    _require_layout(sp, ep, world)
    name = "_".join(f"{name}{size}" for name, size in (("sp", sp), ("ep", ep)) if size > 1)
    name += "" if world == max(sp, ep) else f"_of{world}"
    return {name: Layout(world, sp=sp, ep=ep, fsdp=True)}


def _require_layout(sp: int, ep: int, world: int) -> None:
    """Refuses sizes that `world` ranks cannot be divided into: every type would fail on the ranks, and its row would say so.

    Raises:
        ConfigError: a size does not divide `world`; the message names one that both divide.
    """
    for option, size, shared in (("--sp", sp, "a sequence"), ("--ep", ep, "the experts")):
        if world % size:
            raise ConfigError(
                f"{option} {size} does not divide --world {world}: the ranks that share {shared} form equal groups. To fix: "
                f"give --world {math.lcm(sp, ep)}, or a multiple of it."
            )


def _examine_all(todo: Mapping[str, str], version: str, jobs: int, *, takes_media: bool) -> Iterator[Examined]:
    """Examines types, and yields each as it finishes. One whose process dies is printed: that says nothing of the type.

    Args:
        todo: model type -> the digest of the generated text of its current row, or "".
    """
    calls = {
        model_type: {"version": version, "takes_media": takes_media, "known_digest": known}
        for model_type, known in todo.items()
    }
    for _, found in own_process.run_each(examine, calls, jobs):
        if isinstance(found, own_process.ProcessDied):
            console.print(
                f"not examined: {found}. To fix: free memory, and run it again.", soft_wrap=True, markup=False
            )
            continue
        yield found


def types_of(family: str, release: upstream.Release) -> list[str]:
    """The model types of a family in a release."""
    candidates = _candidates(release, takes_media=_takes_media(family))
    if family == TEXT:
        return candidates
    if family == "moe":
        return [model_type for model_type in candidates if _has_experts(model_type, release)]
    wanted = MEDIA if family == "media" else (family,)
    return [model_type for model_type in candidates if _family(model_type, release) in wanted]


def _requested_types(only: list[str], release: upstream.Release, *, takes_media: bool) -> list[str]:
    """The named types, without duplicates.

    Raises:
        ConfigError: a type has no head of the kind to sweep, or is not in this release.
    """
    candidates, others = (_candidates(release, takes_media=takes) for takes in (takes_media, not takes_media))
    for model_type in only:
        if model_type in candidates:
            continue
        if model_type in others:
            how = "omit --family media" if takes_media else "give --family media"
            raise ConfigError(
                f"--only {model_type}: {release.origin} has no {'head with media' if takes_media else 'causal head'} of that "
                f"type, but one of the other kind. To fix: {how}."
            )
        near = ", ".join(difflib.get_close_matches(model_type, candidates, n=3)) or "none"
        raise ConfigError(
            f"--only {model_type}: {release.origin} has no such type (nearest: {near}). To prove a model that is in no "
            f"release: `patchgen verify --code FOLDER`."
        )
    return list(dict.fromkeys(only))


def missing_types(rows: Container[records.Place], release: upstream.Release) -> dict[bool, list[str]]:
    """The model types of a release that have no row, without and with media."""
    text, with_media = (
        [
            model_type
            for model_type in _candidates(release, takes_media=takes_media)
            if (takes_media, model_type) not in rows
        ]
        for takes_media in (False, True)
    )
    return {False: text, True: [model_type for model_type in with_media if _family(model_type, release) in MEDIA]}


def _candidates(release: upstream.Release, *, takes_media: bool) -> list[str]:
    """The types with a causal head, or, with `takes_media`, with a head that may take images or audio."""
    return sorted(
        {
            model_type
            for name in (MEDIA_MAPS if takes_media else (CAUSAL_MAP,))
            for model_type in release.auto_map(name)
        }
    )


def _family(model_type: str, release: upstream.Release) -> str:
    """The family of a type by the media that its models take: VISION, AUDIO or OMNI; TEXT if they take none."""
    anatomy = _anatomy(model_type, release)
    inputs = {name for info in anatomy.classes for name in media.takes_media(anatomy, info)} if anatomy else set[str]()
    audio = {name for name in inputs if name in AUDIO_INPUTS or "audio" in name}
    if not inputs:
        return TEXT
    return OMNI if audio and inputs - audio else AUDIO if audio else VISION


def _has_experts(model_type: str, release: upstream.Release) -> bool:
    """Whether the file of a model type has experts."""
    anatomy = _anatomy(model_type, release)
    return anatomy is not None and bool(anatomy.with_role(Role.EXPERTS))


def _anatomy(model_type: str, release: upstream.Release) -> Anatomy | None:
    path = release.file_of(model_type)
    if path is None:
        return None
    origin = upstream.load_file(release, path, model=model_type)
    return study(source.parse(origin.text, origin.path), origin)
