"""A training step of Qwen3-30B-A3B at full width, against plain transformers and torchtitan: tokens/s, TFLOP/s, MFU, memory.

    torchrun --nproc-per-node 4 benchmarks/bench_train.py
    torchrun --nproc-per-node 4 benchmarks/bench_train.py --layers 16 --tokens 16384 --layouts FSDP EP4 --profile 16384
    torchrun --nproc-per-node 2 benchmarks/bench_train.py --device cpu --tiny          # that it runs, on gloo

ours            the generated class, `runtime.parallel`, fused_moe=auto, causal_lm_loss=auto and --kernels; several layouts
transformers    upstream's class with `experts_implementation="grouped_mm"`, torch's FSDP2 as its tutorial has it,
                `clip_grad_norm_`; the same attention kernel unless --their-attention names another
torchtitan      its Qwen3 MoE, compiled, its FSDP2 or expert parallelism (`peer_torchtitan.py`)

With `--rows FILE` each case is written there before it starts and when it has ended, and cases that the file has are not
started again: what kills a run costs one case, and the same command goes on after it (`bench_scaling.py`).

All: the same weights, the same packed rows (documents of log-normal length), fp32 parameters and AdamW, bf16 compute,
fp32 reduction, a router that learns, clipping, activation checkpointing of whole layers above --checkpoint-above tokens
(ours: --our-checkpoint-above, since less is kept for the backward). Losses and gradient norms of the first step are
compared. MFU is by `runtime/train/flops.py`, for all alike. torchtitan's checkpointing is the first of --peer-checkpoint
that fits. `ratio` is to the fastest case of transformers or torchtitan at the same tokens.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import case_failures
import named_weights
import peer_torchtitan
import result_rows
import torch
import torch.distributed as dist
from case_rows import CaseRows
from packed_rows import packed_row
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_cases import CASE_COLUMNS, LAYOUTS, TITAN, TRANSFORMERS, WHO, compare, describe, has_mode
from train_steps import our_step, replayed_step, their_step

from patchgen.runtime import attention, registry, seams
from patchgen.runtime.parallel import ParallelConfig, checkpointing, loss, peer_memory, sharding, undivided
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import flops, optimizers, trainer
from patchgen.runtime.train.precision import FP8_EXPERTS

Model = nn.Module | peer_torchtitan.Peer
RESULTS = Path(__file__).with_name("results_train.csv")
COLUMNS: tuple[str, ...] = (
    "date",
    "versions",
    "gpus",
    "layers",
    "who",
    "layout",
    "ckpt",
    "tokens/GPU",
    "loss 1",
    "norm 1",
    "s/step",
)
COLUMNS += ("tokens/s/GPU", "TFLOP/s", "MFU %", "peak GiB", "ratio")
MODEL = {"vocab_size": 151_936, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
MODEL |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODEL |= {"norm_topk_prob": True, "use_cache": False, "max_position_embeddings": 40_960, "tie_word_embeddings": False}
TINY = MODEL | {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BYTES_PER_PARAMETER = 16  # fp32 parameter, gradient and two states of AdamW
SHARE_FOR_STATE = 0.5  # of the memory; the remainder is for activations, logits and gathered layers


@dataclass(frozen=True)
class Setting:
    """The settings of all cases of a run."""

    device: str
    sizes: dict
    attention: str
    their_attention: str
    steps: int
    warm_up: int
    cost: flops.ModelCost
    peak: float | None
    traces: Path | None


def config_of(sizes: dict):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**sizes)


def layers_that_fit(sizes: dict, memory: int, world: int) -> int:
    """Layers whose parameters, gradients and optimizer take `SHARE_FOR_STATE` of the memory, at most all 48."""

    def count(layers: int) -> int:
        with torch.device("meta"):
            model = registry.build_model(config_of(sizes | {"num_hidden_layers": layers}))
        return sum(parameter.numel() for parameter in model.parameters())

    one_layer, two_layers = count(1), count(2)
    budget = memory * SHARE_FOR_STATE * world / BYTES_PER_PARAMETER
    return max(1, min(48, int((budget - (2 * one_layer - two_layers)) // (two_layers - one_layer))))


# ------------------------------------------------------------------------------------------ the models


def ours(setting: Setting, state: ParallelState, mode: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = registry.build_model(config_of(setting.sizes), attn_implementation=setting.attention).train()
    checkpointing.apply(model, mode)
    options |= {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    sharding.shard_model(model, state, options=sharding.ShardingOptions(**options))
    if seams.selected()["fused_moe"] in FP8_EXPERTS and mode != "none":  # as a training run has it
        undivided.keep_fp8(model, transposed=False)
    return model


def theirs(setting: Setting, mode: str) -> nn.Module:
    from transformers import Qwen3MoeForCausalLM

    experts = "grouped_mm" if setting.device == "cuda" else "eager"
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(
            config_of(setting.sizes), attn_implementation=setting.their_attention, experts_implementation=experts
        ).train()
    if model.config._experts_implementation != experts:
        raise RuntimeError(f"Asked for {experts} experts, got {model.config._experts_implementation}.")
    if mode == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def model_of(name: str, setting: Setting, state: ParallelState, mode: str, longest: int, **options: object) -> Model:
    """A model for rows of at most `longest` tokens."""
    if WHO.get(name) == TITAN:
        sizes = setting.sizes, LAYOUTS[name].get("ep", 1)
        return peer_torchtitan.Peer(*sizes, tokens=longest, mode=mode, device=setting.device)
    return theirs(setting, mode) if name == TRANSFORMERS else ours(setting, state, mode, **options)


def optimizer_of(name: str, model: Model, setting: Setting) -> torch.optim.Optimizer:
    """AdamW: of torch, fused, for transformers; of a training run for ours."""
    if isinstance(model, peer_torchtitan.Peer):
        return model.optimizer()
    if name == TRANSFORMERS:
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=setting.device == "cuda")
    return optimizers.adamw_for(next(model.parameters()))(sharding.optimizer_groups(model), lr=1e-5)


def fill(model: Model, device: str) -> None:
    """Fills in weights that depend only on their names."""
    if isinstance(model, peer_torchtitan.Peer):
        return model.fill()
    if next(model.parameters()).is_meta:
        sharding.materialise(model, device)
    for name, parameter in model.named_parameters():
        named_weights.place(named_weights.weight_of(name, parameter.shape, device), parameter)


# ------------------------------------------------------------------------------------------------- the data


def inputs_of(
    tokens: int, state: ParallelState, setting: Setting, step: int, *, on_host: bool = False
) -> tuple[dict, float]:
    """This rank's inputs, and the FLOPs of its share of the global batch.

    The global batch is the same for every layout: `world` rows of `tokens`; SP ranks share their rows, one after the other.
    """
    first = state.batch_index * state.sp
    vocabulary = setting.sizes["vocab_size"]
    rows = [packed_row(tokens, vocabulary, step * 10_000 + index) for index in range(first, first + state.sp)]
    full_batch = {key: torch.cat([row[key] for row in rows], dim=1) for key in rows[0]}
    local_batch = slice_batch(full_batch, sp=state.sp, sp_rank=state.sp_rank)
    bounds = local_batch.get("cu_seq_lens_q")
    lengths = bounds.diff().tolist() if bounds is not None else [tokens * state.sp]
    device = "cpu" if on_host else setting.device
    inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in local_batch.items()}
    return inputs, setting.cost.flops(lengths) / state.sp


# -------------------------------------------------------------------------------------------------- a step


def step_of(name: str, model: Model) -> Callable:
    if isinstance(model, peer_torchtitan.Peer):
        return model.step
    return their_step if name == TRANSFORMERS else our_step


def measure(name: str, model: Model, optimizer, tokens: int, state: ParallelState, setting: Setting) -> dict:
    """Loss and norm of the first step, then the time of a step after the warm-up."""
    step = step_of(name, model)
    replays = LAYOUTS[name].get("cuda_graph", False)
    if replays and isinstance(model, nn.Module):
        step = replayed_step(model, setting.device, state)
    batches = [inputs_of(tokens, state, setting, index, on_host=replays) for index in range(2)]
    items = [loss.count_items([inputs], setting.device) for inputs, _ in batches]
    if replays:
        items = [int(number) for number in items]
    reset_peak(setting)
    share, norm = step(model, optimizer, batches[0][0], state, items[0])
    total = share.clone()
    dist.all_reduce(total)
    for index in range(1, setting.warm_up):
        step(model, optimizer, batches[index % 2][0], state, items[index % 2])
    trainer.freeze_objects()  # as a training run, for all
    synchronise(setting)
    started = time.perf_counter()
    for index in range(setting.steps):
        step(model, optimizer, batches[index % 2][0], state, items[index % 2])
    synchronise(setting)
    seconds = torch.tensor((time.perf_counter() - started) / setting.steps, device=setting.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    work = torch.tensor(sum(flops for _, flops in batches) / len(batches), dtype=torch.float64, device=setting.device)
    dist.all_reduce(work)
    tflops = float(work) / float(seconds) / dist.get_world_size() / 1e12
    row = {"loss 1": round(float(total), 5), "norm 1": round(float(norm), 4), "s/step": round(float(seconds), 4)}
    row |= {"tokens/s/GPU": round(tokens / float(seconds)), "TFLOP/s": round(tflops, 1)}
    if setting.peak:
        row["MFU %"] = round(100 * tflops / setting.peak, 1)
    if setting.device == "cuda":
        # Peer memory exists from the first step on, and torch's count does not include it.
        peak = torch.tensor(
            (torch.cuda.max_memory_allocated() + peer_memory.shared_gpu_bytes()) / 2**30, device=setting.device
        )
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        row["peak GiB"] = round(float(peak), 1)
    return row


def profile(name: str, model: Model, optimizer, tokens: int, state: ParallelState, setting: Setting) -> None:
    """The kernels and the calls of the host that take most of one step, with their share; and its trace. No step is replayed."""
    step = step_of(name, model)
    inputs, _ = inputs_of(tokens, state, setting, 0)
    items = loss.count_items([inputs], setting.device)
    synchronise(setting)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        started = time.perf_counter()
        step(model, optimizer, inputs, state, items)
        synchronise(setting)
        seconds = time.perf_counter() - started
    if setting.traces is not None:
        setting.traces.mkdir(parents=True, exist_ok=True)
        label = "".join(letter if letter.isalnum() else "_" for letter in name)
        profiler.export_chrome_trace(str(setting.traces / f"{label}_{tokens}_rank{dist.get_rank()}.json.gz"))
    if dist.get_rank() == 0:
        events = profiler.key_averages()
        print(f"\nprofile of {name}, {tokens} tokens per GPU, {seconds:.3f} s", flush=True)
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
        for time_of, chosen in (("self_device_time_total", kernels), ("self_cpu_time_total", events)):
            for event in sorted(chosen, key=lambda event: -getattr(event, time_of))[:14]:
                share = getattr(event, time_of) / 1e6 / seconds
                print(f"  {share:6.1%} {event.count:>6} x  {event.key[:120]}", flush=True)


# ------------------------------------------------------------------------------------------------- the run


def run(setting: Setting, arguments: argparse.Namespace, started: float) -> list[dict]:
    rank, world, layers = dist.get_rank(), dist.get_world_size(), setting.sizes["num_hidden_layers"]
    rows = CaseRows(CASE_COLUMNS, result="s/step", path=arguments.rows, writes=rank == 0)
    dist.barrier()  # all have read the file before one writes it
    for name in arguments.layouts:
        sizes = dict(LAYOUTS[name])
        options = {"expert_exchange": sizes.pop("expert_exchange", "all_to_all")}
        sizes.pop("cuda_graph", None)
        sharded = {key: sizes.pop(key) for key in ("shard_exchange", "reshard_after_forward") if key in sizes}
        if world % sizes.get("sp", 1) or world % sizes.get("ep", 1):
            continue
        state = ParallelState.create(ParallelConfig.for_world(world, **sizes), setting.device, **options)
        above = arguments.checkpoint_above if name == TRANSFORMERS else arguments.our_checkpoint_above
        for mode in arguments.peer_checkpoint if WHO.get(name) == TITAN else ("none", "full"):
            cases = [describe(layers, name, mode, tokens) for tokens in arguments.tokens]
            pending = [case for case in cases if case not in rows and has_mode(case, above, rows)]
            if not pending or is_late(started, arguments.budget, setting):
                continue
            model = None
            for row in pending:
                if row is not pending[0] and is_late(started, arguments.budget, setting):
                    break
                tokens, failed = row["tokens/GPU"], ""
                rows.start(row)
                try:
                    if model is None:  # one that cannot be built is this case's failure
                        model = model_of(name, setting, state, mode, max(arguments.tokens), **sharded)
                    fill(model, setting.device)  # each first step starts from the same weights
                    optimizer = optimizer_of(name, model, setting)
                    row |= measure(name, model, optimizer, tokens, state, setting)
                    if tokens in arguments.profile:
                        profile(name, model, optimizer, tokens, state, setting)
                except Exception as error:  # of one case: other layouts and modes are measured nonetheless
                    failed = row["s/step"] = case_failures.reason(error)
                optimizer = None
                gc.unfreeze()
                gc.collect()  # before the next row makes another
                rows.add(row)
                if rank == 0:
                    line = " | ".join(str(row.get(column, "")) for column in COLUMNS[3:-1])
                    print(f"{line}   (after {time.perf_counter() - started:.0f} s)", flush=True)
                if failed:
                    case_failures.leave_unless_shared(f"{name}, {mode}, {tokens}")
                    break  # the gradients that are left may be of half a step; longer rows need more still
            if isinstance(model, peer_torchtitan.Peer):
                model.close()
            model = None
            gc.unfreeze()
            gc.collect()  # FSDP2's hooks and their modules refer to each other
            if setting.device == "cuda":
                torch.cuda.empty_cache()
    return list(rows)


def is_late(started: float, budget: float, setting: Setting) -> bool:
    """Whether the time is up, by rank 0's clock."""
    late = torch.tensor(time.perf_counter() - started > budget, dtype=torch.int32, device=setting.device)
    dist.broadcast(late, src=0)
    return bool(late)


