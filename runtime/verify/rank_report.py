"""The results of a proof on ranks: printed, and recorded in `verify_ranks.json` next to the generated file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.runtime.compatibility import digest
from patchgen.runtime.verify import code_sets
from patchgen.runtime.verify.media_ranks import RankResult
from patchgen.runtime.verify.report import one_digit

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import LayoutRecord, MadeWith, RankCaseRecord, RankProofRecord

FILE_NAME = "verify_ranks.json"


def print_results(model: str, layout: str, results: Sequence[RankResult]) -> None:
    """Prints how each tower was computed, and for each batch the relative differences or why it failed."""
    print(f"{model} on {layout}")
    for path, how in towers_of(results).items():
        print(f"  {path}: {how}")
    for result in results:
        figures = f"loss differs by {result.loss:.1e}, worst gradient by {result.gradient:.1e} ({result.parameter})"
        print(
            f"  {'failed' if result.reason else 'ok':7} {result.case:21} {result.reason.strip() if result.reason else figures}"
        )


def write_results(file: Path, layout: str, results: Sequence[RankResult], made_with: MadeWith) -> Path:
    """Writes one layout into the record next to a generated file; other layouts of the same file are kept.

    Args:
        made_with: the sources and releases that this proof depends on.
    """
    path = file.parent / FILE_NAME
    sha256 = digest(file)
    before: RankProofRecord | None = code_sets.read(path) if path.is_file() else None
    layouts: dict[str, LayoutRecord] = before.get("layouts", {}) if before and before.get("sha256") == sha256 else {}
    layouts[layout] = {
        "cases": {result.case: _case_record(result) for result in results},
        "towers": towers_of(results),
        "made_with": made_with,
    }
    record: RankProofRecord = {"sha256": sha256, "layouts": dict(sorted(layouts.items()))}
    path.write_text(code_sets.dumps(record, indent=2))
    return path


def _case_record(result: RankResult) -> RankCaseRecord:
    record: RankCaseRecord = {"loss": one_digit(result.loss), "gradient": one_digit(result.gradient)}
    if result.reason:
        record["failed"] = result.reason.strip().splitlines()[-1]
    return record


def towers_of(results: Sequence[RankResult]) -> dict[str, str]:
    """How each tower was computed, over all batches."""
    return {path: how for result in results for path, how in sorted(result.towers.items())}
