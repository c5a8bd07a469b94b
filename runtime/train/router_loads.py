"""How evenly the routers of a model spread tokens over experts, and the warning for those that have collapsed.

    even        every expert gets K / E of the tokens
    collapsed   nearly all tokens go to K experts of a layer, or nearly every token goes to one: the others learn little or
                nothing, and the ranks of the busy ones work while the others wait

E experts   K experts per token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.parallel import sharding
from patchgen.runtime.parallel.expert_load import ExpertLoad
from patchgen.runtime.train import flops, router_balance, selection_bias
from patchgen.runtime.train.recipe import Recipe

COLLAPSED = 0.9
"""A layer has collapsed if its K busiest experts get this much of what even routing would leave to the other experts ..."""
ONE_EXPERT, LEAST_MULTIPLE = 0.95, 4.0
"""... or if so many of the tokens go to one expert, at least this multiple of its even share."""
READINGS = 3
"""So many readings in a row tell: one may be chance."""
TOKENS_PER_EXPERT = 8
"""With fewer tokens per expert in a reading, few experts get nearly all of them by chance."""
SHOWN_LAYERS = 3


@dataclass(frozen=True)
class ExpertLoads:
    """What each expert got since the last reading, over all ranks.

    Attributes:
        counts: path of an experts module -> slots (one of K per token) of each of its experts.
        per_token: K.
    """

    counts: dict[str, list[int]]
    per_token: int

    @property
    def busiest(self) -> float:
        """Load of the busiest expert of any layer, as a multiple of the even share; at most E / K."""
        return max(max(counts) * len(counts) / sum(counts) for counts in self.counts.values())

    @property
    def shares(self) -> list[float]:
        """For each layer the share of its K busiest experts: K / E if routing is even, 1 if the other experts get nothing."""
        return [round(self.share(path), 4) for path in self.counts]

    def share(self, path: str) -> float:
        """That of one layer."""
        return self._share(self.counts[path])

    def collapsed(self) -> list[str]:
        """The paths of layers that have collapsed; of layers with too few tokens nothing is said."""
        return [path for path, counts in self.counts.items() if self._has_collapsed(counts)]

    def _has_collapsed(self, counts: Sequence[int]) -> bool:
        if sum(counts) < TOKENS_PER_EXPERT * len(counts) or len(counts) == self.per_token:
            return False
        even, of_tokens = self.per_token / len(counts), max(counts) * self.per_token / sum(counts)
        is_on_one = of_tokens >= ONE_EXPERT and of_tokens / even >= LEAST_MULTIPLE * ONE_EXPERT
        return is_on_one or self._share(counts) - even >= COLLAPSED * (1 - even)

    def _share(self, counts: Sequence[int]) -> float:
        return sum(sorted(counts)[-self.per_token :]) / sum(counts)


class Counter(Protocol):
    """Counts the loads of experts."""

    def read_on_device(self) -> dict[str, Tensor]:
        """As `ExpertLoad.read_on_device`."""
        ...


class RouterLoads:
    """Reads the loads, and finds layers that have collapsed.

    Args:
        model: a model with experts.
        balance: `train.router_balance` of the run.
        biases: those that are moved, which count the loads already; None: they are counted here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        balance: str | None = None,
        biases: router_balance.SelectionBiases | None = None,
    ) -> None:
        self._model, self._balance = model, balance
        self._counter: Counter = biases or ExpertLoad(model)
        self._per_token = flops.experts_per_token(model.config.get_text_config())
        self._readings: dict[str, int] = {}  # of a layer that has collapsed, in a row
        self._has_warned = False

    def read_on_device(self) -> dict[str, Tensor]:
        """The counts since the last call (collective; does not wait for the device), for `loads_of`."""
        return self._counter.read_on_device()

    def loads_of(self, counts: Mapping[str, Tensor]) -> ExpertLoads | None:
        """The loads by such counts, on the host; None if no experts were called with indices."""
        found = {path: count.tolist() for path, count in counts.items() if count.any()}
        return ExpertLoads(found, self._per_token) if found else None

    def warning(self, loads: ExpertLoads) -> str | None:
        """What is wrong and what to do, at the first reading that tells; None before and after."""
        self._readings = {path: self._readings.get(path, 0) + 1 for path in loads.collapsed()}
        collapsed = [path for path, readings in self._readings.items() if readings >= READINGS]
        if self._has_warned or not collapsed:
            return None
        self._has_warned = True
        worst = max(collapsed, key=loads.share)
        counts, more = loads.counts[worst], len(collapsed) - SHOWN_LAYERS
        num_experts, idle = len(counts), counts.count(0)
        shown = ", ".join(collapsed[:SHOWN_LAYERS]) + (f" and {more} more" if more > 0 else "")
        return (
            f"Routers have collapsed in {len(collapsed)} of {len(loads.counts)} layers ({shown}): for {READINGS} readings in a row "
            f"few experts got nearly all tokens. In {worst} the {loads.per_token} busiest of {num_experts} got "
            f"{loads.share(worst):.0%}, the busiest {max(counts) * num_experts / sum(counts):.1f}x the even share; {idle} got "
            f"none. To fix: {remedy(self._model, self._balance)}"
        )


def of_run(
    recipe: Recipe, model: PreTrainedModel, biases: router_balance.SelectionBiases | None = None
) -> RouterLoads | None:
    """What reads the loads of a recipe's model; None without experts."""
    return RouterLoads(model, recipe.train.router_balance, biases) if sharding.expert_paths(model) else None


def remedy(model: PreTrainedModel, balance: str | None = None) -> str:
    """What balances the routers of a model, in keys of a recipe.

    Args:
        balance: `train.router_balance` of the run.
    """
    slower, config = "lower optim.lr or raise optim.warmup_steps", model.config.get_text_config()
    if balance == "bias":
        return f"raise train.router_bias.rate, or train.router_bias.bound if it is set; or {slower}."
    ways = []
    if router_balance.has_router_loss(type(model), config):
        ways.append(
            "raise the coefficient of the router's loss, model.overrides: {router_aux_loss_coef: ...} "
            f"(now {config.router_aux_loss_coef:g})"
            if balance == "loss" or config.output_router_logits
            else "train with the router's loss, which is off: train.router_balance: loss"
        )
    if selection_bias.find(model):
        ways.append("move the selection bias of its routers: train.router_balance: bias")
    return f"{'; or '.join([*ways, slower])}." if ways else f"{slower}; this model has no router loss."
