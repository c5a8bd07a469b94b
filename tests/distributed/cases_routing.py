"""What each rank does in the tests of router replay; see test_routing_on_ranks.py."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path

import cases_models
import cases_rl
import cases_sequence
import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime import attention, rl, seams
from patchgen.runtime.checkpoint import stream_weights
from patchgen.runtime.parallel import checkpointing, sharding
from patchgen.runtime.parallel.state import ParallelState

NOISE, LEARNING_RATE = 1e-6, 1e-2


def build(name: str, state: ParallelState, *, has_noise: bool, checkpoint: str = "none") -> nn.Module:
    """A model whose experts all tie, or whose routers decide each tie by a little noise."""
    attention.register()
    seams.configure(fused_moe="torch")
    model = cases_models.build(name, generated=True, attention_name="patchgen_eager")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "mlp.gate." in key or "mlp.router." in key:
                parameter.copy_(parameter[:1].clone().expand_as(parameter))
                parameter.add_(has_noise * NOISE * torch.randn(parameter.shape, generator=generator))
    checkpointing.apply(model, checkpoint)
    return sharding.shard_model(model, state)


def rows(state: ParallelState) -> tuple[dict[str, Tensor], Tensor]:
    """This rank's rows, padded left and right, and which they are."""
    inputs, _, _ = cases_rl.rollouts()
    mine = torch.arange(cases_rl.ROWS).chunk(state.config.num_batches)[state.batch_index]
    return {key: value[mine] for key, value in inputs.items()}, mine


def record(name: str, **layout: int) -> tuple[Tensor, Tensor, rl.RoutingRecord]:
    """Log-probabilities of this rank's rows, which they are, and the experts that were selected."""
    state = cases_sequence.state_of(**layout)
    model = build(name, state, has_noise=False)
    inputs, mine = rows(state)
    with rl.record_routing(model, state) as routing:
        values = rl.log_probs(model, inputs, state)
    return values, mine, routing


def replay(name: str, routing: rl.RoutingRecord, checkpoint: str = "none", **layout: int):
    """With noise in routers: log-probabilities of this rank's rows with the recorded experts and without, which rows they are, and
    how much a step with the recorded experts changes each weight. `update` sees the log-probabilities of `log_probs`, to the bit.

    Args:
        routing: of all rows.
    """
    state = cases_sequence.state_of(**layout)
    model = build(name, state, has_noise=True, checkpoint=checkpoint)
    inputs, mine = rows(state)
    routing = rl.RoutingRecord({layer: value[mine] for layer, value in routing.experts.items()}, routing.multiple)
    found = rl.log_probs(model, inputs, state, routing=routing)
    without = rl.log_probs(model, inputs, state)
    before = dict(stream_weights(model, layout="stacked"))

    def loss_function(values: Tensor, _: None) -> Tensor:
        assert torch.equal(values.detach(), found)
        return values.sum()

    optimizer = torch.optim.SGD(sharding.optimizer_groups(model), lr=LEARNING_RATE, weight_decay=0.0)
    rl.update(model, optimizer, [(inputs, None)], loss_function, state, routing=[routing], max_grad_norm=1e9)
    after = stream_weights(model, layout="stacked")
    changes = {key: value - before[key] for key, value in after}
    return found, without, mine, changes if dist.get_rank() == 0 else {}


def page() -> tuple[Tensor, Tensor, Tensor]:
    """The first block of docs/tasks/router_replay.md as it stands: log-probabilities before a step, of a reference whose routers
    decide ties otherwise, and after the step."""
    text = (Path(__file__).parents[2] / "docs/tasks/router_replay.md").read_text(encoding="utf-8")
    state = cases_sequence.state_of()
    model, reference = (build("qwen3_moe", state, has_noise=has_noise) for has_noise in (False, True))
    inputs, _ = rows(state)
    optimizer = torch.optim.SGD(sharding.optimizer_groups(model), lr=1e-6)
    given = {"model": model, "reference": reference, "inputs": inputs, "state": state, "optimizer": optimizer}
    names = given | {"told": None, "loss_function": lambda values, _: values.sum()}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1], names)
    assert names["done"].taken
    return names["before"], names["of_reference"], names["after"]
