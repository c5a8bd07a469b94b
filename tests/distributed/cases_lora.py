"""What each rank does in the tests of adapters of experts; see test_expert_lora.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import cases_models
import torch
import torch.distributed as dist
from cases_trainer import PROBE, Kept
from torch.distributed.tensor import DTensor

from patchgen.runtime import parallel
from patchgen.runtime.parallel import ParallelConfig, loss, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import ending, expert_lora, lora
from patchgen.runtime.train.launched import LaunchedStep
from patchgen.runtime.train.recipe import LoraConfig, from_dict
from patchgen.runtime.train.trainer import Trainer


def train_all(runs: dict[str, tuple[dict, str]]) -> dict[str, dict]:
    """Several runs on the same ranks, by name; each is a recipe, and a folder for the adapters that it starts from."""
    return {name: train(values, start) for name, (values, start) in runs.items()}


def train(values: dict, start: str | None = None) -> dict:
    """A run with adapters: losses, logits of `PROBE` with the adapters and without them, and what the training holds.

    Args:
        start: where the adapters are saved before the first step.
    """
    kept = Kept()
    trainer = Trainer(from_dict(values), torch.device("cpu"), (kept,))
    if start is not None:
        lora.save(trainer.adapted, Path(start))
    held: dict[str, int] = {}
    launch_step = trainer.launch_step

    def measured(*step: Any) -> LaunchedStep:
        held["gradients"] = sum(size(p.grad) for p in trainer.model.parameters() if p.grad is not None)
        return launch_step(*step)

    trainer.launch_step = measured
    adapters = sum(size(p) for name, p in trainer.model.named_parameters() if "lora_" in name)
    logits: dict[str, torch.Tensor] = {}
    export = ending.export

    def probed(trainer: Trainer) -> Path:
        with torch.no_grad(), parallel.using(trainer.state):
            logits["logits"] = probe(trainer)
            with trainer.adapted.disable_adapter():
                logits["off"] = probe(trainer)
        return export(trainer)

    with mock.patch.object(ending, "export", probed):  # before the adapters are merged
        trainer.run()
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    held |= {"adapters": adapters, "optimizer": sum(size(value) for value in states if value.ndim)}
    return {"losses": [record.loss for record in kept.steps], "held": held, **logits}


def probe(trainer: Trainer) -> torch.Tensor:
    """Logits of this rank's share of a sequence, gathered."""
    ids = torch.tensor([PROBE])
    sp, rank = trainer.state.sp, trainer.state.sp_rank
    width = ids.shape[1] // sp
    mine = trainer.model.eval()(input_ids=ids[:, rank * width : (rank + 1) * width], use_cache=False).logits
    if sp == 1:
        return mine.clone()
    parts = [torch.empty_like(mine) for _ in range(sp)]
    dist.all_gather(parts, mine.contiguous(), group=trainer.state.sp_group)
    return torch.cat(parts, 1)


def size(tensor: torch.Tensor) -> int:
    """Bytes on this rank."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.numel() * own.element_size()


def adapted(name: str, parameters: tuple[str, ...], folder: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of a generated model with random adapters of experts, which are saved in `folder`; and their gradients, as
    PEFT names and lays them out."""
    state = ParallelState.create(ParallelConfig.for_world(dist.get_world_size(), ep=dist.get_world_size()), "cpu")
    model = sharding.shard_model(cases_models.build(name, generated=True, attention_name="eager"), state)
    wanted = LoraConfig(rank=3, target_modules=(), target_parameters=parameters)
    view = lora.add_adapters(model, wanted, state, source="", seed=0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_B" in path:
                parameter.to_local().normal_(0, 0.1)
    lora.save(view, Path(folder))
    with parallel.using(state), loss.step(torch.tensor(1)):
        logits = model(input_ids=torch.tensor([PROBE]) % cases_models.VOCABULARY, use_cache=False).logits
        (logits.square().sum() / dist.get_world_size()).backward()  # gradients are summed over the ranks
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.to_local().copy_(parameter.grad.to_local())
    names = {f"base_model.model.{path}" for path, parameter in model.named_parameters() if parameter.requires_grad}
    found = expert_lora.in_peft_layout(view)
    assert found.keys() == names
    return logits.detach(), {path.replace(".default", ""): gradient for path, gradient in found.items()}
