"""What each rank does in the tests of tokens sent ahead and sums pushed; see test_expert_parallel.py."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import torch
import torch.distributed as dist
from cases_experts import HIDDEN, create_peers, routing, silu, tensors, unread_rows_are_no_numbers
from torch import Tensor
from torch.utils import checkpoint

from patchgen.kernels.peers import peer_rows, pushed_sums
from patchgen.kernels.peers.published import Published, TokenCounts
from patchgen.runtime import ops, parallel, seams
from patchgen.runtime.parallel import checkpointing, expert_peers, experts


class _Block(torch.nn.Module):
    """A router and experts, as an MoE block has them; `changes`: what the experts get is not what the block gets."""

    def __init__(self, own: dict[str, Tensor], num_experts: int, changes: bool) -> None:
        super().__init__()
        self.experts = torch.nn.ParameterDict({name: tensor.clone() for name, tensor in own.items()})
        self.num_experts, self.changes = num_experts, changes

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        tokens = x.view(-1, HIDDEN)
        if self.changes:
            tokens = tokens * 1.0
        out = ops.fused_moe(tokens, index, weights, **self.experts, num_experts=self.num_experts, activation=silu)
        return out.view_as(x)


def _keeps_experts() -> tuple:
    """Contexts of a user's selective checkpointing."""

    def policy(_context: object, operation: object, *_args: object, **_options: object) -> checkpoint.CheckpointPolicy:
        keep = str(operation) == "patchgen.moe_forward.default"
        return checkpoint.CheckpointPolicy.MUST_SAVE if keep else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint.create_selective_checkpoint_contexts(policy)


def an_error_before_the_experts_turns_nothing_off() -> list[int]:
    """How many layers' tokens were sent ahead: after all, after those that an error on one rank left, and after those."""
    world, rank = dist.get_world_size(), dist.get_rank()
    own = {name: tensor.chunk(world)[rank] for name, tensor in tensors(2 * world, biased=False).items()}
    hidden, index, weights = routing("uneven", rank, 2 * world)
    state, block = create_peers(world), _Block(own, 2 * world, changes=False)
    expert_peers.install_token_prefetch(block, [block.experts])
    call, read, sent, after = ops.fused_moe, peer_rows.read_tokens, [], []
    peer_rows.read_tokens = lambda *args: sent.append(args[2] is None) or read(*args)

    def failing(*_args: object, **_options: object) -> Tensor:
        raise ValueError("in the router")

    try:
        with parallel.using(state), torch.no_grad():
            expected = block(hidden[None], index, weights)
            after.append(sum(sent))
            ops.fused_moe = failing
            with contextlib.suppress(ValueError):
                block(hidden[None], index, weights)
            ops.fused_moe = call
            if rank == 0:  # an error of its own: it has tokens on their way, the other has not
                state.context.prefetched_tokens = None
            again = call(hidden, index, weights, **block.experts, num_experts=2 * world, activation=silu)
            after.append(sum(sent))
            found = block(hidden[None], index, weights)
            after.append(sum(sent))
    finally:
        ops.fused_moe, peer_rows.read_tokens = call, read
    for one in (again[None], found):
        torch.testing.assert_close(one, expected, rtol=0, atol=0)
    return after


def tokens_sent_ahead(kind: str, backend: str, changes: bool, mode: str, delay: float = 0) -> tuple[int, int]:
    """Two steps with tokens sent ahead and sums pushed, to the bit as without; how often either was done.

    Args:
        mode: of activation checkpointing; without what patchgen remembers, "torch", and "operators" that keeps the experts.
        delay: seconds that one rank reads later than the others, in each backward.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    own = {name: tensor.chunk(world)[rank] for name, tensor in tensors(2 * world, biased=False).items()}
    hidden, index, weights = routing(kind, rank, 2 * world)
    if backend == "triton":
        import interpreter_loops  # noqa: F401  a rank loads no conftest
    sent, pushed = [], []
    read, push = peer_rows.read_tokens, pushed_sums.push

    def noted_read(published: Published, tokens: TokenCounts, index: Tensor | None, *shape) -> Tensor:
        sent.append(index is None)
        if delay and index is not None and rank == 1 and torch._C._current_graph_task_id() != -1:
            time.sleep(delay)
        return read(published, tokens, index, *shape)

    def run(is_ahead: bool) -> list[Tensor]:
        state, block, found = create_peers(world), _Block(own, 2 * world, changes), []
        if is_ahead:
            expert_peers.install_token_prefetch(block, [block.experts])
        for _ in range(2):
            leaves = [hidden[None].clone().requires_grad_(), weights.clone().requires_grad_()]
            with parallel.using(state), seams.using(fused_moe=backend), unread_rows_are_no_numbers():
                if mode == "none":
                    out = block(leaves[0], index, leaves[1])
                else:
                    contexts = {"torch": checkpoint.noop_context_fn, "operators": _keeps_experts}
                    options = {"context_fn": contexts.get(mode, partial(checkpointing.contexts, mode))}
                    out = torch.utils.checkpoint.checkpoint(
                        block, leaves[0], index, leaves[1], use_reentrant=False, **options
                    )
                out.square().sum().backward()
            found += [out.detach(), *(leaf.grad for leaf in (*leaves, *block.experts.values()))]
        return [one.clone() for one in found]

    expected_push, pushed_sums.offer = pushed_sums.offer, lambda _: contextlib.nullcontext()
    try:
        expected = run(False)
        pushed_sums.offer = expected_push
        peer_rows.read_tokens = noted_read
        pushed_sums.push = lambda *args: pushed.append(1) or push(*args)
        found = run(True)
    finally:
        peer_rows.read_tokens, pushed_sums.push, pushed_sums.offer = read, push, expected_push
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    return sum(sent), len(pushed)


def an_error_between_two_buffers_is_told() -> str:
    """What the next exchange says after experts that fail once, on all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    state = create_peers(world)
    own = {name: tensor.chunk(world)[rank] for name, tensor in tensors(2 * world, biased=False).items()}
    kernel = experts.experts_kernel

    def run() -> None:
        with parallel.using(state), seams.using(fused_moe="triton"):
            ops.fused_moe(*routing("uneven", rank, 2 * world), **own, num_experts=2 * world, activation=silu)

    def failing(*_args: object, **_options: object) -> Tensor:
        raise ValueError("in the experts")

    experts.experts_kernel = lambda: failing
    try:
        with contextlib.suppress(ValueError):
            run()
    finally:
        experts.experts_kernel = kernel
    try:
        run()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was said")


def a_repeated_block_begins_on_the_buffer_that_it_did_not_end_on(times: int) -> tuple[int, int]:
    """Exchanges of a block, with those that are added; and of its last and first, how many buffers they are."""
    peers = create_peers(dist.get_world_size()).peers
    used: list[int] = []
    turn = peers.next_buffers

    def noted() -> Published:
        published = turn()
        used.append(published.parts[0].data_ptr())
        return published

    peers.next_buffers = noted
    with peers.replayable():
        for _ in range(times):
            peers.publish([])
    return len(used), len({used[0], used[-1]})
