"""What each rank does in the tests of adapters of experts; see test_expert_lora.py."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from cases_trainer import PROBE, Kept
from torch.distributed.tensor import DTensor

from patchgen.runtime import parallel
from patchgen.runtime.train import lora
from patchgen.runtime.train.recipe import from_dict
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
    update = trainer.update

    def measured() -> tuple[float, float]:
        held["gradients"] = sum(size(p.grad) for p in trainer.model.parameters() if p.grad is not None)
        return update()

    trainer.update = measured
    adapters = sum(size(p) for name, p in trainer.model.named_parameters() if "lora_" in name)
    logits: dict[str, torch.Tensor] = {}
    export = trainer.export

    def probed() -> Path:
        with torch.no_grad(), parallel.using(trainer.state):
            logits["logits"] = probe(trainer)
            with trainer.adapted.disable_adapter():
                logits["off"] = probe(trainer)
        return export()

    trainer.export = probed  # before the adapters are merged
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
