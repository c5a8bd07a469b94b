"""What each rank does in the tests of row-sharded tables; see test_tables_on_ranks.py."""

from __future__ import annotations

import copy
import pathlib

import cases_checkpoints
import cases_models
import cases_sequence
import torch
import torch.distributed as dist
from rounding import require_equal_up_to_rounding
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchgen.runtime.checkpoint import export_pretrained, load_pretrained
from patchgen.runtime.parallel import sharding, tables
from patchgen.runtime.parallel.gradients import norm

WIDTH = 4


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def ids_of(rank: int, num_rows: int, lookup: int) -> Tensor:
    """Ids with repetitions; none at all for rank 1 in the second look-up."""
    if (rank, lookup) == (1, 1):
        return torch.empty(1, 0, dtype=torch.long)
    return torch.randint(0, num_rows, (2, 5), generator=torch.Generator().manual_seed(10 * lookup + rank))


def sharded(cls: type[nn.Embedding], num_rows: int, dtype: torch.dtype, **layout: int) -> tuple[nn.Embedding, Tensor]:
    """A table of small integers, on all ranks, and the whole weight."""
    module = cls(num_rows, WIDTH, padding_idx=2, dtype=dtype)
    whole = torch.randint(-8, 8, (num_rows, WIDTH), generator=torch.Generator().manual_seed(0)).to(dtype)
    module.weight.data.copy_(whole)
    model = nn.Sequential(module)
    state = cases_sequence.state_of(**layout)
    tables.divide(model, ["0.weight"], state, param_dtype=None)
    return module, whole


def looks_up(cls: type[nn.Embedding], num_rows: int, dtype: torch.dtype, **layout: int) -> None:
    """Rows and gradients of two look-ups, bit for bit those of the whole table on one rank with the ids of all: all are small
    integers, whose sums are exact in any order."""
    module, whole = sharded(cls, num_rows, dtype, **layout)
    alone = cls(num_rows, WIDTH, padding_idx=2, _weight=whole.clone())
    rank, world = dist.get_rank(), dist.get_world_size()
    for lookup in range(2):
        ids = ids_of(rank, num_rows, lookup)
        rows = module(ids)
        assert rows.shape == (*ids.shape, WIDTH) and torch.equal(rows, alone(ids).detach())
        (rows * (1 + rank + lookup)).sum().backward()
        for other in range(world):
            (alone(ids_of(other, num_rows, lookup)) * (1 + other + lookup)).sum().backward()
    gradient = module.weight.grad
    assert isinstance(gradient, DTensor) and torch.equal(gradient.full_tensor(), alone.weight.grad)
    assert not alone.weight.grad[2].any()
    require_equal_up_to_rounding(norm([module.weight]), alone.weight.grad.float().norm())
    module.weight.requires_grad_(False)
    assert not module(ids_of(rank, num_rows, 0)).requires_grad, "frozen: no backward"


def scales_as_gathered(width: int, computed: torch.dtype) -> None:
    """Rows of gemma4's scaled embedding and the gradients of its table, bit for bit those of FSDP2, which casts what it gathers:
    upstream's forward rounds its scale to the weight's dtype."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

    results, names = [], ("Gemma4TextScaledWordEmbedding",)
    for above in (1, None):
        torch.manual_seed(0)
        model = nn.Sequential(Gemma4TextScaledWordEmbedding(16, width, padding_idx=0, embed_scale=width**0.5))
        options = sharding.ShardingOptions(param_dtype=computed, shard_tables_above=above)
        sharding.shard_model(
            model, cases_sequence.state_of(), options=options, layer_classes=names, expert_parameters=()
        )
        assert len(tables.of_model(model)) == (above == 1)
        rows = model(torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank())))
        rows.sum().backward()
        results.append((rows, cases_models.full_tensor(model[0].weight.grad)))
    (rows, gradient), (expected_rows, expected_gradient) = results
    assert rows.dtype == expected_rows.dtype == computed and torch.equal(rows, expected_rows)
    require_equal_up_to_rounding(gradient, expected_gradient, dtype=computed)


def refuses_what_is_no_row(*, everywhere: bool) -> list[str]:
    """The errors of ids below and beyond the rows, looked up on all ranks or on the last alone."""
    module, _ = sharded(nn.Embedding, 5, torch.float32)
    told = []
    for wrong in (-1, 5):
        try:
            module(torch.tensor([0, wrong if everywhere or dist.get_rank() == 1 else 4]))
        except IndexError as error:
            told.append(str(error))
    return told


def round_trip(head: str, file: str, source: str, target: str) -> tuple[int, int, list[str]]:
    """Loads a checkpoint of a model with n-gram tables into a sharded model and exports it; returns the bytes read, those of this
    rank's parts, and the row-sharded tables."""
    cls = cases_checkpoints.generated_class(head, file)
    config = copy.deepcopy(cls.config_class.from_pretrained(source))
    with torch.device("meta"):
        model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    sharding.shard_model(model, cases_sequence.state_of(), options=sharding.ShardingOptions(shard_tables_above=1))
    report = load_pretrained(model, source)
    own = sum(cases_checkpoints.local_tensor(tensor).nbytes for tensor in model.state_dict().values())
    export_pretrained(model, target, source=source, max_file=100_000)
    return report.num_bytes, own, list(tables.of_model(model))


def generated(folder: str) -> pathlib.Path:
    """The generated file of qwen4_exp, written to a folder."""
    from patchgen import pipeline, provenance, upstream

    provenance.write(pipeline.generate(upstream.load("qwen4_exp")), pathlib.Path(folder))
    return pathlib.Path(folder) / "modeling_qwen4_exp.py"
