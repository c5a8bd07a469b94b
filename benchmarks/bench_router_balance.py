"""Small mixtures of experts from random weights: the load of the busiest expert and the loss, by what balances the routers.

    OMP_NUM_THREADS=1 python benchmarks/bench_router_balance.py --commit ID           # one CPU rank, a minute for each case
    python benchmarks/bench_router_balance.py --commit ID --wide --steps 150   # a GPU of 80 GB or more, the same

`recipes/qwen3_moe_toy.yaml` (8 experts, 2 per token: 4 times the even share is the worst) with 4 batches a step, and a model of
these sizes as `deepseek_v3`, whose routers have a bias for selection alone. The loss is an evaluation's at the end, on text of the
same source, without the loss of the routers. `--wide`: three layers of Qwen3-30B-A3B's width (128 experts, 8 per token: 16 is the
worst), 16,384 tokens a step, AdamW at 3e-4.
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
WIDE_LAYERS = {
    "vocab_size": 384, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 3,
    "num_attention_heads": 32, "num_experts_per_tok": 8, "max_position_embeddings": 4096,
}  # fmt: skip
WIDE = {
    "qwen3_moe": WIDE_LAYERS | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "norm_topk_prob": True},
    "deepseek_v3": WIDE_LAYERS | {
        "num_key_value_heads": 32, "n_routed_experts": 128, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "norm_topk_prob": True,
    },
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
WIDE_CASES: dict[str, dict[str, dict[str, object]]] = {
    "qwen3_moe": {
        "none": {"train.router_balance": "none"},
        "loss, coefficient 0.001": {"train.router_balance": "loss"},
        "loss, coefficient 0.01": {"train.router_balance": "loss", COEFFICIENT: 0.01},
    },
    "deepseek_v3": {
        "none": {"train.router_balance": "none"},
        "bias, by sign, rate 0.003": {"train.router_balance": "bias", "train.router_bias": {"rate": 0.003}},
        "bias, by sign, rate 0.03": {"train.router_balance": "bias", "train.router_bias": {"rate": 0.03}},
        "bias, by size, rate 0.02": {
            "train.router_balance": "bias",
            "train.router_bias": {"rate": 0.02, "by": "size"},
        },
        "bias, by size, rate 0.1": {"train.router_balance": "bias", "train.router_bias": {"rate": 0.1, "by": "size"}},
    },
}


def measure(model_type: str, settings: dict[str, object], steps: int, folder: Path, *, wide: bool) -> dict[str, float]:
    """Trains a case in `folder`; its loss and the load of its busiest expert."""
    keys: dict[str, object] = {"train.steps": steps, "checkpoint.export": False, "log.directory": str(folder)}
    tokens = 16384 if wide else 512
    if wide:
        keys |= {
            "model.source": model_type, "model.overrides": WIDE[model_type], "data.tokens_per_batch": tokens,
            "train.batches_per_step": 1, "optim": {"name": "adamw", "lr": 3e-4, "schedule": "linear", "warmup_steps": 20},
        }  # fmt: skip
    else:
        keys |= {"train.batches_per_step": 4}
        if model_type == "deepseek_v3":
            keys |= {"model.source": "deepseek_v3", "model.overrides": DEEPSEEK}
    keys["eval_data"] = {"sources": [{"path": "builtin:stdlib"}], "tokens_per_batch": tokens, "on_long": "split"}
    keys |= settings
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
    parser.add_argument("--commit", required=True, help="of the code that runs")
    parser.add_argument("--model", choices=CASES, help="only this one's cases")
    parser.add_argument("--balance", default="", help="only cases with these words in their name")
    parser.add_argument("--wide", action="store_true", help="three layers of Qwen3-30B-A3B's width, on a GPU")
    options = parser.parse_args()
    device = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    versions = f"{device}torch {torch.__version__}, transformers {transformers.__version__}"
    for model_type, cases in (WIDE_CASES if options.wide else CASES).items():
        if options.model not in (None, model_type):
            continue
        for name, settings in cases.items():
            if options.balance not in name:
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = measure(model_type, settings, options.steps, Path(folder) / "run", wide=options.wide)
            row = {"model": model_type, "balance": name, "steps": options.steps, **found}
            print(row, flush=True)
            result_rows.append(RESULTS, COLUMNS, [row], versions=versions, commit=options.commit)


if __name__ == "__main__":
    main()
