"""One MoE layer under expert parallelism: what its exchange costs, by all-to-all and through peer memory.

    torchrun --nproc-per-node 2 benchmarks/bench_expert_exchange.py
    python benchmarks/bench_expert_exchange.py                          # one GPU: what a rank computes in each form

Qwen3-30B-A3B's experts, bf16, uniform random routing, forward and backward, medians. With several ranks: the layer by both
exchanges. "host" is how long the host needs to launch a layer, and waits in it, on an idle device. With one: all experts
without EP; half of them, as one of two ranks has them, over the rows that an all-to-all brings it, and over the tokens of two
ranks; and the kernels that read from peers, here on memory of this GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import result_rows
import torch
import torch.distributed as dist
from torch import Tensor

from patchgen.kernels.fused_moe import fused_moe
from patchgen.kernels.peers import peer_rows
from patchgen.kernels.peers.published import Published, TokenCounts
from patchgen.runtime import ops, parallel, seams
from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState

RESULTS = Path(__file__).with_name("results_expert_exchange.csv")
COLUMNS: tuple[str, ...] = ("date", "versions", "gpus", "tokens/GPU", "what", "ms", "host ms", "peak MiB")
HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8


def median_ms(function: Callable[[], object], repetitions: int = 20) -> tuple[float, float]:
    """`(device, host)`: medians of one call; the host starts each on an idle device."""
    for _ in range(4):
        function()
    devices, hosts = [], []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        started = time.perf_counter()
        function()
        hosts.append((time.perf_counter() - started) * 1e3)
        last.record()
        torch.cuda.synchronize()
        devices.append(first.elapsed_time(last))
    return statistics.median(devices), statistics.median(hosts)


def experts_of(count: int) -> dict[str, Tensor]:
    shapes = {"gate_up_proj": (count, 2 * INNER, HIDDEN), "down_proj": (count, HIDDEN, INNER)}
    return {
        name: (torch.randn(shape, device="cuda") * 0.02).bfloat16().requires_grad_() for name, shape in shapes.items()
    }


def tokens_of(count: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(count, HIDDEN, device="cuda").bfloat16().requires_grad_()
    index = torch.rand(count, EXPERTS, device="cuda").topk(TOP_K, dim=1).indices
    weights = torch.rand(count, TOP_K, device="cuda").requires_grad_()
    return hidden, index, weights


def both_ways(call: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor, experts: dict) -> Callable:
    direction = torch.randn_like(hidden)

    def run() -> None:
        out = call(hidden, index, weights, **experts, activation=torch.nn.functional.silu)
        out.backward(direction)
        for leaf in (hidden, weights, *experts.values()):
            leaf.grad = None

    return run


def across_ranks(tokens: int) -> list[dict]:
    rows = []
    for exchange in ("all_to_all", "peer_memory"):
        config = ParallelConfig.for_world(dist.get_world_size(), ep=dist.get_world_size())
        state = ParallelState.create(config, "cuda", expert_exchange=exchange)
        experts = experts_of(EXPERTS // state.ep)
        with parallel.using(state), seams.using(fused_moe="auto"):
            step = both_ways(partial(ops.fused_moe, num_experts=EXPERTS), *tokens_of(tokens), experts)
            rows.append(measured(f"layer, {exchange}", tokens, step))
    return rows


def on_one_gpu(tokens: int) -> list[dict]:
    num_local = EXPERTS // 2
    hidden, index, weights = tokens_of(2 * tokens)
    local = torch.where(index < num_local, index, num_local).to(torch.int32)
    rows_of_all = local.reshape(-1)[local.reshape(-1) < num_local][:, None]
    received = torch.randn(len(rows_of_all), HIDDEN, device="cuda").bfloat16().requires_grad_()
    received_weights = torch.rand(len(rows_of_all), 1, device="cuda").requires_grad_()
    half, all_experts = experts_of(num_local), experts_of(EXPERTS)
    rows = [
        measured(
            "experts, one rank without EP",
            tokens,
            both_ways(partial(fused_moe, num_experts=EXPERTS), *tokens_of(tokens), all_experts),
        ),
        measured(
            "experts, rows of an all-to-all of 2",
            tokens,
            both_ways(partial(fused_moe, num_experts=num_local), received, rows_of_all, received_weights, half),
        ),
        measured(
            "experts, tokens of 2 ranks",
            tokens,
            both_ways(
                partial(fused_moe, num_experts=num_local, max_rows=2 * tokens * TOP_K), hidden, local, weights, half
            ),
        ),
    ]
    memory = [torch.randn(2 * tokens, HIDDEN, device="cuda").bfloat16().view(torch.uint8).view(-1) for _ in range(2)]
    published = Published(tuple(memory), torch.tensor([part.data_ptr() for part in memory], device="cuda"))
    counts = TokenCounts((tokens, tokens), torch.tensor([0, tokens, 2 * tokens], device="cuda"))
    like, own_index = hidden.detach(), index[:tokens].contiguous()
    routing = {"index_offset": 0, "weights_offset": tokens * TOP_K * 4, "weights_dtype": torch.float32}
    reading = {
        "read_routing": lambda: peer_rows.read_routing(
            published, counts, TOP_K, first_expert=0, num_experts=num_local, **routing
        ),
        "read_tokens": lambda: peer_rows.read_tokens(published, counts, local, num_local, HIDDEN, torch.bfloat16),
        "sum_rows": lambda: peer_rows.sum_rows(published, counts, 0, own_index, num_local, like),
        "read_slots": lambda: peer_rows.read_slots(published, counts, 0, own_index, num_local, 0, torch.float32),
    }
    return rows + [measured(f"{name}, own memory", tokens, call) for name, call in reading.items()]


def measured(what: str, tokens: int, function: Callable[[], object]) -> dict:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    device, host = median_ms(function)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    row = {"tokens/GPU": tokens, "what": what, "ms": round(device, 3), "host ms": round(host, 3)}
    row["peak MiB"] = round(peak)
    if int(os.environ.get("RANK", "0")) == 0:
        print(" | ".join(str(value) for value in row.values()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    arguments = parser.parse_args()
    is_one = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not is_one:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    rows = [row for tokens in arguments.tokens for row in (on_one_gpu(tokens) if is_one else across_ranks(tokens))]
    if int(os.environ.get("RANK", "0")) == 0:
        stamp = {"versions": f"torch {torch.__version__}"}
        stamp["gpus"] = f"{os.environ.get('WORLD_SIZE', '1')} {torch.cuda.get_device_name()}"
        result_rows.append(RESULTS, COLUMNS, rows, **stamp)
    if not is_one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
