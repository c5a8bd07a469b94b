"""Qwen3 MoE on several GPUs: agreement with one GPU, waits for the device, step time and memory.

    torchrun --nproc-per-node 2 benchmarks/bench_parallel.py                        # everything
    torchrun --nproc-per-node 4 benchmarks/bench_parallel.py --parts table --tokens 4096 131072
    torchrun --nproc-per-node 2 benchmarks/bench_parallel.py --device cpu --tiny --tokens 64 128    # that it runs, on gloo

agreement   bf16 with fused kernels on all ranks against fp32 on one: its error, next to the error of bf16 on one. A small
            model (`SMALL`), four documents per row
syncs       a forward and backward under `torch.cuda.set_sync_debug_mode`: the places that wait for the device
table       seconds per step (forward, backward, clip, AdamW) of the slowest rank, tokens per second and GPU; peak memory of
            rank 0, and NCCL's share of one of its steps (torch.profiler)

`syncs` and `table`: four layers of Qwen3-30B-A3B, rows packed with documents of `--document` tokens. Parameters are fp32,
layers compute in bf16; gradients are summed in fp32, in `syncs` as computed. "ckpt" is activation checkpointing.

NCCL's share is 0 where ranks read each other's memory, the default between up to four GPUs of one machine. "all-to-all %"
counts every kernel that sends and receives: tokens of EP, heads of SP, and gradients that are exchanged and then summed.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import os
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import result_rows
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import patchgen
from patchgen.generated_models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM
from patchgen.runtime import attention, parallel, seams
from patchgen.runtime.parallel import (
    ParallelConfig,
    batch,
    checkpointing,
    experts,
    gloo_groups,
    gradients,
    loss,
    peer_memory,
    report,
    sharding,
)
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import optimizers

PACKAGE = Path(patchgen.__file__).parent
RESULTS = Path(__file__).with_name("results_parallel.csv")
COLUMNS: tuple[str, ...] = ("date", "versions", "gpus", "layout", "ckpt", "tokens per GPU", "s/step", "tokens/s/GPU")
COLUMNS += ("peak GiB", "all-to-all %", "all-gather %", "reduce-scatter %")
PARTS = ("agreement", "syncs", "table")
LAYOUTS = {
    "FSDP": {},
    "EP2": {"ep": 2},
    "EP4": {"ep": 4},
    "SP2": {"sp": 2},
    "SP4": {"sp": 4},
    "EP2 x SP2": {"ep": 2, "sp": 2},
    "EP4 x SP2": {"ep": 4, "sp": 2},
    "EP4 x SP4": {"ep": 4, "sp": 4},
}
SLICE = {"num_hidden_layers": 4, "max_window_layers": 4, "vocab_size": 151_936, "use_cache": False}
SLICE |= {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
SLICE |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SMALL = SLICE | {"vocab_size": 4096, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "num_experts": 16}
TINY = SMALL | {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
TINY |= {"moe_intermediate_size": 16}


@dataclass(frozen=True)
class Setting:
    """Where and how everything runs."""

    device: str
    attention: str
    seams: dict[str, str]


def build(sizes: dict, setting: Setting) -> nn.Module:
    """The model on the meta device."""
    from transformers import Qwen3MoeConfig

    with torch.device("meta"):
        return Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**sizes), attn_implementation=setting.attention).train()


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Random weights of this rank's shards."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(dist.get_rank())
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.ndim == 1:
            local.fill_(1.0)
        else:
            local.normal_(0, 0.02, generator=generator)


def make_batch(tokens: int, state: ParallelState, sizes: dict, document: int, seed: int, device: str) -> dict:
    """`tokens` of this rank: a slice of a row of `tokens * sp` in documents of `document` tokens."""
    generator = torch.Generator().manual_seed(seed * 1000 + state.batch_index)
    length = tokens * state.sp
    ids = torch.randint(0, sizes["vocab_size"], (1, length), generator=generator)
    positions = torch.arange(length) % document
    full_batch = {"input_ids": ids, "labels": ids, "position_ids": positions[None]}
    local_batch = batch.slice_batch(full_batch, sp=state.sp, sp_rank=state.sp_rank)
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in local_batch.items()}


def train_step(model: nn.Module, inputs: dict, optimizer, state: ParallelState, items: Tensor) -> Tensor:
    with parallel.using(state), loss.step(items):
        share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        share.backward()
    gradients.clip(model, 1.0, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return share.detach()


def fits(layout: dict, world: int) -> bool:
    return world % layout.get("sp", 1) == 0 and world % layout.get("ep", 1) == 0


# -------------------------------------------------------------------------------------------- the table


def table(setting: Setting, sizes: dict, arguments: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = []
    for name in arguments.layouts:
        if not fits(LAYOUTS[name], world):
            continue
        state = ParallelState.create(ParallelConfig.for_world(world, **LAYOUTS[name]), setting.device)
        for tokens in arguments.tokens:
            mode = "full" if tokens > arguments.checkpoint_above else "none"
            model = build(sizes, setting)
            checkpointing.apply(model, mode)
            options = sharding.ShardingOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            sharding.shard_model(model, state, options=options)
            sharding.materialise(model, setting.device)
            fill(model)
            if rank == 0 and tokens == arguments.tokens[0]:
                print(report.describe(model, state, setting.seams), flush=True)
            row = {"layout": name, "ckpt": mode, "tokens per GPU": tokens}
            try:
                row |= measure(model, state, tokens, sizes, arguments, setting)
            except torch.OutOfMemoryError:
                row["s/step"] = "out of memory"
            rows.append(row)
            del model
            gc.collect()  # FSDP2's hooks and their modules refer to each other
            if setting.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            if rank == 0:
                print(" | ".join(str(row.get(column, "")) for column in COLUMNS[3:]), flush=True)
    if rank == 0 and not arguments.tiny:
        write(rows, world, setting)


def measure(model: nn.Module, state, tokens: int, sizes: dict, arguments: argparse.Namespace, setting) -> dict:
    optimizer = optimizers.adamw_for(next(model.parameters()))(sharding.optimizer_groups(model), lr=1e-5)
    inputs = make_batch(tokens, state, sizes, min(arguments.document, tokens * state.sp), 0, setting.device)
    items = loss.count_items([inputs], setting.device)
    train_step(model, inputs, optimizer, state, items)
    synchronise(setting)
    started = time.perf_counter()
    for _ in range(arguments.steps):
        train_step(model, inputs, optimizer, state, items)
    synchronise(setting)
    seconds = torch.tensor((time.perf_counter() - started) / arguments.steps, device=setting.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    row = {"s/step": round(float(seconds), 4), "tokens/s/GPU": round(tokens / float(seconds))}
    if setting.device == "cuda":
        row["peak GiB"] = round((torch.cuda.max_memory_allocated() + peer_memory.shared_gpu_bytes()) / 2**30, 1)
        row |= communication(lambda: train_step(model, inputs, optimizer, state, items), setting)
    return row


def communication(step, setting: Setting) -> dict[str, float]:
    """The share of a step in which NCCL's kernels of each kind run, in percent; on this rank."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        started = time.perf_counter()
        step()
        synchronise(setting)
        seconds = time.perf_counter() - started
    kinds = {"SendRecv": "all-to-all %", "AllGather": "all-gather %", "ReduceScatter": "reduce-scatter %"}
    shares = dict.fromkeys(kinds.values(), 0.0)
    for event in profile.key_averages():
        for word, column in kinds.items():
            if word in event.key:
                shares[column] += event.device_time_total / 1e6 / seconds * 100
    return {column: round(value, 1) for column, value in shares.items()}


