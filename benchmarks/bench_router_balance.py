"""Small mixtures of experts from random weights: the load of the busiest expert and the loss, by what balances the routers.

    OMP_NUM_THREADS=1 python benchmarks/bench_router_balance.py            # one CPU rank, a minute for each case

`recipes/qwen3_moe_toy.yaml` (8 experts, 2 per token: 4 times the even share is the worst) with 4 batches a step, and a model of
these sizes as `deepseek_v3`, whose routers have a bias for selection alone. The loss is an evaluation's at the end, on text of the
same source, without the loss of the routers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import result_rows
import torch
import transformers

from patchgen.runtime.train import run_log

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results_router_balance.csv")
COLUMNS = ("date", "versions", "commit", "model", "balance", "steps", "eval_loss", "busiest")
LAST = 10
"""Steps over which the load of the busiest expert of any layer is averaged, at the end."""
DEEPSEEK = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
COEFFICIENT = "model.overrides.router_aux_loss_coef"
CASES: dict[str, dict[str, dict[str, object]]] = {
    "qwen3_moe": {
        "none": {"train.router_balance": "none"},
        "loss, coefficient 0.001": {"train.router_balance": "loss"},
        "loss, coefficient 0.01": {"train.router_balance": "loss", COEFFICIENT: 0.01},
        "loss, coefficient 0.1": {"train.router_balance": "loss", COEFFICIENT: 0.1},
    },
    "deepseek_v3": {
        "none": {"train.router_balance": "none"},
        "bias, by sign, rate 0.01": {"train.router_balance": "bias", "train.router_bias": {"rate": 0.01}},
        "bias, by size, rate 0.02": {
            "train.router_balance": "bias",
            "train.router_bias": {"rate": 0.02, "by": "size"},
        },
    },
}
"""Model type -> case -> keys of the recipe."""


def measure(model_type: str, settings: dict[str, object], steps: int, folder: Path) -> dict[str, float]:
    """Trains a case in `folder`; its loss and the load of its busiest expert."""
    source = {"model.source": "deepseek_v3", "model.overrides": DEEPSEEK} if model_type == "deepseek_v3" else {}
    keys = source | settings | {
        "train.steps": steps, "train.batches_per_step": 4, "checkpoint.export": False, "log.directory": str(folder),
        "eval_data": {"sources": [{"path": "builtin:stdlib"}], "tokens_per_batch": 512, "on_long": "split"},
    }  # fmt: skip
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "patchgen.cli", "train", str(ROOT / "recipes" / "qwen3_moe_toy.yaml"), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    entries = run_log.read(folder)
    loads = [entry["expert_load"] for entry in entries if "expert_load" in entry][-LAST:]
    loss = next(entry["eval_loss"] for entry in reversed(entries) if "eval_loss" in entry)
    return {"eval_loss": round(loss, 4), "busiest": round(statistics.mean(loads), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    for model_type, cases in CASES.items():
        for name, settings in cases.items():
            with tempfile.TemporaryDirectory() as folder:
                found = measure(model_type, settings, options.steps, Path(folder) / "run")
            row = {"model": model_type, "balance": name, "steps": options.steps, **found}
            print(row, flush=True)
            result_rows.append(RESULTS, COLUMNS, [row], versions=versions, commit=commit)


if __name__ == "__main__":
    main()
