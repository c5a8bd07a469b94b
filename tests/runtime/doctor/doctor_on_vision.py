"""Each planted fault in a small vision model, and what the doctor says of it: a JSON object a line.

Its own process, because torchvision must be there before transformers is imported.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "data"))
from small_processors import use_torchvision

use_torchvision()


LIMIT = 450_000
"""Bytes: the toy has 510 thousand, 420 thousand of them around its layers and in the largest."""


def tell(case: str, report: Any) -> None:
    """A line of what a report on a sound model says."""
    left = [entry.check for entry in report.entries if entry.finding.status == "not checked"]
    row = {"fault": case, "failed": report.failed, "not_checked": left, "text": report.text()}
    print(json.dumps(row), flush=True)


def in_ranks_too(folder: Path) -> None:
    """Processes that are started from here begin with torchvision as well."""
    folder.mkdir()
    beside = str(Path(__file__).parents[1] / "data")
    (folder / "sitecustomize.py").write_text("from small_processors import use_torchvision\n\nuse_torchvision()\n")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(folder), beside, os.environ["PYTHONPATH"]))


def main() -> None:
    import planted
    import toys

    from patchgen.runtime.doctor import examine
    from patchgen.runtime.train.recipe import from_dict

    place = Path(tempfile.mkdtemp())
    in_ranks_too(place / "at_start")
    toy = toys.vision_toy(place)
    tell("", examine(from_dict(toy.values | {"parallel": {"sp": 2, "ep": 2}})))
    tell("layer by layer", examine(from_dict(toy.values), skip=("proof", "step", "layout"), memory=LIMIT))
    for fault in planted.PROMISED:
        recipe = planted.planted(toy, fault, place / fault.replace(" ", "_"))
        report = examine(recipe, skip=("proof", "step", "layout"))
        found = planted.is_found(planted.finding(report, fault), fault)
        print(json.dumps({"fault": fault, "is_found": found, "text": report.text()}), flush=True)


if __name__ == "__main__":
    main()
