"""The record of what a generated file was made from (`provenance.json`); writes generated files and detects manual edits."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen import __version__, emit, project_code
from patchgen.anatomy import Anatomy
from patchgen.anatomy.census import census
from patchgen.anatomy.classes import calls, dotted
from patchgen.errors import StaleFile
from patchgen.passes.hand_edits import targets_record
from patchgen.runtime.code_hash import symbol_hash
from patchgen.source import Module
from patchgen.upstream import Upstream

if TYPE_CHECKING:
    from patchgen.model_configs import ModelConfig
    from patchgen.passes.base import Hit
    from patchgen.pipeline import Generated, Step
    from patchgen.runtime.verify.record_types import HitRecord, PartRecord, PassRecord, Provenance


OMITTED_IF_EMPTY = ("inherited", "asked", "parts", "edits")


def generated_root() -> Path:
    """The folder of the generated models: the project's if its patchgen.toml names one, else this package's."""
    return _project_root() or Path(__file__).parent / "generated_models"


def _project_root() -> Path | None:
    project = project_code.current_project()
    return project.path(project.generated) if project is not None and project.generated else None


def shown_root() -> str:
    """The folder of the generated models as diffs name it: the path in patchgen.toml, independent of the working directory."""
    project = project_code.current_project()
    return Path(project.generated).as_posix() if project is not None and project.generated else "generated_models"


def command(upstream: Upstream, heads: Sequence[str] = ()) -> str:
    """The command that regenerates the model, with these heads as options."""
    asked = "".join(f" --head {head}" for head in heads)
    if upstream.version is None:
        config = f" --config {shlex.quote(upstream.config_file)}" if upstream.config_file else ""
        source = shlex.quote(upstream.given or upstream.path)
        return f"patchgen generate {upstream.model} --source {source}{config}{asked}"
    if _project_root() is not None:
        return f"patchgen generate {upstream.model} --transformers {upstream.version}{asked}"
    options = f' ARGS="{asked[1:]}"' if asked else ""
    return f"make regen MODEL={upstream.model} TRANSFORMERS={upstream.version}{options}"


def record(
    steps: Sequence[Step],
    roots: Sequence[str],
    dropped: Sequence[str],
    files: dict[str, str],
    config: ModelConfig,
    asked: Sequence[str] = (),
) -> str:
    """The text of `provenance.json`, which depends on neither time nor machine.

    Args:
        roots, dropped: the classes that the file was generated for, and what they do not reach.
        files: file name -> text of generated and copied files, the modeling file first.
        config: the record has its heads; without any, the roots that are causal heads, or else all roots.
        asked: the heads that were given on the command line.
    """
    anatomy, before, module = steps[-1].anatomy, steps[0].before, steps[-1].outcome.module
    upstream = anatomy.upstream
    models = [name for name in anatomy.models_in(module) if upstream.is_own(name)]
    causal = {*anatomy.own_heads()}
    heads = list(config.heads) or [name for name in roots if name in causal] or list(roots)
    added = {name for step in steps for name in step.outcome.added if before.has(name)}
    nodes = {name: info.node for name, info in anatomy.classes.items()} | anatomy.functions
    nodes |= {name: before.block(name).node for name in added}
    hashes = [_sha256(text.encode()) for text in files.values()]
    facts: Provenance = {
        "model": upstream.model,
        "patchgen": __version__,
        "upstream": {
            "version": upstream.version,
            "module": upstream.module,
            "path": upstream.path,
            "sha256": upstream.sha256,
        },
        "inherited": [{"path": t.path, "version": t.version, "sha256": t.sha256} for t in upstream.taken],
        "command": command(upstream, asked),
        "roots": list(roots),
        "heads": heads,
        "asked": list(asked),
        "model_types": [kind for kind in dict.fromkeys(map(anatomy.model_type_of, models)) if kind],
        "classes": models,
        # only those that found something, so that a new pass does not change every record
        "passes": [_ran(step) for step in steps if emit.summary(step.outcome) != emit.NOTHING],
        "census": census(anatomy, module, heads, _passes_of(steps, module, anatomy)),
        "parts": _parts(module, anatomy),
        "dropped": list(dropped),
        "edits": targets_record(config.edits, before),
        "symbols": {
            name: symbol_hash(node)
            for name, node in nodes.items()
            if module.has(name) and module.block(name).line  # line 0: a pass added it, upstream has no such symbol
        },
        "generated_sha256": hashes[0],
        "other_sha256": dict(zip(list(files)[1:], hashes[1:], strict=True)),
    }
    written = {name: value for name, value in facts.items() if value or name not in OMITTED_IF_EMPTY}
    return json.dumps(written, indent=2, ensure_ascii=False) + "\n"


def _ran(step: Step) -> PassRecord:
    hits, by_upstream = ([_hit(hit) for hit in found] for found in (step.outcome.hits, step.outcome.upstream))
    return {"name": step.name, "hits": hits, "upstream": by_upstream, "notes": list(step.outcome.notes)}


def _hit(hit: Hit) -> HitRecord:
    return {"site": hit.site, "line": hit.line, "what": hit.what}


def _parts(module: Module, anatomy: Anatomy) -> list[PartRecord]:
    """The language models of other files that the classes build: the construction, and the class and model by default."""
    return [
        {
            "site": f"{info.name}.{build.attribute or build.method}",
            "builds": build.code,
            "default": {
                "class": anatomy.target_of(build),
                "model": anatomy.upstream.model_of(anatomy.default_type(build)),
            },
        }
        for info in anatomy.still_in(module)
        for build in info.auto_builds
        if anatomy.is_part(build)
    ]


def _passes_of(steps: Sequence[Step], module: Module, anatomy: Anatomy) -> dict[str, list[str]]:
    """Class or function -> the passes with a site in it; a function without one -> the first seam that it is passed to."""
    passes_by_name: dict[str, list[str]] = {}
    for step in steps:
        for hit in (*step.outcome.hits, *step.outcome.upstream) if step.rewrites else ():
            passes_by_name.setdefault(hit.site.partition(".")[0], []).append(step.name)
    for call in calls(*module.statements):
        if dotted(call.func).startswith("ops."):
            for argument in call.args:
                if dotted(argument) in anatomy.functions:
                    passes_by_name.setdefault(dotted(argument), [dotted(call.func)])
    return passes_by_name


def read(directory: Path) -> Provenance:
    """The record in a folder of `generated_models`. Raises StaleFile if there is none, or it is not JSON."""
    path = directory / "provenance.json"
    if not path.is_file():
        raise StaleFile(f"{directory} holds no generated model: there is no provenance.json.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StaleFile(
            f"{path} is not JSON: {error}. To fix: restore it, or generate the model again with --force."
        ) from error


def is_unreadable(directory: Path) -> bool:
    """Whether a folder has a record that cannot be parsed, so that drift of its hand edits' targets cannot be checked."""
    if not (directory / "provenance.json").is_file():
        return False
    try:
        read(directory)
    except StaleFile:
        return True
    return False


