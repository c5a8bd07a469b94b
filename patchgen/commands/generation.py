"""generate, check, list."""

from __future__ import annotations

import difflib
import functools
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import track
from rich.table import Table

from patchgen import emit, pipeline, project_code, provenance, upstream
from patchgen.anatomy.census import summary
from patchgen.commands import project_examples, sweeping
from patchgen.commands.console import console, display_path, print_diff, refusing_unwritable
from patchgen.errors import ConfigError, PatchgenError, StaleFile, UpstreamNotFound
from patchgen.pipeline import Generated
from patchgen.runtime.compatibility import proof_of
from patchgen.runtime.registry import installed_directory
from patchgen.runtime.verify import records
from patchgen.runtime.verify.committed_models import CommittedModel, committed, named_models

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import Provenance

CURRENT, STALE, UNCHECKED = "current", "stale", "unchecked"
PASSES_NOT_LISTED = ("prune", "absolute_imports")


def generate(
    models: list[str],
    every: bool,
    version: str | None,
    source: Path | None,
    output: Path | None,
    *,
    config: Path | None = None,
    dry_run: bool,
    force: bool,
    reviewed: Sequence[str] = (),
    heads: Sequence[str] = (),
) -> None:
    """Generates models. Writes each with its parts, or nothing of it if it or a part is refused; the other models go on.

    Args:
        models: may be empty with a source, whose file gives the name.
        config: the config file of the source.
        reviewed: targets of hand edits that a person compared with the new upstream.
        heads: the classes to generate for; with `every`, those that each file was generated for before.

    Raises:
        PatchgenError: a model was refused; of several models, with every refusal, after the others are written.
    """
    names = [upstream.name_of(source)] if source and not models and not every else named_models(models, every=every)
    if source is not None and len(names) > 1:
        raise ConfigError(f"--source {source} is one model, but {len(names)} names were given: {', '.join(names)}.")
    if heads and len(names) != 1:
        raise ConfigError(
            f"--head {heads[0]} belongs to one model, but {len(names)} were given. To fix: name its model."
        )
    root = output or provenance.generated_root()
    if not dry_run:
        project_code.refuse_installed_package(root, "Generated models")
    several = len(names) > 1
    refused: dict[str, PatchgenError] = {}
    for name in track(names, "generating", console=console, disable=not (several and console.is_terminal)):
        start = time.perf_counter()
        try:
            loaded = upstream.load(name, version, source, config)
            roots = CommittedModel(name).record.get("asked", ()) if every else heads
            generated, changed = _generate(loaded, root, roots, dry_run=dry_run, force=force, reviewed=reviewed)
        except PatchgenError as error:
            if not several:
                raise
            refused[name] = error
            console.print(f"{name}: refused", style="red")
            continue
        seconds = time.perf_counter() - start
        if several:
            state = "dry run" if dry_run else f"{len(changed)} files changed"
            lines = emit.changed_lines(generated.diff)
            console.print(f"{name}: {lines} lines against upstream, {state}, {seconds:.1f} s")
        else:
            _show(generated, changed, seconds, root, dry_run=dry_run)
    if refused:
        messages = "\n".join(f"{name}: {error}" for name, error in refused.items())
        raise PatchgenError(
            f"{len(refused)} of {len(names)} models were not generated and stay as they are:\n{messages}"
        )


def _generate(
    loaded: upstream.Upstream,
    root: Path,
    heads: Sequence[str],
    *,
    dry_run: bool,
    force: bool,
    reviewed: Sequence[str],
) -> tuple[Generated, list[Path]]:
    """Writes one model, and those that it builds and that are missing or of another release, below `root`; returns it and the
    files that changed."""
    is_generated = functools.partial(_is_generated, root, loaded.version)
    models = pipeline.generate_whole(loaded, is_generated, heads=heads)
    folders = [root / model.model for model in models]
    for model, folder in zip(models, folders, strict=True):  # of all, before any is written
        if force and provenance.is_unreadable(folder):
            what = "cannot be read. Whether upstream changed under hand edits was not checked."
            console.print(f"note: {display_path(folder / 'provenance.json')} {what}", markup=False, soft_wrap=True)
        provenance.require_writable(model, folder, force=force, reviewed=reviewed)
    if dry_run:
        return models[0], []
    with refusing_unwritable(root):
        changed = [
            path
            for model, folder in zip(models, folders, strict=True)
            for path in provenance.write(model, folder, force=force, reviewed=reviewed)
        ]
    return models[0], changed


