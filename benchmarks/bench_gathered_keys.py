"""One attention layer over a sequence that two or more GPUs share: heads exchanged, keys gathered, or all of it on each GPU.

    torchrun --nproc-per-node 2 benchmarks/bench_gathered_keys.py
    torchrun --nproc-per-node 2 benchmarks/bench_gathered_keys.py --device cpu --tokens 64 --heads 4:2    # that it runs, on gloo

heads    Ulysses (`runtime/parallel/sequence.py`): where the ranks divide the query heads
keys     each rank has the queries of two chunks and all keys (`runtime/parallel/gathered_keys.py`): chosen where they do not;
         here by hand for divisible heads, too
whole    inputs gathered, attention of the full sequence on each rank, its slice kept: what `runtime/gathered_attention.py` does
         around attention that can be divided in neither way

Forward and backward of queries `N_q:N_k` heads of 128 in bf16, causal, one document per row. "bytes" is what a rank receives in the
forward, by formula. Results and gradients of each are compared with `whole`: the relative distance, the largest of out, dq, dk, dv.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import result_rows
import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime import attention, parallel
from patchgen.runtime.parallel import ParallelConfig, gathered_keys, sequence
from patchgen.runtime.parallel.collectives import gather_rows
from patchgen.runtime.parallel.state import ParallelState

RESULTS = Path(__file__).with_name("results_gathered_keys.csv")
COLUMNS = (
    "date",
    "commit",
    "versions",
    "gpus",
    "heads",
    "tokens",
    "what",
    "ms",
    "forward ms",
    "peak MiB",
    "bytes MiB",
    "distance",
)
HEAD_SIZE = 128


class Causal(nn.Module):
    """Stands for an attention module."""

    is_causal = True


def attend(what: str, states_BsND: list[Tensor], state: ParallelState) -> Tensor:
    """`(B, s, N, D)` of this rank -> `(B, s, N_q, D)`."""
    function, module = attention.attention_function("auto", None), Causal()
    q, k, v = states_BsND
    if what == "whole":
        s = q.shape[1]
        q, k, v = (
            gather_rows(states.transpose(0, 1).contiguous(), state.sp_group, operation="gather").transpose(0, 1)
            for states in (q, k, v)
        )
        with parallel.using(None):
            out = function(module, *(states.transpose(1, 2) for states in (q, k, v)), None)[0]
        return out[:, state.sp_rank * s :][:, :s]
    with parallel.using(state), _blocks(1 if what == "keys" else None):
        return function(module, *(states.transpose(1, 2) for states in (q, k, v)), None)[0]


@contextlib.contextmanager
def _blocks(number: int | None) -> Iterator[None]:
    """Query heads in `number` blocks, or as many as the ranks divide them into."""
    if number is None:
        yield
        return
    with mock.patch.object(gathered_keys, "head_blocks", return_value=number):
        yield


def received_bytes(what: str, s: int, heads: tuple[int, int], n: int) -> float:
    """Of a rank in the forward, in bf16."""
    N_q, N_k = heads
    share = 2 * s * HEAD_SIZE * (n - 1)
    if what == "heads":
        return share / n * (2 * N_q + 2 * N_k * sequence.key_value_repeats(N_q, N_k, n, where="attention"))
    if what == "keys":  # keys of n - 1 ranks; half or so of the queries moves, and comes back
        moved = sum(
            end - first
            for part in range(n)
            if part
            for first, end in gathered_keys.spans_within(gathered_keys.chunks_of(0, n, n * s), part, s)
        )
        return share * 2 * N_k + 2 * 2 * HEAD_SIZE * N_q * moved
    return share * (N_q + 2 * N_k)


def measure(
    what: str, inputs: list[Tensor], upstream: Tensor, state: ParallelState, repeats: int
) -> tuple[dict, list[Tensor]]:
    """Figures of forward and backward, and their results."""
    seconds, forward = [], []
    is_cuda = inputs[0].is_cuda
    wait = torch.cuda.synchronize if is_cuda else lambda: None
    for repeat in range(repeats + 2):
        leaves = [states.detach().requires_grad_() for states in inputs]
        wait()
        dist.barrier()
        if is_cuda and repeat == repeats + 1:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        out = attend(what, leaves, state)
        wait()
        middle = time.perf_counter()
        out.backward(upstream)
        wait()
        seconds.append(time.perf_counter() - started)
        forward.append(middle - started)
    figures = {"ms": statistics.median(seconds[2:]) * 1e3, "forward ms": statistics.median(forward[2:]) * 1e3}
    slowest = torch.tensor(list(figures.values()), device=inputs[0].device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    figures = dict(zip(figures, (round(value, 3) for value in slowest.tolist()), strict=True))
    if is_cuda:
        figures["peak MiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    return figures, [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def rows_of(heads: tuple[int, int], tokens: int, state: ParallelState, device: str, repeats: int) -> Iterator[dict]:
    """A row for each way that these heads can be divided."""
    s, n = tokens // state.sp, state.sp
    generator = torch.Generator(device).manual_seed(state.sp_rank)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = [
        torch.randn((1, s, number, HEAD_SIZE), generator=generator, device=device, dtype=dtype)
        for number in (heads[0], heads[1], heads[1], heads[0])
    ]
    *inputs, upstream = made
    expected: list[Tensor] = []
    for what in ("whole", "keys", *(("heads",) if heads[0] % n == 0 else ())):
        figures, found = measure(what, inputs, upstream, state, repeats)
        expected = expected or found
        distances = [
            float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, expected, strict=True)
        ]
        worst = torch.tensor(max(distances), device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        row = {"heads": f"{heads[0]}:{heads[1]}", "tokens": tokens, "what": what, **figures}
        row |= {"bytes MiB": round(received_bytes(what, s, heads, n) / 2**20, 1), "distance": f"{float(worst):.1e}"}
        if dist.get_rank() == 0:
            print(" | ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--heads", nargs="+", default=["32:4", "32:8", "8:1", "5:1"], metavar="N_q:N_k")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="", help="of the code, for the rows")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    world = dist.get_world_size()
    state = ParallelState.create(ParallelConfig.for_world(world, sp=world), arguments.device)
    rows = []
    for heads in arguments.heads:
        for tokens in arguments.tokens:
            query_heads, key_heads = map(int, heads.split(":"))
            rows += rows_of((query_heads, key_heads), tokens, state, arguments.device, arguments.repeats)
    if dist.get_rank() == 0:
        gpus = f"{dist.get_world_size()} {torch.cuda.get_device_name() if arguments.device == 'cuda' else 'CPU'}"
        result_rows.append(
            RESULTS, COLUMNS, rows, commit=arguments.commit, versions=f"torch {torch.__version__}", gpus=gpus
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
