"""Whether the first loss is plausible for undamaged weights and matching data, checked before the first optimizer step.

An untrained model gives all V tokens nearly the same probability: ln V. Random weights are a little above it, for their
logits are not quite equal. Far above it are weights or data that do not belong together: a head that was scaled, a
tokenizer of another model, labels that were shifted twice.

    V = 151,936    ln V = 11.93    0.8 ln V = 9.54    1.5 ln V + 1 = 18.9

    weights                                       warned above     the run ends above
    random, or with a new part                    -                1.5 ln V + 1
    from a checkpoint                             0.8 ln V         1.5 ln V + 1
    from a checkpoint that the doctor examined    0.8 ln V         1.5 L + 1, L the loss that it found on these data
    any, with train.first_loss_limit              -                that limit
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.data.text import digest
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, to_dict
from patchgen.runtime.train.records import TrainingStopped

SHARE, SPREAD = 1.5, 1.0
KNOWN = 0.8
"""Share of ln V: a trained checkpoint is below it on text of any language that it has seen."""


def highest(vocab_size: int) -> float:
    """The largest plausible first loss per label, in nats."""
    return SHARE * math.log(vocab_size) + SPREAD


@dataclass(frozen=True)
class Expected:
    """What a first loss is compared with.

    Attributes:
        vocab_size: V.
        limit: `train.first_loss_limit`; None: not set.
        is_trained: whether all weights come from a checkpoint.
        level: the loss that the doctor measured for these weights and data; None: it was not run.
    """

    vocab_size: int
    limit: float | None = None
    is_trained: bool = False
    level: float | None = None

    @property
    def most(self) -> float:
        """A first loss above it is implausible."""
        if self.limit is not None:
            return self.limit
        most = highest(self.vocab_size)
        return most if self.level is None or not self.is_trained else min(most, SHARE * self.level + SPREAD)

    def refusal(self, loss: float) -> str:
        """Why a first loss per label is implausible; empty if it is not."""
        if not loss > self.most:  # one that is no number is told by its gradient (optim.on_nonfinite)
            return ""
        told = f"The first loss is {loss:.2f}; an untrained model of {self.vocab_size:,} tokens has ln V = "
        told += f"{math.log(self.vocab_size):.2f}, and a first loss above {self.most:.2f} is implausible"
        if self.limit is None and self.most < highest(self.vocab_size):
            return (
                f"{told}: `patchgen doctor` measured {self.level:.2f} with these weights on the first samples. Either the run "
                "computes something else than one device does, or the rest of the data is of another kind. "
                "train.first_loss_limit raises the limit."
            )
        return (
            f"{told}. The weights are damaged (a scaled head, parts left at random), or they and the data do not belong "
            "together (another tokenizer, shifted labels): `patchgen doctor RECIPE` says which. train.first_loss_limit raises "
            "the limit."
        )

    def warning(self, loss: float) -> str:
        """What is unusual about a plausible first loss; empty: nothing."""
        untrained = math.log(self.vocab_size)
        if self.limit is not None or not self.is_trained or not loss > KNOWN * untrained:
            return ""
        return (
            f"The first loss is {loss:.2f}, and an untrained model has ln V = {untrained:.2f}: these weights, all from a "
            "checkpoint, are hardly better on these data. If they were trained, look for the tokenizer or chat template of "
            "another model, shifted labels or damaged weights: `patchgen doctor RECIPE` says which. If they were not, or on "
            "data of another kind, this is expected: set train.first_loss_limit to silence the warning."
        )


def expected(recipe: Recipe, model: PreTrainedModel) -> Expected:
    """What the first loss of a recipe's model is compared with; `level` is that of a doctor that ran on this machine."""
    trained = models.is_from_checkpoint(recipe, model)
    level = read_level(recipe) if trained else None
    return Expected(model.config.get_text_config().vocab_size, recipe.train.first_loss_limit, trained, level)


def require_plausible(share: Tensor, model: PreTrainedModel, recipe: Recipe) -> None:
    """Checks the loss before the first optimizer step. Every rank takes part in the sum.

    Args:
        share: this rank's of the first step's loss.

    Raises:
        TrainingStopped: it is implausible.
    """
    held_to, is_first = expected(recipe, model), dist.get_rank() == 0
    level = held_to.level if is_first and held_to.level is not None else 0.0  # machines may have kept different ones
    sums = all_reduce(torch.stack([share, torch.full_like(share, level)]), operation="add up the first loss")
    loss, level = sums.tolist()
    held_to = Expected(held_to.vocab_size, held_to.limit, held_to.is_trained, level or None)
    if told := held_to.refusal(loss):
        raise TrainingStopped(told)
    if is_first and (told := held_to.warning(loss)):
        print(told, flush=True)


# ------------------------------------------------------------------------------------------- a kept level


def keep_level(recipe: Recipe, loss: float) -> None:
    """Keeps the first loss that the doctor found with a recipe's weights on its data."""
    place = _place(recipe)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({"loss": loss}), encoding="utf-8")


def read_level(recipe: Recipe) -> float | None:
    """The loss that was kept for these weights, as they lie there now, and these data; None: none was."""
    try:
        return float(json.loads(_place(recipe).read_text(encoding="utf-8"))["loss"])
    except (OSError, ValueError, KeyError):
        return None


def _place(recipe: Recipe) -> Path:
    return Path.home() / ".cache" / "patchgen" / "first_loss" / f"{digest(_identity(recipe))}.json"


def _identity(recipe: Recipe) -> list[Any]:
    """What a first loss depends on: not the layout, the kernels, nor the rows, so that a recipe of which the proof has
    decided these is the one that names none."""
    found, values = models.find_weights(recipe.model), to_dict(recipe)
    model: Mapping[str, Any] = values["model"]
    files = sorted(found.glob("*.safetensors")) if isinstance(found, Path) else []
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    place = str(found.resolve()) if isinstance(found, Path) else str(found)
    named = {name: model[name] for name in ("overrides", "code")}
    return [named, place, stamps, values["data"]["kind"], values["data"]["sources"]]