def edited_files(directory: Path, facts: Provenance) -> list[str]:
    """The files of a generated model that differ from what its record says was written, missing ones included."""
    return [name for name, sha256 in _recorded(facts).items() if _sha256_of(directory / name) != sha256]


def _recorded(facts: Provenance) -> dict[str, str | None]:
    """File name -> the hash of what was written."""
    return {f"modeling_{facts.get('model')}.py": facts.get("generated_sha256"), **facts.get("other_sha256", {})}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sha256_of(path: Path) -> str | None:
    return _sha256(path.read_bytes()) if path.is_file() else None


def drifted_edits(directory: Path, generated: Generated) -> list[str]:
    """The targets of hand edits that upstream changed since the same, unchanged edit was recorded in this folder.

    An edit that was changed itself is not listed: its author is assumed to have read the new target. Nor is a mend that the release
    does not need: it changes nothing there.
    """
    if not (directory / "provenance.json").is_file():
        return []
    known, edits = (
        {
            (edit["verb"], edit["target"], edit["edit"]): edit["upstream"]
            for edit in facts.get("edits", ())
            if edit["verb"] != "mend_upstream" or "mend" in edit
        }
        for facts in (read(directory), json.loads(generated.provenance))
    )
    return list(dict.fromkeys(key[1] for key, upstream in edits.items() if known.get(key, upstream) != upstream))