def _is_generated(root: Path, version: str | None, name: str) -> bool:
    """Whether the model `name`, which another one builds, was generated from the same release: in `root`, or where runs search."""
    folders = (root / name, provenance.generated_root() / name, installed_directory() / name)
    existing = (folder for folder in folders if (folder / "provenance.json").is_file())
    return any(provenance.read(folder)["upstream"]["version"] == version for folder in existing)


def _show(generated: Generated, changed: list[Path], seconds: float, root: Path, *, dry_run: bool) -> None:
    table = Table(title=f"{generated.model} from {generated.upstream.origin}", title_justify="left")
    table.add_column("pass")
    for column in ("hits", "upstream", "lines", "ms"):
        table.add_column(column, justify="right")
    for step in generated.steps:
        lines = step.changed_lines if step.name != "prune" else 0
        figures = (len(step.outcome.hits), len(step.outcome.upstream), lines)
        table.add_row(step.name, *(str(value or "-") for value in figures), f"{step.seconds * 1000:.0f}")
    console.print(table)
    for step in generated.steps:
        for note in step.outcome.notes:
            console.print(f"  note {step.name}: {note}", markup=False)
    console.print(f"  census {summary(json.loads(generated.provenance)['census'])}")
    dropped = sum(len(step.outcome.hits) for step in generated.steps if step.name == "prune")
    if dropped:
        console.print(f"  {dropped} classes and functions dropped, listed at the top of the diff")
    console.print(f"  {emit.changed_lines(generated.diff)} changed lines against upstream, {seconds:.2f} s")
    if dry_run:
        console.print("  dry run: nothing written")
    elif changed:
        for path in changed:
            console.print(f"  wrote {display_path(path)}")
        console.print(f"  review: {_review_command(changed)}", soft_wrap=True)
    else:
        console.print("  nothing changed")
    if not dry_run:
        console.print(f"  {_proof_line(root, generated.model)}", markup=False, soft_wrap=True)


def _proof_line(root: Path, model: str) -> str:
    """What the proof beside a written file says of these bytes: the lines that no proof ran. Without one, the command for it."""
    proof = proof_of(root / model / f"modeling_{model}.py")
    if not proof:
        where = "" if root == provenance.generated_root() else f" --directory {display_path(root / model)}"
        return f"not proven as it is now: patchgen verify {model}{where}"
    ranges = [[int(number) for number in text.split("-")] for text in proof.get("not_run", ())]
    count = sum(1 + lines[-1] - lines[0] for lines in ranges)
    not_run = (
        f"{count} lines that no proof ran: {', '.join(proof['not_run'])}" if count else "its proofs ran every line"
    )
    return f"{proof['status']}; {not_run}"


def _review_command(changed: list[Path]) -> str:
    """A command that shows what was written, parts included; plain `git diff` omits untracked files."""
    first = {path.parent: path for path in reversed(changed)}
    folders = " ".join(str(display_path(folder)) for folder in first)
    new = [
        str(display_path(folder))
        for folder, path in first.items()
        if not _git(folder, "ls-files", "--error-unmatch", path.name)
    ]
    if not new:
        return f"git diff {folders}"
    if _git(changed[0].parent, "rev-parse", "--is-inside-work-tree"):
        return f"git add -N {' '.join(new)} && git diff {folders}"
    return f"git diff --no-index /dev/null {display_path(changed[0])}"


def _git(folder: Path, *arguments: str) -> bool:
    """Whether the git command succeeds; without git it does not."""
    try:
        return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def check(models: list[str]) -> int:
    """Compares every committed file with what generation gives now, and every recorded proof with the sources that it
    depends on, and runs the examples of the project's passes; without `models`, looks for folders without a record, too. Prints
    what differs, is stale or has no proof. 0 if all agree and every model has one."""
    names = models or committed()
    if not names:
        raise StaleFile(
            f"There is no generated model to check in {display_path(provenance.generated_root())}. "
            "To fix: generate one with `patchgen generate MODEL`."
        )
    known = committed()
    refuse_unknown(names)
    states = [_state(name) for name in names]
    root = provenance.generated_root()
    folders = [] if models else [path for path in sorted(root.iterdir()) if any(path.glob("*.py"))]
    orphans = [folder.name for folder in folders if folder.name not in known]
    for folder in orphans:
        console.print(f"[red]stray[/] {folder} is in generated_models/ but has no provenance.json")
    unchecked = f", {states.count(UNCHECKED)} unchecked" if UNCHECKED in states else ""
    console.print(f"{states.count(CURRENT)} of {len(names)} generated models are current{unchecked}.")
    unproven = records.unproven(names)
    if unproven:
        console.print(
            f"[red]unproven[/] {len(unproven)} of {len(names)} models have no proof: {', '.join(unproven)}. To fix: "
            f"patchgen verify {' '.join(unproven)}",
            soft_wrap=True,
        )
    has_stale_records = _report_stale_records(names, with_rows=not models)
    has_broken_examples = project_examples.report_broken()
    return 1 if STALE in states or orphans or unproven or has_stale_records or has_broken_examples else 0


