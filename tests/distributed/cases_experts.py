"""What each rank does in the tests of expert parallelism; see test_expert_parallel.py."""

from __future__ import annotations

import contextlib
import os
import warnings
from functools import partial

import torch
import torch.distributed as dist
from cases_sequence import state_of
from rounding import require_equal_up_to_rounding
from torch import Tensor

from patchgen.kernels.fused_moe import fused_moe as one_process
from patchgen.kernels.peers import peer_rows
from patchgen.runtime import ops, parallel, seams
from patchgen.runtime.parallel import (
    ParallelConfig,
    checkpointing,
    collectives,
    expert_peers,
    expert_rows,
    experts,
    peer_memory,
)
from patchgen.runtime.parallel.state import ParallelState

TOKENS, HIDDEN, INTERMEDIATE, SLOTS = 13, 16, 8, 3


def silu(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


def tensors(num_experts: int, biased: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    made = {
        "gate_up_proj": normal(num_experts, 2 * INTERMEDIATE, HIDDEN),
        "down_proj": normal(num_experts, HIDDEN, INTERMEDIATE),
    }
    if biased:
        made |= {"gate_up_bias": normal(num_experts, 2 * INTERMEDIATE), "down_bias": normal(num_experts, HIDDEN)}
    return made


def routing(kind: str, rank: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, expert indices and weights of one rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = {"no tokens on rank 1": 0 if rank == 1 else TOKENS, "uneven": TOKENS + 5 * rank}.get(kind, TOKENS)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    weights = torch.rand(tokens, SLOTS, generator=generator)
    shuffled = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)
    index = shuffled[:, :SLOTS].clone()
    if kind == "all on one expert":
        index.fill_(num_experts - 1)
    elif kind == "none for rank 0":
        index = torch.randint(num_experts // 2, num_experts, (tokens, SLOTS), generator=generator)
    elif kind == "slots left out":
        index[:, 1] = num_experts
        index[::2, 2] = num_experts
    return hidden, index, weights


def agrees(
    kind: str, num_experts: int, biased: bool = False, capacity: int | None = None, exchange: str = "all_to_all"
) -> None:
    """Experts over all ranks against all experts in this process: outputs and every gradient, twice, bit for bit."""
    world, rank = dist.get_world_size(), dist.get_rank()
    state = state_of(ep=world, expert_capacity=capacity, expert_exchange=exchange)
    whole = tensors(num_experts, biased)
    own = {name: tensor.chunk(world)[rank] for name, tensor in whole.items()}
    hidden, index, weights = routing(kind, rank, num_experts)
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(20 + rank))

    def run(tensors, with_state):
        leaves = {name: t.clone().requires_grad_() for name, t in {"x": hidden, "w": weights, **tensors}.items()}
        with parallel.using(with_state):
            call = ops.fused_moe if with_state is not None else one_process
            projections = {name: leaves[name] for name in tensors}
            out = call(leaves["x"], index, leaves["w"], **projections, num_experts=num_experts, activation=silu)
        (out * direction).sum().backward()
        return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}

    with unread_rows_are_no_numbers():
        out, gradients = run(own, state)
        again, gradients_again = run(own, state)
    torch.testing.assert_close(out, again, rtol=0, atol=0)
    expected, expected_gradients = run(whole, None)
    require_equal_up_to_rounding(out, expected, what="output")
    for name in ("x", "w"):
        require_equal_up_to_rounding(gradients[name], expected_gradients[name], what=name)
    for name in whole:
        torch.testing.assert_close(gradients[name], gradients_again[name], rtol=0, atol=0)
        total = expected_gradients[name].clone()
        dist.all_reduce(total)  # every rank's tokens reach the experts
        require_equal_up_to_rounding(gradients[name], total.chunk(world)[rank], what=name)


ON_GPU = {"tokens": 300, "hidden": 256, "inner": 128, "num_experts": 16, "top_k": 4}


def tensors_on_gpu() -> dict[str, Tensor]:
    num_experts, hidden, inner = ON_GPU["num_experts"], ON_GPU["hidden"], ON_GPU["inner"]
    generator = torch.Generator().manual_seed(0)
    return {
        "gate_up_proj": torch.randn(num_experts, 2 * inner, hidden, generator=generator) * 0.05,
        "down_proj": torch.randn(num_experts, hidden, inner, generator=generator) * 0.05,
    }


def routing_on_gpu(kind: str, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the gradient of the output, expert indices and weights of one rank."""
    num_experts, top_k = ON_GPU["num_experts"], ON_GPU["top_k"]
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = {"no tokens on rank 1": 0 if rank == 1 else 300, "uneven": 300 + 500 * rank}.get(kind, ON_GPU["tokens"])
    hidden, direction = (torch.randn(2, tokens, ON_GPU["hidden"], generator=generator)).unbind()
    weights = torch.rand(tokens, top_k, generator=generator)
    index = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].clone()
    if kind == "all on one expert":
        index.fill_(num_experts - 1)
    elif kind == "slots left out":
        index[:, 1] = num_experts
        index[::2] = num_experts
    return hidden, direction, index, weights


def agrees_on_gpu(kind: str) -> tuple[float, float]:
    """Peer memory between processes, in bf16 with the Triton experts, no wait for the device once buffers are there.

    Returns:
        The largest error of output and gradients against fp32 in one process, as a multiple of that of bf16 in one
        process; and the largest difference between two runs.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # all processes on one GPU, where there is one
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    config = ParallelConfig.for_world(world, ep=world)
    state = ParallelState.create(config, "cuda", expert_exchange="peer_memory")
    num_experts, whole = ON_GPU["num_experts"], tensors_on_gpu()
    hidden, direction, index, weights = routing_on_gpu(kind, rank)

    def run(dtype: torch.dtype, with_state: ParallelState | None, backend: str = "triton") -> dict[str, Tensor]:
        part = {name: t.chunk(world)[rank] if with_state else t for name, t in whole.items()}
        made = {"x": hidden, "w": weights, **part}
        leaves = {
            name: t.to(device, torch.float32 if name == "w" else dtype).requires_grad_() for name, t in made.items()
        }
        on_device, to_output = index.to(device), direction.to(device, dtype)
        with parallel.using(with_state), seams.using(fused_moe="triton"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if with_state is not None and state.peers.num_bytes else "default")
            try:
                call = ops.fused_moe if with_state is not None else partial(one_process, backend=backend)
                projections = {name: leaves[name] for name in whole}
                out = call(
                    leaves["x"], on_device, leaves["w"], **projections, num_experts=num_experts, activation=silu
                )
                out.backward(to_output)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}

    run(torch.bfloat16, state)  # makes the buffers
    found, again = run(torch.bfloat16, state), run(torch.bfloat16, state)
    lone, expected = run(torch.bfloat16, None), run(torch.float32, None, "reference")
    for name in whole:  # every rank's tokens reach the experts
        for result in (lone, expected):
            total = result[name].float().cpu()
            dist.all_reduce(total)
            result[name] = total.chunk(world)[rank].to(device)
    change = max(float((found[name] - again[name]).abs().max()) for name in expected if found[name].numel())
    return largest_error(found, lone, expected), change


def largest_error(found: dict[str, Tensor], bar: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all tensors, as a multiple of the error of `bar`; what should be zero has to be zero."""
    worst = 0.0
    for name, value in expected.items():
        if value.numel() and float(value.norm()):
            scale = float(value.norm())
            error, allowed = (float((one[name].float() - value).norm()) / scale for one in (found, bar))
            worst = max(worst, error / max(allowed, 1e-3))
        else:
            assert not found[name].numel() or not float(found[name].float().norm()), name
    return worst


@contextlib.contextmanager
def unread_rows_are_no_numbers():
    """Rows that a rank did not read from another hold NaN: nothing may read them."""
    original = peer_rows.read_tokens

    def read(published, tokens, index, num_experts, *shape):
        rows = original(published, tokens, index, num_experts, *shape)
        if index is None:
            return rows
        return rows.masked_fill_((index >= num_experts).all(dim=1, keepdim=True), torch.nan)

    peer_rows.read_tokens = read
    try:
        yield
    finally:
        peer_rows.read_tokens = original


def create_peers(world: int, **options: object) -> ParallelState:
    """A state of its own, with buffers that nobody has used."""
    return ParallelState.create(
        ParallelConfig.for_world(world, ep=world), "cpu", expert_exchange="peer_memory", **options
    )


def buffers_grow_with_the_tokens_of_any_rank() -> list[int]:
    """Sizes of a buffer after layers of few tokens, many on the last rank, and few again; results as in one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    state = create_peers(world)
    whole = {name: tensor * 0.1 for name, tensor in tensors(2 * world, biased=False).items()}
    own = {name: tensor.chunk(world)[rank] for name, tensor in whole.items()}
    sizes = []
    for tokens in (3, 30_000 if rank == world - 1 else 3, 4):
        generator = torch.Generator().manual_seed(rank)
        hidden = torch.randn(tokens, HIDDEN, generator=generator)
        index = torch.randint(2 * world, (tokens, SLOTS), generator=generator)
        weights = torch.rand(tokens, SLOTS, generator=generator)
        with parallel.using(state):
            out = ops.fused_moe(hidden, index, weights, **own, num_experts=2 * world, activation=silu)
        expected = one_process(hidden, index, weights, **whole, num_experts=2 * world, activation=silu)
        require_equal_up_to_rounding(out, expected, what=f"{tokens} tokens")
        sizes.append(state.peers.num_bytes)
    return sizes


def recomputation_reads_no_tokens_again(mode: str) -> tuple[int, int]:
    """How often a checkpointed layer tells its token count and sends its tokens, forward and backward."""
    world, rank = dist.get_world_size(), dist.get_rank()
    state = create_peers(world)
    whole = tensors(2 * world, biased=False)
    hidden, index, weights = routing("uneven", rank, 2 * world)
    calls: list[str] = []
    send, agree = expert_peers._Exchange.send, state.peers.exchange_counts
    state.peers.exchange_counts = lambda count: calls.append("agree") or agree(count)

    def run(with_mode: str | None) -> list[Tensor]:
        own = {name: t.chunk(world)[rank].clone().requires_grad_() for name, t in whole.items()}
        leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]

        def layer(x: Tensor, w: Tensor) -> Tensor:
            return ops.fused_moe(x, index, w, **own, num_experts=2 * world, activation=silu)

        with parallel.using(state):
            if with_mode is None:
                out = layer(*leaves)
            else:
                context = partial(checkpointing.contexts, with_mode)
                out = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False, context_fn=context)
            out.square().sum().backward()
        return [leaf.grad for leaf in (*leaves, *own.values())]

    expected = run(None)
    calls.clear()
    expert_peers._Exchange.send = lambda *args: calls.append("send") or send(*args)
    try:
        found = run(mode)
    finally:
        expert_peers._Exchange.send = send
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    return calls.count("agree"), calls.count("send")


