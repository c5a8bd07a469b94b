"""A sequence-classification head on a generated model, made when it is asked for; nothing is generated for it.

    generated     class Qwen3MoeForCausalLM(Qwen3MoePreTrainedModel): self.model = Qwen3MoeModel(config) ...
    upstream      class Qwen3MoeForSequenceClassification(GenericForSequenceClassification, Qwen3MoePreTrainedModel)
    made here     the same two bases, the second the generated one; self.model the generated model, self.score as upstream's

The names of its parameters are upstream's (`model.*`, `score.weight`), and so is the class's: what it is exported to loads
in plain transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils.generic import can_return_tuple

from patchgen.runtime import ops, parallel, parts
from patchgen.runtime.parallel.loss import current_step

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    class _Bases(GenericForSequenceClassification, PreTrainedModel):
        """What stands behind `SequenceClassifier` in every class that is made of it."""
else:
    _Bases = object


class UnknownHeadError(LookupError):
    """Upstream has no sequence classifier of this form for a config."""


def sequence_classifier(head: type[PreTrainedModel], config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The sequence classifier over the base of a generated causal head.

    Args:
        head: a generated class; its base model is what it keeps under `base_model_prefix`.
        config: that it takes.

    Raises:
        UnknownHeadError: upstream has none, or one that does more than its generic class.
    """
    upstream = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if upstream is None:
        raise UnknownHeadError(f"transformers has no sequence classifier for a {type(config).__name__}.")
    assert isinstance(upstream, type), "the mapping names one class for a config"
    own = [name for name in ("__init__", "forward") if name in vars(upstream)]
    if not issubclass(upstream, GenericForSequenceClassification) or own:
        raise UnknownHeadError(
            f"transformers' {upstream.__name__} has {' and '.join(own) or 'a form'} of its own; a head is made here for "
            "those that are transformers' GenericForSequenceClassification and nothing else."
        )
    with torch.device("meta"):
        causal = head._from_config(config)
    base, upstream_base = type(causal.base_model), MODEL_MAPPING[type(config)]
    assert isinstance(upstream_base, type), "a config whose classifier is the generic one has one base model"
    if base.__name__ != upstream_base.__name__:
        raise UnknownHeadError(
            f"transformers' {upstream.__name__} is over {upstream_base.__name__}, and the generated {head.__name__} "
            f"over {base.__name__}."
        )
    pretrained = next(one for one in head.__bases__ if issubclass(one, PreTrainedModel))
    ops.register_checkpoint_mapping(upstream.__name__)
    beside = tuple(f"{name}.*" for name, _ in causal.named_children() if name != head.base_model_prefix)
    members = {
        "__module__": head.__module__,
        "__doc__": f"{upstream.__name__} over the generated {base.__name__}.",
        "base_class": base,
        "base_model_prefix": upstream.base_model_prefix,
        "config_class": head.config_class,
        parts.PLAN: getattr(head, parts.PLAN),
        "only_causal": () if head.__name__ == upstream.__name__ else beside,
    }
    return type(upstream.__name__, (SequenceClassifier, GenericForSequenceClassification, pretrained), members)


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The layer that gives what is read of a model: its scores or its logits."""
    return model.score if isinstance(model, SequenceClassifier) else model.get_output_embeddings()


class SequenceClassifier(_Bases):
    """`GenericForSequenceClassification` with another base model, and with a loss over the documents of packed rows."""

    base_class: type[PreTrainedModel]
    only_causal: tuple[str, ...]
    """Patterns of what a checkpoint of the causal head holds besides."""
    only_here = ("score.*",)
    """Patterns of what such a checkpoint lacks."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super(GenericForSequenceClassification, self).__init__(config)
        assert config.num_labels is not None, "a config that is made a classifier's has labels"
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.base_class._from_config(config))
        self.score = nn.Linear(config.get_text_config().hidden_size, self.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: torch.LongTensor | None = None, labels: torch.LongTensor | None = None, **kwargs: Any
    ) -> SequenceClassifierOutputWithPast:
        """While a parallel state is live: the loss of the step's objective; without one the scores `(1, s, labels)` of each
        token, for which of them counts is the objective's matter. Else upstream's."""
        if parallel.current() is None:
            return GenericForSequenceClassification.forward(self, input_ids=input_ids, labels=labels, **kwargs)
        for name in ("shift_labels", "num_items_in_batch"):
            kwargs.pop(name, None)
        hidden_states = getattr(self, self.base_model_prefix)(input_ids=input_ids, **kwargs).last_hidden_state
        objective = current_step().objective
        if objective is None:
            return SequenceClassifierOutputWithPast(logits=self.score(hidden_states))
        return SequenceClassifierOutputWithPast(loss=objective(self.score, hidden_states))