def _report_stale_records(names: list[str], *, with_rows: bool) -> bool:
    """Prints which proofs of these models, and which rows of docs/coverage.md and docs/heads.md, are stale; whether any are."""
    found = records.stale_proofs(names)
    path = records.path_in(None)
    if with_rows and path.is_file():
        release = upstream.open_release(records.required_key()["transformers"])
        from patchgen.commands import head_sweep  # generating does not need it

        if (heads := path.with_name(head_sweep.FILE)).is_file() and (stale := head_sweep.stale_types(heads, release)):
            found.append(records.Stale("types of docs/heads.md", tuple(stale), "make sweep-heads"))
        found += records.stale_rows(path, missing=sweeping.missing_types(records.read(path), release))
    for one in found:
        console.print(f"[red]stale[/] {one}", soft_wrap=True)
    if not found:
        console.print(
            "Every recorded proof is current."
            if len(records.unproven(names)) < len(names)
            else "No proof is recorded."
        )
    return bool(found)


def refuse_unknown(models: list[str]) -> None:
    """Raises if a model is not committed."""
    known = committed()
    missing = [name for name in models if name not in known]
    if missing:
        raise UpstreamNotFound(f"Not committed: {', '.join(missing)}. Committed models: {', '.join(known) or 'none'}.")


def _state(name: str) -> str:
    """CURRENT if the files of a committed model are what generation gives now, byte for byte; else STALE or UNCHECKED."""
    directory = provenance.generated_root() / name
    record = provenance.read(directory)
    version = record["upstream"]["version"]
    if version is None:
        return _state_without_source(name, directory, record)
    try:
        files = pipeline.generate(upstream.load(name, version), heads=record.get("asked", ())).files
    except PatchgenError as error:
        console.print(f"[red]fails[/] {name}: {escape(str(error))}")
        return STALE
    state = CURRENT
    for file_name, wanted in files.items():
        path = directory / file_name
        existing = path.read_bytes() if path.is_file() else b""
        if existing != wanted.encode():
            state = STALE
            _show_stale(path, existing.decode(errors="replace"), wanted)
    return state


def _state_without_source(name: str, directory: Path, record: Provenance) -> str:
    """The state of a model generated from a file outside any release: only the hashes in its record can be compared."""
    edited = provenance.edited_files(directory, record)
    for file_name in edited:
        console.print(f"[red]stale[/] {name}: {file_name} was edited: its hash is not the one in provenance.json")
    if edited:
        return STALE
    console.print(
        f"[yellow]unchecked[/] {name} was generated from the file {record['upstream']['path']}; it is unchanged since, "
        f"and whether generation still gives it is unknown. To check: {record['command']} --dry-run",
        soft_wrap=True,
    )
    return UNCHECKED


def _show_stale(path: Path, existing: str, wanted: str) -> None:
    old, new = existing.split("\n"), wanted.split("\n")
    pairs = enumerate(zip(old, new, strict=False), start=1)
    line = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)) + 1)
    console.print(f"[red]stale[/] {display_path(path)}:{line}", soft_wrap=True)
    if [text.removesuffix("\r") for text in old] == new:
        console.print("its line endings differ from the generated ones (CRLF instead of LF)")
        return
    lines = list(difflib.unified_diff(old, new, "committed", "generated now", lineterm="", n=1))
    print_diff(lines[:40])
    if len(lines) > 40:
        console.print(f"... {len(lines) - 40} more lines")


def list_models() -> None:
    """Prints a row per committed model."""
    table = Table("model", "upstream", "passes with hits", "lines", "proof", "proven with")
    for model in map(CommittedModel, committed()):
        hits = [p["name"] for p in model.record["passes"] if p["hits"] and p["name"] not in PASSES_NOT_LISTED]
        version, lines = str(model.record["upstream"]["version"]), str(model.changed_lines)
        proof = model.current_proof
        status = proof["status"] if proof else "stale proof" if model.proof else "not proven"
        releases = ", ".join(proof.get("transformers", ()) if proof else ()) or "-"
        table.add_row(model.name, version, ", ".join(hits), lines, status, releases)
    console.print(table)
