"""How long a page of `patchgen report` takes to write and to open in Chromium, and how long a jump in it takes.

python benchmarks/bench_report.py qwen3_omni_moe --picture docs/report.png
python benchmarks/bench_report.py qwen3_omni_moe --to 5.20.0                # the page of an upgrade
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from patchgen import provenance
from patchgen.report import model, upgrade
from patchgen.upgrade import compare_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import chromium  # pyright: ignore[reportMissingImports]

LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3_omni_moe")
    parser.add_argument("--to", help="a release: the page of the upgrade to it")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--picture", type=Path, help="a PNG of the page at the loss")
    arguments = parser.parse_args()
    comparison = compare_model(arguments.model, arguments.to, provenance.generated_root()) if arguments.to else None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{arguments.model}.html"
        start = time.perf_counter()
        file.write_text(upgrade.page(comparison) if comparison else model.page(arguments.model), encoding="utf-8")
        print(f"{arguments.model}: written in {time.perf_counter() - start:.2f} s, {file.stat().st_size / 1e6:.2f} MB")
        page = chromium.Page(1400, 820)
        opened, jumps = [], []
        for _ in range(arguments.repeat):
            page.open(file)
            page.settle()
            opened.append(page.ask(LOADED) / 1000)
        for _ in range(20):
            start = time.perf_counter()
            page.press("n")
            jumps.append(time.perf_counter() - start)
        lines = page.ask("document.querySelectorAll('.r').length")
        median, longest = statistics.median(jumps), max(jumps)
        print(
            f"{lines} rows: opened in {min(opened):.2f} to {max(opened):.2f} s; a jump to the next site takes "
            f"{1000 * median:.0f} ms, at most {1000 * longest:.0f} ms"
        )
        if arguments.picture is not None and not comparison:
            page.open(file)
            page.ask("location.hash = sites.find((one) => one.dataset.site.startsWith('fused_loss')).id")
            page.settle()
            page.picture(arguments.picture)
        page.close()


if __name__ == "__main__":
    main()
