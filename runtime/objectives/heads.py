"""Task heads (classifiers, question answering, embeddings) on generated models, built at run time, not generated.

    generated     class Qwen3MoeForCausalLM(Qwen3MoePreTrainedModel): self.model = Qwen3MoeModel(config) ...
    upstream      class Qwen3MoeForSequenceClassification(GenericForSequenceClassification, Qwen3MoePreTrainedModel)
    built here    the same two bases, the second one generated; self.model is the generated model, self.score as upstream's

Names of parameters (`model.*`, `score.weight`) and classes are upstream's, so exports load in plain transformers. Embeddings
use the generated base model itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PreTrainedModel,
    modeling_layers,
)
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils.generic import can_return_tuple

from patchgen.runtime import ops, parallel, parts
from patchgen.runtime.objectives.base import ANSWERS, CLASSIFICATION, TOKEN
from patchgen.runtime.parallel.loss import current_step

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    _Model = PreTrainedModel
else:
    _Model = object


LOSS_INPUTS = ("labels", "shift_labels", "num_items_in_batch")
"""Inputs of the loss, which a base model does not take."""


class UnknownHeadError(LookupError):
    """Upstream has no such head for a config."""


@dataclass(frozen=True)
class HeadType:
    """A generic head of transformers.

    Attributes:
        description: in words, for error messages.
        generic: its class; only upstream heads that add nothing to it are supported.
        mapping: upstream's mapping from configs to heads.
        layer: the name of the layer that computes the scores.
        build_layers: builds the head's layers, by name.
    """

    description: str
    generic: type
    mapping: Any
    layer: str
    build_layers: Callable[[PreTrainedConfig], dict[str, nn.Module]]


def _score_layers(config: PreTrainedConfig) -> dict[str, nn.Module]:
    return {"score": nn.Linear(_hidden_size(config), _num_labels(config), bias=False)}


def _token_score_layers(config: PreTrainedConfig) -> dict[str, nn.Module]:
    rates = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
    rate = next((rate for rate in rates if rate is not None), 0.1)
    bias = getattr(config, "token_classification_bias", True)
    return {"dropout": nn.Dropout(rate), "score": nn.Linear(_hidden_size(config), _num_labels(config), bias=bias)}


def _answer_layers(config: PreTrainedConfig) -> dict[str, nn.Module]:
    return {"qa_outputs": nn.Linear(_hidden_size(config), 2)}


def _hidden_size(config: PreTrainedConfig) -> int:
    return config.get_text_config().hidden_size


def _num_labels(config: PreTrainedConfig) -> int:
    assert config.num_labels is not None, "set for every classifier"
    return config.num_labels


HEAD_TYPES = {
    CLASSIFICATION: HeadType(
        "sequence classifier",
        modeling_layers.GenericForSequenceClassification,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "score",
        _score_layers,
    ),
    TOKEN: HeadType(
        "token classifier",
        modeling_layers.GenericForTokenClassification,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        "score",
        _token_score_layers,
    ),
    ANSWERS: HeadType(
        "question-answering head",
        modeling_layers.GenericForQuestionAnswering,
        MODEL_FOR_QUESTION_ANSWERING_MAPPING,
        "qa_outputs",
        _answer_layers,
    ),
}


def head_over(kind: str, head: type[PreTrainedModel], config: PreTrainedConfig) -> type[PreTrainedModel]:
    """A head of a kind (`base.CLASSIFICATION` ...) on the base model of a generated head.

    Args:
        head: a generated class, with its base model under `base_model_prefix`.
        config: of that class.

    Raises:
        UnknownHeadError: upstream has no such head, or one that differs from its generic class or has another base model.
    """
    head_type = HEAD_TYPES.get(kind)
    upstream_base = MODEL_MAPPING.get(type(config), None)
    if not isinstance(upstream_base, type):
        raise UnknownHeadError(f"transformers has no single base model for a {type(config).__name__}.")
    upstream = cast("type[PreTrainedModel]", upstream_base) if head_type is None else _upstream_head(head_type, config)
    with torch.device("meta"):
        causal = head._from_config(config)
    base = cast("type[PreTrainedModel]", type(causal.base_model))
    if base.__name__ != upstream_base.__name__:
        raise UnknownHeadError(
            f"transformers' {upstream.__name__} has the base model {upstream_base.__name__}, and the generated "
            f"{head.__name__} has {base.__name__}."
        )
    ops.register_checkpoint_mapping(upstream)
    causal_only = tuple(f"{name}.*" for name, _ in causal.named_children() if name != head.base_model_prefix)
    members = {
        "__module__": head.__module__,
        "__doc__": f"{upstream.__name__} on the generated {base.__name__}.",
        "config_class": head.config_class,
        parts.PLAN: getattr(head, parts.PLAN),
        "causal_only": () if head.__name__ == upstream.__name__ else causal_only,
    }
    if head_type is None:
        return type(upstream.__name__, (Embedder, base), {**members, "forward": _embedding_forward(base)})
    pretrained = next(base for base in head.__bases__ if issubclass(base, PreTrainedModel))
    members |= {"head_type": head_type, "base_class": base, "base_model_prefix": upstream.base_model_prefix}
    return type(upstream.__name__, (Scorer, head_type.generic, pretrained), members)


def _upstream_head(head_type: HeadType, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Upstream's head of a config, which must add nothing to the generic class."""
    upstream = head_type.mapping.get(type(config), None)
    if upstream is None:
        raise UnknownHeadError(f"transformers has no {head_type.description} for a {type(config).__name__}.")
    assert isinstance(upstream, type), "the mapping names one class for a config"
    overridden = [name for name in ("__init__", "forward") if name in vars(upstream)]
    if not issubclass(upstream, head_type.generic) or overridden:
        difference = (
            f"overrides {' and '.join(overridden)}"
            if overridden
            else f"is not derived from {head_type.generic.__name__}"
        )
        raise UnknownHeadError(
            f"transformers' {upstream.__name__} {difference}; only heads that add nothing to transformers' "
            f"{head_type.generic.__name__} are supported."
        )
    return upstream


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The layer that computes a model's scores or logits."""
    return getattr(model, model.head_type.layer) if isinstance(model, Scorer) else model.get_output_embeddings()