def reset_peak(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def synchronise(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def write(rows: list[dict], world: int) -> None:
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    stamp = {
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}" + peer_torchtitan.version(),
        "gpus": f"{world} {gpu}",
    }
    result_rows.append(RESULTS, COLUMNS, rows, **stamp)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU")
    parser.add_argument("--layers", type=int, help="instead of as many as fit")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument(
        "--layouts", nargs="+", default=["FSDP", TRANSFORMERS, "EP4", "EP2", "SP2"], choices=list(LAYOUTS)
    )
    parser.add_argument("--checkpoint-above", type=int, default=4096)
    parser.add_argument("--our-checkpoint-above", type=int, help="default: the same")
    parser.add_argument(
        "--peer-checkpoint", nargs="+", default=list(peer_torchtitan.MODES), help="torchtitan's, in order"
    )
    parser.add_argument("--attention", help="default: the first of ORDER in runtime/attention.py that can run")
    parser.add_argument("--their-attention", help="default: the same")
    parser.add_argument(
        "--kernels", nargs="+", default=[], metavar="SEAM=NAME", help="further seams of ours: rotary=compiled ..."
    )
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="JSON lines of cases: these are skipped, results_train.csv stays"
    )
    parser.add_argument("--steps", type=int, default=4, help="timed")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the timed ones")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no further case is started")
    parser.add_argument(
        "--profile", type=int, nargs="+", default=[], metavar="TOKENS", help="at these sizes, one step"
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="for the traces of --profile")
    arguments = parser.parse_args()
    if arguments.our_checkpoint_above is None:
        arguments.our_checkpoint_above = arguments.checkpoint_above
    return arguments


