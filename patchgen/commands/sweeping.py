"""sweep: generate and prove every model type of a family, one row each in docs/coverage.md and docs/coverage.json."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from patchgen import __version__, provenance, upstream
from patchgen.commands import support_matrix
from patchgen.errors import ConfigError
from patchgen.templates import render

if TYPE_CHECKING:
    from patchgen.runtime.verify.proof import Proof

console = Console(highlight=False)

PROVEN, EAGER_ONLY, GENERATED, FAILED = "proven", "proven, eager only", "generated", "failed"
TEXT, VISION, AUDIO, OMNI = "text", "vision", "audio", "omni"
MEDIA = (VISION, AUDIO, OMNI)
FAMILIES = (TEXT, "moe", *MEDIA, "media")
CAUSAL_MAP = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
MEDIA_MAPS = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
# Kernels that need no compiler: every seam is compared in `patchgen verify`, a sweep compares these.
IMPLEMENTATIONS = ("torch", "chunked")


def sweep(family: str, jobs: int, version: str | None, only: list[str], output: Path | None, *, fresh: bool) -> int:
    """Runs the family; 0 if every type that generates is proven, or, with `only`, if every one of those is.

    Interrupted, it goes on where it stopped. Rows of types that this run does not ask for stay in the record, each with
    the code that it was made with.

    Raises:
        ConfigError: no such family.
    """
    if family not in FAMILIES:
        raise ConfigError(f"There is no family '{family}'. Families: {', '.join(FAMILIES)}.")
    release = upstream.open_release(version)
    takes_media = family in (*MEDIA, "media")
    wanted = list(dict.fromkeys(only)) or (
        _with_media(family, release) if takes_media else sorted(release.auto_map(CAUSAL_MAP))
    )
    if family == "moe" and not only:
        wanted = [kind for kind in wanted if _routes(kind, release)]
    path = (output or provenance.generated_root().resolve().parent / "docs") / "coverage.json"
    key = {"transformers": release.version, "patchgen": __version__, "sources": _source_hash()}
    rows = _previous(path)
    keys = {kind: (takes_media, kind) for kind in wanted}
    todo = [kind for kind in wanted if fresh or rows.get(keys[kind], {}).get("made_with") != _made_with(key)]
    columns = (
        TextColumn("sweeping"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(wanted), completed=len(wanted) - len(todo))
        for row in _run(todo, release.version, jobs, takes_media=takes_media):
            place = keys[row["model_type"]]
            row["family"] = _family(row["model_type"], release) if takes_media else TEXT
            rows[place] = {**row, "ranks": rows.get(place, {}).get("ranks", {}), "made_with": _made_with(key)}
            _write(path, key, rows)
            progress.update(task, advance=1, description=row["model_type"])
            if not console.is_terminal:
                console.print(f"{row['model_type']}: {row['status']} {row['reason']}", soft_wrap=True)
    _write(path, key, rows)
    if output is None:
        support_matrix.write()
    asked = [rows[keys[kind]] for kind in wanted]
    counts = {
        status: sum(row["status"] == status for row in asked) for status in (PROVEN, EAGER_ONLY, GENERATED, FAILED)
    }
    moe = sum(row["status"] == PROVEN and row["moe"] for row in asked)
    console.print(
        f"{counts[PROVEN]} proven ({moe} MoE), {counts[EAGER_ONLY]} proven with eager attention only, "
        f"{counts[GENERATED]} generated, {counts[FAILED]} failed"
    )
    console.print(f"written: {path} and {path.with_suffix('.md').name}", soft_wrap=True)
    is_good = counts[PROVEN] == len(asked) if only else counts[PROVEN] and not counts[GENERATED]
    return 0 if is_good else 1


def sweep_ranks(only: list[str], sp: int, ep: int, world: int, output: Path | None) -> int:
    """Compares types on several gloo ranks with upstream on one, into the same table; 0 if any agrees, all of `only`."""
    from patchgen.runtime.verify import parallel_coverage

    path = (output or provenance.generated_root().resolve().parent / "docs") / "coverage.json"
    release = upstream.open_release(None)
    key = {"transformers": release.version, "patchgen": __version__, "sources": _source_hash()}
    rows = _previous(path)
    measured = parallel_coverage.sweep(only, sp=sp, ep=ep, world=world)
    layout = "_".join(f"{name}{size}" for name, size in (("sp", sp), ("ep", ep)) if size > 1)
    for found in measured:
        blank = {**_row(found.model_type, FAILED, "not swept"), "made_with": "-"}
        known = rows.setdefault((False, found.model_type), blank)
        differences = (found.loss, found.gradients, found.packed_loss, found.packed_gradients)
        worst = max((d for d in differences if d == d), default=None)  # NaN: not measured
        known.setdefault("ranks", {})[layout] = {"difference": worst, "reason": found.reason}
    _write(path, key, rows)
    if output is None:
        support_matrix.write()
    agreeing = sum(not found.reason for found in measured)
    console.print(
        f"{agreeing} of {len(measured)} agree on {world} ranks with {layout}; written: {path}", soft_wrap=True
    )
    return 0 if (agreeing == len(measured) if only else agreeing) else 1


def _run(todo: list[str], version: str, jobs: int, *, takes_media: bool) -> Iterator[dict]:
    """Rows as they come. A type that takes its process down is a failed row, and the others go on."""
    context = multiprocessing.get_context("spawn")
    remaining = list(todo)
    while remaining:
        with ProcessPoolExecutor(min(jobs, len(remaining)), mp_context=context, initializer=_quiet) as pool:
            futures = {pool.submit(examine, kind, version, takes_media=takes_media): kind for kind in remaining}
            broken = []
            for future in as_completed(futures):
                kind = futures[future]
                try:
                    row = future.result()
                except BrokenProcessPool:
                    broken.append(kind)
                    continue
                remaining.remove(kind)
                yield row
        if broken:
            remaining.remove(broken[0])
            yield _row(broken[0], FAILED, "its process died (out of memory, or a crash in native code)")


def _quiet() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["OMP_NUM_THREADS"] = "1"


def examine(model_type: str, version: str, *, takes_media: bool = False) -> dict:
    """Generates and proves one model type, the head that takes images or audio if asked for it; the row says how far it
    came and why not further."""
    from patchgen import emit, model_configs, pipeline, provenance
    from patchgen.errors import PatchgenError
    from patchgen.runtime.verify.coverage import REFUSALS

    start = time.perf_counter()
    try:
        generated = pipeline.generate(upstream.load(model_type, version))
    except PatchgenError as error:
        return _row(model_type, FAILED, _phrase(error), seconds=time.perf_counter() - start)
    name = model_type if model_type.isidentifier() else model_type.replace("-", "_")
    hits = {step.name: len(step.outcome.hits) for step in generated.steps if step.outcome.hits}
    config = Path(model_configs.__file__).parent / f"{name}.py"
    facts = {
        "hits": {k: v for k, v in hits.items() if k not in ("prune", "absolute_imports", "checkpoint_mapping")},
        "notes": sum(len(step.outcome.notes) for step in generated.steps),
        "config_lines": len(config.read_text().splitlines()) if config.is_file() else 0,
        "changed_lines": emit.changed_lines(generated.diff),
        "moe": "fused_experts" in hits,
    }
    generation = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        provenance.write(generated, Path(folder), force=True)
        try:
            outcome = _prove(model_type, Path(folder), takes_media=takes_media)
        except REFUSALS as error:  # of a media head that cannot be found
            outcome = {"status": GENERATED, "reason": _phrase(error)}
    return _row(model_type, **facts, **outcome, seconds=time.perf_counter() - start, generation_seconds=generation)


def _prove(model_type: str, directory: Path, *, takes_media: bool) -> dict:
    from patchgen.runtime.verify.report import training_record
    from patchgen.runtime.verify.verdict import Verdict, one_line
    from patchgen.runtime.verify.verify_model import head_with_media, judge

    head = head_with_media(directory) if takes_media else None
    found, proof = judge(model_type, directory=directory, implementations=IMPLEMENTATIONS, head=head)
    if proof is None:
        return {"status": found.status, "reason": found.reason}
    facts = {
        "loss_difference": max((case.loss.relative for case in proof.cases), default=0.0),
        "gradient_difference": max((case.gradient.relative for case in proof.cases), default=0.0),
        "inputs": _inputs(proof),
        "training": training_record(proof.training) if proof.training is not None else None,
    }
    if takes_media and found.status == PROVEN and not facts["inputs"]:
        refusal = next(iter(proof.refused_inputs.items()), ("media", "the head takes none"))
        found = Verdict(GENERATED, one_line("only its text was compared: {}: {}".format(*refusal)))
    return {"status": found.status, "reason": found.reason, **facts}


def _inputs(proof: Proof) -> list[str]:
    """The inputs with images, video or audio on which both classes were compared."""
    from patchgen.commands.models_page import MEDIA_CASES

    return [kind for kind in MEDIA_CASES if any(case.name == kind for case in proof.cases)]


def _row(model_type: str, status: str, reason: str, **facts: object) -> dict:
    row = {
        "model_type": model_type,
        "status": status,
        "reason": reason,
        "hits": {},
        "notes": 0,
        "config_lines": 0,
        "changed_lines": 0,
        "moe": False,
        "family": TEXT,
        "inputs": [],
        "loss_difference": None,
        "gradient_difference": None,
        "training": None,
        "seconds": 0.0,
        "generation_seconds": 0.0,
        **facts,
    }
    return {k: round(v, 2) if k.endswith("seconds") else v for k, v in row.items()}


def _phrase(error: object) -> str:
    """The first line of a message, at most 160 characters, with the site that a pass missed."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    detail = next((line.removeprefix("expected ") for line in lines[1:] if line.startswith(("expected", "sign"))), "")
    return " ".join(f"{lines[0]} {detail}".split())[:160]


