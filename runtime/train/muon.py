"""Muon for matrices and for stacks of experts' matrices: steps by a gradient's momentum whose singular values are made alike.

    buffer = momentum * buffer + (1 - momentum) * gradient
    update = orthogonalised(momentum * buffer + (1 - momentum) * gradient)
    weight = (1 - lr * decay) * weight - lr * 0.2 * sqrt(max(rows, columns)) * update

Muon is of Jordan et al. (https://kellerjordan.github.io/posts/muon, with the coefficients below), the factor of "Muon is Scalable
for LLM Training" (arXiv:2502.16982, section 2.2), by which an entry changes by 0.2 as with AdamW, so that learning rates carry
over. `torch.optim.Muon` computes the same for whole matrices of two dimensions.

A matrix is orthogonalised as a whole. Experts that a rank has whole need no communication. Of matrices that n ranks hold in slices,
each rank is sent every n-th, and sends the slices of the result back: each way a rank sends 2 bytes for each element that it
holds, over the mesh dimension that slices them. Copies of a model (HSDP) compute the same. No rank holds a whole stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchgen.runtime.parallel import watch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x x^T x and (x x^T)^2 x. Five steps bring singular values from 0.002 on to between 0.68 and 1.2, smaller ones nearer to it
than they were: 0.001 to 0.47."""
STEPS = 5
EPSILON = 1e-7
BATCH_ELEMENTS = 1 << 27
"""Elements of the matrices that a rank orthogonalises at once, in 16 bits; an iteration needs a few copies."""