def synchronise(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def write(rows: list[dict], world: int, setting: Setting) -> None:
    gpu = torch.cuda.get_device_name() if setting.device == "cuda" else "cpu"
    result_rows.append(RESULTS, COLUMNS, rows, versions=f"torch {torch.__version__}", gpus=f"{world} {gpu}")


# ------------------------------------------------------------------------------------------- agreement


def random_weights(sizes: dict) -> dict[str, Tensor]:
    """Weights of the full model, the same on every rank."""
    from transformers import Qwen3MoeConfig

    torch.manual_seed(0)
    full_model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**sizes), attn_implementation="patchgen_eager")
    with torch.no_grad():
        for parameter in full_model.parameters():
            parameter.normal_(0, 0.05) if parameter.ndim > 1 else parameter.fill_(1.0)
    return {key: value.clone() for key, value in full_model.state_dict().items()}


def global_batch(sizes: dict, tokens: int) -> dict[str, Tensor]:
    """A row for each rank, of four documents each: `[world, tokens]`."""
    world, generator = dist.get_world_size(), torch.Generator().manual_seed(5)
    ids = torch.randint(0, sizes["vocab_size"], (world, tokens), generator=generator)
    positions = (torch.arange(tokens) % (tokens // 4)).expand(world, -1)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def to_device(inputs: dict, device: str) -> dict:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}


def on_one_rank(
    setting: Setting, sizes: dict, weights: dict, rows: dict, dtype: torch.dtype, attention_name: str, choices: dict
) -> tuple[float, dict[str, Tensor]]:
    """Loss of the whole batch, computed by this rank alone in `dtype`, and its gradients widened to fp32."""
    from transformers import Qwen3MoeConfig

    model: nn.Module = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**sizes), attn_implementation=attention_name)
    model.train()
    model.load_state_dict(weights)
    model.to(device=setting.device, dtype=dtype)  # pyright: ignore[reportCallIssue]  # transformers' decorator
    inputs = to_device(batch.slice_batch(rows, sp=1, sp_rank=0), setting.device)
    items = (inputs["shift_labels"] != batch.IGNORED).sum()
    with seams.using(**choices):
        value = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        value.backward()
    return float(value.detach()), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def agreement(setting: Setting, sizes: dict, arguments: argparse.Namespace) -> None:
    """Errors of loss and gradients in bf16, many ranks and one, against fp32 without kernels on one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weights, all_rows = random_weights(sizes), global_batch(sizes, arguments.agreement_tokens)
    fp32_on_one = bf16_on_one = None
    if rank == 0:
        compute_on_one = functools.partial(on_one_rank, setting, sizes, weights, all_rows)
        fp32_on_one = compute_on_one(torch.float32, "patchgen_eager", dict.fromkeys(setting.seams, "eager"))
        bf16_on_one = compute_on_one(torch.bfloat16, setting.attention, setting.seams)
        print(
            "layout: error of the loss (in bf16 on one rank), the parameter with the largest ratio, error of its gradient / "
            "that in bf16 on one rank (at least 1e-3) = ratio, expected below 1.5 but for --tiny, not asserted",
            flush=True,
        )
    for name in arguments.layouts:
        if not fits(LAYOUTS[name], world):
            continue
        state = ParallelState.create(ParallelConfig.for_world(world, **LAYOUTS[name]), setting.device)
        model = build(sizes, setting)
        options = sharding.ShardingOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharding.shard_model(model, state, options=options)
        sharding.materialise(model, setting.device)
        sharding.load_full_tensors(model, {key: value.to(setting.device) for key, value in weights.items()})
        rows = torch.arange(world).chunk(state.config.num_batches)[state.batch_index]
        own_rows = {key: value[rows] for key, value in all_rows.items()}
        inputs = to_device(batch.slice_batch(own_rows, sp=state.sp, sp_rank=state.sp_rank), setting.device)
        items = loss.count_items([inputs], setting.device)
        with parallel.using(state), loss.step(items), seams.using(**setting.seams):
            share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
            share.backward()
        total = share.detach().clone()
        dist.all_reduce(total)
        sharded = {key: parameter.grad for key, parameter in model.named_parameters()}
        full = {key: gradient.full_tensor() for key, gradient in sharded.items() if isinstance(gradient, DTensor)}
        if fp32_on_one is not None and bf16_on_one is not None:
            expected_loss, expected = fp32_on_one
            errors = {key: distance(full[key], expected[key]) for key in full}
            bf16_errors = {key: max(distance(bf16_on_one[1][key], expected[key]), 1e-3) for key in full}
            ratios = {key: errors[key] / bf16_errors[key] for key in full}
            worst = max(ratios, key=ratios.__getitem__)
            print(
                f"{name}: loss {abs(float(total) - expected_loss) / expected_loss:.1e} (one rank "
                f"{abs(bf16_on_one[0] - expected_loss) / expected_loss:.1e}), {worst} {errors[worst]:.2e} / "
                f"{bf16_errors[worst]:.2e} = {ratios[worst]:.2f}",
                flush=True,
            )


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm().clamp(min=1e-12))


# ----------------------------------------------------------------------------------------------- syncs


def syncs(setting: Setting, sizes: dict, arguments: argparse.Namespace) -> None:
    """Where a forward and backward wait for the device; a bounded exchange is expected not to, which is not asserted."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, capacity in cases_of_syncs(
        arguments.layouts, world, arguments.agreement_tokens * sizes["num_experts_per_tok"]
    ):
        config = ParallelConfig.for_world(world, **LAYOUTS[name])
        state = ParallelState.create(config, setting.device, expert_capacity=capacity)
        model = build(sizes, setting)
        checkpointing.apply(model, "full")
        sharding.shard_model(model, state, options=sharding.ShardingOptions(param_dtype=torch.bfloat16))
        sharding.materialise(model, setting.device)
        fill(model)
        inputs = make_batch(arguments.agreement_tokens, state, sizes, arguments.document, 0, setting.device)
        items = loss.count_items([inputs], setting.device)
        with seams.using(**setting.seams), parallel.using(state), loss.step(items):
            for _ in range(2):  # the first step compiles and allocates
                model(**inputs, num_items_in_batch=items, use_cache=False).loss.backward()
            torch.cuda.synchronize()
            with waits() as places:
                model(**inputs, num_items_in_batch=items, use_cache=False).loss.backward()
        bound = ""
        if capacity is not None:
            left_out = experts.dropped_rows(state)
            bound = f", at most {capacity} rows from a rank to another ({left_out} left out on rank 0 in three steps)"
        if rank == 0:
            print(f"{name}{bound}: {sum(places.values())} waits in forward and backward", flush=True)
            for place, count in places.most_common():
                print(f"    {count} x {place}", flush=True)