class TaskHead(_Model):
    """A head that is built here."""

    causal_only: tuple[str, ...]
    """Patterns of weights that only a checkpoint of the causal head has."""
    new_weights: ClassVar[tuple[str, ...]] = ()
    """Patterns of weights that such a checkpoint lacks."""

    def loss_or_scores(self, head: Callable, hidden_states: torch.Tensor) -> SequenceClassifierOutputWithPast:
        """The loss of the step's objective; without an objective the scores `(1, s, labels)` of all s tokens."""
        objective = current_step().objective
        if objective is None:
            return SequenceClassifierOutputWithPast(logits=head(hidden_states))
        return SequenceClassifierOutputWithPast(loss=objective(head, hidden_states))


class Scorer(TaskHead):
    """A generic head on a generated base model, with a loss over the documents of packed rows."""

    head_type: ClassVar[HeadType]
    base_class: ClassVar[type[PreTrainedModel]]

    @property
    def new_weights(self) -> tuple[str, ...]:
        return (f"{self.head_type.layer}.*",)

    def __init__(self, config: PreTrainedConfig) -> None:
        super(self.head_type.generic, self).__init__(config)  # pyright: ignore[reportCallIssue]  # the next base class
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.base_class._from_config(config))
        for name, module in self.head_type.build_layers(config).items():
            setattr(self, name, module)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: torch.LongTensor | None = None, labels: torch.LongTensor | None = None, **kwargs: Any
    ) -> Any:
        """In a run, the loss over packed rows, or all scores (`loss_or_scores`); outside of one, upstream's forward."""
        if parallel.current() is None:
            optional = {} if labels is None else {"labels": labels}
            return self.head_type.generic.forward(self, input_ids=input_ids, **optional, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in LOSS_INPUTS}
        hidden_states = getattr(self, self.base_model_prefix)(input_ids=input_ids, **kwargs).last_hidden_state
        if isinstance(dropout := getattr(self, "dropout", None), nn.Module):
            hidden_states = dropout(hidden_states)
        return self.loss_or_scores(getattr(self, self.head_type.layer), hidden_states)


class Embedder(TaskHead):
    """A generated base model, with a loss computed from its hidden states."""


def _embedding_forward(base: type[PreTrainedModel]) -> Callable[..., Any]:
    """The forward of an `Embedder`, with the signature of its base model's."""

    @functools.wraps(base.forward)
    def forward(self: Embedder, *args: Any, **kwargs: Any) -> Any:
        if parallel.current() is None or current_step().objective is None:
            return base.forward(self, *args, **kwargs)
        for name in LOSS_INPUTS:
            kwargs.pop(name, None)
        return self.loss_or_scores(nn.Identity(), base.forward(self, *args, **kwargs).last_hidden_state)

    return forward