@dataclass(frozen=True)
class Parts:
    """Which rows, or columns, of a matrix form matrices of their own.

    Attributes:
        count: how many there are; 1: the matrix is whole.
        dim: 0: rows are divided; 1: columns.
        alternating: every `count`-th row belongs together (`gate0, up0, gate1, ...`), instead of a block of rows.
    """

    count: int = 1
    dim: int = 0
    alternating: bool = False

    def split(self, matrices_KRC: Tensor) -> Tensor:
        """`[K * count, rows / count, columns]`; transposed if columns are divided."""
        if self.dim == 1:
            matrices_KRC = matrices_KRC.mT
        K, R, C = matrices_KRC.shape
        if self.alternating:
            return matrices_KRC.reshape(K, R // self.count, self.count, C).transpose(1, 2).flatten(0, 1)
        return matrices_KRC.reshape(K * self.count, R // self.count, C)

    def join(self, parts: Tensor) -> Tensor:
        """The inverse of `split`."""
        parts = parts.unflatten(0, (-1, self.count))
        whole = (parts.transpose(1, 2) if self.alternating else parts).flatten(1, 2)
        return whole.mT if self.dim == 1 else whole


WHOLE = Parts()


@dataclass(frozen=True)
class _Slices:
    """How ranks hold the matrices of a parameter: whole without a group, else slices along `dim` of rows (0) or columns (1)."""

    group: dist.ProcessGroup | None = None
    dim: int = 0


class Muon(torch.optim.Optimizer):
    """Muon; the state is that of `torch.optim.Muon`, a `momentum_buffer` laid out as the parameter.

    Args:
        groups: of parameters of two dimensions, or of three, stacks of matrices `[E, rows, columns]`; plain or DTensors. Each
            group may have its own `lr` and `weight_decay`.
        parts: of parameters whose matrices are divided before they are orthogonalised.

    Raises:
        ValueError: a parameter of other dimensions, or one whose matrices ranks slice in two ways.
    """

    def __init__(
        self,
        groups: Sequence[dict],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        parts: Mapping[nn.Parameter, Parts] | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.parts = dict(parts or {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim not in (2, 3):
                    raise ValueError(
                        f"Muon takes matrices and stacks of them; found the shape {list(parameter.shape)}."
                    )
                _slices(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps every parameter that has a gradient; ranks must have gradients for the same ones."""
        self._next_owner = 0
        for group in self.param_groups:
            for members in self._batches(parameter for parameter in group["params"] if parameter.grad is not None):
                self._step_together(members, group)

    def _batches(self, parameters: Iterator[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Parameters whose matrices are alike, as many as may be orthogonalised at once."""
        alike: dict[tuple, list[nn.Parameter]] = {}
        for parameter in parameters:
            layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else ()
            alike.setdefault((parameter.shape, self.parts.get(parameter, WHOLE), layout), []).append(parameter)
        for (shape, *_), members in alike.items():
            ranks = 1 if (slices := _slices(members[0])).group is None else slices.group.size()
            at_once = max(1, ranks * BATCH_ELEMENTS // max(1, shape.numel()))
            for start in range(0, len(members), at_once):
                yield members[start : start + at_once]

    def _step_together(self, members: list[nn.Parameter], group: dict) -> None:
        updates = [self._with_momentum(parameter, group["momentum"]) for parameter in members]
        parts, slices = self.parts.get(members[0], WHOLE), _slices(members[0])
        rows, columns = members[0].shape[-2:]
        together = torch.cat(updates) if len(updates) > 1 else updates[0]
        if slices.group is None:
            found = _in_batches(together, parts)
        else:
            found = self._exchanged(together, parts, slices, (rows, columns))
        sizes = (rows // parts.count, columns) if parts.dim == 0 else (rows, columns // parts.count)
        rate = group["lr"] * 0.2 * math.sqrt(max(sizes))
        for parameter, update in zip(members, found.split([len(one) for one in updates]), strict=True):
            weight = _local(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update.to(weight.device).view_as(weight), alpha=-rate)

    def _exchanged(self, updates_KRC: Tensor, parts: Parts, slices: _Slices, sizes: tuple[int, int]) -> Tensor:
        """This rank's slices of matrices, orthogonalised as wholes by the ranks that own them.

        Args:
            updates_KRC: this rank's slices.
            sizes: rows and columns of a whole matrix.
        """
        assert slices.group is not None
        sliced = updates_KRC.mT if slices.dim == 1 else updates_KRC
        exchange = _Exchange(slices.group, len(sliced), sizes[slices.dim], sizes[1 - slices.dim], self._next_owner)
        self._next_owner += len(sliced)  # so that few matrices of each shape are not always the first rank's
        whole = exchange.gather(sliced)
        whole = _in_batches(whole.mT if slices.dim == 1 else whole, parts)
        sliced = exchange.scatter(whole.mT if slices.dim == 1 else whole)
        return sliced.mT if slices.dim == 1 else sliced

    def _with_momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """This rank's part of a gradient with Nesterov's momentum, `[matrices, rows, columns]` in bf16."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None, "`step` takes no others"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        gradient, buffer = _local(gradient), _local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum).bfloat16()
        if isinstance(parameter, DTensor):  # parameters in host memory are computed where their ranks compute
            update = update.to(parameter.device_mesh.device_type)
        return update.unsqueeze(0) if update.ndim == 2 else update


def orthogonalised(matrices_KRC: Tensor) -> Tensor:
    """U V^T of each matrix U S V^T, but for singular values of about 0.7 to 1.2 in place of 1, by Newton and Schulz's iteration
    in the matrices' dtype."""
    R, C = matrices_KRC.shape[1:]
    x = matrices_KRC.mT if R > C else matrices_KRC
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = x / norms.clamp(min=EPSILON).to(x.dtype)  # no singular value above one
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.mT if R > C else x


def _in_batches(matrices_KRC: Tensor, parts: Parts) -> Tensor:
    """Orthogonalises matrices in place."""
    at_once = max(1, BATCH_ELEMENTS // max(1, matrices_KRC[:1].numel()))
    for batch in matrices_KRC.split(at_once):
        if batch.numel():
            batch.copy_(parts.join(orthogonalised(parts.split(batch))))
    return matrices_KRC


class _Exchange:
    """Sends slices of `count` matrices `[length, width]`, which ranks hold by rows, to the ranks that own them, and back.

    Of n ranks, rank `first + j` modulo n owns matrix j.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, length: int, width: int, first: int) -> None:
        self.group, self.width, self.ranks, self.rank = group, width, group.size(), group.rank()
        self.starts = [(rank - first) % self.ranks for rank in range(self.ranks)]
        per_rank = -(-length // self.ranks)  # FSDP2 cuts as torch.chunk does
        self.rows = [min(max(0, length - rank * per_rank), per_rank) for rank in range(self.ranks)]
        self.owned = [len(range(start, count, self.ranks)) for start in self.starts]

    def gather(self, slices_KrC: Tensor) -> Tensor:
        """The whole matrices that this rank owns, from everybody's slices."""
        sent = [slices_KrC[start :: self.ranks].reshape(-1) for start in self.starts]
        mine = self.owned[self.rank]
        received = self._exchange(sent, [mine * rows * self.width for rows in self.rows])
        if not mine:
            return slices_KrC.new_empty(0, sum(self.rows), self.width)
        return torch.cat([part.view(mine, -1, self.width) for part in received if len(part)], dim=1)

    def scatter(self, owned_KRC: Tensor) -> Tensor:
        """This rank's slices of all matrices, from those that ranks own."""
        sent = [part.reshape(-1) for part in owned_KRC.split(self.rows, dim=1)]
        rows = self.rows[self.rank]
        received = self._exchange(sent, [owned * rows * self.width for owned in self.owned])
        slices = owned_KRC.new_empty(sum(self.owned), rows, self.width)
        for rank, part in enumerate(received):
            slices[self.starts[rank] :: self.ranks] = part.view(self.owned[rank], rows, self.width)
        return slices

    def _exchange(self, sent: list[Tensor], received: list[int]) -> tuple[Tensor, ...]:
        target = sent[0].new_empty(sum(received))
        # As bytes, since gloo does not send bf16.
        sizes = ([target.itemsize * size for size in counts] for counts in (received, [len(one) for one in sent]))
        with watch.operation("slices of matrices for Muon"):
            dist.all_to_all_single(
                target.view(torch.uint8), torch.cat(sent).view(torch.uint8), *sizes, group=self.group
            )
        return target.split(received)


def _slices(parameter: nn.Parameter) -> _Slices:
    if not isinstance(parameter, DTensor):
        return _Slices()
    mesh, stacks = parameter.device_mesh, parameter.ndim - 2
    # Not by class: the shard of an expert over a second mesh has a class of its own.
    divided = [
        (place, dim)
        for place, placement in enumerate(parameter.placements)
        if (dim := getattr(placement, "dim", -1)) >= stacks and mesh.size(place) > 1
    ]
    if len(divided) > 1:
        raise ValueError(f"Muon: matrices of the shape {list(parameter.shape)} are sliced over two mesh dimensions.")
    if not divided:
        return _Slices()
    ((place, dim),) = divided
    return _Slices(mesh.get_group(place), dim - stacks)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
