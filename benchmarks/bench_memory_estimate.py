"""The estimate of memory beside the peaks that runs on GPUs showed, as recorded; needs no GPU.

    python benchmarks/bench_memory_estimate.py --commit HASH

Rows of `bench_trainer.py memory` (results_memory.csv) and, since shards and tokens travel as they do, of `bench_train.py`
(results_train.csv). Writes results_memory_estimate.csv anew and prints it; ends with 1 if an estimate is off by more than `BAR`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_train import MODEL
from bench_trainer import CASES

from patchgen.runtime.parallel import checkpointing
from patchgen.runtime.train import memory, recipe
from patchgen.runtime.train import model as models

HERE = Path(__file__).parent
RESULTS = HERE / "results_memory_estimate.csv"
COLUMNS = (
    "commit",
    "measured",
    "gpus",
    "layers",
    "case",
    "tokens/GPU",
    "peak GiB",
    "estimate GiB",
    "ratio",
    "at once",
)
SINCE = "2026-11-23"
"""Of bench_train.py: earlier rows are of other exchanges."""
LAYOUTS = {
    "FSDP": "FSDP",
    "FSDP, graph": "FSDP, graph",
    "EP2, peer memory": "EP2",
    "EP2, peer memory, graph": "EP2, graph",
}
LAYOUTS |= {"FSDP, collectives": "FSDP, collectives", "SP2": "SP2", "FSDP, kept gathered": "FSDP, kept gathered"}
BAR = 0.1


def recorded() -> Iterator[dict]:
    """What was measured: date, gpus, layers, case, whether layers are recomputed, tokens and peak."""
    for row in csv.DictReader((HERE / "results_memory.csv").open()):
        yield {name: row[name] for name in ("date", "gpus", "layers", "case", "tokens/GPU", "peak GiB")} | {
            "ckpt": "none"
        }
    for row in csv.DictReader((HERE / "results_train.csv").open()):
        if row["who"] == "ours" and row["date"] >= SINCE and row["layout"] in LAYOUTS and row["peak GiB"]:
            yield {**row, "case": LAYOUTS[row["layout"]]}


def recipe_of(row: dict, world: int) -> recipe.Recipe:
    settings = dict(CASES[row["case"]])
    micro_batches, sp = settings.pop("micro_batches", 1), settings.get("parallel.sp", 1)
    layers = int(row["layers"])
    sections: dict = {
        "model": {
            "source": "qwen3_moe",
            "overrides": MODEL | {"num_hidden_layers": layers},
        },
        "data": {"tokens_per_batch": int(row["tokens/GPU"]) * sp, "pad_batches": True},
        "train": {"batches_per_step": world // sp * micro_batches, "router_balance": "none"},
        "parallel": {"param_dtype": "bfloat16"},
        "kernels": {"rms_norm": "auto", "rotary": "compiled"},
    }
    if row["ckpt"] == "full":
        sections["parallel"]["activation_checkpointing"] = "full"
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections[section] = {**sections.get(section, {}), name: value} if name else value
    return recipe.from_dict(sections)


def estimate(row: dict) -> memory.Estimate:
    world = int(row["gpus"].split()[0])
    given = recipe_of(row, world)
    model = models.build_on_meta(given)
    checkpointing.apply(model, given.parallel.activation_checkpointing)
    chosen = models.configure_seams(given, model)
    layout = models.parallel_config(given.parallel, world)
    return memory.estimate(model, given, layout, torch.bfloat16, chosen, device_type="cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="", help="of the code, for the rows")
    arguments = parser.parse_args()
    rows = []
    cases = {(row["gpus"], row["layers"], row["case"], row["ckpt"], row["tokens/GPU"]): row for row in recorded()}
    for row in cases.values():  # the latest of each
        found, peak = estimate(row), float(row["peak GiB"])
        total = found.total / 2**30
        shown = {name: row[name] for name in ("gpus", "layers", "tokens/GPU", "peak GiB")}
        case = f"{row['case']}, recomputed" if row["ckpt"] == "full" else row["case"]
        shown |= {"commit": arguments.commit, "measured": row["date"], "case": case, "at once": found.reached}
        rows.append(shown | {"estimate GiB": round(total, 1), "ratio": round(total / peak, 3)})
        print(" | ".join(str(rows[-1][column]) for column in COLUMNS[1:]), flush=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    apart = [row for row in rows if abs(row["ratio"] - 1) > BAR]
    print(f"{len(rows)} peaks, ratios {min(row['ratio'] for row in rows)} to {max(row['ratio'] for row in rows)}")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
