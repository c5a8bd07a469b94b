"""The saved steps of a run in a folder: which are complete, which are not and why, and the folder of each."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from patchgen.runtime.checkpoint.manifest import Manifest, check_folder


class SavedSteps:
    """The checkpoints below a directory. Not collective: any rank may read it alone."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def complete_steps(self) -> list[int]:
        """The steps of the complete checkpoints, in the order in which they were saved."""
        complete = [
            (manifest.serial, manifest.step) for _, manifest, problem in self.checkpoints() if manifest and not problem
        ]
        return [step for _, step in sorted(complete)]

    def broken(self) -> dict[str, str]:
        """The folders that are incomplete -> why."""
        problems = {folder.name: problem for folder, _, problem in self.checkpoints() if problem}
        for leftover in self.directory.glob(".step-*.partial") if self.directory.is_dir() else ():
            problems[leftover.name] = "the save was interrupted"
        return problems

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None; warns about incomplete ones."""
        broken = self.broken()
        if broken:
            listed = "\n".join(f"  {name}: {problem}" for name, problem in sorted(broken.items()))
            warnings.warn(f"{self.directory} holds incomplete checkpoints:\n{listed}", stacklevel=2)
        complete = self.complete_steps()
        return complete[-1] if complete else None

    def checkpoints(self) -> Iterator[tuple[Path, Manifest | None, str]]:
        """Folders, their manifests, and what makes them incomplete; "" for a complete one."""
        folders = sorted(self.directory.glob("step-*")) if self.directory.is_dir() else []
        replaced = self.directory.glob(".step-*.replaced")
        folders += [folder for folder in replaced if not (self.directory / step_name(folder)).exists()]
        for folder in folders:
            if re.fullmatch(r"step-\d+", step_name(folder)):
                yield folder, *check_folder(folder)

    def folder_of(self, step: int) -> Path:
        """The folder of a step: under its final name, or renamed by a save of the same step that was interrupted at the end."""
        final = self.directory / folder_name(step)
        replaced = self.directory / f".{final.name}.replaced"
        return replaced if replaced.exists() and not final.exists() else final

    def newest_first(self) -> list[int]:
        """The steps of the complete checkpoints; warns about the others."""
        self.latest()  # warns
        return self.complete_steps()[::-1]

    def advice_on_others(self, step: int) -> str:
        """Which other steps could be loaded, for an error about `step`."""
        others = [folder_name(other) for other in self.complete_steps() if other != step]
        return f"Complete checkpoints: {', '.join(others)}." if others else "No other checkpoint there is complete."


def folder_name(step: int) -> str:
    """The name of the folder of a step."""
    return f"step-{step:08d}"


def step_name(folder: Path) -> str:
    """`step-...` of a folder, also of one with a temporary name (`.step-....replaced`)."""
    return folder.name.removeprefix(".").partition(".")[0]
