"""Moving to another release of transformers: its changes are found, judged and applied."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from patchgen import provenance
from patchgen.runtime.parent_process import end_with_parent
from patchgen.upgrade import releases
from patchgen.upgrade.comparing import compare_model
from patchgen.upgrade.findings import ModelUpgrade, Site, Upgrade

__all__ = ["ModelUpgrade", "Site", "Upgrade", "compare", "compare_model"]


def compare(
    models: Sequence[str],
    to: str,
    *,
    jobs: int = 2,
    reviewed: Collection[str] = (),
    root: Path | None = None,
    on_model: Callable[[ModelUpgrade], None] = lambda found: None,
) -> Upgrade:
    """Compares committed models with those generated from another release; several models in parallel processes.

    Args:
        models: the names of their folders in `root`.
        to: a version, a wheel or a folder; all releases are fetched before the first comparison.
        jobs: the most processes.
        reviewed: targets of hand edits that a person compared with the new release.
        root: the folder of generated models; by default `provenance.generated_root()`.
        on_model: called with the comparison of each model, in the order of `models`.

    Raises:
        PatchgenError: a release, or the record of a model, cannot be read.
    """
    root = root or provenance.generated_root()
    target = releases.find(to)
    versions = [provenance.read(root / model)["upstream"]["version"] or releases.installed() for model in models]
    for version in dict.fromkeys(versions):
        releases.find(version)
    work = [(model, to, root, tuple(reviewed)) for model in models]
    found: list[ModelUpgrade] = []
    with contextlib.ExitStack() as stack:
        run_all = map
        if jobs > 1 and len(models) > 1:
            context = multiprocessing.get_context("spawn")
            run_all = stack.enter_context(ProcessPoolExecutor(min(jobs, len(models)), context, end_with_parent)).map
        for model in run_all(compare_model, *zip(*work, strict=True)) if work else ():
            on_model(model)
            found.append(model)
    return Upgrade(", ".join(dict.fromkeys(versions)), target.release.version, tuple(found))
