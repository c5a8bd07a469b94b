"""Token exchange of expert parallelism through peer memory: ranks of one machine read each other's tokens, each at most once.

    publish   each rank writes its tokens, their expert indices and routing weights, once
    read      each rank reads the tokens that have a slot for its experts, at most all tokens of all ranks; or all of them
              while routers compute, if the MoE module passes its input on to its experts (`install_token_prefetch`)
    experts   one fused_moe over the tokens of all ranks, with the slots of other ranks' experts left out: its result for a
              token is the sum over the experts of this rank
    publish   each rank writes these sums; the Triton experts write them to the ranks of their tokens (`pushed_sums.py`)
    read      each rank reads the sums of its own tokens and adds them, in fp32 and in rank order

The first two steps, which send tokens, are what the literature calls dispatch, the last two, which return sums, combine.

The backward is symmetric: gradients of outputs are published and read by the ranks that computed for the token; gradients
of tokens are summed by the token's rank; the gradient of a routing weight comes from the rank of its expert.

Only devices know which rows exist and which tiles cover them. The ranks' CPU processes exchange token counts, without their
devices. Buffers of rows (`h`, the experts' first projection, a row for each token and expert; those of the backward) are sized
for `ROUND_SHARES` times a rank's even share. With two ranks no routing exceeds that. With more, rows beyond it are computed in
further rounds of the same size, as many as the worst routing needs; a round without rows reads nothing. So no row is dropped,
and no CPU process reads a row count.

    n ranks   T tokens of this rank   N tokens of all ranks   K experts per token   H hidden size   e experts of this rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from patchgen.kernels.moe import early_gradients
from patchgen.kernels.peers import peer_rows, pushed_sums
from patchgen.kernels.peers.published import TokenCounts
from patchgen.kernels.peers.pushed_sums import PushTargets
from patchgen.runtime import parallel
from patchgen.runtime.parallel import checkpointing, overlap
from patchgen.runtime.parallel.peer_memory import PeerBuffers, aligned
from patchgen.runtime.parallel.state import ParallelState

ROUND_SHARES = 2
"""The size of a round, in even shares of a rank: its part of all rows if they were spread evenly over the ranks."""

# This rank's experts: (tokens [N, H], index [N, K], weights [N, K][, max_rows]) -> sums [N, H].
Compute = Callable[..., Tensor]


def exchange_by_peer_memory(
    state: ParallelState,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    compute: Compute,
    *,
    num_experts: int,
    pushes: bool = False,
) -> Tensor:
    """`[T, H]`: the experts of all ranks over `hidden_states [T, H]`, `top_k_index` and `top_k_weights [T, K]`.

    Args:
        compute: this rank's experts over the tokens of all ranks, called once per round.
        num_experts: of the model.
        pushes: whether `compute` may write its sums directly to the ranks of their tokens (`kernels/peers/pushed_sums.py`),
            so that its return value is not read.
    """
    if state.peers is None:
        raise ValueError("The ranks of this state share no memory. To fix: use `exchange_by_all_to_all`.")
    is_recomputing = checkpointing.is_replay() or _in_backward()
    prefetched = None if is_recomputing else _take_prefetched(state, state.peers, hidden_states)
    exchange = _Exchange.create(state.peers, hidden_states, top_k_index, top_k_weights, num_experts, prefetched)
    rows, weights = _SendTokens.apply(hidden_states, top_k_weights, top_k_index, exchange)
    overlap.compute_announced()
    rows, weights = _WaitForTokens.apply(rows, weights, exchange)
    # A checkpointed layer saves or recomputes full results. Non-reentrant checkpointing stops a recomputation early, before
    # the barrier after a push.
    may_push = pushes and exchange.num_rounds == 1 and not checkpointing.is_active() and not is_recomputing
    # A dispatch mode on any rank may save what operators return, which must then be the sums.
    targets = (
        exchange.push_targets() if may_push and state.peers.all_true(_get_current_dispatch_mode() is None) else None
    )
    with pushed_sums.offer(targets):
        sums = _compute_in_rounds(compute, rows, exchange, weights)
    return _ReturnSums.apply(sums, top_k_index, exchange, targets)


def _take_prefetched(state: ParallelState, peers: PeerBuffers, hidden_states: Tensor) -> PrefetchedTokens | None:
    """The prefetched tokens, if all ranks prefetched their `hidden_states`; called by all ranks or by none.

    After a caught error a rank may have tokens in flight that others have not.
    """
    prefetched, state.context.prefetched_tokens = state.context.prefetched_tokens, None
    if not state.context.prefetches_tokens or peers.all_true(
        prefetched is not None and prefetched.matches(hidden_states)
    ):
        return prefetched
    if peers.all_true(prefetched is not None) and prefetched is not None:  # by all, but on some rank not these tokens
        setattr(prefetched.module, _PREFETCHES, False)
    return None


@dataclass
class PrefetchedTokens:
    """Tokens sent to every rank before their experts are known.

    Attributes:
        source: the tensor they were read from, with its version then.
        rows: `[N, H]` of all ranks, to be waited for.
    """

    module: nn.Module
    source: Tensor
    version: int
    counts: TokenCounts
    rows: Tensor

    def matches(self, hidden_states: Tensor) -> bool:
        """Whether `hidden_states` are these tokens, unchanged."""
        width = self.source.shape[-1]
        return (
            hidden_states.data_ptr() == self.source.data_ptr()  # `source` is alive, so its memory was not reused
            and self.source._version == self.version
            and hidden_states.dtype == self.source.dtype
            and hidden_states.shape == (self.source.numel() // width, width)
            and hidden_states.is_contiguous()
            and self.source.is_contiguous()
        )


_PREFETCHES = "_patchgen_prefetches_tokens"  # on a module: False once its experts got other tokens


def install_token_prefetch(model: nn.Module, experts: Sequence[nn.Module]) -> None:
    """Lets MoE modules send their input while their routers compute, which takes about as long as the transfer.

    If the experts then get another tensor, that is sent as without the prefetch.
    """
    experts_modules = set(experts)
    for module in model.modules():
        if not experts_modules.isdisjoint(module.children()):
            module.register_forward_pre_hook(_prefetch_input, with_kwargs=True)


def _prefetch_input(module: nn.Module, args: tuple, kwargs: dict) -> None:
    if torch.compiler.is_compiling():
        return
    state = parallel.current()
    if state is None or state.peers is None or checkpointing.is_replay() or _in_backward():
        return
    state.context.prefetches_tokens, state.context.prefetched_tokens = True, None
    source = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)), None)
    if source is None or source.ndim < 2 or source.is_inference() or not getattr(module, _PREFETCHES, True):
        return
    # Selective checkpointing matches the operations of forward and recomputation by order; the recomputation has no
    # prefetched tokens and would read them in one more operation.
    if not state.peers.all_true(checkpointing.is_active() or _get_current_dispatch_mode() is None):
        return
    with _disable_current_modes(), torch.no_grad():  # hidden from selective checkpointing
        tokens = source.detach().reshape(-1, source.shape[-1])
        peers = state.peers
        counts = peers.exchange_counts(tokens.shape[0])
        peers.reserve(max(counts.per_rank) * tokens.shape[1] * tokens.element_size())
        with peers.side_stream():
            published = peers.publish([(0, tokens)])
            rows = peer_rows.read_tokens(published, counts, None, 0, tokens.shape[1], tokens.dtype)
    state.context.prefetched_tokens = PrefetchedTokens(module, source, source._version, counts, rows)


def _in_backward() -> bool:
    """Whether a backward is running, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _compute_in_rounds(compute: Compute, rows: Tensor, exchange: _Exchange, weights: Tensor) -> Tensor:
    """The sums of all rounds. All but the first are checkpointed, because what they would save has no useful bound."""
    index, max_rows = exchange.local_index, exchange.rows_per_round
    assert index is not None, "set by `_SendTokens`"
    if exchange.num_rounds == 1:
        return compute(rows, index, weights)
    order = torch.sort(index.reshape(-1), stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    round_of_slot = place.view(index.shape).div(max_rows, rounding_mode="floor")

    def index_of_round(number: int) -> Tensor:
        return index.masked_fill(round_of_slot != number, exchange.num_local_experts)

    total = compute(rows, index_of_round(0), weights, max_rows)
    for number in range(1, exchange.num_rounds):
        total = total + torch_checkpoint.checkpoint(
            compute, rows, index_of_round(number), weights, max_rows, use_reentrant=False, preserve_rng_state=False
        )
    return total


@dataclass
class _Exchange:
    """One layer's exchange: token counts, buffer offsets, and what is in flight.

    Attributes:
        local_index: `[N, K]` int32, this rank's experts in `[0, e)`; e marks a slot that is left out; None until tokens are sent.
        global_index: `[T, K]`, the model's experts of this rank's tokens; None until they are sent.
        pending_gradients: gradients in flight, and what the side stream reads for them; kept until waited for.
    """

    peers: PeerBuffers
    counts: TokenCounts
    num_experts: int
    top_k: int
    index_offset: int
    weights_offset: int
    local_index: Tensor | None = None
    global_index: Tensor | None = None
    pending_gradients: tuple[Tensor, ...] = field(default=())
    prefetched: PrefetchedTokens | None = None

    @classmethod
    def create(
        cls,
        peers: PeerBuffers,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        num_experts: int,
        prefetched: PrefetchedTokens | None = None,
    ) -> _Exchange:
        """An exchange with the token counts of all ranks, and buffers that are large enough for all its steps."""
        counts = checkpointing.remember(
            lambda: prefetched.counts if prefetched else peers.exchange_counts(hidden_states.shape[0])
        )
        top_k, hidden_size = top_k_index.shape[1], hidden_states.shape[1]
        row_bytes, slot_bytes = hidden_size * hidden_states.element_size(), top_k * top_k_weights.element_size()
        largest = max(counts.per_rank)
        index_offset = aligned(largest * row_bytes)
        weights_offset = index_offset + aligned(largest * top_k * torch.int32.itemsize)
        sent_bytes = weights_offset + largest * slot_bytes
        returned_bytes = aligned(counts.total * row_bytes) + counts.total * slot_bytes
        peers.reserve(max(sent_bytes, returned_bytes, largest * peers.num_ranks * row_bytes))
        return cls(peers, counts, num_experts, top_k, index_offset, weights_offset, prefetched=prefetched)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.peers.num_ranks

    @property
    def rows_per_round(self) -> int:
        return -(-ROUND_SHARES * self.counts.total * self.top_k // self.peers.num_ranks)

    @property
    def num_rounds(self) -> int:
        """Enough for all slots of all ranks to be for this rank's experts."""
        return -(-self.counts.total * self.top_k // self.rows_per_round) if self.counts.total else 1

    def send(self, tokens: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(tokens [N, H], weights [N, K], index [N, K])`, in flight; to be waited for."""
        with self.peers.side_stream():
            parts = [(self.index_offset, index.to(torch.int32)), (self.weights_offset, weights)]
            published = self.peers.publish(parts if self.prefetched else [(0, tokens), *parts])
            local, all_weights = peer_rows.read_routing(
                published,
                self.counts,
                self.top_k,
                index_offset=self.index_offset,
                weights_offset=self.weights_offset,
                weights_dtype=weights.dtype,
                first_expert=self.peers.rank * self.num_local_experts,
                num_experts=self.num_local_experts,
            )
            if self.prefetched:
                rows, self.prefetched = self.prefetched.rows, None
            else:
                rows = peer_rows.read_tokens(
                    published, self.counts, local, self.num_local_experts, tokens.shape[1], tokens.dtype
                )
        return rows, all_weights, local

    def gather_output_gradients(self, gradient: Tensor) -> Tensor:
        """`[N, H]`: the gradients `[T, H]` of all ranks for tokens with a slot on this rank."""
        assert self.local_index is not None, "set by `_SendTokens`"
        with self.peers.side_stream():
            published = self.peers.publish([(0, gradient)])
            rows = peer_rows.read_tokens(
                published,
                self.counts,
                self.local_index,
                self.num_local_experts,
                gradient.shape[1],
                gradient.dtype,
            )
        early_gradients.compute_deferred()  # of the layer after this one in the forward
        self.peers.wait()
        return rows

    def push_targets(self) -> PushTargets:
        """The buffers for sums pushed to the ranks of their tokens; to be called once sent tokens have arrived."""
        return PushTargets(self.peers.next_buffers(), self.counts, self.peers.rank)

    def gather_sums(self, sums: Tensor, index: Tensor, targets: PushTargets | None = None) -> Tensor:
        """`[T, H]`: the sums `[N, H]` of all ranks for this rank's tokens, added; from `targets` if they were pushed there."""
        pushed = targets is not None and targets.was_pushed
        with self.peers.side_stream():
            published = self.peers.publish([] if pushed else [(0, sums)], targets.published if targets else None)
            if targets is not None and pushed:
                out = pushed_sums.sum_received(targets, index, self.num_local_experts, sums)
            else:
                out = peer_rows.sum_rows(published, self.counts, self.peers.rank, index, self.num_local_experts, sums)
        self.peers.wait()
        return out

    def start_gradients(self, rows: Tensor, weights: Tensor) -> None:
        """Starts to collect the gradients of this rank's tokens and weights into `pending_gradients`."""
        assert self.global_index is not None, "set by `_SendTokens`"
        rows, weights, index = rows.contiguous(), weights.contiguous(), self.global_index
        offset = aligned(rows.numel() * rows.element_size())
        with self.peers.side_stream():
            published = self.peers.publish([(0, rows), (offset, weights)])
            common = (published, self.counts, self.peers.rank, index, self.num_local_experts)
            own_rows = peer_rows.sum_rows(*common, rows)
            own_weights = peer_rows.read_slots(*common, offset, weights.dtype)
        self.pending_gradients = (own_rows, own_weights, rows, weights)

    def are_pending(self, rows: Tensor, weights: Tensor) -> bool:
        """Whether these gradients are in flight, because a kernel handed them over early (`early_gradients.py`)."""
        pairs = zip(self.pending_gradients[2:], (rows, weights), strict=False)
        return bool(self.pending_gradients) and all(
            pending.data_ptr() == gradient.data_ptr() for pending, gradient in pairs
        )

    def wait(self) -> None:
        """Makes later launches wait for the arrival of what was sent."""
        self.peers.wait()

    def wait_for_gradients(self) -> tuple[Tensor, ...]:
        """The gradients that were in flight, waited for."""
        self.peers.wait()
        gradients, self.pending_gradients = self.pending_gradients, ()
        return gradients


# Two nodes around the overlapped computation, so that its backward overlaps too: `_WaitForTokens` starts the exchange of
# gradients, `_SendTokens` waits. The gradients that autograd passes between the two
# are not read; the exchanged ones are in `pending_gradients`.
class _SendTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weights, index, exchange):
        ctx.exchange = exchange
        # Remembered, so that a recomputed layer sends its tokens once.
        rows, all_weights, local = checkpointing.remember(lambda: exchange.send(tokens, weights, index))
        exchange.local_index, exchange.global_index = local, index
        return rows.detach(), all_weights.detach()

    @staticmethod
    def backward(ctx, _rows, _weights):
        gradient, weights_gradient, *_read = ctx.exchange.wait_for_gradients()
        return gradient, weights_gradient, None, None


class _WaitForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, exchange):
        ctx.exchange = exchange
        exchange.wait()
        return rows.view_as(rows), weights.view_as(weights)

    @staticmethod
    def backward(ctx, rows, weights):
        early_gradients.await_gradients(None)
        if not ctx.exchange.are_pending(rows, weights):
            ctx.exchange.start_gradients(rows, weights)
        return rows, weights, None


class _ReturnSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums, index, exchange, targets):
        ctx.exchange = exchange
        if not _in_backward():
            early_gradients.discard_deferred()
        return exchange.gather_sums(sums, index, targets)

    @staticmethod
    def backward(ctx, gradient):
        spread = ctx.exchange.gather_output_gradients(gradient.contiguous())
        if ctx.exchange.num_rounds == 1:  # else gradients are sums over rounds
            early_gradients.await_gradients(ctx.exchange.start_gradients)
        return spread, None, None, None
