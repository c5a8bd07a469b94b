"""The gain of overlapping an exchange with other work, in one layer: heads in groups (SP), shared experts (EP).

    torchrun --nproc-per-node 4 benchmarks/bench_overlap.py
    torchrun --nproc-per-node 2 benchmarks/bench_overlap.py --device cpu --tiny     # that it runs, on gloo

attention   one attention call over a sequence of which each rank has a slice, forward and backward, with the heads in
            1, 2 and 4 groups; the sequence exchange is all of it that is not attention
experts     one MoE block of DeepSeek-V3's width with its shared experts, EP over all ranks, forward and backward: the
            shared experts where upstream has them, and during the exchange of tokens

Both compare outputs and gradients of the variants in the same run. Medians of `--repeats` runs, ranks synchronised.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import result_rows
import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.generated_models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from patchgen.runtime import attention, parallel, seams
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.parallel import ParallelConfig, gloo_groups, overlap
from patchgen.runtime.parallel.state import ParallelState

RESULTS = Path(__file__).with_name("results_overlap.csv")
COLUMNS: tuple[str, ...] = (
    "date",
    "versions",
    "gpus",
    "what",
    "variant",
    "tokens per GPU",
    "ms",
    "gain %",
    "largest difference",
)


class Layer(nn.Module):
    is_causal = True


def timed(run: Callable[[], object], repeats: int, device: str) -> float:
    """Median milliseconds of `run` on the slowest rank."""
    times = []
    for _ in range(repeats + 2):  # two to warm up
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed = torch.tensor(time.perf_counter() - started, device=device)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        times.append(float(elapsed) * 1e3)
    return statistics.median(times[2:])


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest distance between two lists of tensors, relative in norm."""
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, expected, strict=True))


def attention_rows(arguments: argparse.Namespace, dtype: torch.dtype) -> list[dict]:
    world, rank = dist.get_world_size(), dist.get_rank()
    N_q, N_k, D = (8, 4, 16) if arguments.tiny else (64, 16, 128)
    rows = []
    for tokens in arguments.tokens:
        generator = torch.Generator(arguments.device).manual_seed(rank)

        def normal(heads: int, tokens: int = tokens, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(1, heads, tokens, D, device=arguments.device, dtype=dtype, generator=generator)

        states = [normal(heads) for heads in (N_q, N_k, N_k)]
        direction = normal(N_q).transpose(1, 2)
        reference, first = None, None
        for groups in (1, 2, 4):
            state = ParallelState.create(
                ParallelConfig.for_world(world, sp=world), arguments.device, head_groups=groups
            )
            call = attention.attention_function(arguments.attention, BACKENDS[arguments.attention])

            def run(state=state, call=call, states=states, direction=direction) -> list[Tensor]:
                leaves = [t.detach().requires_grad_() for t in states]
                with parallel.using(state):
                    out, _ = call(Layer(), *leaves, None)
                out.backward(direction)
                return [out.detach(), *(t.grad for t in leaves)]

            got = run()
            reference = reference or got
            spent = timed(run, arguments.repeats, arguments.device)
            first = first or spent
            rows.append(
                {
                    "what": f"attention, sp {world}, {arguments.attention}",
                    "variant": f"{groups} head groups",
                    "tokens per GPU": tokens,
                    "ms": round(spent, 2),
                    "gain %": round((first - spent) / first * 100, 1),
                    "largest difference": f"{difference(got, reference):.1e}",
                }
            )
    return rows


def expert_rows(arguments: argparse.Namespace, dtype: torch.dtype) -> list[dict]:
    from transformers import DeepseekV3Config

    world, rank = dist.get_world_size(), dist.get_rank()
    sizes: dict[str, Any] = {"hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 16 * world}
    sizes |= {"num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 4}
    if arguments.tiny:
        sizes |= {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    config = DeepseekV3Config(**sizes)
    torch.manual_seed(0)
    block = DeepseekV3MoE(config)
    num_local = config.n_routed_experts // world
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.02)
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(block.experts, name)
        setattr(block.experts, name, nn.Parameter(stack.detach()[rank * num_local : (rank + 1) * num_local].clone()))
    block.to(arguments.device, dtype)
    state = ParallelState.create(ParallelConfig.for_world(world, ep=world), arguments.device)
    later = mock.patch.object(overlap, "announce", lambda function, *args: lambda: function(*args))
    rows = []
    for tokens in arguments.tokens:
        hidden = torch.randn(1, tokens, config.hidden_size, device=arguments.device, dtype=dtype)
        direction = torch.randn_like(hidden)

        def run(hidden: Tensor = hidden, direction: Tensor = direction) -> list[Tensor]:
            block.zero_grad()
            leaf = hidden.detach().requires_grad_()
            with parallel.using(state):
                out = block(leaf)
                out.backward(direction)
            grads = (leaf.grad, *(p.grad for p in block.shared_experts.parameters()))
            return [out.detach(), *(grad for grad in grads if grad is not None)]

        with later:
            reference = run()
            apart = timed(run, arguments.repeats, arguments.device)
        together = timed(run, arguments.repeats, arguments.device)
        for variant, spent in (("one after the other", apart), ("beside the exchange", together)):
            rows.append(
                {
                    "what": f"MoE block with shared experts, ep {world}",
                    "variant": variant,
                    "tokens per GPU": tokens,
                    "ms": round(spent, 2),
                    "gain %": round((apart - spent) / apart * 100, 1),
                    "largest difference": f"{difference(run(), reference):.1e}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--attention", default=None)
    parser.add_argument("--experts", default="triton")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.attention = arguments.attention or ("patchgen_flash_varlen" if on_gpu else "patchgen_sdpa")
    if arguments.tiny:
        arguments.tokens = [64]
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gloo_groups.use_one_worker()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with seams.using(fused_moe=arguments.experts if on_gpu else "torch"):
        rows = attention_rows(arguments, dtype) + expert_rows(arguments, dtype)
    if dist.get_rank() == 0:
        write(rows)
    dist.destroy_process_group()


def write(rows: list[dict]) -> None:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    stamp = {
        "versions": f"torch {torch.__version__}",
        "gpus": f"{dist.get_world_size()} {gpu}",
    }
    for row in rows:
        print(" | ".join(str(row[column]) for column in COLUMNS[3:]), flush=True)
    result_rows.append(RESULTS, COLUMNS, rows, **stamp)


if __name__ == "__main__":
    main()
