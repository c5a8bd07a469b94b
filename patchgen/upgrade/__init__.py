"""What a move to another release changes: found, judged, and applied."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from patchgen import provenance
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
    done: Callable[[ModelUpgrade], None] = lambda found: None,
) -> Upgrade:
    """Compares committed models with what a release would make of them; in processes, where there are several.

    Args:
        models: their folders in `root`.
        to: a version, a wheel or a folder; both releases are fetched before the first model is looked at.
        reviewed: targets of hand edits that a person read against the new release.
        root: the folder of generated models; by default `provenance.generated_root()`.
        done: is told of each model.

    Raises:
        PatchgenError: a release, or the record of a model, cannot be read.
    """
    root = root or provenance.generated_root()
    place = releases.find(to)
    versions = [provenance.read(root / model)["upstream"]["version"] or releases.installed() for model in models]
    for version in dict.fromkeys(versions):
        releases.find(version)
    work = [(model, to, root, tuple(reviewed)) for model in models]
    if jobs < 2 or len(models) < 3:
        found = map(compare_model, *zip(*work, strict=True)) if work else ()
        return Upgrade(", ".join(dict.fromkeys(versions)), place.release.version, tuple(map(_told(done), found)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(models)), mp_context=context) as pool:
        found = pool.map(compare_model, *zip(*work, strict=True))
        return Upgrade(", ".join(dict.fromkeys(versions)), place.release.version, tuple(map(_told(done), found)))


def _told(done: Callable[[ModelUpgrade], None]) -> Callable[[ModelUpgrade], ModelUpgrade]:
    def tell(found: ModelUpgrade) -> ModelUpgrade:
        done(found)
        return found

    return tell
