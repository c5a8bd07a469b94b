"""`train.router_balance`: what keeps the experts of a run busy; decided or refused before its ranks start, done after each step.

loss    the router loss of the model, with the coefficient of its config
bias    after each step, for each expert        b += rate * sign(mean load - its load)
        b is added to the scores by which experts are chosen, and to nothing else (`selection_bias.py`); the load is
        counted over all ranks and micro-batches of the step, in whole numbers, so that b is the same in every layout
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchgen.runtime import registry
from patchgen.runtime.attention_kinds import configs_of
from patchgen.runtime.checkpoint.placement import shard_like
from patchgen.runtime.objectives import choose
from patchgen.runtime.parallel import sharding
from patchgen.runtime.parallel.expert_load import ExpertLoad
from patchgen.runtime.parallel.undivided import local
from patchgen.runtime.train import architecture, selection_bias
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError
from patchgen.runtime.train.sections import ModelConfig, RouterBiasConfig
from patchgen.runtime.train.weight_sources import find_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SWITCH, COEFFICIENT = "output_router_logits", "router_aux_loss_coef"
"""The fields of a text config with a router loss. The first is also an argument of the model, which a run passes: an export whose
config has it on would compute the loss wherever it generates, and transformers fails there with padding."""
DEFAULT_COEFFICIENT = 0.01
"""Of a config that has 0."""


# --------------------------------------------------------------------------------------- before ranks start


def decided(recipe: Recipe) -> Recipe:
    """The recipe with `router_balance: loss` if it leaves that open and its experts start from random weights; with `loss`, also
    with a coefficient that is not 0.

    Raises:
        RecipeError: it asks for the loss, and the model has none.
    """
    balance = recipe.train.router_balance
    if balance == "loss" or (balance is None and _starts_unbalanced(recipe)):
        train = dataclasses.replace(recipe.train, router_balance="loss")
        return dataclasses.replace(recipe, train=train, model=_with_coefficient(recipe))
    return recipe


def as_proven(recipe: Recipe) -> Recipe:
    """The recipe as it is compared with upstream before ranks start: with the router loss on by its config, if the run has it."""
    if recipe.train.router_balance != "loss":
        return recipe
    _, path = _text_config(recipe)
    overrides = _merged(recipe.model.overrides, _nested(path, {SWITCH: True}))
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, overrides=overrides))


def forward_options(recipe: Recipe) -> dict[str, bool]:
    """The arguments with which a run calls its model for the router loss."""
    return {SWITCH: True} if recipe.train.router_balance == "loss" else {}


@contextlib.contextmanager
def switched_on(recipe: Recipe, model: PreTrainedModel) -> Iterator[None]:
    """Within the block the config of a run's model says what its steps do about the router loss, for checks that read it."""
    config = model.config.get_text_config()
    before = vars(config).copy()
    for name, value in forward_options(recipe).items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name in forward_options(recipe):
            setattr(config, name, before[name])


def has_router_loss(model_class: type[nn.Module], config: PreTrainedConfig) -> bool:
    """Whether a model with this text config can add a loss of its routers: the config has the fields, the forward the switch."""
    has_fields = getattr(config, SWITCH, None) is not None and getattr(config, COEFFICIENT, None) is not None
    return has_fields and SWITCH in signature(model_class.forward).parameters


def require_possible(recipe: Recipe, model: PreTrainedModel) -> None:
    """Refuses `router_balance: bias` for a model that has no such bias, or stores it in 16 bits.

    Args:
        model: of the recipe, with its parameters' dtypes, also on the meta device.

    Raises:
        RecipeError: with what can be set instead.
    """
    if recipe.train.router_balance == "bias":
        _require_biases(model, selection_bias.find(model))


def summary(recipe: Recipe, model: PreTrainedModel) -> str:
    """What balances the experts of a run, in one line; "" if it has none, or leaves the routers as its weights have them."""
    if not sharding.expert_paths(model):
        return ""
    balance, is_random = recipe.train.router_balance, find_weights(recipe.model) is None
    text = model.config.get_text_config()
    if balance == "bias":
        names, options = [*selection_bias.find(model).values()], recipe.train.router_bias
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        how = "by" if options.by == "sign" else "by up to the error of its load times"
        return f"a bias per expert, moved after each step {how} {options.rate:g}: {names[0]}{more}"
    if balance == "loss" or (has_router_loss(type(model), text) and getattr(text, SWITCH)):
        why = ", since the experts start from random weights (train.router_balance: none declines)"
        return f"the router loss, coefficient {getattr(text, COEFFICIENT):g}{why if balance == 'loss' and is_random else ''}"
    if not is_random:
        return ""
    advice = "; train.router_balance: bias would" if balance is None and selection_bias.find(model) else ""
    return f"nothing keeps these experts busy, which start from random weights{advice}"


def _starts_unbalanced(recipe: Recipe) -> bool:
    """Whether experts with a router loss start from random weights, and the recipe does not say whether it is on."""
    if find_weights(recipe.model) is not None or recipe.lora is not None or not _adds_router_loss(recipe):
        return False
    config, path = _text_config(recipe)
    named = recipe.model.overrides
    for name in path:
        named = named.get(name, {})
    return SWITCH not in named and not getattr(config, SWITCH) and _has_experts(recipe)


def _adds_router_loss(recipe: Recipe) -> bool:
    """Whether the recipe's model adds the loss; a new head over the base model does not."""
    _, head, _ = _configs_and_head(recipe)
    has_own_head = choose.objective_of(recipe.objective).head is None
    return has_own_head and has_router_loss(head, _text_config(recipe)[0])


