"""The move itself: generate into a staging folder, prove in the release's environment, and only then write.

All files of a model move, or none, and no proof is repeated: one in the staging folder, or beside the committed file, is
reused while it is current.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from patchgen import pipeline, provenance
from patchgen.errors import PatchgenError
from patchgen.pipeline import Generated
from patchgen.runtime.code_hash import short_hash
from patchgen.runtime.compatibility import ALLOW_VARIABLE
from patchgen.runtime.verify import source_closure
from patchgen.upgrade import environments, releases
from patchgen.upgrade.findings import PERSON, ModelUpgrade, Upgrade
from patchgen.upstream import load, load_from
from patchgen.wheels import cache_directory

PROOF, PROVEN = "verify.json", "proven"


@dataclass
class MoveResult:
    """What `move` did: the models that are at the new release now, and why the others are not (model -> reason)."""

    moved: list[str] = field(default_factory=list[str])
    held_back: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class MoveContext:
    """What every model of a move needs: the release, its Python, the staging folder, the folder to write."""

    target: releases.LocatedRelease
    python: Path
    staging: Path
    root: Path
    reviewed: Collection[str]
    jobs: int


def move(
    found: Upgrade,
    to: str,
    root: Path,
    *,
    reviewed: Collection[str],
    python: Path | None,
    jobs: int,
    report: Callable[[str], None],
) -> MoveResult:
    """Moves every model that needs no person: each is regenerated, proven, and written with its proof. Installs nothing here.

    A model is held back if its proof fails, unless its status is the one that it had before.

    Args:
        to: the release, as `releases.find` takes it.
        root: the folder of generated models.
        python: a Python that has the release; without one, unless it is installed here, an environment is created and kept.
        report: prints a message per step.
    """
    result = MoveResult(held_back={model.model: model.reason for model in found.models if model.verdict == PERSON})
    ready = [model for model in found.models if model.verdict < PERSON]
    if not ready:
        return result
    target = releases.find(to)
    report(f"an environment with {target.release.origin} ...")
    context = MoveContext(target, environments.python_for(target, python), _staging(to, root), root, reviewed, jobs)
    report(f"proving {len(ready)} models with {context.python}")
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        futures = {
            pool.submit(_move_one, generated, context): generated.model for generated in _generated(ready, context)
        }
        for number, future in enumerate(as_completed(futures), start=1):
            name = futures[future]
            try:
                outcome = future.result()
                result.moved.append(name)
            except PatchgenError as error:
                outcome = f"not moved: {error}"
                result.held_back[name] = str(error)
            report(f"{number} of {len(ready)} {name}: {outcome}")
    result.moved.sort()
    return result


def _staging(to: str, root: Path) -> Path:
    version = releases.find(to).release.version
    return cache_directory() / "upgrades" / f"{version}-{short_hash(str(root.resolve()), to)}"


def _generated(models: list[ModelUpgrade], context: MoveContext) -> Iterator[Generated]:
    """Each model generated from the release, while processes prove those before it."""
    for model in models:
        record = provenance.read(context.root / model.model)
        if record["upstream"]["version"] is None:
            source = load(model.model, source=releases.user_source(model.model, record))
        else:
            source = load_from(context.target.release, model.model)
        yield pipeline.generate(source, heads=record.get("asked", ()))


def _move_one(generated: Generated, context: MoveContext) -> str:
    """Proves and writes one model; returns the outcome as a message.

    Raises:
        PatchgenError: it was not written; with the reason.
    """
    start = time.perf_counter()
    folder, staging = context.root / generated.model, context.staging / generated.model
    provenance.refuse_drifted_edits(folder, generated, context.reviewed)
    if _is_proven(folder, generated, context):
        provenance.write(generated, folder, reviewed=context.reviewed)
        return "moved already, proven"
    provenance.write(generated, staging, force=True, reviewed=[edit.target for edit in generated.config.edits])
    outcome = "proven before"
    if not _is_proven(staging, generated, context):
        prove(context.python, staging, context.jobs)
        outcome = "proven"
    proof = json.loads((staging / PROOF).read_text(encoding="utf-8"))
    before: dict[str, object] = {}
    if (folder / PROOF).is_file():
        before = json.loads((folder / PROOF).read_text(encoding="utf-8"))
    if proof["status"] != PROVEN:
        if proof["status"] != before.get("status"):
            raise PatchgenError(
                f"not proven: {proof['status']} {proof['reason']}. The generated files are in {staging}"
            )
        outcome = f"{proof['status']}, as before"
    written = provenance.write(generated, folder, reviewed=context.reviewed)
    provenance.write_whole({folder / PROOF: (staging / PROOF).read_text(encoding="utf-8")})
    return f"{outcome}, {len(written)} files written, {time.perf_counter() - start:.0f} s"


def _is_proven(folder: Path, generated: Generated, context: MoveContext) -> bool:
    """Whether a folder has a proof record, of any status, of this very text, with the target release, by today's prover."""
    if not (folder / PROOF).is_file():
        return False
    proof = json.loads((folder / PROOF).read_text(encoding="utf-8"))
    made_with = proof.get("made_with", {})
    is_same_text = proof.get("sha256") == hashlib.sha256(generated.text.encode()).hexdigest()
    is_same_prover = made_with.get("prover") == source_closure.prover()
    return is_same_text and is_same_prover and made_with.get("transformers") == context.target.release.version


