"""A step of LoRA compared with one of full training, Qwen3-30B-A3B at full width: seconds, peak memory, trained parameters.

    python benchmarks/bench_lora.py                                # one GPU, 4 layers, 4,096 and 16,384 tokens
    python benchmarks/bench_lora.py --device cpu --tiny            # that it runs

full                   every parameter, fp32 with AdamW, as `bench_train.py` has it
LoRA attention         adapters on q, k, v and o
LoRA with experts      those, and on gate_up_proj and down_proj of all experts

With LoRA the frozen weights are stored in bf16, what layers compute in: nothing else reads them. All train the same packed
rows with the same kernels. Before anything is timed, one layer's experts with adapters are compared with the reference,
expert by expert in fp32 on the same inputs: output and every gradient, beside the errors of the same loop in bf16.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import bench_train as common
import result_rows
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from patchgen.kernels.fused_moe import fused_moe
from patchgen.kernels.moe.adapters import ExpertAdapters, LowRank
from patchgen.runtime import attention, parallel, registry, seams
from patchgen.runtime.parallel import ParallelConfig, checkpointing, gradients, loss, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import flops, lora, optimizers
from patchgen.runtime.train.recipe import LoraConfig

RESULTS = Path(__file__).with_name("results_lora.csv")
COLUMNS: tuple[str, ...] = (
    "date",
    "versions",
    "gpu",
    "experts",
    "layers",
    "case",
    "rank",
    "ckpt",
    "tokens",
    "trained M",
    "loss 1",
    "loss last",
)
COLUMNS += ("s/step", "tokens/s", "peak GiB", "time of full", "memory of full")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FULL = "full"
CASES: dict[str, tuple[str, ...] | None] = {FULL: None, "LoRA attention": (), "LoRA with experts": EXPERTS}
"""The stacked parameters that get adapters besides the attention; None: full training without adapters."""
FACTOR = 2.0
"""How much further from the reference in fp32 than the same loop in bf16 the kernels may be."""
LEARNING_RATE = {FULL: 1e-5}


# ------------------------------------------------------------------------------------------ the comparison


def experts_of(sizes: dict, rank: int, device: str) -> dict[str, Any]:
    """One layer's experts, adapters, tokens and routing, in fp32."""
    num_experts, hidden, inner = sizes["num_experts"], sizes["hidden_size"], sizes["moe_intermediate_size"]
    tokens, generator = 4 * num_experts, torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * scale

    scores = random(tokens, num_experts).softmax(-1)
    weights, index = scores.topk(sizes["num_experts_per_tok"], dim=-1)
    return {
        "x": random(tokens, hidden),
        "index": index,
        "weights": weights / weights.sum(-1, keepdim=True),
        "gate_up": random(num_experts, 2 * inner, hidden, scale=hidden**-0.5),
        "down": random(num_experts, hidden, inner, scale=inner**-0.5),
        "gate_up_left": random(num_experts, 2 * inner, rank, scale=rank**-0.5),
        "gate_up_right": random(num_experts, rank, hidden, scale=hidden**-0.5),
        "down_left": random(num_experts, hidden, rank, scale=rank**-0.5),
        "down_right": random(num_experts, rank, inner, scale=inner**-0.5),
    }


def run_experts(tensors: dict[str, Tensor], dtype: torch.dtype, backend: str) -> dict[str, Any]:
    """Output and gradients of what is trained, of bf16 numbers computed with in `dtype`."""
    cast = {n: t.bfloat16().to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    trained = [name for name in cast if name not in ("index", "gate_up", "down")]
    for name in trained:
        cast[name].requires_grad_()
    adapters = ExpertAdapters(
        *(LowRank(cast[f"{name}_left"], cast[f"{name}_right"], 0.5) for name in ("gate_up", "down"))
    )
    out = fused_moe(
        *(cast[name] for name in ("x", "index", "weights", "gate_up", "down")),
        num_experts=cast["gate_up"].shape[0],
        activation=nn.SiLU(),
        adapters=adapters,
        backend=backend,
    )
    generator = torch.Generator(out.device).manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(dtype))
    return {"out": out.detach()} | {f"d {name}": cast[name].grad for name in trained}


def compare_experts(sizes: dict, rank: int, device: str, backend: str) -> list[str]:
    """Prints the errors of `backend` against the reference; returns those that are too large."""
    tensors, problems = experts_of(sizes, rank, device), []
    exact = run_experts(tensors, torch.float32, "reference")
    loop, found = (run_experts(tensors, torch.bfloat16, name) for name in ("reference", backend))
    for name, expected in exact.items():
        errors = [float((one[name].float() - expected).norm() / expected.norm()) for one in (found, loop)]
        print(f"  {name:<16} errs by {errors[0]:.2e}, the loop in bf16 by {errors[1]:.2e}", flush=True)
        if not errors[0] <= FACTOR * errors[1]:
            problems.append(f"{name} errs by {errors[0]:.2e}, more than {FACTOR} times the loop's {errors[1]:.2e}")
    return problems


# ------------------------------------------------------------------------------------------------ the steps


def build(case: str, mode: str, rank: int, state: ParallelState, setting: common.Setting) -> nn.Module:
    """The model of a case, sharded, with its weights."""
    parameters = CASES[case]
    options: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    with torch.device("meta"):
        model = registry.build_model(
            common.config_of(setting.sizes),
            attn_implementation=setting.attention,
            dtype=torch.float32 if parameters is None else torch.bfloat16,
        ).train()
    checkpointing.apply(model, mode)
    sharding_options = sharding.ShardingOptions(**options)
    sharding.shard_model(model, state, options=sharding_options)
    common.fill(model, setting.device)
    if parameters is not None:
        config = LoraConfig(rank=rank, alpha=2.0 * rank, target_parameters=parameters)
        lora.add_adapters(model, config, state, source="", seed=0, options=sharding_options)
    return model


