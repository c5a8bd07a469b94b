"""The saved steps of a run in a folder: which are whole, which are not and why, and where each lies."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from patchgen.runtime.checkpoint.manifest import Manifest, examine


class SavedSteps:
    """What lies below a directory of checkpoints; reading it takes no other rank."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def complete(self) -> list[int]:
        """The steps of the checkpoints that are whole, in the order in which they were saved."""
        whole = [(known.serial, known.step) for _, known, problem in self.found() if known and not problem]
        return [step for _, step in sorted(whole)]

    def broken(self) -> dict[str, str]:
        """Folders that are no complete checkpoint -> why."""
        found = {folder.name: problem for folder, _, problem in self.found() if problem}
        for leftover in self.directory.glob(".step-*.partial") if self.directory.is_dir() else ():
            found[leftover.name] = "its save did not come to an end"
        return found

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, None if there is none. Broken ones are named in a warning."""
        broken = self.broken()
        if broken:
            listed = "\n".join(f"  {name}: {problem}" for name, problem in sorted(broken.items()))
            warnings.warn(f"{self.directory} holds incomplete checkpoints:\n{listed}", stacklevel=2)
        complete = self.complete()
        return complete[-1] if complete else None

    def found(self) -> Iterator[tuple[Path, Manifest | None, str]]:
        """Folders, their manifests, and why they are not whole."""
        folders = sorted(self.directory.glob("step-*")) if self.directory.is_dir() else []
        folders += [folder for folder in self.directory.glob(".step-*.replaced") if not self._has_final(folder)]
        for folder in folders:
            if re.fullmatch(r"step-\d+", step_name(folder)):
                yield folder, *examine(folder)

    def _has_final(self, replaced: Path) -> bool:
        return (self.directory / step_name(replaced)).exists()

    def folder_of(self, step: int) -> Path:
        """Where a step lies: under its name, or set aside by a save that came just short of its end."""
        final = self.directory / folder_name(step)
        replaced = self.directory / f".{final.name}.replaced"
        return replaced if replaced.exists() and not final.exists() else final

    def newest_first(self) -> list[int]:
        """The steps of the whole ones; the others are named in a warning."""
        self.latest()  # names those that are not whole
        return self.complete()[::-1]

    def others(self, step: int) -> str:
        """The advice of an error about one of them."""
        others = [folder_name(other) for other in self.complete() if other != step]
        return f"Complete ones: {', '.join(others)}." if others else "No other checkpoint there is complete."


def folder_name(step: int) -> str:
    """What the folder of a step is called."""
    return f"step-{step:08d}"


def step_name(folder: Path) -> str:
    """`step-...` of a folder that stands aside."""
    return folder.name.removeprefix(".").partition(".")[0]