def cases_of_syncs(layouts: list[str], world: int, capacity: int) -> list[tuple[str, int | None]]:
    """`(layout, the most rows that a rank sends to another in an exchange)`; None: not bounded."""
    cases: list[tuple[str, int | None]] = [(name, None) for name in layouts if fits(LAYOUTS[name], world)]
    return cases + ([("EP2", capacity)] if ("EP2", None) in cases else [])


class waits:
    """Counts the waits for the device within a block, by the innermost line of the package `patchgen` that caused them, or of
    any code if none of the package did."""

    def __enter__(self) -> collections.Counter:
        self.places: collections.Counter = collections.Counter()
        self.before = warnings.showwarning
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        torch.cuda.set_sync_debug_mode("warn")
        return self.places

    def __exit__(self, *_) -> None:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self.before

    def _note(self, message, *_args, **_kwargs) -> None:
        if "synchroniz" not in str(message):
            return
        stack = traceback.extract_stack()[:-1]  # without this method
        frames = [frame for frame in stack if "warnings.py" not in frame.filename]
        of_package = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
        frame = (of_package or frames)[-1]
        self.places[f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"] += 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="default: all")
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=list(LAYOUTS),
        choices=LAYOUTS,
        help="default: all; those that do not fit the number of ranks are left out",
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[4096, 16384, 32768, 131072], help="per GPU, of the table"
    )
    parser.add_argument("--document", type=int, default=16384, help="tokens of a document, in syncs and table")
    parser.add_argument("--steps", type=int, default=3, help="timed, of the table")
    parser.add_argument(
        "--checkpoint-above",
        type=int,
        default=16384,
        metavar="TOKENS",
        help="with more tokens per GPU the table's layers are computed again in the backward",
    )
    parser.add_argument(
        "--agreement-tokens", type=int, default=1024, metavar="TOKENS", help="per GPU, of agreement and syncs"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--attention", help="default: patchgen_flash_varlen, on a CPU patchgen_sdpa")
    parser.add_argument("--experts", default="torch", help="what serves the experts: auto, triton, torch")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU; writes no rows")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gloo_groups.use_one_worker()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    attention.register()
    setting = Setting(
        arguments.device,
        arguments.attention or ("patchgen_flash_varlen" if on_gpu else "patchgen_sdpa"),
        {"fused_moe": arguments.experts, "causal_lm_loss": "chunked"},
    )
    seams.configure(**setting.seams)
    sizes = TINY if arguments.tiny else SLICE
    for part in arguments.parts:
        started = time.perf_counter()
        if part == "agreement":
            agreement(setting, TINY if arguments.tiny else SMALL, arguments)
        elif part == "table":
            table(setting, sizes, arguments)
        elif on_gpu:
            syncs(setting, sizes, arguments)
        elif dist.get_rank() == 0:
            print("syncs: skipped, needs GPUs", flush=True)
        if dist.get_rank() == 0 and (on_gpu or part != "syncs"):
            print(f"[{part}: {time.perf_counter() - started:.0f} s]", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
