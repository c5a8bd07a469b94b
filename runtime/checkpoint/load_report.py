"""What a load did, for the report at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from patchgen.runtime.checkpoint.vocabulary import NewRows

NEW_ROWS_TEXT: dict[NewRows, str] = {"mean": "the mean of the others", "random": "random (upstream's initial values)"}


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank.

    Attributes:
        num_tensors: parameters and buffers that were filled from the checkpoint, tied ones once.
        num_bytes: bytes that this rank read.
        initialised: names that the checkpoint lacks, as `allow_missing` or upstream allows: they have upstream's initial
            values, the same on any number of ranks.
        ignored: keys that upstream's class or `allow_unexpected` ignores.
        grown: name of each parameter with more rows than in the checkpoint -> its rows there and in the model.
        new_rows: what the new rows of those are.
        unread: files beside those that were read which also hold or list weights.
        dequantised: how many tensors of the checkpoint are quantised, by form.
    """

    directory: Path
    num_tensors: int
    num_bytes: int
    seconds: float
    initialised: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    grown: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    new_rows: NewRows | None = None
    unread: tuple[str, ...] = ()
    dequantised: str = ""

    def __str__(self) -> str:
        gigabytes = self.num_bytes / 1e9
        lines = [
            f"{self.num_tensors} tensors from {self.directory}: {gigabytes:.2f} GB in {self.seconds:.1f} s "
            f"({gigabytes / max(self.seconds, 1e-9):.2f} GB/s) on this rank"
        ]
        if self.dequantised:
            lines.append(f"  dequantised as they were read: {self.dequantised}")
        for what, names in (
            ("initialised, not loaded", self.initialised),
            ("ignored, by upstream or by the recipe (model.ignore_keys)", self.ignored),
            ("not read, as in transformers", self.unread),
            (
                f"vocabulary grown, new rows are {NEW_ROWS_TEXT[self.new_rows or 'mean']}",
                [f"{name} from {stored} to {rows} rows" for name, (stored, rows) in self.grown.items()],
            ),
        ):
            if names:
                lines.append(f"  {what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if names[8:] else ''}")
        return "\n".join(lines)