def prove(python: Path, folder: Path, jobs: int, variables: Mapping[str, str] | None = None) -> None:
    """Proves the generated model in a folder with a Python's release of transformers; writes `verify.json` there.

    Args:
        variables: additional environment variables.

    Raises:
        PatchgenError: the prover wrote no proof; with its last message.
    """
    (folder / PROOF).unlink(missing_ok=True)
    threads = str(max((os.cpu_count() or 1) // max(jobs, 1), 1))
    environment = {"OMP_NUM_THREADS": threads, **environments.environment_variables(), **(variables or {})}
    command = [python, "-P", "-m", "patchgen.cli", "verify", "--directory", folder]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    (folder / "verify.log").write_text(result.stdout + result.stderr, encoding="utf-8")
    if not (folder / PROOF).is_file():
        message = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        raise PatchgenError(
            f"it cannot be proven: {message.removeprefix('patchgen: ')} (full output: {folder / 'verify.log'})"
        )


# ------------------------------------------------------------------------------------- a committed file beside another release


def prove_against(model: str, to: str, root: Path, python: Path | None = None) -> tuple[bool, str]:
    """Proves a committed file, unchanged, with another release; adds the release to its `verify.json`, or removes it.

    Returns:
        Whether it is proven, and the status and reason of the proof.

    Raises:
        PatchgenError: the release or its environment is unavailable, the prover wrote no proof, or the present `verify.json`
            proves another text.
    """
    target = releases.find(to)
    version = target.release.version
    source, staging = root / model, _staging(to, root) / f"{model}-as-committed"
    staging.mkdir(parents=True, exist_ok=True)
    copied = [*source.glob("*.py"), source / "provenance.json"]
    provenance.write_whole({staging / path.name: path.read_text(encoding="utf-8") for path in copied})
    prove(environments.python_for(target, python), staging, 1, {ALLOW_VARIABLE: version})
    proof = json.loads((staging / PROOF).read_text(encoding="utf-8"))
    is_proven = proof["status"] == PROVEN
    before = json.loads((source / PROOF).read_text(encoding="utf-8")) if (source / PROOF).is_file() else proof
    if before.get("sha256") != proof["sha256"]:
        raise PatchgenError(
            f"{model}: {PROOF} beside it proves another text. To fix: prove it with its own release: patchgen verify {model}"
        )
    listed: set[str] = set(before["transformers"]) - {version} | ({version} if is_proven else set())
    before["transformers"] = sorted(listed, key=_version_key)
    provenance.write_whole({source / PROOF: json.dumps(before, indent=2) + "\n"})
    return is_proven, f"{proof['status']} {proof['reason']}".strip()


def _version_key(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in version.split(".")]
