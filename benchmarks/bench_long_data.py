"""Data at 1M tokens per row on the CPU: the token cache, packed rows and a rank's slice of them, and `patchgen data`.

    python benchmarks/bench_long_data.py                    # appends to benchmarks/results_long_data.csv
    python benchmarks/bench_long_data.py --tokens 65536 --rows 2

Each part runs in a process of its own with one thread: seconds of CPU per row, and how much more memory the process had at its
peak than when the part began. Documents of log-normal length (median 400 tokens), or one that fills the row; tokens are drawn
at random. `patchgen data` shows one row of `builtin:stdlib`, whose tokens are in the cache already.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import result_rows
import torch
from bench_data import Draw, Lengths, log_normal

from patchgen.runtime.data import preview_page, preview_text
from patchgen.runtime.data.cache import open_cache
from patchgen.runtime.data.cached_loader import PlannedLoader
from patchgen.runtime.data.config import DataConfig, SourceConfig
from patchgen.runtime.data.documents import Documents
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.train import recipe as recipes
from patchgen.runtime.train.data_view import preview_of_recipe

RESULTS = Path(__file__).with_name("results_long_data.csv")
COLUMNS = ("date", "versions", "cpu", "part", "tokens", "documents", "CPU s per row", "peak MiB", "output MiB")
PARTS = ("cache", "rows", "slice of 8", "text", "page")


def peak() -> float:
    """MiB that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(part: str, tokens: int, rows: int, documents: str, folder: Path) -> dict:
    """One part, in this process."""
    torch.set_num_threads(1)
    if part in ("text", "page"):
        toy = Path(__file__).parents[1] / "recipes" / "qwen3_moe_toy.yaml"
        changes = {"data.tokens_per_batch": str(tokens), "data.cache_dir": str(folder)}
        recipe, before, started = recipes.load(toy, changes), peak(), time.process_time()
        shown = preview_of_recipe(recipe, rows=1)
        output = preview_text.as_text(shown, colour=False) if part == "text" else preview_page.as_page(shown, title="")
        return {
            "documents": len(shown.rows[0].documents),
            "CPU s per row": time.process_time() - started,
            "peak MiB": peak() - before,
            "output MiB": len(output.encode()) / 2**20,
        }
    many = log_normal(tokens * rows // 400, tokens)
    lengths = np.full(rows + 1, tokens) if documents == "one" else many
    before, started = peak(), time.process_time()
    cache = open_cache(folder, Lengths(lengths), Draw(), skip_bad=False)
    if part == "cache":
        scale = tokens / int(lengths.sum())
        return {"CPU s per row": (time.process_time() - started) * scale, "peak MiB": peak() - before}
    config = DataConfig(sources=(SourceConfig("made up"),), tokens_per_batch=tokens, epochs=None)
    loader = PlannedLoader(
        config, [Documents(cache, limit=tokens, on_long="error")], pad_token_id=0, batch_index=0, num_batches=1
    )
    batch = next(loader)
    before, started, sizes = peak(), time.process_time(), []
    for _ in range(rows):
        if part == "rows":
            batch = next(loader)
        else:
            slice_batch(batch, sp=8, sp_rank=7)
        sizes.append(len(batch["cu_seq_lens_q"]) - 1)
    seconds = (time.process_time() - started) / rows
    return {"documents": int(np.mean(sizes)), "CPU s per row": seconds, "peak MiB": peak() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20, help="of a row")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--folder", type=Path, help="of caches; default: a temporary one")
    parser.add_argument("--one", metavar="PART:DOCUMENTS", help="of the processes that this one starts")
    arguments = parser.parse_args()
    if arguments.one:
        part, documents = arguments.one.split(":")
        row = measure(part, arguments.tokens, arguments.rows, documents, arguments.folder)
        print(json.dumps(row), flush=True)
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        for part in arguments.parts:
            for documents in ("many",) if part in ("text", "page") else ("one", "many"):
                command = [sys.executable, __file__, "--one", f"{part}:{documents}", "--folder", str(folder)]
                command += ["--tokens", str(arguments.tokens), "--rows", str(arguments.rows)]
                if part in ("text", "page"):  # the first writes the cache
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1])
                row = {"part": part, "tokens": arguments.tokens, "documents": 1} | found
                row |= {key: float(f"{value:.3g}") for key, value in found.items() if isinstance(value, float)}
                rows.append(row)
                print(row, flush=True)
    versions = f"torch {torch.__version__}, numpy {np.__version__}"
    result_rows.append(RESULTS, COLUMNS, rows, versions=versions, cpu=f"{platform.machine()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
