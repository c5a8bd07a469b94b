"""The move itself: regenerate aside, prove in the release's own environment, and only then write.

A model moves whole or not at all, and what is done is not done again: generated files and proofs that lie aside, or that
moved in an earlier run, are taken as they are while they hold.
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
class Moved:
    """What `move` did: the models that stand at the new release now, and why others do not."""

    moved: list[str] = field(default_factory=list)
    held_back: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Workshop:
    """Where models are made before they are written: the release, its Python, a folder aside."""

    place: releases.Place
    python: Path
    aside: Path
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
    say: Callable[[str], None],
) -> Moved:
    """Moves every model that needs nobody: each is regenerated, proven, and written with its proof. Installs nothing here.

    Args:
        to: the release, as `releases.find` takes it.
        root: the folder of generated models.
        python: a Python that has the release; without one an environment is made and kept.
        say: is told of each step.
    """
    result = Moved()
    result.held_back |= {model.model: model.reason for model in found.models if model.verdict == PERSON}
    ready = [model for model in found.models if model.verdict < PERSON]
    if not ready:
        return result
    place = releases.find(to)
    say(f"an environment with {place.release.origin} ...")
    shop = Workshop(place, environments.python_for(place, python), _aside(to, root), root, reviewed, jobs)
    say(f"proving {len(ready)} models with {shop.python}")
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        waiting = {pool.submit(_move_one, generated, shop): generated.model for generated in _generated(ready, shop)}
        for number, future in enumerate(as_completed(waiting), start=1):
            name = waiting[future]
            try:
                words = future.result()
                result.moved.append(name)
            except PatchgenError as error:
                words = f"stays as it is: {error}"
                result.held_back[name] = str(error)
            say(f"{number} of {len(ready)} {name}: {words}")
    result.moved.sort()
    return result


def _aside(to: str, root: Path) -> Path:
    version = releases.find(to).release.version
    return cache_directory() / "upgrades" / f"{version}-{short_hash(str(root.resolve()), to)}"


def _generated(models: list[ModelUpgrade], shop: Workshop) -> Iterator[Generated]:
    """Each model as the release gives it; in one thread, while the processes of others prove."""
    for model in models:
        record = provenance.read(shop.root / model.model)
        if record["upstream"]["version"] is None:
            source = load(model.model, source=releases.own_source(model.model, record))
        else:
            source = load_from(shop.place.release, model.model)
        yield pipeline.generate(source, heads=record.get("asked", ()))


def _move_one(generated: Generated, shop: Workshop) -> str:
    """Proves and writes one model; says how it went.

    Raises:
        PatchgenError: it was not written; with the reason.
    """
    start = time.perf_counter()
    target, aside = shop.root / generated.model, shop.aside / generated.model
    provenance.refuse_drifted_edits(target, generated, shop.reviewed)
    if _is_proven(target, generated, shop):
        provenance.write(generated, target, reviewed=shop.reviewed)
        return "stands there already, proven"
    provenance.write(generated, aside, force=True, reviewed=[edit.target for edit in generated.config.edits])
    how = "proven before"
    if not _is_proven(aside, generated, shop):
        prove(shop.python, aside, shop.jobs)
        how = "proven"
    proof = json.loads((aside / PROOF).read_text(encoding="utf-8"))
    before = json.loads((target / PROOF).read_text(encoding="utf-8")) if (target / PROOF).is_file() else {}
    if proof["status"] != PROVEN:
        if proof["status"] != before.get("status"):
            raise PatchgenError(f"not proven: {proof['status']} {proof['reason']}. What was generated is in {aside}")
        how = f"{proof['status']}, as before"
    written = provenance.write(generated, target, reviewed=shop.reviewed)
    provenance.write_whole({target / PROOF: (aside / PROOF).read_text(encoding="utf-8")})
    return f"{how}, {len(written)} files written, {time.perf_counter() - start:.0f} s"


def _is_proven(folder: Path, generated: Generated, shop: Workshop) -> bool:
    """Whether a folder holds these very bytes and a proof of them with that release by today's prover."""
    if not (folder / PROOF).is_file():
        return False
    proof = json.loads((folder / PROOF).read_text(encoding="utf-8"))
    made_with = proof.get("made_with", {})
    is_of_these = proof.get("sha256") == hashlib.sha256(generated.text.encode()).hexdigest()
    is_present = made_with.get("prover") == source_closure.prover()
    return is_of_these and is_present and made_with.get("transformers") == shop.place.release.version


def prove(python: Path, folder: Path, jobs: int, allowed: Mapping[str, str] | None = None) -> None:
    """Proves the generated model in a folder with the release that a Python has; writes `verify.json` beside it.

    Args:
        allowed: more environment variables.

    Raises:
        PatchgenError: there is no proof at all; with what the prover said last.
    """
    (folder / PROOF).unlink(missing_ok=True)
    threads = str(max((os.cpu_count() or 1) // max(jobs, 1), 1))
    variables = {"OMP_NUM_THREADS": threads, **environments.environment_variables(), **(allowed or {})}
    command = [python, "-P", "-m", "patchgen.cli", "verify", "--directory", folder]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    (folder / "verify.log").write_text(result.stdout + result.stderr, encoding="utf-8")
    if not (folder / PROOF).is_file():
        said = (result.stderr.strip() or result.stdout.strip() or "nothing").splitlines()[-1]
        raise PatchgenError(
            f"it cannot be proven: {said.removeprefix('patchgen: ')} (all of it: {folder / 'verify.log'})"
        )


# ------------------------------------------------------------------------------------- a committed file as it stands


def prove_against(model: str, to: str, root: Path, python: Path | None = None) -> tuple[bool, str]:
    """Proves a committed file, as it stands, with another release; its `verify.json` then lists the release, or no longer.

    Returns:
        Whether it is proven, and the words of the proof.

    Raises:
        PatchgenError: the release, or its environment, is unavailable.
    """
    place = releases.find(to)
    version = place.release.version
    source, aside = root / model, _aside(to, root) / f"{model}-as-committed"
    aside.mkdir(parents=True, exist_ok=True)
    files = {aside / path.name: path.read_text(encoding="utf-8") for path in source.glob("*.py")}
    provenance.write_whole(
        files | {aside / "provenance.json": (source / "provenance.json").read_text(encoding="utf-8")}
    )
    prove(environments.python_for(place, python), aside, 1, {ALLOW_VARIABLE: version})
    proof = json.loads((aside / PROOF).read_text(encoding="utf-8"))
    holds = proof["status"] == PROVEN
    before = json.loads((source / PROOF).read_text(encoding="utf-8")) if (source / PROOF).is_file() else proof
    if before.get("sha256") != proof["sha256"]:
        raise PatchgenError(
            f"{model}: {PROOF} beside it is of other bytes. Prove it with its own release first: patchgen verify {model}"
        )
    listed = set(before["transformers"]) - {version} | ({version} if holds else set())
    before["transformers"] = sorted(listed, key=_by_number)
    provenance.write_whole({source / PROOF: json.dumps(before, indent=2) + "\n"})
    return holds, f"{proof['status']} {proof['reason']}".strip()


def _by_number(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in version.split(".")]
