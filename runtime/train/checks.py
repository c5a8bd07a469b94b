"""All that can be known of a run before its ranks start: told in one sentence, by `patchgen train` and by `--dry-run`.

Shapes come from the model on the meta device, keys of weights from the headers of their files: nothing is allocated.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from patchgen.runtime.checkpoint.load import require_fitting
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.objectives import choose
from patchgen.runtime.parallel import sharding
from patchgen.runtime.parallel.sequence import key_value_repeats
from patchgen.runtime.train import lora, lora_targets, run_plan, setup
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUNTING = "patchgen_counting_heads"
LENGTH = 8


def require_runnable(recipe: Recipe, world: int) -> PreTrainedModel:
    """The model of a recipe on the meta device, after a look at all that `world` ranks would refuse.

    Raises:
        RecipeError, DataError, CheckpointError: the layout does not divide the model, a kernel cannot run here or has no
            use, data or weights are not there or do not fit.
    """
    run_plan.require_valid(recipe, world)
    folder = Path(recipe.model.source)
    if folder.exists() and recipe.model.source in CONFIG_MAPPING:
        warnings.warn(
            f"model.source = '{folder}' is a model type, and here also {folder.resolve()}, which is what is read. Write "
            f"./{folder} to say so, or start elsewhere to mean the type.",
            stacklevel=2,
        )
    for data in (recipe.data, recipe.eval_data):
        for source in data.sources if data else ():
            open_source(source)
    model = models.build_on_meta(recipe)
    models.configure_seams(recipe, model)
    if (other := choose.teacher_recipe(recipe)) is not None:
        teacher = models.build_on_meta(other)
        choose.require_same_tokens(model, teacher)
        _require_weights(other, teacher)
    if recipe.lora is not None:
        lora.require_any_layout(lora_targets.find_targets(model, recipe.lora), world)
    layout = models.parallel_config(recipe.parallel, world)
    if layout.ep > 1:
        with _named(f"parallel.ep = {layout.ep}"):
            sharding.check_plan(model, sharding.expert_paths(model), layout.ep)
    if layout.sp > 1:
        with _named(f"parallel.sp = {layout.sp}"):
            for name, heads in _attention_heads(models.build_on_meta(recipe)).items():
                key_value_repeats(*heads, layout.sp, where=name)
    _require_weights(recipe, model)
    if folder.is_dir():
        setup.data_parts(recipe)  # a tokenizer that is missing, or that has tokens without an embedding
    return model


def _require_weights(recipe: Recipe, model: PreTrainedModel) -> None:
    weights = models.find_weights(recipe.model)
    if isinstance(weights, Path):
        require_fitting(model, weights, **models.may_differ(recipe, model))


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """What a layout is refused with, as a fault of the recipe's key."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{key}: {error}") from error


def _attention_heads(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Query and key heads of each module that attends, as its own forward makes them, by path.

    Experts hand on what they get: where tokens go is decided by values, and there are none here. A model whose other
    layers ask for values as well is seen no further than to them; its ranks look at the rest.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, tuple[int, int]] = {}

    def count(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: object, **options: object):
        found[paths[id(module)]] = query.shape[1], key.shape[1]
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    ALL_ATTENTION_FUNCTIONS.register(COUNTING, count)
    ALL_MASK_ATTENTION_FUNCTIONS.register(COUNTING, lambda *args, **options: None)
    model.config._attn_implementation = COUNTING
    for path in sharding.expert_paths(model):
        experts = model.get_submodule(path.rpartition(".")[0])
        experts.forward = lambda hidden_states, *args, **options: hidden_states
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    with torch.no_grad(), contextlib.suppress(RuntimeError, TypeError, AttributeError):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return found
