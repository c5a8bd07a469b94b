"""Checks of a run before its ranks start, for `patchgen train` and `--dry-run`.

Shapes come from the model on the meta device, weight names from the file headers: nothing is allocated.
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

from patchgen.runtime.checkpoint.load import match_checkpoint
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.objectives import choose
from patchgen.runtime.parallel import sharding
from patchgen.runtime.parallel.sequence import key_value_repeats
from patchgen.runtime.train import data_check, lora, lora_targets, reading, router_balance, run_plan, setup
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError
from patchgen.runtime.verify.verdict import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_COUNTER = "patchgen_counting_heads"
NUM_TOKENS = 8


def build_runnable(recipe: Recipe, world: int) -> PreTrainedModel:
    """The recipe's model on the meta device, after checking, as far as possible here, what `world` ranks would refuse.

    Raises:
        RecipeError, DataError, CheckpointError: the layout does not divide the model, a kernel cannot run here or the
            model does not call it, data or weights are missing or do not fit.
    """
    run_plan.require_valid(recipe, world)
    folder = Path(recipe.model.source)
    if folder.is_dir() and recipe.model.source in CONFIG_MAPPING and not models.is_model_type(recipe.model.source):
        warnings.warn(
            f"model.source = '{folder}' is a model type and also the folder {folder.resolve()}; the folder is read. Write "
            f"./{folder} to mean the folder, or start from another directory to mean the type.",
            stacklevel=2,
        )
    if recipe.has_media and models.is_model_type(recipe.model.source):
        setup.load_processor(recipe.model.source)  # a bare model type has no processor: this raises, as on the ranks
    for section, data in (("data", recipe.data), ("eval_data", recipe.eval_data)):
        with reading.naming_section(section):
            for source in data.sources if data else ():
                open_source(source)
    model = models.build_on_meta(recipe)
    models.configure_seams(recipe, model)
    router_balance.require_possible(recipe, model)
    if (teacher_recipe := choose.teacher_recipe(recipe)) is not None:
        teacher = models.build_on_meta(teacher_recipe)
        choose.require_same_vocab_size(model, teacher)
        setup.require_same_token_ids(recipe.model.source, teacher_recipe.model.source)
        _require_weights(teacher_recipe, teacher)
    if recipe.lora is not None:
        lora.require_trainable_on(lora_targets.find_targets(model, recipe.lora), world)
    layout = models.parallel_config(recipe.parallel, world)
    if layout.ep > 1:
        with _as_recipe_error(f"parallel.ep = {layout.ep}"):
            sharding.check_plan(model, sharding.expert_paths(model), layout.ep)
    if layout.sp > 1:
        _require_divisible_heads(recipe, layout.sp)
    _require_weights(recipe, model)
    if folder.is_dir():
        parts = setup.data_parts(recipe)  # refuses a missing tokenizer and tokens without an embedding
        data_check.require_lengths(recipe, parts)
    return model


def _require_weights(recipe: Recipe, model: PreTrainedModel) -> None:
    weights = models.find_weights(recipe.model)
    if isinstance(weights, Path):
        match = match_checkpoint(model, weights, **models.allowed_differences(recipe, model))
        models.require_effective(recipe, model, match)


def _require_divisible_heads(recipe: Recipe, sp: int) -> None:
    """Refuses a number of sequence slices that does not divide the attention heads; warns of heads that cannot be counted here."""
    head_counts, failure = _attention_heads(models.build_on_meta(recipe))
    with _as_recipe_error(f"parallel.sp = {sp}"):
        for name, heads in head_counts.items():
            key_value_repeats(*heads, sp, where=name)  # raises if sp does not fit; the result is not needed
    if failure:
        counted = f" in layers after {[*head_counts][-1]}" if head_counts else ""
        warnings.warn(
            f"parallel.sp = {sp}: whether it divides the attention heads of '{recipe.model.source}'{counted} cannot be checked "
            f"here, so only the ranks check it: {failure}.",
            stacklevel=3,
        )


@contextlib.contextmanager
def _as_recipe_error(setting: str) -> Iterator[None]:
    """Turns a ValueError into a RecipeError that names the recipe's key."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{setting}: {error}") from error


def _attention_heads(model: PreTrainedModel) -> tuple[dict[str, tuple[int, int]], str]:
    """Path of each attention module -> its numbers of query and key heads, counted by running the forward on the meta device;
    and why some of them are missing, "" if none is known to be.

    Experts return their input: routing depends on values, and meta tensors have none. If another layer depends on values,
    the forward ends there, and the ranks check the remaining layers.

    Raises:
        RecipeError: a layer calls its attention with tensors that have no heads to count.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    head_counts: dict[str, tuple[int, int]] = {}

    def count(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: object, **options: object):
        path = paths.get(id(module), type(module).__name__)
        shapes = [list(tensor.shape) for tensor in (query, key, value)]
        if any(len(shape) != 4 for shape in shapes):
            raise RecipeError(
                f"parallel.sp: {path} calls its attention with query, key and value of {shapes}, expected [batch, heads, tokens, "
                "size] each."
            )
        head_counts[path] = query.shape[1], key.shape[1]
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    failure = ""
    model.config._attn_implementation = HEAD_COUNTER
    for path in sharding.expert_paths(model):
        experts = model.get_submodule(path.rpartition(".")[0])
        experts.forward = lambda hidden_states, *args, **options: hidden_states
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    ALL_ATTENTION_FUNCTIONS[HEAD_COUNTER] = count
    # Masks are looked up in what `register` adds, which transformers has no function to remove.
    ALL_MASK_ATTENTION_FUNCTIONS.register(HEAD_COUNTER, lambda *args, **options: None)
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except RecipeError:
        raise
    except Exception as error:  # whatever it is, the ranks check
        failure = (
            f"the forward on the meta device ends with {type(error).__name__}: {one_line(error).removesuffix('.')}"
        )
    finally:
        del ALL_ATTENTION_FUNCTIONS[HEAD_COUNTER]
        del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[HEAD_COUNTER]
    if not head_counts:
        failure = failure or "no layer uses transformers' attention interface"
    return head_counts, failure
