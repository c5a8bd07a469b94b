"""Checks a finished run: its loss fell, and plain transformers loads its export.

    python -m patchgen.runtime.train.check_run runs/qwen3_moe_toy --below 0.6

Generated classes are not registered here: upstream's own class loads the model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from patchgen.runtime.train import run_log
from patchgen.runtime.train.records import TrainingStopped

LAST_STEPS = 5


def check(directory: Path, below: float) -> str:
    """Checks the run in `directory`; returns a one-line result.

    Raises:
        ValueError: there are no steps, the mean loss of the last few is not below `below` times the first, or the export has
            missing or unexpected weights or is loaded by another class than upstream's.
        TrainingStopped: a line of the log is broken.
    """
    losses = [entry["loss"] for entry in run_log.read(directory) if "loss" in entry]
    if not losses:
        raise ValueError(f"{directory} has no steps ({run_log.STEPS}).")
    last = statistics.mean(losses[-LAST_STEPS:])
    if not last < below * losses[0]:
        raise ValueError(
            f"The mean loss of the last {LAST_STEPS} of {len(losses)} steps is {last:.4f}, not below {below:.0%} of the first, "
            f"{losses[0]:.4f}."
        )
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory / "export", output_loading_info=True, trust_remote_code=False
    )
    model, report = loaded  # a pair, which the signature of from_pretrained does not show
    mismatches = {kind: sorted(names) for kind, names in report.items() if names}
    if mismatches:
        raise ValueError(f"transformers does not load {directory / 'export'} completely: {mismatches}")
    origin = type(model).__module__
    if not origin.startswith("transformers."):
        raise ValueError(f"The export was loaded by {origin}, not by transformers' own class.")
    return (
        f"loss {losses[0]:.4f} -> {last:.4f} ({last / losses[0]:.0%}) in {len(losses)} steps; {origin} loads the export: "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, none missing, none unexpected"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--below", type=float, default=1.0, help="required: last mean loss / first loss < BELOW")
    arguments = parser.parse_args()
    try:
        print(check(arguments.directory, arguments.below))
    except (ValueError, TrainingStopped) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
