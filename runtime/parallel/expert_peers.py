"""The exchange of experts' tokens inside a host: ranks read each other's tokens, each at most once.

    publish   every rank writes its tokens, the experts they go to and their weights, once
    read      every rank reads the tokens that have a slot for its experts: a bound is all tokens of all ranks, no count;
              all of them, while routers compute, where the module around the experts hands on what it gets (`send_ahead`)
    experts   one fused_moe over the tokens of all ranks, the slots of other ranks' experts left out: what it returns for a
              token is the sum over the experts here
    publish   every rank writes these sums; the Triton experts write them to the ranks of their tokens (`pushed_sums.py`)
    read      every rank reads those of its own tokens and adds them up, in fp32, in the order of the ranks

The backward is the same the other way: gradients of outputs are published and read by the ranks that computed for the
token; gradients of tokens are summed by the token's rank; that of a routing weight comes from the rank of its expert.

Which rows there are, and which tiles cover them, only devices know. The hosts tell each other how many tokens they have,
without their devices. Buffers of rows (`h`, and what the backward makes) are sized for `ROUND_SHARES` times a rank's even
share. With two ranks no routing exceeds that. With more, the rows beyond it are computed in further rounds, each of the
same size, as many as the worst routing needs; a round without rows reads nothing. So no row is ever left out, and the
host never asks how many there are.

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
from patchgen.kernels.peers.peer_rows import Tokens
from patchgen.kernels.peers.pushed_sums import Places
from patchgen.runtime import parallel
from patchgen.runtime.parallel import checkpointing, overlap
from patchgen.runtime.parallel.peer_memory import PeerBuffers, aligned
from patchgen.runtime.parallel.state import ParallelState

ROUND_SHARES = 2

# This rank's experts: (tokens [N, H], index [N, K], weights [N, K][, most slots not left out]) -> sums [N, H].
Compute = Callable[..., Tensor]


def over_peers(
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
        pushes: that `compute` may write its sums to the ranks of their tokens (`kernels/peers/pushed_sums.py`) and nobody
            reads what it returns.
    """
    if state.peers is None:
        raise ValueError("The ranks of this state share no memory: `over_rows` exchanges their tokens.")
    is_again = checkpointing.is_replay() or _is_backward()
    ahead = None if is_again else _sent_ahead(state, state.peers, hidden_states)
    exchange = _Exchange.agree(state.peers, hidden_states, top_k_index, top_k_weights, num_experts, ahead)
    rows, weights = _Send.apply(hidden_states, top_k_weights, top_k_index, exchange)
    overlap.compute_announced()
    rows, weights = _Arrive.apply(rows, weights, exchange)
    # What a checkpointed layer keeps or computes again is whole; torch ends a recomputation before the push's barrier.
    may_push = pushes and exchange.num_rounds == 1 and not checkpointing.is_active() and not is_again
    # Whoever keeps what operators return, on any rank, keeps sums and not what is left where they were pushed.
    places = exchange.places() if may_push and state.peers.all_say(_get_current_dispatch_mode() is None) else None
    with pushed_sums.offered(places):
        sums = _in_rounds(compute, rows, exchange, weights)
    return _Return.apply(sums, top_k_index, exchange, places)


def _sent_ahead(state: ParallelState, peers: PeerBuffers, hidden_states: Tensor) -> SentAhead | None:
    """`hidden_states`, where all ranks sent theirs ahead.

    Asked by all ranks or by none: where an error was caught, a rank may have tokens on their way that others have not.
    """
    ahead, state.context.prefetched_tokens = state.context.prefetched_tokens, None
    if not state.context.prefetches_tokens or peers.all_say(ahead is not None and ahead.are(hidden_states)):
        return ahead
    if peers.all_say(ahead is not None) and ahead is not None:  # sent by all, and on some rank others than these
        setattr(ahead.module, _SENDS_AHEAD, False)
    return None


