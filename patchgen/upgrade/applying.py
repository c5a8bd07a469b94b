"""The move itself: generate into a staging folder, prove in the release's environment, and only then write.

All files of a model move, or none, and no proof is repeated: one in the staging folder, or beside the committed file, is
reused while it is current.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchgen import pipeline, provenance
from patchgen.errors import PatchgenError
from patchgen.pipeline import Generated
from patchgen.runtime import registry
from patchgen.runtime.code_hash import short_hash
from patchgen.runtime.compatibility import ALLOW_VARIABLE, digest
from patchgen.runtime.verify import code_sets
from patchgen.runtime.verify.verdict import PROVEN
from patchgen.upgrade import environments, releases
from patchgen.upgrade.findings import PERSON, ModelUpgrade, Upgrade
from patchgen.upstream import load, load_from
from patchgen.wheels import cache_directory

PROOF = "verify.json"


@dataclass
class MoveResult:
    """What `move` did.

    Attributes:
        moved: the models that are at the new release now -> the status of their proof.
        held_back: the other models -> why they were not moved.
    """

    moved: dict[str, str] = field(default_factory=dict[str, str])
    held_back: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class MoveContext:
    """What every model of a move needs.

    Attributes:
        python: a Python with the target release.
        staging: the folder in the cache where models are generated and proven.
        root: the folder of generated models, which the move writes.
        reviewed: targets of hand edits that a person compared with the target release.
    """

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

    A model that is not proven is held back, unless the status of its proof is that of the committed file's.

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
        for number, (name, done) in enumerate(_move_all(ready, context, pool), start=1):
            if isinstance(done, PatchgenError):
                outcome = f"not moved: {done}"
                result.held_back[name] = str(done)
            else:
                result.moved[name], outcome = done
            report(f"{number} of {len(ready)} {name}: {outcome}")
    result.moved = dict(sorted(result.moved.items()))
    return result


def _staging(to: str, root: Path) -> Path:
    version = releases.find(to).release.version
    return cache_directory() / "upgrades" / f"{version}-{short_hash(str(root.resolve()), to)}"


def _move_all(
    models: list[ModelUpgrade], context: MoveContext, pool: Executor
) -> Iterator[tuple[str, tuple[str, str] | PatchgenError]]:
    """Moves models; yields each name with what `_move_one` returns, or with the reason why the model was not moved.

    The models are generated one by one, while earlier ones are being proven. Those that build others (`Generated.parts`) are
    proven last: their proof is also of the text of their parts, which may move too.
    """
    with_parts: list[Generated] = []
    running: dict[Future[tuple[str, str]], str] = {}
    for model in models:
        try:
            generated = _generate(model, context)
        except PatchgenError as error:
            yield model.model, error
            continue
        if generated.parts:
            with_parts.append(generated)
        else:
            running[pool.submit(_move_one, generated, context)] = generated.model
    yield from _results(running)
    yield from _results({pool.submit(_move_one, one, context): one.model for one in with_parts})


def _results(
    running: Mapping[Future[tuple[str, str]], str],
) -> Iterator[tuple[str, tuple[str, str] | PatchgenError]]:
    for future in as_completed(running):
        try:
            yield running[future], future.result()
        except PatchgenError as error:
            yield running[future], error


def _generate(model: ModelUpgrade, context: MoveContext) -> Generated:
    record = provenance.read(context.root / model.model)
    if record["upstream"]["version"] is None:
        source = load(model.model, source=releases.user_source(model.model, record))
    else:
        source = load_from(context.target.release, model.model)
    return pipeline.generate(source, heads=record.get("asked", ()))


def _move_one(generated: Generated, context: MoveContext) -> tuple[str, str]:
    """Proves and writes one model; returns the status of its proof, and the outcome as a message.

    Raises:
        PatchgenError: it was not written, for the reason in the message.
    """
    start = time.perf_counter()
    folder = context.root / generated.model
    provenance.refuse_drifted_edits(folder, generated, context.reviewed)
    if _has_current_proof(folder, generated, context):
        provenance.write(generated, folder, reviewed=context.reviewed)
        status = _proof_in(folder)["status"]
        return status, f"already moved, {status}"
    staging = _stage(generated, context)
    outcome = "proven earlier"
    if not _has_current_proof(staging, generated, context):
        prove(context.python, staging, context.jobs)
        outcome = "proven"
    proof = _proof_in(staging)
    before = _proof_in(folder) if (folder / PROOF).is_file() else {}
    if proof["status"] != PROVEN:
        if proof["status"] != before.get("status"):
            raise PatchgenError(
                f"not proven: {proof['status']} {proof['reason']}. The generated files are in {staging}"
            )
        outcome = f"{proof['status']}, as before"
    written = provenance.write(generated, folder, reviewed=context.reviewed)
    provenance.write_whole({folder / PROOF: (staging / PROOF).read_text(encoding="utf-8")})
    return proof["status"], f"{outcome}, {len(written)} files written, {time.perf_counter() - start:.0f} s"


def _stage(generated: Generated, context: MoveContext) -> Path:
    """Writes the generated files for the prover, beside the models that they build, which its proof is also of.

    These are the committed ones, in a folder of this model: another move may have left others where all are staged.
    """
    place = context.staging / f"{generated.model}-with-parts" if generated.parts else context.staging
    _copy_parts(generated.parts, context.root, place)
    staging = place / generated.model
    provenance.write(generated, staging, force=True, reviewed=[edit.target for edit in generated.config.edits])
    return staging


def _copy_parts(parts: Iterable[str], root: Path, place: Path) -> None:
    """Copies the models that another builds, from where `digest` finds them for a model in `root`, to `place`."""
    for name in parts:
        folders = (folder / name for folder in (root, registry.installed_directory()))
        source = next((folder for folder in folders if (folder / f"modeling_{name}.py").is_file()), None)
        if source is not None:
            _copy_model(source, place / name)


def _copy_model(source: Path, target: Path) -> None:
    """Copies what the prover reads of a generated model."""
    target.mkdir(parents=True, exist_ok=True)
    files = [file for file in (*source.glob("*.py"), source / "provenance.json") if file.is_file()]
    provenance.write_whole({target / file.name: file.read_text(encoding="utf-8") for file in files})


def _proof_in(folder: Path) -> dict[str, Any]:
    return code_sets.read(folder / PROOF)


def _has_current_proof(folder: Path, generated: Generated, context: MoveContext) -> bool:
    """Whether a folder has this generated text, and a proof of it and of the present text of its parts, of any status, with the
    target release, made by the present prover."""
    file = folder / f"modeling_{generated.model}.py"
    if not (folder / PROOF).is_file() or not file.is_file() or file.read_bytes() != generated.text.encode():
        return False
    proof = _proof_in(folder)
    made_with = proof.get("made_with", {})
    is_same_text = proof.get("sha256") == digest(file)
    return (
        is_same_text
        and code_sets.is_current(made_with)
        and made_with.get("transformers") == context.target.release.version
    )


def prove(python: Path, folder: Path, jobs: int, variables: Mapping[str, str] | None = None) -> None:
    """Proves the generated model in a folder with a Python's release of transformers; writes `verify.json` there.

    Args:
        variables: additional environment variables.

    Raises:
        PatchgenError: the prover wrote no proof; the message ends with its last line of output.
    """
    (folder / PROOF).unlink(missing_ok=True)
    threads = str(max((os.cpu_count() or 1) // max(jobs, 1), 1))
    environment = {"OMP_NUM_THREADS": threads, **environments.environment_variables(), **(variables or {})}
    command = [python, "-P", "-m", "patchgen.cli", "verify", "--directory", folder]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    (folder / "verify.log").write_text(result.stdout + result.stderr, encoding="utf-8")
    if not (folder / PROOF).is_file():
        reason = _failure(result.stderr.strip() or result.stdout.strip() or "no output")
        raise PatchgenError(f"it cannot be proven: {reason} (full output: {folder / 'verify.log'})")


def _failure(output: str) -> str:
    """The last line of a prover's output; of a traceback that ends in one of transformers' models, with that place."""
    message = output.splitlines()[-1].removeprefix("patchgen: ")
    frames = re.findall(r'^  File "(.+)", line (\d+)', output, re.MULTILINE)
    place, line = frames[-1] if frames else ("", "")
    file = Path(place).as_posix().partition("/transformers/models/")[2]
    return f"upstream's own code fails ({file}, line {line}): {message}" if file else message


# --------------------------------------------------------------------------------------- a committed file with another release


def prove_against(model: str, to: str, root: Path, python: Path | None = None) -> tuple[bool, str]:
    """Proves a committed file, unchanged, with another release. Its `verify.json` then lists the release if the eager comparison
    passes, as `verify.report.write_proof` does; if it fails, or the prover writes no proof, the release is no longer listed.

    Returns:
        Whether it is proven, and the status and reason of the proof.

    Raises:
        PatchgenError: the release or its environment is unavailable, the prover wrote no proof, or the existing `verify.json`
            is of a different version of the file.
    """
    target = releases.find(to)
    version = target.release.version
    source, place = root / model, _staging(to, root) / f"{model}-as-committed"
    staging = place / model
    before = _proof_in(source) if (source / PROOF).is_file() else None
    if before is not None:
        _require_proof_of_present_text(before, source, model)
    _copy_model(source, staging)
    # Beside the copy, as beside the committed file: the proof is also of the text of these.
    committed_parts = [part["default"]["model"] for part in provenance.read(source).get("parts", ())]
    _copy_parts(filter(None, committed_parts), root, place)
    python = environments.python_for(target, python)
    try:
        prove(python, staging, 1, {ALLOW_VARIABLE: version})
    except PatchgenError:
        if before is not None:
            _list_release(source, before, version, is_equal=False)
        raise
    proof = _proof_in(staging)
    _require_proof_of_present_text(proof, source, model)  # neither may have changed while it was proven
    _list_release(source, before or proof, version, is_equal=version in proof["transformers"])
    return proof["status"] == PROVEN, f"{proof['status']} {proof['reason']}".strip()


def _require_proof_of_present_text(proof: dict[str, Any], folder: Path, model: str) -> None:
    if proof.get("sha256") != digest(folder / f"modeling_{model}.py"):
        raise PatchgenError(
            f"{model}: {PROOF} is the proof of a different version of modeling_{model}.py, or of the language model that it "
            f"builds. To fix: prove the present files with their own release: patchgen verify {model}"
        )


def _list_release(folder: Path, proof: dict[str, Any], version: str, *, is_equal: bool) -> None:
    """Writes a proof with a release added to those that the file runs with (`is_equal`), or removed from them."""
    listed: set[str] = set(proof["transformers"]) - {version} | ({version} if is_equal else set())
    proof["transformers"] = sorted(listed, key=_version_key)
    provenance.write_whole({folder / PROOF: code_sets.dumps(proof, indent=2)})


def _version_key(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in version.split(".")]