def unavailable_peer_memory_is_refused() -> None:
    """With a bound on what is sent, between hosts, and where memory cannot be mapped: on every rank, with the reason."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def fails(*_args: object) -> None:
        raise RuntimeError("no permission")

    several = {"gethostname": lambda: f"host {rank}"}
    refused_by = {
        "expert_capacity bounds the rows of an all-to-all": ({"expert_capacity": 3}, peer_memory.socket, {}),
        "run on several machines (host 0, host 1": ({}, peer_memory.socket, several),
        "rank 0 could not share memory (no permission)": ({}, peer_memory.PeerBuffers, {"reserve": fails}),
    }
    for words, (options, owner, replaced) in refused_by.items():
        originals = {name: getattr(owner, name) for name in replaced}
        for name, function in replaced.items():
            setattr(owner, name, function)
        try:
            with warnings.catch_warnings(action="ignore"):
                create_peers(world, **options)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")
        finally:
            for name, function in originals.items():
                setattr(owner, name, function)


def capacity_drops_and_counts() -> None:
    """With all tokens on one expert, a bound keeps so many rows of each rank and counts the others."""
    world, rank = dist.get_world_size(), dist.get_rank()
    kept = 20
    state = state_of(ep=world, expert_capacity=kept)
    whole = tensors(2 * world, biased=False)
    own = {name: tensor.chunk(world)[rank] for name, tensor in whole.items()}
    hidden, index, weights = routing("all on one expert", rank, 2 * world)
    with parallel.using(state):
        out = ops.fused_moe(hidden, index, weights, **own, num_experts=2 * world, activation=silu)
    assert experts.dropped_rows(state) == TOKENS * SLOTS - kept
    left = index.clone().view(-1)
    left[kept:] = 2 * world  # rows are kept in slot order
    expected = one_process(hidden, left.view_as(index), weights, **whole, num_experts=2 * world, activation=silu)
    require_equal_up_to_rounding(out, expected)


def recomputation_exchanges_no_sizes(mode: str) -> int:
    """The number of size exchanges of a checkpointed layer, forward and backward."""
    world, rank = dist.get_world_size(), dist.get_rank()
    state = state_of(ep=world)
    own = {name: t.chunk(world)[rank].requires_grad_() for name, t in tensors(2 * world, biased=False).items()}
    hidden, index, weights = routing("uneven", rank, 2 * world)
    calls = []
    original = expert_rows._exchange_sizes

    def counted(*args):
        calls.append(args)
        return original(*args)

    expert_rows._exchange_sizes = counted
    try:
        with parallel.using(state):
            out = torch.utils.checkpoint.checkpoint(
                lambda x: ops.fused_moe(x, index, weights, **own, num_experts=2 * world, activation=silu),
                hidden.requires_grad_(),
                use_reentrant=False,
                context_fn=lambda: checkpointing.contexts(mode),
            )
            out.sum().backward()
    finally:
        expert_rows._exchange_sizes = original
    return len(calls)


def shared_experts_run_beside_the_exchange(at_once: bool, exchange: str) -> None:
    """Both ways: the exchange of tokens starts, the shared experts compute, the exchange is waited for."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = tensors(2 * world, biased=False)
    own = {name: tensor.chunk(world)[rank] for name, tensor in whole.items()}
    hidden, index, weights = routing("balanced", rank, 2 * world)
    events: list[str] = []

    def noting(method, event: str):
        def run(self, *args, **kwargs):
            if getattr(self, "operation", "send tokens to their experts") == "send tokens to their experts":
                events.append(f"{event} back" if kwargs.get("reverse") else event)
            return method(self, *args, **kwargs)

        return run

    def shared(x: Tensor) -> Tensor:
        events.append("shared")
        out = x * 2
        out.register_hook(lambda _gradient: events.append("shared back"))
        return out

    if exchange == "all_to_all":
        noted = {"launch": "launch", "wait": "wait"}
        cls = collectives._Exchange
    else:
        noted = {"send": "launch", "wait": "wait", "start_gradients": "launch back", "wait_for_gradients": "wait back"}
        cls = expert_peers._Exchange
    originals = {name: getattr(cls, name) for name in noted}
    for name, event in noted.items():
        setattr(cls, name, noting(originals[name], event))
    try:
        with parallel.using(state_of(ep=world, expert_exchange=exchange)):
            x = hidden.clone().requires_grad_()
            beside = ops.beside_experts(shared, x, at_once=at_once)
            out = ops.fused_moe(x, index, weights, **own, num_experts=2 * world, activation=silu)
            (out + beside()).sum().backward()
    finally:
        for name, method in originals.items():
            setattr(cls, name, method)
    assert events[:3] == ["launch", "shared", "wait"], events
    # What was computed while tokens travelled has its backward while their gradients travel.
    back = events[3:]
    assert back.index("launch back") < back.index("wait back"), events
    assert "shared back" in back, events
    if exchange == "peer_memory":
        assert back == ["launch back", "shared back", "wait back"], events


def a_computation_that_an_error_left_behind_is_forgotten() -> None:
    computed: list[str] = []

    def failing(x: Tensor) -> None:
        handle = ops.beside_experts(lambda x: computed.append("stale") or x, x)
        raise RuntimeError(f"before the experts: {handle is not None}")

    world, rank = dist.get_world_size(), dist.get_rank()
    own = {name: tensor.chunk(world)[rank] for name, tensor in tensors(2 * world, biased=False).items()}
    hidden, index, weights = routing("balanced", rank, 2 * world)
    with parallel.using(state_of(ep=world)):
        with contextlib.suppress(RuntimeError):
            failing(hidden)
        ops.fused_moe(hidden, index, weights, **own, num_experts=2 * world, activation=silu)
    assert computed == []


def workers_of_the_group() -> int:
    """How many threads of this rank run the collectives of all ranks."""
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._threads