def main() -> None:
    arguments, started = read_arguments(), time.perf_counter()
    device = arguments.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=300))
    attention.register()
    name = arguments.attention or attention.choose()
    sizes = TINY if arguments.tiny else MODEL
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 2**30
    layers = arguments.layers or (2 if arguments.tiny else layers_that_fit(sizes, memory, dist.get_world_size()))
    sizes = sizes | {"num_hidden_layers": layers, "max_window_layers": layers}
    with torch.device("meta"):
        cost = flops.model_cost(registry.build_model(config_of(sizes)))
    setting = Setting(
        device=device,
        sizes=sizes,
        attention=name,
        their_attention=arguments.their_attention or name,
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        cost=cost,
        peak=flops.peak_tflops(torch.device(device)),
        traces=arguments.traces,
    )
    choices = {"fused_moe": "auto", "causal_lm_loss": "auto"}
    choices |= dict(choice.split("=", 1) for choice in arguments.kernels)
    with seams.using(**choices):
        if dist.get_rank() == 0:
            print(
                f"{layers} layers, {cost.parameters / 1e9:.2f} B parameters, {cost.active / 1e9:.2f} B active; attention "
                f"{name}, transformers' {setting.their_attention}; {choices}",
                flush=True,
            )
            print(" | ".join(COLUMNS[3:-1]), flush=True)
        rows = run(setting, arguments, started)
    problems = compare(rows)
    if dist.get_rank() == 0:
        if arguments.rows is None:
            write(rows, dist.get_world_size())
        for row in rows:
            if "ratio" in row and row["who"] == "ours":
                print(
                    f"{row['layout']} at {row['tokens/GPU']}: {row['ratio']} times the fastest of theirs", flush=True
                )
        compared = any("ratio" in row for row in rows)
        agrees = "first steps agree with theirs" if compared else "nothing of theirs to compare with"
        print("\n".join(problems) or agrees, flush=True)
        print(f"{time.perf_counter() - started:.0f} s in all", flush=True)
    dist.destroy_process_group()
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