def step(model: nn.Module, optimizer, inputs: dict, state: ParallelState, items: Tensor) -> Tensor:
    with parallel.using(state), loss.step(items):
        share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        share.backward()
    lora.reduce_gradients(model)
    gradients.clip(model, 1.0, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return share.detach()


def measure(case: str, tokens: int, arguments: argparse.Namespace, state: ParallelState, setting) -> dict:
    """A row: the first loss, and the mean of the timed steps. The model is built for it, and freed afterwards."""
    mode = "full" if tokens > arguments.checkpoint_above else "none"
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = build(case, mode, arguments.rank, state, setting)
    groups = sharding.optimizer_groups(model)
    trained = [parameter for group in groups for parameter in group["params"]]
    optimizer = optimizers.adamw_for(trained[0])(groups, lr=LEARNING_RATE.get(case, 1e-3))
    batch, _ = common.inputs_of(tokens, state, setting, 0)
    items = loss.count_items([batch], setting.device)
    first = step(model, optimizer, batch, state, items)
    for _ in range(1, setting.warm_up):
        step(model, optimizer, batch, state, items)
    common.synchronise(setting)
    started = time.perf_counter()
    for _ in range(setting.steps):
        last = step(model, optimizer, batch, state, items)
    common.synchronise(setting)
    seconds = (time.perf_counter() - started) / setting.steps
    row = {"layers": setting.sizes["num_hidden_layers"], "case": case, "rank": arguments.rank, "ckpt": mode}
    row |= {"tokens": tokens, "trained M": round(sum(p.numel() for p in trained) / 1e6, 1)}
    row |= {"loss 1": round(float(first), 5), "loss last": round(float(last), 5)}
    row |= {"s/step": round(seconds, 4), "tokens/s": round(tokens / seconds)}
    if setting.device == "cuda":
        row["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return row


def run(arguments: argparse.Namespace, state: ParallelState, setting: common.Setting, started: float) -> list[dict]:
    """All rows; each is printed when it is measured."""
    rows: list[dict] = []
    for tokens in arguments.tokens:
        for case in CASES:
            if time.perf_counter() - started > arguments.budget:
                print(f"{case} at {tokens}: the time is up", flush=True)
                continue
            row = measure(case, tokens, arguments, state, setting)
            full = next((other for other in rows if other["case"] == FULL and other["tokens"] == tokens), row)
            row["time of full"] = round(row["s/step"] / full["s/step"], 3)
            if "peak GiB" in row:
                row["memory of full"] = round(row["peak GiB"] / full["peak GiB"], 3)
            rows.append(row)
            line = " | ".join(str(row.get(column, "")) for column in COLUMNS[5:])
            print(f"{line}   (after {time.perf_counter() - started:.0f} s)", flush=True)
            gc.collect()  # FSDP2's hooks and their modules refer to each other
            if setting.device == "cuda":
                torch.cuda.empty_cache()
    return rows


def problems_of(rows: list[dict]) -> list[str]:
    """Cases that do not train: all start from the same weights, and a few steps on one batch lower its loss."""
    problems = []
    for row in rows:
        name = f"{row['case']} at {row['tokens']}"
        if not row["loss last"] < row["loss 1"]:
            problems.append(f"{name}: the loss did not fall: {row['loss 1']}, {row['loss last']}")
        full = next((other for other in rows if other["case"] == FULL and other["tokens"] == row["tokens"]), row)
        if abs(row["loss 1"] - full["loss 1"]) > 1e-2 * full["loss 1"]:
            problems.append(f"{name}: first loss {row['loss 1']}, of full training {full['loss 1']}")
    return problems


def write(rows: list[dict], kernel: str) -> None:
    import peft
    import transformers

    stamp = {
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "experts": kernel,
    }
    result_rows.append(RESULTS, COLUMNS, rows, **stamp)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU; writes no rows")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--fused-moe", default="auto", help="what serves the experts: auto, triton, torch")
    parser.add_argument("--checkpoint-above", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4, help="timed")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds after which no further case is started")
    arguments = parser.parse_args()
    started = time.perf_counter()
    device = arguments.device
    if arguments.tiny:
        arguments.layers, arguments.tokens = 2, [min(tokens, 512) for tokens in arguments.tokens[:1]]
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    attention.register()
    sizes = (common.TINY if arguments.tiny else common.MODEL) | {
        "num_hidden_layers": arguments.layers,
        "max_window_layers": arguments.layers,
    }
    with torch.device("meta"):
        cost = flops.model_cost(registry.build_model(common.config_of(sizes)))
    name = attention.choose()
    setting = common.Setting(
        device,
        sizes,
        name,
        name,
        arguments.steps,
        arguments.warm_up,
        cost,
        flops.peak_tflops(torch.device(device)),
        None,
    )
    print(f"{cost.parameters / 1e9:.2f} B parameters in {arguments.layers} layers; attention {name}", flush=True)
    problems = compare_experts(sizes, arguments.rank, device, arguments.fused_moe)
    with seams.using(fused_moe=arguments.fused_moe, causal_lm_loss="auto"):
        rows = run(arguments, ParallelState.create(ParallelConfig.for_world(1), device), setting, started)
    problems += problems_of(rows)
    if not arguments.tiny:
        write(rows, arguments.fused_moe)
    print(
        "\n".join(problems) or "the experts with adapters agree with the reference, and every case trains", flush=True
    )
    print(f"{time.perf_counter() - started:.0f} s in all", flush=True)
    dist.destroy_process_group()
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