def _has_experts(recipe: Recipe) -> bool:
    _, head, config = _configs_and_head(recipe)
    with torch.device("meta"):
        model = head._from_config(copy.deepcopy(config), attn_implementation="eager")
    return bool(sharding.expert_paths(model))


def _with_coefficient(recipe: Recipe) -> ModelConfig:
    """The section `model` with a coefficient of the router loss."""
    if not _adds_router_loss(recipe):
        raise RecipeError(
            f"train.router_balance: loss, but {_configs_and_head(recipe)[1].__name__} with objective.name = "
            f"{recipe.objective.name} adds no router loss. To fix: set train.router_balance: bias, if its routers have a bias for "
            "selection alone, or none."
        )
    config, path = _text_config(recipe)
    if getattr(config, COEFFICIENT):
        return recipe.model
    overrides = _merged(recipe.model.overrides, _nested(path, {COEFFICIENT: DEFAULT_COEFFICIENT}))
    return dataclasses.replace(recipe.model, overrides=overrides)


def _nested(path: Sequence[str], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config inside others, as overrides of the outermost one."""
    for name in reversed(path):
        fields = {name: fields}
    return fields


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        name: _merged(values.get(name, {}), change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    return {**values, **nested}


def _text_config(recipe: Recipe) -> tuple[PreTrainedConfig, list[str]]:
    """The config of the recipe's text model, and the names of the fields that lead to it."""
    whole, _, config = _configs_and_head(recipe)
    text = config.get_text_config()  # of an encoder-decoder a copy
    paths = {id(inner): path.split(".") if path else [] for path, inner in configs_of(whole)}
    return (text, paths[id(text)]) if id(text) in paths else (config, paths[id(config)])


def _configs_and_head(recipe: Recipe) -> tuple[PreTrainedConfig, type[PreTrainedModel], PreTrainedConfig]:
    """The recipe's config, its generated head, and the config or sub-config that this head takes."""
    whole = models.read_config(recipe.model)
    try:
        return whole, *models.find_head_and_config(whole, architecture.register(recipe.model))
    except registry.UnknownModelError as error:
        raise RecipeError(f"model.source = '{recipe.model.source}': {error}") from error


def _require_biases(model: PreTrainedModel, biases: Mapping[str, str]) -> None:
    """Raises RecipeError unless there are biases, each in fp32."""
    if not biases:
        instead = (
            "train.router_balance: loss, which balances them by the router loss of the config"
            if has_router_loss(type(model), model.config.get_text_config())
            else "none; this model has no router loss either"
        )
        raise RecipeError(
            f"train.router_balance: bias moves a bias that routers add to their scores for selection alone, and {_name(model)} "
            "has none. One could be added, but upstream's model, for which the export is made, would choose other experts without "
            f"it. To fix: set {instead}."
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if narrow := [name for name in biases.values() if tensors[name].dtype != torch.float32]:
        raise RecipeError(
            f"train.router_balance: bias needs {narrow[0]} in float32, and it is stored in {tensors[narrow[0]].dtype}, in which "
            "small moves round to nothing. To fix: set model.dtype: float32; layers compute in parallel.param_dtype."
        )


def _name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


# ------------------------------------------------------------------------------------------ after each step


def biases_of_run(recipe: Recipe, model: PreTrainedModel) -> SelectionBiases | None:
    """What moves the biases of a recipe's model; None: none are moved."""
    return SelectionBiases(model, recipe.train.router_bias) if recipe.train.router_balance == "bias" else None


class SelectionBiases:
    """The biases of a model's routers, moved after each step; it has the loads of the steps, too.

    Args:
        model: on this rank, sharded or not, before the first forward that is to be counted.

    Raises:
        RecipeError: as `require_possible`.
    """

    def __init__(self, model: PreTrainedModel, options: RouterBiasConfig) -> None:
        names = selection_bias.find(model)
        _require_biases(model, names)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.biases: dict[str, Tensor] = {path: tensors[name] for path, name in names.items()}
        self.options = options
        self._load = ExpertLoad(model)
        self._since_reading: dict[str, Tensor] = {}

    @torch.no_grad()
    def after_step(self, step: int, *, was_taken: Tensor | bool = True) -> None:
        """Moves the biases by the loads of a step (collective; does not wait for the device).

        Args:
            step: 1 is the first of the run.
            was_taken: whether the step was not skipped for its gradients, also as a scalar tensor: else its loads move nothing.
        """
        loads = self._load.read_on_device()
        for path, load in loads.items():
            before = self._since_reading.get(path)
            self._since_reading[path] = load if before is None else before + load
        for path, bias in self.biases.items():
            self._move(bias, loads[path], step, was_taken)

    def read_on_device(self) -> dict[str, Tensor]:
        """As `ExpertLoad.read_on_device`, not collective: the loads are those of all ranks already."""
        counts, self._since_reading = self._since_reading, {}
        return counts

    def _move(self, bias: Tensor, load_E: Tensor, step: int, was_taken: Tensor | bool) -> None:
        """Adds to a bias what one step's loads of the experts, int64 `(E,)`, move it by."""
        options, num_slots = self.options, load_E.sum()
        error_E = num_slots - load_E * len(load_E)  # E times what is missing to the mean: exact
        if options.by == "sign":
            move_E = error_E.sign().double()
        else:
            move_E = error_E.double() / num_slots.clamp(min=1)
        rate = options.rate * min(1.0, step / max(1, options.warmup_steps))
        shard, move = local(bias), (rate * move_E).view(bias.shape)
        moved = shard + (shard_like(move, bias) if isinstance(bias, DTensor) else move).to(shard)
        if options.bound is not None:
            moved = moved.clamp(-options.bound, options.bound)
        shard.copy_(torch.where(torch.as_tensor(was_taken, device=shard.device), moved, shard))