def refuse_drifted_edits(directory: Path, generated: Generated, reviewed: Collection[str] = ()) -> None:
    """Raises StaleFile if targets of hand edits changed upstream, but for the targets in `reviewed`."""
    drifted = [target for target in drifted_edits(directory, generated) if target not in reviewed]
    if drifted:
        raise StaleFile(
            f"{', '.join(drifted)} of {generated.upstream.origin} {'is' if len(drifted) == 1 else 'are'} not what the "
            f"hand edit in the config of '{generated.model}' was written for: upstream changed it since, and the edit "
            "would hide that.\n"
            f"Compare the three with `patchgen upgrade {generated.model} --to {generated.upstream.version or 'VERSION'}`; "
            "then change the edit, or say that it is right as it is: "
            + " ".join(f"--reviewed {target}" for target in drifted)
        )


def write(generated: Generated, directory: Path, *, force: bool = False, reviewed: Collection[str] = ()) -> list[Path]:
    """Writes the files of a generated model, under a lock on the folder; returns the paths that changed.

    Raises StaleFile if a file was edited manually or has no record, or the record is unreadable, unless `force`; and if the
    target of a hand edit has changed and is not in `reviewed`, the targets that were compared with the new upstream.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        require_writable(generated, directory, force=force, reviewed=reviewed)
        wanted = {directory / name: text for name, text in generated.files.items()}
        changed = {path: text for path, text in wanted.items() if not _holds(path, text)}
        write_whole(changed)
        return list(changed)
    finally:
        os.close(descriptor)


def require_writable(
    generated: Generated, directory: Path, *, force: bool = False, reviewed: Collection[str] = ()
) -> None:
    """Raises what `write` would raise."""
    if not (force and is_unreadable(directory)):
        refuse_drifted_edits(directory, generated, reviewed)
    if not force:
        _refuse_to_lose_edits(directory, generated)


def write_whole(files: Mapping[Path, str]) -> None:
    """Writes temporary files, then renames them all: after a crash each file is complete, old or new."""
    temporary: dict[Path, str] = {}
    try:
        for path, text in files.items():
            descriptor, temporary[path] = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with open(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            os.chmod(temporary[path], 0o644)
        for path, name in temporary.items():
            os.replace(name, path)
    finally:
        for name in temporary.values():
            Path(name).unlink(missing_ok=True)


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _refuse_to_lose_edits(directory: Path, generated: Generated) -> None:
    """Raises StaleFile if a file that would be overwritten has no record, or was edited since it was recorded."""
    recorded = _recorded(read(directory)) if (directory / "provenance.json").is_file() else {}
    for name, text in generated.files.items():
        path = directory / name
        # a file may already have the new text if a run stopped between two renames
        if name == "provenance.json" or not path.is_file() or _holds(path, text):
            continue
        if recorded.get(name) is None:
            raise StaleFile(
                f"{name} in {directory.name}/ stands there without a record (provenance.json) that patchgen wrote it; "
                "generating would overwrite it.\n"
                "Move it away, restore provenance.json beside it, or give --force to overwrite it."
            )
        if _sha256_of(path) != recorded[name]:
            raise StaleFile(
                f"{name} in {directory.name}/ was edited after it was generated; generating would lose the edits.\n"
                "Move them into a pass or into the model's config as a hand edit (`patchgen explain hand_edits`), "
                "or give --force to overwrite them."
            )
