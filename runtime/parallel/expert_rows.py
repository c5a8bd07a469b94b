"""Token exchange of expert parallelism by all-to-all: a row per slot is sent to the rank of its expert, its result back.

Example: 4 experts on 2 ranks, K = 2, three tokens on each rank.

    rank 0, owns e0 e1                              rank 1, owns e2 e3
    tokens   t0:(e0,e2)  t1:(e1,e3)  t2:(e0,e1)     tokens   u0:(e2,e3)  u1:(e0,e2)  u2:(e2,e3)
    rows sorted by expert
             t0e0 t2e0 t1e1 t2e1 | t0e2 t1e3                 u1e0 | u0e2 u1e2 u2e2 u0e3 u2e3
    exchange
             t0e0 t2e0 t1e1 t2e1 u1e0                        t0e2 t1e3 u0e2 u1e2 u2e2 u0e3 u2e3
    experts  one fused_moe over the received rows, one slot each, with the routing weights that came along
    exchange back, then each token sums its own rows in slot order

The routing weight is sent with its row, so the kernel applies it at the same place as without expert parallelism and the
results are identical. No atomics: the backward of every gather is a gather.

    T tokens   K experts per token   H hidden size   E experts of the model   e experts of this rank
    R rows that this rank sends      Q rows that it receives                  n ranks of the EP group
    S slots sorted by expert, T * K
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from patchgen.runtime.parallel import checkpointing, overlap, watch
from patchgen.runtime.parallel.collectives import all_to_all, start_all_to_all
from patchgen.runtime.parallel.state import ParallelState


@dataclass(frozen=True)
class Route:
    """The mapping between rows and (token, slot) pairs.

    Attributes:
        slot_of_row_R: the slot `t * K + k` of each row; arbitrary for empty rows.
        row_of_slot_TK: the row of each slot; arbitrary for slots that are left out.
        left_out_TK: whether a slot has no row.
        empty_R: whether a row has no slot; None: no row is empty.
    """

    slot_of_row_R: Tensor
    row_of_slot_TK: Tensor
    left_out_TK: Tensor
    empty_R: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields, in order."""
        return (self.slot_of_row_R, self.row_of_slot_TK, self.left_out_TK, self.empty_R)


@dataclass(frozen=True)
class Exchange:
    """The rows per rank (None: equal blocks), and the local expert of each received row.

    Attributes:
        expert_Q1: in `[0, e]`; e marks an empty row.
    """

    send_sizes: list[int] | None
    receive_sizes: list[int] | None
    expert_Q1: Tensor


def exchange_by_all_to_all(
    state: ParallelState,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    num_experts: int,
) -> Tensor:
    """`[T, H]`: the experts of all ranks over `hidden_states [T, H]`, `top_k_index` and `top_k_weights [T, K]`.

    One host sync (the sizes of the exchange); none if `state.expert_capacity` bounds them.

    Args:
        compute: this rank's experts: `(rows [Q, H], expert [Q, 1], weight [Q, 1])` to `[Q, H]`.
        num_experts: of the model.
    """
    route, exchange = _plan(state, top_k_index, num_experts)

    def send(rows: Tensor, content: str) -> Callable[[], Tensor]:
        return start_all_to_all(
            rows,
            state.ep_group,
            operation=f"send {content} to their experts",
            receive_sizes=exchange.receive_sizes,
            send_sizes=exchange.send_sizes,
        )

    slots_RH = _GatherTokens.apply(hidden_states, route)
    arriving_tokens = send(slots_RH, "tokens")
    weight_R1 = _GatherTokens.apply(top_k_weights.reshape(-1, 1), _one_slot_each(route))
    arriving_weights = send(weight_R1, "routing weights")
    overlap.compute_announced()
    out_QH = compute(arriving_tokens(), exchange.expert_Q1, arriving_weights())
    back_RH = all_to_all(
        out_QH,
        state.ep_group,
        operation="return tokens from their experts",
        receive_sizes=exchange.send_sizes,
        send_sizes=exchange.receive_sizes,
    )
    return _SumTokens.apply(back_RH, route)


# ---------------------------------------------------------------------------------------------- planning


def dropped_rows(state: ParallelState) -> int:
    """The number of rows over `expert_capacity` dropped on this rank since the last call. Waits for the device."""
    total = sum(int(count) for count in state.context.dropped_rows.values())
    state.context.dropped_rows.clear()
    return total


def _plan(state: ParallelState, top_k_index: Tensor, num_experts: int) -> tuple[Route, Exchange]:
    # One-byte keys sort in one radix pass.
    keys = top_k_index.reshape(-1).to(torch.uint8 if num_experts < 256 else torch.int16)
    keys_S, slot_S = torch.sort(keys, stable=True)
    expert_S = keys_S.to(top_k_index.dtype)
    place_of_slot = torch.empty_like(slot_S)
    place_of_slot[slot_S] = torch.arange(slot_S.numel(), device=slot_S.device)
    place_TK = place_of_slot.view(top_k_index.shape)
    if state.expert_capacity is None:
        sizes = checkpointing.remember(lambda: _exchange_sizes(state, expert_S, num_experts))
        num_sent = sum(sizes.send_sizes or ())
        return Route(slot_S[:num_sent], place_TK, top_k_index >= num_experts), sizes
    return _plan_with_capacity(state, top_k_index, expert_S, slot_S, place_TK, num_experts)


