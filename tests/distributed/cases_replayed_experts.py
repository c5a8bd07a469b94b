"""Layers of experts captured in a CUDA graph, on each of two processes; see test_experts_on_gpu.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime import ops, parallel, seams
from patchgen.runtime.parallel import ParallelConfig, expert_peers
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import captured

TOKENS, HIDDEN, INNER, NUM_EXPERTS, TOP_K = 300, 256, 128, 16, 4


class Block(nn.Module):
    """Experts, and a router with one weight per expert."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
        stacks = {name: torch.randn(NUM_EXPERTS, *size, generator=generator) * 0.05 for name, size in sizes.items()}
        shards = {name: stack.chunk(world)[rank].to(device, torch.bfloat16) for name, stack in stacks.items()}
        self.experts = nn.ParameterDict(shards)
        self.router = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, generator=generator).to(device, torch.bfloat16))

    def forward(self, hidden_TH: Tensor) -> Tensor:
        weights_TK, index_TK = (hidden_TH @ self.router.T).float().softmax(-1).topk(TOP_K)
        return ops.fused_moe(
            hidden_TH, index_TK, weights_TK, **self.experts, num_experts=NUM_EXPERTS, activation=nn.functional.silu
        )


def replays_what_it_runs(num_layers: int, sends_ahead: bool) -> tuple[int, int]:
    """Forward and backward of layers, replayed on other tokens than were captured, to the bit as without a graph.

    Returns:
        How many exchanges a step has without a graph, and how many were captured.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # all processes on one GPU, where there is one
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    state = ParallelState.create(ParallelConfig.for_world(world, ep=world), "cuda", expert_exchange="peer_memory")
    assert state.peers is not None
    model = nn.ModuleList(Block(rank, world, device) for _ in range(num_layers))
    if sends_ahead:
        expert_peers.install_token_prefetch(model, [block.experts for block in model])
    generator = torch.Generator().manual_seed(1 + rank)
    rows = torch.randn(4, TOKENS, HIDDEN, generator=generator).to(device, torch.bfloat16)
    given = rows[0].clone().requires_grad_()
    leaves = [given, *model.parameters()]

    def step() -> Tensor:
        out = given
        for block in model:
            out = out + block(out)
        out.float().square().mean().backward()
        return out

    def results(out: Tensor) -> list[Tensor]:
        return [out.detach().clone(), *(leaf.grad.clone() for leaf in leaves)]

    with parallel.using(state), seams.using(fused_moe="triton"):
        expected = []
        for row in rows:
            with torch.no_grad():
                given.copy_(row)
            for leaf in leaves:
                leaf.grad = None
            before = state.peers._num_exchanges
            expected.append(results(step()))
            eager = state.peers._num_exchanges - before
        for leaf in leaves:
            leaf.grad = None
        before, out = state.peers._num_exchanges, []
        graph = captured._capture(lambda: out.append(step()), model, state)
        recorded = state.peers._num_exchanges - before
    for number in (0, 1, 2, 3, 3, 0):  # twice the same: buffers of the replay before are read no more
        with torch.no_grad():
            given.copy_(rows[number])
        graph.replay()
        for place, (one, two) in enumerate(zip(results(out[0]), expected[number], strict=True)):
            assert torch.equal(one, two), f"row {number}, value {place}: {(one - two).abs().max()}"
    return eager, recorded