@dataclass
class SentAhead:
    """Tokens that are on their way before anybody knows their experts, all of them to every rank.

    Attributes:
        source: what they were read from, and its version then.
        rows: `[N, H]` of all ranks, to be waited for.
    """

    module: nn.Module
    source: Tensor
    version: int
    tokens: Tokens
    rows: Tensor

    def are(self, hidden_states: Tensor) -> bool:
        """Whether these are the tokens, unchanged."""
        width = self.source.shape[-1]
        return (
            hidden_states.data_ptr() == self.source.data_ptr()  # which is held: nothing else can lie there
            and self.source._version == self.version
            and hidden_states.dtype == self.source.dtype
            and hidden_states.shape == (self.source.numel() // width, width)
            and hidden_states.is_contiguous()
            and self.source.is_contiguous()
        )


_SENDS_AHEAD = "_patchgen_sends_tokens_ahead"  # of a module: False where it turned out that its tokens are others


def send_ahead(model: nn.Module, experts: Sequence[nn.Module]) -> None:
    """Lets the modules around experts send what they get while they compute who gets it: routers take as long as the way.

    Where what reaches the experts turns out to be something else, it is sent then, as without this.
    """
    inside = set(experts)
    for module in model.modules():
        if not inside.isdisjoint(module.children()):
            module.register_forward_pre_hook(_send_input_ahead, with_kwargs=True)


def _send_input_ahead(module: nn.Module, args: tuple, kwargs: dict) -> None:
    if torch.compiler.is_compiling():
        return
    state = parallel.current()
    if state is None or state.peers is None or checkpointing.is_replay() or _is_backward():
        return
    state.context.prefetches_tokens, state.context.prefetched_tokens = True, None
    source = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
    if source is None or source.ndim < 2 or source.is_inference() or not getattr(module, _SENDS_AHEAD, True):
        return
    # A checkpointing of the user's counts operations, of which there would be more when the layer is computed again.
    if not state.peers.all_say(checkpointing.is_active() or _get_current_dispatch_mode() is None):
        return
    with _disable_current_modes(), torch.no_grad():  # unseen by selective checkpointing, which counts operations
        tokens = source.detach().reshape(-1, source.shape[-1])
        peers = state.peers
        counts = peers.agree(tokens.shape[0])
        peers.reserve(max(counts.counts) * tokens.shape[1] * tokens.element_size())
        with peers.beside():
            published = peers.publish([(0, tokens)])
            rows = peer_rows.read_tokens(published, counts, None, 0, tokens.shape[1], tokens.dtype)
    state.context.prefetched_tokens = SentAhead(module, source, source._version, counts, rows)


def _is_backward() -> bool:
    """Whether a backward runs, that computes a layer again."""
    return torch._C._current_graph_task_id() != -1


def _in_rounds(compute: Compute, rows: Tensor, exchange: _Exchange, weights: Tensor) -> Tensor:
    """The sums of all rounds. All but the first compute again in the backward: what they keep has no bound but the worst."""
    index, most = exchange.known(exchange.index), exchange.rows_per_round
    if exchange.num_rounds == 1:
        return compute(rows, index, weights)
    order = torch.sort(index.reshape(-1), stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    round_of_slot = place.view(index.shape).div(most, rounding_mode="floor")

    def own(number: int) -> Tensor:
        return index.masked_fill(round_of_slot != number, exchange.own_experts)

    total = compute(rows, own(0), weights, most)
    for number in range(1, exchange.num_rounds):
        total = total + torch_checkpoint.checkpoint(
            compute, rows, own(number), weights, most, use_reentrant=False, preserve_rng_state=False
        )
    return total


@dataclass
class _Exchange:
    """One layer's exchange: who has how many tokens, where things lie in a buffer, and what is on its way.

    Attributes:
        index: `[N, K]` int32, this rank's experts in `[0, e)`; e marks a slot that is left out.
        slots: `[T, K]`, the model's experts of this rank's tokens.
        travelling: what the stream beside reads; kept until it was waited for.
    """

    peers: PeerBuffers
    tokens: Tokens
    num_experts: int
    top_k: int
    index_offset: int
    weights_offset: int
    index: Tensor | None = None
    slots: Tensor | None = None
    travelling: tuple[Tensor, ...] = field(default=())
    ahead: SentAhead | None = None

    @classmethod
    def agree(
        cls,
        peers: PeerBuffers,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        num_experts: int,
        ahead: SentAhead | None = None,
    ) -> _Exchange:
        """With the token counts of all ranks, and buffers that are large enough for every step of it."""
        tokens = checkpointing.remember(lambda: ahead.tokens if ahead else peers.agree(hidden_states.shape[0]))
        top_k, hidden_size = top_k_index.shape[1], hidden_states.shape[1]
        row, slot = hidden_size * hidden_states.element_size(), top_k * top_k_weights.element_size()
        most = max(tokens.counts)
        index_offset = aligned(most * row)
        weights_offset = index_offset + aligned(most * top_k * torch.int32.itemsize)
        returned = aligned(tokens.total * row) + tokens.total * slot
        peers.reserve(max(weights_offset + most * slot, returned, most * peers.num_ranks * row))
        return cls(peers, tokens, num_experts, top_k, index_offset, weights_offset, ahead=ahead)

    @staticmethod
    def known(index: Tensor | None) -> Tensor:
        """`index` or `slots`, of an exchange that has sent its tokens."""
        if index is None:
            raise RuntimeError("This exchange has not sent its tokens yet: nothing says whose they are.")
        return index

    @property
    def own_experts(self) -> int:
        return self.num_experts // self.peers.num_ranks

    @property
    def rows_per_round(self) -> int:
        return -(-ROUND_SHARES * self.tokens.total * self.top_k // self.peers.num_ranks)

    @property
    def num_rounds(self) -> int:
        """So many that every slot of every rank could be for this rank's experts."""
        return -(-self.tokens.total * self.top_k // self.rows_per_round) if self.tokens.total else 1

    def send(self, tokens: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`(tokens [N, H], weights [N, K], index [N, K])`, on their way; to be waited for."""
        with self.peers.beside():
            parts = [(self.index_offset, index.to(torch.int32)), (self.weights_offset, weights)]
            published = self.peers.publish(parts if self.ahead else [(0, tokens), *parts])
            local, all_weights = peer_rows.read_routing(
                published,
                self.tokens,
                self.top_k,
                index_offset=self.index_offset,
                weights_offset=self.weights_offset,
                weights_dtype=weights.dtype,
                first_expert=self.peers.rank * self.own_experts,
                num_experts=self.own_experts,
            )
            if self.ahead:
                rows, self.ahead = self.ahead.rows, None
            else:
                what = local, self.own_experts, tokens.shape[1], tokens.dtype
                rows = peer_rows.read_tokens(published, self.tokens, *what)
        return rows, all_weights, local

    def spread(self, gradient: Tensor) -> Tensor:
        """`[N, H]`: the gradients `[T, H]` of all ranks, where a token has a slot here."""
        with self.peers.beside():
            published = self.peers.publish([(0, gradient)])
            rows = peer_rows.read_tokens(
                published, self.tokens, self.known(self.index), self.own_experts, gradient.shape[1], gradient.dtype
            )
        early_gradients.compute_late()  # of the layer after this one
        self.peers.wait()
        return rows

    def places(self) -> Places:
        """Where the ranks' sums for each other's tokens may go, once what was sent has arrived."""
        return Places(self.peers.turn(), self.tokens, self.peers.rank)

    def gather_sums(self, sums: Tensor, index: Tensor, places: Places | None = None) -> Tensor:
        """`[T, H]`: the sums `[N, H]` of all ranks for the tokens of this one, added up; of `places` where they are there."""
        pushed = places is not None and places.are_filled
        with self.peers.beside():
            published = self.peers.publish([] if pushed else [(0, sums)], places.published if places else None)
            if places is not None and pushed:
                out = pushed_sums.add_up(places, index, self.own_experts, sums)
            else:
                out = peer_rows.sum_rows(published, self.tokens, self.peers.rank, index, self.own_experts, sums)
        self.peers.wait()
        return out

    def start_gradients(self, rows: Tensor, weights: Tensor) -> None:
        """The gradients of this rank's tokens and weights start on their way: `travelling`, to be waited for."""
        rows, weights, index = rows.contiguous(), weights.contiguous(), self.known(self.slots)
        offset = aligned(rows.numel() * rows.element_size())
        with self.peers.beside():
            published = self.peers.publish([(0, rows), (offset, weights)])
            common = (published, self.tokens, self.peers.rank, index, self.own_experts)
            own_rows = peer_rows.sum_rows(*common, rows)
            own_weights = peer_rows.read_slots(*common, offset, weights.dtype)
        self.travelling = (own_rows, own_weights, rows, weights)

    def have_started(self, rows: Tensor, weights: Tensor) -> bool:
        """Whether it is these gradients that travel: a kernel handed them over before it was done (`early_gradients.py`)."""
        same = zip(self.travelling[2:], (rows, weights), strict=False)
        return bool(self.travelling) and all(sent.data_ptr() == own.data_ptr() for sent, own in same)

    def arrive(self) -> None:
        """What was sent is there for what is launched from now on."""
        self.peers.wait()

    def take(self) -> tuple[Tensor, ...]:
        """What was on its way, waited for."""
        self.peers.wait()
        arrived, self.travelling = self.travelling, ()
        return arrived


# Two nodes around what is computed beside, so that its backward runs while the gradients travel: `_Arrive` starts them,
# `_Send` waits. Between the two passes a stand-in that nothing reads.
class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weights, index, exchange):
        ctx.exchange = exchange
        # Kept where a layer is recomputed: its tokens travel once.
        rows, all_weights, local = checkpointing.remember(lambda: exchange.send(tokens, weights, index))
        exchange.index, exchange.slots = local, index
        return rows.detach(), all_weights.detach()

    @staticmethod
    def backward(ctx, _rows, _weights):
        gradient, weights_gradient, *_read = ctx.exchange.take()
        return gradient, weights_gradient, None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, exchange):
        ctx.exchange = exchange
        exchange.arrive()
        return rows.view_as(rows), weights.view_as(weights)

    @staticmethod
    def backward(ctx, rows, weights):
        early_gradients.await_gradients(None)
        if not ctx.exchange.have_started(rows, weights):
            ctx.exchange.start_gradients(rows, weights)
        return rows, weights, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums, index, exchange, places):
        ctx.exchange = exchange
        if not _is_backward():
            early_gradients.forget_late()
        return exchange.gather_sums(sums, index, places)

    @staticmethod
    def backward(ctx, gradient):
        spread = ctx.exchange.spread(gradient.contiguous())
        if ctx.exchange.num_rounds == 1:  # else gradients are sums over rounds
            early_gradients.await_gradients(ctx.exchange.start_gradients)
        return spread, None, None, None
