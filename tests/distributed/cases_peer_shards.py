"""Shards read from the memory of other ranks against FSDP2's collectives; see test_peer_shards.py."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchgen.kernels.peers import peer_sums
from patchgen.runtime.parallel import ParallelConfig, gradients, peer_shards, peer_units, sharding, undivided
from patchgen.runtime.parallel.peer_shards import PeerShards
from patchgen.runtime.parallel.peer_units import PeerGroup
from patchgen.runtime.parallel.state import ParallelState

DEVICE = "cpu"


@contextlib.contextmanager
def sizes(small: int, piece: int = peer_shards.MAX_PIECE_BYTES) -> Iterator[None]:
    """Bytes below which shards are small, and of which a piece of a large gradient is, for a model of a few parameters."""
    before = peer_units.SMALL_BYTES, peer_shards.MAX_PIECE_BYTES
    peer_units.SMALL_BYTES, peer_shards.MAX_PIECE_BYTES = small, piece
    try:
        yield
    finally:
        peer_units.SMALL_BYTES, peer_shards.MAX_PIECE_BYTES = before


def state_of() -> ParallelState:
    return ParallelState.create(ParallelConfig.for_world(dist.get_world_size()), DEVICE)


class Layer(nn.Module):
    """Rows that ranks do not divide evenly, and a matrix that is not small."""

    recomputes = peeks = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        if self.peeks:  # what is computed with a constant copy is read in the backward after the gradient is whole
            x = x + torch.tanh(x @ self.up.weight.detach().T) @ self.up.weight.detach()
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Tied ends or not, two layers, the second called twice, and a layer that not every step uses."""

    def __init__(self, tied: bool = True, width: int = 10, **options: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.sometimes = Layer(width)
        self.head = nn.Linear(width, 19, bias=False)  # after what it reads, as upstream's
        for layer in (*self.layers, self.sometimes):
            vars(layer).update(options)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, all_layers: bool = True) -> Tensor:
        x = self.embedding(ids)
        for layer in (*self.layers, self.layers[1], *([self.sometimes] if all_layers else [])):
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float().view(-1, 19), ids.view(-1))


def sharded(
    exchange: str,
    freeze: str | None = None,
    *,
    tied: bool = True,
    width: int = 10,
    recomputes: bool = False,
    peeks: bool = False,
    **options,
) -> nn.Module:
    torch.manual_seed(0)
    model = Model(tied, width, recomputes=recomputes, peeks=peeks)
    if freeze is not None:
        model.get_parameter(freeze).requires_grad_(False)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    options = sharding.ShardingOptions(**dtypes, exchange_gradients=True, shard_exchange=exchange, **options)
    return sharding.shard_model(model, state_of(), layer_classes=["Layer"], options=options)


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(0, 19, (2, 6), generator=generator).to(DEVICE)


class WritesCopies(torch.optim.AdamW):
    """Leaves the copies that layers compute with as new as the parameters, as `train/adamw.py` does on GPUs."""

    writes_copies = True

    @torch.no_grad()
    def step(self, closure=None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                copy = undivided.copy_of(parameter)
                if copy is not None and parameter.grad is not None:
                    copy.before_writing()
                    copy.tensor.copy_(undivided.local(parameter).view(-1))
                    copy.mark_written(parameter)


def train(model: nn.Module, accumulate_unsharded: bool, writes: bool) -> list[Tensor]:
    """Losses, gradients, norms and parameters of three steps of two micro-batches, evaluations between."""
    kind = WritesCopies if writes else torch.optim.AdamW
    optimizer = kind(sharding.optimizer_groups(model), lr=1e-2)
    found = []
    for step in range(3):
        for micro in range(2):
            sharding.reduce_gradients(model, is_last=micro == 1, accumulate_unsharded=accumulate_unsharded)
            loss = model(batch(10 * step + micro), all_layers=step > 0)
            loss.backward()
            found.append(loss.detach().clone())
        found += [undivided.local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        found.append(gradients.clip(model, 1.0, optimizer=optimizer))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model.eval()(batch(77)).clone())
        model.train()
    return found + [undivided.local(p).detach().clone() for p in model.parameters()]


def equals_fsdp(
    accumulate_unsharded: bool,
    writes: bool,
    freeze: str | None,
    small: int,
    piece: int = peer_shards.MAX_PIECE_BYTES,
    **options,
) -> None:
    with sizes(small, piece):
        model = sharded("peer_memory", freeze, **options)
        groups = [group for module in (*model.layers, model) for group in undivided.param_groups(module)]
        assert all(type(group) is PeerGroup for group in groups)
        found = train(model, accumulate_unsharded, writes)
        assert [group.keeps_copies for group in groups] == [freeze is None, True, True]
    other = sharded("collectives", freeze, **options)
    assert not any(type(group) is PeerGroup for group in undivided.param_groups(other))
    expected = train(other, accumulate_unsharded, writes=False)
    assert len(found) == len(expected)
    for number, (one, two) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, two), f"value {number}: {(one - two).abs().max()}"


def order_of_reductions() -> list[list[str]]:
    """Which parameters are summed together, in the order of one backward."""
    found = []
    reduce = PeerShards.reduce

    def noted(self, group, gradients):
        found.append([slot.param._param_fqn for slot, _ in gradients])
        return reduce(self, group, gradients)

    PeerShards.reduce = noted
    try:
        with sizes(small=150):
            sharded("peer_memory", tied=False)(batch(0)).backward()
    finally:
        PeerShards.reduce = reduce
    return found


def a_model_is_freed() -> list[bool]:
    """What is asked of gradients of the root holds nothing of a model that nobody has any more."""
    model = sharded("peer_memory", tied=False)
    model(batch(0)).backward()
    (group,) = undivided.param_groups(model)
    left = [weakref.ref(param._unsharded_param) for param in group.fsdp_params]
    del model, group
    gc.collect()
    return [one() is None for one in left]