def _exchange_sizes(state: ParallelState, expert_S: Tensor, num_experts: int) -> Exchange:
    """Exchanges how many rows of each expert each rank sends; the only host sync of the layer."""
    n, num_local = state.ep, num_experts // state.ep
    bounds = torch.arange(num_experts + 1, device=expert_S.device)
    send_ne = torch.searchsorted(expert_S, bounds).diff().view(n, num_local)
    receive_ne = all_to_all(send_ne, state.ep_group, operation="exchange the sizes of the expert exchange")
    with watch.operation("wait for the sizes of the expert exchange"):
        send_sizes, receive_sizes = torch.stack([send_ne.sum(1), receive_ne.sum(1)]).tolist()
    experts = torch.arange(num_local, device=expert_S.device).repeat(n)
    expert_Q = experts.repeat_interleave(receive_ne.view(-1), output_size=sum(receive_sizes))
    return Exchange(send_sizes, receive_sizes, expert_Q[:, None])


def _plan_with_capacity(state, top_k_index, expert_S, slot_S, place_TK, num_experts) -> tuple[Route, Exchange]:
    """Equal blocks of `expert_capacity` rows per rank, so no size reaches the host. Slots beyond it are left out and counted."""
    n, num_local = state.ep, num_experts // state.ep
    slots, capacity, device = slot_S.numel(), state.expert_capacity, slot_S.device
    first_n = torch.searchsorted(expert_S, torch.arange(n, device=device) * num_local)
    rank_S = torch.div(expert_S, num_local, rounding_mode="floor")
    position_S = torch.arange(slots, device=device) - first_n[rank_S.clamp(max=n - 1)]
    kept_S = (expert_S < num_experts) & (position_S < capacity)
    # Empty rows refer to the first slot; slots that are left out are written to one row past the end.
    row_S = torch.where(kept_S, rank_S * capacity + position_S, n * capacity)
    slot_of_row = torch.zeros(n * capacity + 1, dtype=slot_S.dtype, device=device)
    slot_of_row[row_S] = slot_S
    expert_of_row = torch.full((n * capacity + 1,), num_local, dtype=expert_S.dtype, device=device)
    expert_of_row[row_S] = torch.where(kept_S, expert_S % num_local, num_local)
    slot_of_row, expert_of_row = slot_of_row[:-1], expert_of_row[:-1]
    if not checkpointing.is_replay():
        num_dropped = ((expert_S < num_experts) & ~kept_S).sum()
        dropped = state.context.dropped_rows
        dropped[device] = dropped.get(device, 0) + num_dropped.detach()
    row_TK = row_S.clamp(max=n * capacity - 1)[place_TK]
    expert_Q = checkpointing.remember(
        lambda: all_to_all(expert_of_row, state.ep_group, operation="exchange the expert of each row")
    )
    route = Route(slot_of_row, row_TK, ~kept_S[place_TK], empty_R=expert_of_row == num_local)
    return route, Exchange(None, None, expert_Q[:, None])


# ------------------------------------------------------------------------------------------ permutations


def _one_slot_each(route: Route) -> Route:
    """The route for values per slot, `(T * K, 1)` instead of `(T, H)`."""
    return Route(route.slot_of_row_R, route.row_of_slot_TK.view(-1, 1), route.left_out_TK.view(-1, 1), route.empty_R)


def _rows_of(tokens: Tensor, route: Route) -> Tensor:
    if tokens.shape[0] == 0:
        return tokens.new_zeros(route.slot_of_row_R.shape[0], tokens.shape[1])
    rows = tokens.index_select(0, route.slot_of_row_R // route.row_of_slot_TK.shape[1])
    return rows if route.empty_R is None else rows.masked_fill(route.empty_R[:, None], 0)


def _sum_per_token(rows: Tensor, route: Route) -> Tensor:
    """`(T, H)`: the sum over k of the rows of a token's slots, in fp32 and in slot order."""
    if rows.shape[0] == 0:
        return rows.new_zeros(route.left_out_TK.shape[0], rows.shape[1])
    if rows.is_cuda and rows.shape[1] > 1 and rows.dtype != torch.float64:
        # One kernel: as separate steps it would write K rows per token in fp32.
        from patchgen.kernels.moe.combine import sum_slots

        row_of_slot_TK = torch.where(route.left_out_TK, -1, route.row_of_slot_TK)
        return sum_slots(rows.contiguous(), None, row_of_slot_TK, row_of_slot_TK.shape[1])
    # Left-out slots may have rows past the last row that was sent.
    per_slot_TKH = rows[route.row_of_slot_TK.clamp(max=rows.shape[0] - 1)]
    wide_TKH = per_slot_TKH.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.where(route.left_out_TK.unsqueeze(-1), 0, wide_TKH).sum(dim=1).to(rows.dtype)


# Both save the route as tensors, not on ctx: a checkpointed layer drops them, so on every rank its recomputation starts at
# `_SumTokens`, the first backward node of the layer's experts. If it started at the first kernel with a saved tensor, a rank
# without rows would start later than the others, and exchanges would be mismatched.
class _GatherTokens(torch.autograd.Function):
    """The token of each row; backward: each token sums its rows."""

    @staticmethod
    def forward(ctx, tokens, route):
        ctx.save_for_backward(*route.tensors)
        return _rows_of(tokens, route)

    @staticmethod
    def backward(ctx, gradient):
        return _sum_per_token(gradient, Route(*ctx.saved_tensors)), None


class _SumTokens(torch.autograd.Function):
    """Each token sums its rows; backward: the gradient of each row's token."""

    @staticmethod
    def forward(ctx, rows, route):
        ctx.save_for_backward(*route.tensors)
        return _sum_per_token(rows, route)

    @staticmethod
    def backward(ctx, gradient):
        return _rows_of(gradient, Route(*ctx.saved_tensors)), None
