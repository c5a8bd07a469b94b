"""Prepares micro-batches for an objective: the forwards of reference and teacher before the training forward.

rows --split--> inputs, batch --reference, teacher: forwards without gradients--> the loss of this micro-batch
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime.data.text import digest
from patchgen.runtime.objectives.base import Objective
from patchgen.runtime.objectives.batch import Batch, at_loss_seam, inputs_of, loss_share, split
from patchgen.runtime.objectives.choose import objective_of, require_same_vocab_size, teacher_recipe
from patchgen.runtime.objectives.reference import ReferenceTable
from patchgen.runtime.parallel import loss
from patchgen.runtime.parallel.reshard import reshard
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import model as models
from patchgen.runtime.train.feed import to_device
from patchgen.runtime.train.recipe import Recipe, to_dict

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class ObjectiveRunner:
    """Prepares the micro-batches of this rank for an objective.

    Args:
        model: the trained model, sharded.
        adapted: PEFT's wrapper of it, if adapters are trained: the model without them is the reference.
        table: the reference log-probabilities if the full model is trained.
        teacher: sharded and frozen, if the objective needs one.
    """

    def __init__(
        self,
        objective: Objective,
        model: PreTrainedModel,
        state: ParallelState,
        device: torch.device,
        *,
        adapted: PeftModel | None = None,
        table: ReferenceTable | None = None,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        self.objective, self.model, self.state, self.device = objective, model, state, device
        self.adapted, self.table, self.teacher = adapted, table, teacher

    def prepare(self, rows: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[..., Tensor] | None]:
        """The inputs of the model on the device, and the function that computes the loss (`loss.step(objective=...)`);
        None: the model computes it.

        Args:
            rows: of this rank, on the host.
        """
        if self.objective.is_models_own:
            return to_device(inputs_of(rows), self.device), None
        inputs, batch = self._split(rows)
        if self.objective.needs_reference:
            batch = replace(batch, reference=self._reference(inputs, batch).to(self.device))
        if self.teacher is not None:
            batch = replace(batch, teacher=evaluate(self.teacher, inputs, batch, self.objective.of_teacher))
            reshard(self.teacher)
        return inputs, loss_share(self.objective, batch)

    def fill_table(self, micro_batches: Iterable[Mapping[str, Any]]) -> int:
        """Computes the missing entries of the reference table with the current model, and saves them (collective). Returns how
        many were missing.

        Args:
            micro_batches: of this rank, on the host, as many as of any other.
        """

        def compute(rows: Mapping[str, Any]) -> Sequence[float]:
            inputs, batch = self._split(rows)
            return evaluate(self.model, inputs, batch, Batch.document_log_probs)[: batch.num_samples].tolist()

        assert self.table is not None, "only called with a table"
        self.table.load()
        return self.table.fill(micro_batches, compute)

    def _split(self, rows: Mapping[str, Any]) -> tuple[dict[str, Any], Batch]:
        padding = self.model.config.get_text_config().pad_token_id
        inputs, batch = split(rows, self.state, self.device, padding)
        return to_device(inputs, self.device), batch

    def _reference(self, inputs: dict[str, Any], batch: Batch) -> Tensor:
        """The log-probabilities `(D,)` of the documents before training."""
        if self.table is not None:
            return self.table.of(batch.extra["keys"], batch.num_documents)
        assert self.adapted is not None, "without adapters `build` creates a table"
        with self.adapted.disable_adapter():
            return evaluate(self.model, inputs, batch, Batch.document_log_probs)


def build(
    recipe: Recipe, model: PreTrainedModel, state: ParallelState, device: torch.device, adapted: PeftModel | None
) -> ObjectiveRunner:
    """The recipe's objective on this rank (collective).

    Raises:
        RecipeError: teacher and student have different tokens.
    """
    objective = objective_of(recipe.objective)
    table = teacher = None
    if objective.needs_reference and adapted is None:
        table = ReferenceTable(recipe.directory, digest([to_dict(recipe)["model"], recipe.train.seed]))
    if (teachers_recipe := teacher_recipe(recipe)) is not None:
        teacher = models.build_model(teachers_recipe, state, device).requires_grad_(False)
        require_same_vocab_size(model, teacher)
    return ObjectiveRunner(objective, model, state, device, adapted=adapted, table=table, teacher=teacher)


@torch.no_grad()
def evaluate(model: PreTrainedModel, inputs: dict[str, Any], batch: Batch, function: Callable[[Batch], Any]) -> Any:
    """Calls a function of the batch in a forward without gradients or dropout; returns its result."""
    results = []

    def store(complete: Batch) -> Tensor:
        results.append(function(complete))
        assert complete.hidden is not None, "set by `at_loss_seam`"
        return complete.hidden.new_zeros(())

    with evaluating(model), loss.step(1, router_loss=False, objective=at_loss_seam(store, batch)):
        model(**inputs, use_cache=False)
    return results[0]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval mode (no dropout), then back into the mode before."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
