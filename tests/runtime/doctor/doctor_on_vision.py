"""Each planted fault in a small vision model, and what the doctor says of it: a JSON object a line.

Its own process, because torchvision must be there before transformers is imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "data"))
from small_processors import use_torchvision

use_torchvision()


def main() -> None:
    import planted
    import toys

    from patchgen.runtime.doctor import examine
    from patchgen.runtime.doctor.finding import NOT_CHECKED
    from patchgen.runtime.train.recipe import from_dict

    place = Path(tempfile.mkdtemp())
    toy = toys.vision_toy(place)
    report = examine(from_dict(toy.values), skip=("proof", "layout"))
    left = [entry.check for entry in report.entries if entry.finding.status == NOT_CHECKED]
    print(json.dumps({"fault": "", "failed": report.failed, "not_checked": left, "text": report.text()}), flush=True)
    for fault in planted.PROMISED:
        recipe = planted.planted(toy, fault, place / fault.replace(" ", "_"))
        report = examine(recipe, skip=("proof", "step", "layout"))
        found = planted.is_found(planted.finding(report, fault), fault)
        print(json.dumps({"fault": fault, "is_found": found, "text": report.text()}), flush=True)


if __name__ == "__main__":
    main()
