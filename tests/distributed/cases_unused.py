"""Parameters that only some ranks' rows use, against one rank with all rows; see test_unused.py."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from patchgen.generated_models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from patchgen.runtime import parallel
from patchgen.runtime.parallel import ParallelConfig, gradients, loss, sharding, unused
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import lora
from patchgen.runtime.verify.small_config import small_config

WINDOW = 6
# Rows by step, micro-batch and rank: lengths. Of one long enough; of both; of the second micro-batch alone; of none.
LENGTHS = (((8, 4), (4, 4)), ((8, 7), (9, 8)), ((4, 4), (4, 8)), ((4, 3), (4, 5)))


class Layer(nn.Module):
    """What a row shorter than a window leaves out: a matrix, a vector and a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.pool = nn.Linear(8, 8), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(8))
        self.never = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.mix(x))
        if x.shape[1] >= WINDOW:
            y = y + torch.tanh(self.pool(x[:, :WINDOW]) + self.bias).mean(1, keepdim=True)
        return x + y


class Model(nn.Module):
    """Three layers like those; the second runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 19, bias=False)
        self.path = (0, 1, 1, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for index in self.path:
            x = self.layers[index](x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten(), reduction="sum")


def sharded(model: nn.Module, **options) -> nn.Module:
    state = ParallelState.create(ParallelConfig.for_world(dist.get_world_size()), "cpu")
    options = sharding.ShardingOptions(**options)
    return sharding.shard_model(model, state, layer_classes=["Layer"], options=options)


def rows(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, 19, (1, LENGTHS[step][micro][rank]), generator=generator)


def updates(model: nn.Module, ranks: list[int], accumulate_unsharded: bool) -> list[Tensor]:
    """Of each step of AdamW, which decays: the norm, which parameters had a gradient, and what became of all."""
    optimizer = torch.optim.AdamW(sharding.optimizer_groups(model), lr=1e-2, weight_decay=0.3)
    found = []
    for step, micros in enumerate(LENGTHS):
        for micro in range(len(micros)):
            if len(ranks) == 1:
                sharding.reduce_gradients(
                    model, is_last=micro == len(micros) - 1, accumulate_unsharded=accumulate_unsharded
                )
            for rank in ranks:
                model(rows(step, micro, rank)).backward()
        found.append(gradients.clip(model, 1.0))
        assert gradients.accept(model, found[-1], on_nonfinite="stop")
        found.append(torch.tensor([float(parameter.grad is not None) for parameter in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found += [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]
    return found


def updates_are_those_of_one_rank(accumulate_unsharded: bool, **options) -> tuple[float, list[float]]:
    """The largest relative difference, and how many parameters had a gradient in each step."""
    torch.manual_seed(0)
    whole = Model()
    model = sharded(copy.deepcopy(whole), **options)
    found = updates(model, [dist.get_rank()], accumulate_unsharded)
    expected = updates(whole, list(range(dist.get_world_size())), accumulate_unsharded)
    differences = [
        float((one - two).detach().abs().max() / two.detach().abs().max())
        for one, two in zip(found, expected, strict=True)
    ]
    return max(differences), [float(had.sum()) for had in expected[1 :: 2 + len(list(whole.parameters()))]]


def whole_parameters_are_summed() -> tuple[float, list[bool]]:
    """Parameters that no rank divides, as adapters: the largest difference from both rows' gradients, and which have none."""
    torch.manual_seed(0)
    model = Model()
    one_rank = copy.deepcopy(model)
    model(rows(0, 0, dist.get_rank())).backward()
    lora.reduce_gradients(model)
    unused.drop_unused_gradients(model)
    for rank in range(dist.get_world_size()):
        one_rank(rows(0, 0, rank)).backward()
    pairs = [(mine.grad, own.grad) for mine, own in zip(model.parameters(), one_rank.parameters(), strict=True)]
    differences = [float((mine - own).abs().max() / own.abs().max()) for mine, own in pairs if own is not None]
    return max(differences), [(mine is None) == (own is None) for mine, own in pairs]


def ranks_that_run_different_units() -> str:
    """As many gathers of as many bytes: each rank gets another layer than it asked for, and nothing waits."""
    torch.manual_seed(0)
    model = sharded(Model(), prefetch=0)
    model.path = ((0, 2), (1, 2))[dist.get_rank()]
    model(rows(1, 0, 0)).backward()
    try:
        gradients.accept(model, gradients.clip(model, 1.0), on_nonfinite="stop")
    except RuntimeError as error:
        return str(error)
    return ""


def compressors_of_short_rows() -> tuple[int, float]:
    """deepseek_v4 with a row shorter than its windows on rank 1: how many parameters that row leaves out, and the largest
    relative difference of a gradient from upstream's on one rank with both rows."""
    config = small_config("deepseek_v4").config
    rates = config.compress_rates.values()
    torch.manual_seed(0)
    upstream = modeling_deepseek_v4.DeepseekV4ForCausalLM(config).train()
    model = DeepseekV4ForCausalLM(config).train()
    model.load_state_dict(upstream.state_dict())
    rows = [torch.randint(3, config.vocab_size, (1, length)) for length in (2 * max(rates), min(rates) - 1)]
    items = torch.tensor(sum(row.shape[1] - 1 for row in rows))
    inputs = [{"input_ids": row, "labels": row, "num_items_in_batch": items, "use_cache": False} for row in rows]
    upstream(**inputs[1]).loss.backward()
    left_out = sum(parameter.grad is None for parameter in upstream.parameters())
    upstream(**inputs[0]).loss.backward()
    state = ParallelState.create(ParallelConfig.for_world(dist.get_world_size()), "cpu")
    sharding.shard_model(model, state)
    with parallel.using(state), loss.step(items, 1):
        model(**inputs[dist.get_rank()]).loss.backward()
    differences = [
        float((mine.grad.full_tensor() - own.grad).norm() / own.grad.norm().clamp(min=1e-30))
        for mine, own in zip(model.parameters(), upstream.parameters(), strict=True)
        if own.grad is not None
    ]
    return left_out - sum(parameter.grad is None for parameter in upstream.parameters()), max(differences)