def ranks_that_sum_different_gradients_get_nan() -> list[bool]:
    """Rank 1 has no gradient of a bias: nobody may add up what an earlier step left there."""
    model = sharded("peer_memory")
    model(batch(0)).backward()
    model.zero_grad()
    (group,) = undivided.param_groups(model.layers[0])
    all_gradients = group._take_gradients
    if dist.get_rank() == 1:
        group._take_gradients = lambda: [pair for pair in all_gradients() if pair[1].ndim > 1]
    model(batch(1)).backward()
    own = [undivided.local(p.grad) for p in model.layers[0].parameters() if p.grad is not None]
    return [bool(gradient.isnan().all()) for gradient in own]


def a_rank_without_a_gradient_of_the_head() -> str:
    """Rank 0 sums the head before all layers; rank 1 has no gradient for it, and sums it after them."""
    with sizes(150):
        model = sharded("peer_memory", tied=False)
        if dist.get_rank() == 1:
            model.head.forward = lambda x: x @ model.head.weight.detach().T
        model(batch(0)).backward()
        try:
            gradients.accept(model, gradients.clip(model, 1.0), on_nonfinite="skip")
        except RuntimeError as error:
            return str(error)
        return ""


def a_rank_without_a_large_gradient_adds_zeros(small: int, piece: int) -> None:
    """On rank 1 a layer computes with a constant: the sum is what rank 0 has, and that of the others is as without."""
    with sizes(small, piece):
        found = []
        for exchange in ("peer_memory", "collectives"):
            model = sharded(exchange, tied=False)
            layer = model.layers[0]
            if dist.get_rank() == 1:
                layer.inner = lambda x, layer=layer: torch.tanh(layer.up(x)) @ layer.down.weight.detach().T
            model(batch(0)).backward()
            vars(layer).pop("inner", None)
            found.append([undivided.local(p.grad).clone() for p in model.parameters()])
            model.zero_grad()
            model(batch(1)).backward()
            found[-1] += [undivided.local(p.grad) for p in model.parameters()]
        for one, two in zip(*found, strict=True):
            assert one.isfinite().all() and torch.equal(one, two)


def parameters_that_are_freed_before_a_layer_ends() -> list[int]:
    """Bytes of the first layer's products when its backward ends, of one that nobody reads any more and one that is read."""
    found = []
    with sizes(small=150):
        for peeks in (False, True):
            model = sharded("peer_memory", tied=False, peeks=peeks)
            (group,) = undivided.param_groups(model.layers[0])
            post_backward = group.post_backward

            def noted(*unused, group=group, post_backward=post_backward):
                found.append(
                    sum(
                        s.param.all_gather_outputs[0].untyped_storage().nbytes() for s in group.slots if not s.is_small
                    )
                )
                return post_backward(*unused)

            group.post_backward = noted
            model(batch(0)).backward()
    return found


def a_sum_lives_until_it_was_waited_for() -> int:
    """The stream that sums may still write when the other one asks for memory; returns how many sums were looked at."""
    model = sharded("peer_memory")
    sum_parts, reduce = peer_sums.sum_parts, PeerShards.reduce
    written: list[weakref.ref[Tensor]] = []

    def noted(own, received, tags, out, **options):
        written.append(weakref.ref(out._base if out._base is not None else out))
        return sum_parts(own, received, tags, out, **options)

    def checked(self, group, gradients):
        written.clear()
        event = reduce(self, group, gradients)
        assert written and all(one() is not None for one in written)
        checked.count += 1
        return event

    checked.count = 0
    peer_sums.sum_parts, PeerShards.reduce = noted, checked
    try:
        for micro in range(2):  # the sums of the second are added to the gradients that the first left
            sharding.reduce_gradients(model, is_last=micro == 1)
            model(batch(micro)).backward()
    finally:
        peer_sums.sum_parts, PeerShards.reduce = sum_parts, reduce
    return checked.count


def room_for_what_others_send(piece: int) -> tuple[int, int]:
    """Bytes of a place for gradients, and of the largest shard."""
    with sizes(150, piece):
        model = sharded("peer_memory", tied=False, width=30)
        model(batch(0)).backward()
        groups = [group for module in (*model.layers, model) for group in undivided.param_groups(module)]
        return groups[0].shards._largest_part, max(
            slot.numel * group.itemsize for group in groups for slot in group.slots
        )


def a_change_is_seen_by_all() -> None:
    """A parameter changed on all ranks between steps is cast and read again; what the optimizer wrote is not cast."""
    model = sharded("peer_memory")
    model(batch(0)).backward()
    weight = model.layers[0].down.weight
    copy = undivided.copy_of(weight)
    for parameter in model.parameters():
        written = undivided.copy_of(parameter)
        written.before_writing()
        written.tensor.copy_(undivided.local(parameter).detach().view(-1))
        written.mark_written(parameter)
    copy.tensor.zero_()  # marks it
    marked = model(batch(0)).detach()
    model.reshard()
    with torch.no_grad():
        undivided.local(weight).mul_(2)
    changed = model(batch(0)).detach()
    model.reshard()
    undivided.forget_copies(model)
    assert torch.equal(changed, model(batch(0)).detach())
    assert not torch.equal(marked, changed)


def where_it_is_refused() -> list[str]:
    messages = []
    for options in ({"shard_exchange": "by post"}, {"shard_exchange": "peer_memory"}):
        try:
            sharding.shard_model(
                Model(), state_of(), layer_classes=["Layer"], options=sharding.ShardingOptions(**options)
            )
        except ValueError as error:
            messages.append(str(error))
    return messages