def _with_media(family: str, release: upstream.Release) -> list[str]:
    """The types with a head that takes images or audio, of one family or of all."""
    kinds = sorted({kind for name in MEDIA_MAPS for kind in release.auto_map(name)})
    found = {kind: _family(kind, release) for kind in kinds}
    return [kind for kind, own in found.items() if own in (MEDIA if family == "media" else (family,))]


def _family(model_type: str, release: upstream.Release) -> str:
    """What the models of a type take: images or video, audio, both, or neither."""
    from patchgen import source
    from patchgen.anatomy import study
    from patchgen.anatomy.media import takes_media
    from patchgen.anatomy.roles import AUDIO_INPUTS

    path = release.file_of(model_type)
    if path is None:
        return TEXT
    origin = upstream.load_file(release, path, model=model_type)
    anatomy = study(source.parse(origin.text, origin.path), origin)
    media = {name for info in anatomy.classes for name in takes_media(anatomy, info)}
    sounds = {name for name in media if name in AUDIO_INPUTS or "audio" in name}
    if not media:
        return TEXT
    return OMNI if sounds and media - sounds else AUDIO if sounds else VISION


def _routes(model_type: str, release: upstream.Release) -> bool:
    """Whether the file of a model type has experts."""
    from patchgen import source
    from patchgen.anatomy import Role, study

    path = release.file_of(model_type)
    if path is None:
        return False
    origin = upstream.load_file(release, path, model=model_type)
    return bool(study(source.parse(origin.text, origin.path), origin).with_role(Role.EXPERTS))


