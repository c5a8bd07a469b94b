"""How full batches are, and how fast the loader builds them from the tokenised cache.

    python benchmarks/bench_data.py                 # writes benchmarks/results_data.csv
    python benchmarks/bench_data.py --samples 5000 --seconds 2

Documents have log-normal lengths (median 400 tokens, sigma 1.2: half the tokens are in documents of over 1,700), tokens are
drawn at random; the loader is the one that trainers use, with shuffling, as rank 0 of the given number of ranks. Every
batch is built completely (ids, labels, positions, bounds) in one thread, and not used. On a shared machine, CPU seconds
are more reliable than wall time. Efficiency is tokens of documents per
token of budget over a whole epoch, of all ranks. The targets: 97 % and a million tokens per second.
"""

from __future__ import annotations

import argparse
import csv
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchgen.runtime.data.cache import open_cache
from patchgen.runtime.data.cached_loader import PlannedLoader
from patchgen.runtime.data.config import DataConfig, SourceConfig
from patchgen.runtime.data.documents import Documents
from patchgen.runtime.data.records import BadSample, Record
from patchgen.runtime.data.text import Tokens

RESULTS = Path(__file__).parent / "results_data.csv"
COLUMNS = [
    "mix",
    "packing",
    "budget",
    "ranks",
    "samples",
    "efficiency",
    "tokens_per_cpu_second",
    "tokens_per_second",
    "cpu",
]
VOCABULARY = 50_000


class Lengths:
    """A source of documents with the given lengths."""

    name = "made up"

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def read(self, position: int | None = None) -> Any:
        for number in range(position or 0, len(self.lengths)):
            yield Record(f"document {number}", {"length": int(self.lengths[number])}), number + 1

    def fingerprint(self) -> list[int]:
        return [len(self.lengths), int(self.lengths.sum())]


class Draw:
    """Random ids of a length, in place of a tokenizer."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def encode(self, samples: Any) -> list[Tokens | BadSample]:
        return [Tokens(self.random.integers(0, VOCABULARY, fields["length"]), None) for _, fields in samples]

    def fingerprint(self) -> str:
        return "random"


def log_normal(samples: int, longest: int) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(np.log(400), 1.2, samples)
    return np.clip(lengths, 1, longest).astype(np.int64)


def measure(folder: Path, lengths: np.ndarray, *, packing: bool, budget: int, ranks: int, seconds: float) -> list[Any]:
    config = DataConfig(
        sources=(SourceConfig("made up"),), tokens_per_batch=budget, packing=packing, epochs=1, cache_dir=str(folder)
    )
    cache = open_cache(folder, Lengths(lengths), Draw(), skip_bad=False)
    documents = Documents(cache, limit=budget, on_long="error")

    def loader(epochs: int | None) -> PlannedLoader:
        endless = DataConfig(**{**vars(config), "epochs": epochs})
        return PlannedLoader(endless, [documents], pad_token_id=0, batch_index=0, num_batches=ranks)

    lengths_of = [
        batch["input_ids"].shape[1]
        for batch in PlannedLoader(config, [documents], pad_token_id=0, batch_index=0, num_batches=1)
    ]
    # Ranks take turns at the same batches, and in the last turn some may have none.
    turns = -(-len(lengths_of) // ranks)
    efficiency = sum(lengths_of) / (turns * ranks * budget)
    assert sum(lengths_of) == int(lengths.sum()), "a token was lost or came twice"

    batches = loader(None)
    next(batches)
    tokens, start, cpu_start = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        tokens += next(batches)["input_ids"].shape[1]
    rate, cpu_rate = tokens / (time.perf_counter() - start), tokens / (time.process_time() - cpu_start)
    name = "best fit" if packing else "in order"
    speed = f"{cpu_rate / 1e6:6.1f} M tokens per second of CPU, {rate / 1e6:6.1f} M of the clock"
    print(f"{name:9} budget {budget:6} ranks {ranks:3}: {efficiency:7.2%} full, {speed}", flush=True)
    return [
        "log-normal",
        name,
        budget,
        ranks,
        len(lengths),
        f"{efficiency:.4f}",
        round(cpu_rate),
        round(rate),
        platform.machine(),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of speed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for budget in (4096, 8192, 32768):
            lengths = log_normal(arguments.samples, budget)
            for packing, ranks in ((True, 1), (True, 8), (True, 64), (False, 1)):
                rows.append(
                    measure(
                        Path(folder), lengths, packing=packing, budget=budget, ranks=ranks, seconds=arguments.seconds
                    )
                )
    with arguments.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
