"""What generation gives, told in lines that a reader can compare: hits, notes, changed lines; or the refusal.

Recorded accounts lie in `data/`. `make accounts` writes them again, and the difference in git is what a change of a pass
changes elsewhere.
"""

from __future__ import annotations

import difflib
import json
import os
from itertools import zip_longest
from pathlib import Path

import pytest

from patchgen import pipeline, upstream
from patchgen.errors import PatchgenError
from patchgen.model_configs import ModelConfig
from patchgen.upstream import Upstream

DATA = Path(__file__).parent / "data"
RELEASE = "5.24.0"
"""The release of transformers that the accounts are of."""
ADVICE = "If that is meant: `make accounts`, and review what git shows."
RECORDING = bool(os.environ.get("PATCHGEN_RECORD"))


def account(origin: Upstream, config: ModelConfig | None = None) -> list[str]:
    """What the generator does with a source, line by line."""
    try:
        return account_of(pipeline.generate(origin, config))
    except PatchgenError as error:
        return refusal(error)


def changes(before: pipeline.Generated, after: pipeline.Generated) -> list[str]:
    """What an account has that the other one has not, and the other way round."""
    lines = difflib.unified_diff(account_of(before), account_of(after), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def refusal(error: PatchgenError) -> list[str]:
    return f"{type(error).__name__}: {error}".splitlines()


def account_of(generated: pipeline.Generated) -> list[str]:
    """Hits and notes of each pass, the census, and the lines that differ from upstream's."""
    lines = []
    for step in generated.steps:
        lines += [f"{step.name}: {hit.site}: {hit.what}" for hit in step.outcome.hits]
        lines += [f"{step.name}, as upstream has it: {hit.site}: {hit.what}" for hit in step.outcome.upstream]
        lines += [f"{step.name}, note: {note}" for note in step.outcome.notes]
    lines += [f"census: {name}: {why}" for name, why in json.loads(generated.provenance)["census"].items()]
    return lines + [line for line in generated.diff.splitlines() if line[:1] in ("+", "-")]


def compare(path: Path, found: list[str], what: str) -> None:
    """Fails, with the first line that differs, where an account is not the recorded one; or records it."""
    if of_another_release():
        pytest.skip(f"the accounts are of transformers {RELEASE}, {upstream.open_release().version} is installed")
    if RECORDING:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line + "\n" for line in found), encoding="utf-8")
        return
    difference = first_difference(path.read_text(encoding="utf-8").splitlines(), found)
    if difference:
        pytest.fail(
            f"The generator does something else with {what} than {path.name} records, from {difference}\n{ADVICE}",
            pytrace=False,
        )


def compare_entry(path: Path, name: str, found: list[str]) -> None:
    """The same for one entry of a file of many short accounts."""
    if of_another_release():
        return
    entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if RECORDING:
        entries[name] = found
        path.write_text(json.dumps(entries, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    elif difference := first_difference(entries.get(name, []), found):
        pytest.fail(
            f"'{name}' gives another account than {path.name} records, from {difference}\n{ADVICE}", pytrace=False
        )


def first_difference(recorded: list[str], found: list[str]) -> str:
    for number, (old, new) in enumerate(zip_longest(recorded, found), start=1):
        if old != new:
            return f"line {number} on:\n  recorded  {old}\n  found     {new}"
    return ""


def of_another_release() -> bool:
    return upstream.open_release().version != RELEASE