def _source_hash() -> str:
    """A hash of the code that decides the results: a resumed sweep does not mix rows of different code."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in (root, *(root / name for name in ("runtime", "kernels", "templates"))):
        for path in sorted([*folder.glob("**/*.py"), *folder.glob("**/*.jinja")]):
            if "generated_models" not in path.parts:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _made_with(key: dict[str, str]) -> str:
    """What decided a row: the release, our version, and the code's hash."""
    return " ".join(key.values())


def _previous(path: Path) -> dict[tuple[bool, str], dict]:
    """The rows of the record, by whether they are of a head with media and by model type.

    One that does not say what made it was made with the record's own key.
    """
    if not path.is_file():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = [{"made_with": _made_with(record["key"]), "family": TEXT, "inputs": [], **row} for row in record["rows"]]
    return {(row["family"] != TEXT, row["model_type"]): row for row in rows}


def _write(path: Path, key: dict[str, str], rows: dict[tuple[bool, str], dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = [rows[kind] for kind in sorted(rows)]
    for target, text in (
        (path, json.dumps({"key": key, "rows": ordered}, indent=1) + "\n"),
        (path.with_suffix(".md"), coverage_page(key, ordered)),
    ):
        temporary = target.with_suffix(target.suffix + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)


def coverage_page(key: dict[str, str], rows: list[dict]) -> str:
    """The text of `coverage.md`. It follows from the record alone."""
    older = [row["model_type"] for row in rows if row["made_with"] != _made_with(key)]
    layouts = sorted({layout for row in rows for layout in row.get("ranks", {})}, reverse=True)
    return render("coverage.jinja", key=key, rows=rows, older=older, layouts=layouts)
