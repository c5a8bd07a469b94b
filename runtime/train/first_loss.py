"""Checks before the first optimizer step whether the first loss is plausible for undamaged weights and matching data.

An untrained model gives all V tokens nearly the same probability, a loss of ln V; random weights are slightly above it, since
their logits are not quite equal. A loss far above it means damaged weights or weights and data that do not belong together: a
scaled head, another model's tokenizer, labels shifted twice.

    V = 151,936    ln V = 11.93    0.8 ln V = 9.54    1.5 ln V + 1 = 18.9

    weights                                       warned above     the run ends above
    random, or with a new part                    -                1.5 ln V + 1
    from a checkpoint                             0.8 ln V         1.5 ln V + 1
    from a checkpoint that the doctor examined    0.8 ln V         the lower of that and 1.5 L + 1; L: the loss it measured
    any, with train.first_loss_limit              -                that limit
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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

FACTOR, MARGIN = 1.5, 1.0
IRRELEVANT_KEYS = (
    "separate_modalities",
    "cache_dir",
    "num_workers",
    "shuffle",
    "seed",
    "epochs",
    "pool",
    "pad_batches",
)
"""Keys of data that change neither samples nor their labels, or that preflight fills in."""
TRAINED_FACTOR = 0.8
"""The loss of a trained checkpoint is below this multiple of ln V on text of any language that it has seen."""


def highest_plausible(vocab_size: int) -> float:
    """The largest plausible first loss per label, in nats."""
    return FACTOR * math.log(vocab_size) + MARGIN


@dataclass(frozen=True)
class Expected:
    """What a first loss is compared with.

    Attributes:
        vocab_size: V.
        limit: `train.first_loss_limit`; None: not set.
        is_trained: whether all weights come from a checkpoint.
        measured: the loss that the doctor measured for these weights and data; None: it was not run.
    """

    vocab_size: int
    limit: float | None = None
    is_trained: bool = False
    measured: float | None = None

    @property
    def threshold(self) -> float:
        """A first loss above it is implausible."""
        if self.limit is not None:
            return self.limit
        threshold = highest_plausible(self.vocab_size)
        if self.measured is None or not self.is_trained:
            return threshold
        return min(threshold, FACTOR * self.measured + MARGIN)

    def refusal(self, loss: float) -> str:
        """Why a first loss per label is implausible; empty if it is not."""
        if not loss > self.threshold:  # NaN is left to the check of its gradient (optim.on_nonfinite)
            return ""
        message = f"The first loss is {loss:.2f}; an untrained model with V = {self.vocab_size:,} has ln V = "
        message += f"{math.log(self.vocab_size):.2f}, and a first loss above {self.threshold:.2f} is implausible"
        if self.limit is None and self.threshold < highest_plausible(self.vocab_size):
            return (
                f"{message}: `patchgen doctor` measured {self.measured:.2f} with these weights on the first samples. Either the "
                "run does not compute what one device computes, or the rest of the data is of another kind. "
                "train.first_loss_limit raises the limit."
            )
        return (
            f"{message}. The weights are damaged (a scaled head, parts left randomly initialised), or they and the data do not "
            "belong together (another tokenizer, shifted labels): `patchgen doctor RECIPE` says which. "
            "train.first_loss_limit raises the limit."
        )

    def warning(self, loss: float) -> str:
        """What is unusual about a plausible first loss; empty if nothing is."""
        untrained = math.log(self.vocab_size)
        if self.limit is not None or not self.is_trained or not loss > TRAINED_FACTOR * untrained:
            return ""
        return (
            f"The first loss is {loss:.2f}, and an untrained model has ln V = {untrained:.2f}: these weights, all from a "
            "checkpoint, are hardly better on these data. If they were trained, look for the tokenizer or chat template of "
            "another model, shifted labels or damaged weights: `patchgen doctor RECIPE` says which. If they were not, or the "
            "data are of another kind, this is expected: set train.first_loss_limit to silence the warning."
        )


def expected(recipe: Recipe, model: PreTrainedModel) -> Expected:
    """What the first loss of a recipe's model is compared with; `measured` comes from this machine's cache."""
    trained = models.needs_all_weights(recipe, model)
    measured = read_measured(recipe) if trained else None
    return Expected(model.config.get_text_config().vocab_size, recipe.train.first_loss_limit, trained, measured)


def require_plausible(share: Tensor, model: PreTrainedModel, recipe: Recipe) -> None:
    """Checks the loss before the first optimizer step (collective).

    Args:
        share: this rank's share of the first step's loss.

    Raises:
        TrainingStopped: it is implausible.
    """
    local, is_first = expected(recipe, model), dist.get_rank() == 0
    measured = (local.measured or 0.0) if is_first else 0.0  # rank 0 decides: caches of machines may differ
    sums = all_reduce(torch.stack([share, torch.full_like(share, measured)]), operation="add up the first loss")
    loss, measured = sums.tolist()
    agreed = replace(local, measured=measured or None)
    if refusal := agreed.refusal(loss):
        raise TrainingStopped(refusal)
    if is_first and (warning := agreed.warning(loss)):
        print(warning, flush=True)


# ------------------------------------------------------------------------------------------- cached measurements


def save_measured(recipe: Recipe, loss: float) -> None:
    """Caches the first loss that the doctor measured with a recipe's weights on its data.

    Raises:
        OSError: the cache cannot be written.
    """
    file = _cache_file(recipe)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"loss": loss}), encoding="utf-8")


def read_measured(recipe: Recipe) -> float | None:
    """The cached loss of these weight files, as they are now, on these data; None if there is none that can be read."""
    try:
        return float(json.loads(_cache_file(recipe).read_text(encoding="utf-8"))["loss"])
    except (OSError, ValueError, KeyError, TypeError):  # TypeError: JSON of another form
        return None


def _cache_file(recipe: Recipe) -> Path:
    return Path.home() / ".cache" / "patchgen" / "first_loss" / f"{digest(_cache_key(recipe))}.json"


def _cache_key(recipe: Recipe) -> list[Any]:
    """What a first loss depends on. Layout and kernels, which change it only by rounding, are left out, and so are attention and
    the modalities that share no row, which preflight fills in."""
    weights, values = models.find_weights(recipe.model), to_dict(recipe)
    model: Mapping[str, Any] = values["model"]
    files = sorted(weights.glob("*.safetensors")) if isinstance(weights, Path) else []
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    location = str(weights.resolve()) if isinstance(weights, Path) else str(weights)
    model_keys = {name: model[name] for name in ("overrides", "code", "resize_vocab")}
    data = {name: value for name, value in values["data"].items() if name not in IRRELEVANT_KEYS}
    return [model_keys, location, stamps, data]
