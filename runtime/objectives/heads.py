"""The heads that are not language models on a generated model, made when they are asked for; nothing is generated for them.

    generated     class Qwen3MoeForCausalLM(Qwen3MoePreTrainedModel): self.model = Qwen3MoeModel(config) ...
    upstream      class Qwen3MoeForSequenceClassification(GenericForSequenceClassification, Qwen3MoePreTrainedModel)
    made here     the same two bases, the second the generated one; self.model the generated model, self.score as upstream's

The names of their parameters are upstream's (`model.*`, `score.weight`), and so are the classes': what they are exported to
loads in plain transformers. A base model, of which embeddings are learned, is the generated one itself.
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


NOT_OF_TOKENS = ("labels", "shift_labels", "num_items_in_batch")
"""What a base model does not take."""


class UnknownHeadError(LookupError):
    """Upstream has no head of this form for a config."""


@dataclass(frozen=True)
class Form:
    """A generic head of transformers.

    Attributes:
        what: it is, in words.
        generic: the class; none but a class that adds nothing to it is made here.
        mapping: upstream's, from a config to its head.
        layer: the name of the layer that gives the scores.
        make: the layers that it has beside the model, by name.
    """

    what: str
    generic: type
    mapping: Any
    layer: str
    make: Callable[[PreTrainedConfig], dict[str, nn.Module]]


def _score(config: PreTrainedConfig) -> dict[str, nn.Module]:
    return {"score": nn.Linear(_hidden_size(config), _labels(config), bias=False)}


def _token_score(config: PreTrainedConfig) -> dict[str, nn.Module]:
    given = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
    rate = next((one for one in given if one is not None), 0.1)
    bias = getattr(config, "token_classification_bias", True)
    return {"dropout": nn.Dropout(rate), "score": nn.Linear(_hidden_size(config), _labels(config), bias=bias)}


def _ends(config: PreTrainedConfig) -> dict[str, nn.Module]:
    return {"qa_outputs": nn.Linear(_hidden_size(config), 2)}


def _hidden_size(config: PreTrainedConfig) -> int:
    return config.get_text_config().hidden_size


def _labels(config: PreTrainedConfig) -> int:
    assert config.num_labels is not None, "a config that is made a classifier's has labels"
    return config.num_labels


FORMS = {
    CLASSIFICATION: Form(
        "sequence classifier",
        modeling_layers.GenericForSequenceClassification,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "score",
        _score,
    ),
    TOKEN: Form(
        "token classifier",
        modeling_layers.GenericForTokenClassification,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        "score",
        _token_score,
    ),
    ANSWERS: Form(
        "head for answers",
        modeling_layers.GenericForQuestionAnswering,
        MODEL_FOR_QUESTION_ANSWERING_MAPPING,
        "qa_outputs",
        _ends,
    ),
}


def head_over(kind: str, head: type[PreTrainedModel], config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The head of a kind (`base.CLASSIFICATION` ...) over the base of a generated one.

    Args:
        head: a generated class; its base model is what it keeps under `base_model_prefix`.
        config: that it takes.

    Raises:
        UnknownHeadError: upstream has none, or one that does more than its generic class.
    """
    form = FORMS.get(kind)
    upstream_base = MODEL_MAPPING.get(type(config), None)
    if not isinstance(upstream_base, type):
        raise UnknownHeadError(f"transformers has not one base model for a {type(config).__name__}.")
    upstream = cast("type[PreTrainedModel]", upstream_base) if form is None else _plain(form, config)
    with torch.device("meta"):
        causal = head._from_config(config)
    base = cast("type[PreTrainedModel]", type(causal.base_model))
    if base.__name__ != upstream_base.__name__:
        raise UnknownHeadError(
            f"transformers' {upstream.__name__} is over {upstream_base.__name__}, and the generated {head.__name__} "
            f"over {base.__name__}."
        )
    ops.register_checkpoint_mapping(upstream)
    beside = tuple(f"{name}.*" for name, _ in causal.named_children() if name != head.base_model_prefix)
    members = {
        "__module__": head.__module__,
        "__doc__": f"{upstream.__name__} over the generated {base.__name__}.",
        "config_class": head.config_class,
        parts.PLAN: getattr(head, parts.PLAN),
        "only_causal": () if head.__name__ == upstream.__name__ else beside,
    }
    if form is None:
        return type(upstream.__name__, (Embedder, base), {**members, "forward": _embedding(base)})
    pretrained = next(one for one in head.__bases__ if issubclass(one, PreTrainedModel))
    members |= {"form": form, "base_class": base, "base_model_prefix": upstream.base_model_prefix}
    return type(upstream.__name__, (Scorer, form.generic, pretrained), members)


def _plain(form: Form, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Upstream's class, which is nothing but the generic one."""
    upstream = form.mapping.get(type(config), None)
    if upstream is None:
        raise UnknownHeadError(f"transformers has no {form.what} for a {type(config).__name__}.")
    assert isinstance(upstream, type), "the mapping names one class for a config"
    own = [name for name in ("__init__", "forward") if name in vars(upstream)]
    if not issubclass(upstream, form.generic) or own:
        raise UnknownHeadError(
            f"transformers' {upstream.__name__} has {' and '.join(own) or 'a form'} of its own; a head is made here for "
            f"those that are transformers' {form.generic.__name__} and nothing else."
        )
    return upstream


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The layer that gives what is read of a model: its scores or its logits."""
    return getattr(model, model.form.layer) if isinstance(model, Scorer) else model.get_output_embeddings()


class Learned(_Model):
    """A head that is made here."""

    only_causal: tuple[str, ...]
    """Patterns of what a checkpoint of the causal head holds besides."""
    only_here: ClassVar[tuple[str, ...]] = ()
    """Patterns of what such a checkpoint lacks."""

    def learned(self, head: Callable, hidden_states: torch.Tensor) -> SequenceClassifierOutputWithPast:
        """The loss of the step's objective; without one what the head gives of each token, `(1, s, labels)`: which of them
        counts is the objective's matter."""
        objective = current_step().objective
        if objective is None:
            return SequenceClassifierOutputWithPast(logits=head(hidden_states))
        return SequenceClassifierOutputWithPast(loss=objective(head, hidden_states))


class Scorer(Learned):
    """A generic head with another base model, and with a loss over the documents of packed rows."""

    form: ClassVar[Form]
    base_class: ClassVar[type[PreTrainedModel]]

    @property
    def only_here(self) -> tuple[str, ...]:
        return (f"{self.form.layer}.*",)

    def __init__(self, config: PreTrainedConfig) -> None:
        super(self.form.generic, self).__init__(config)  # pyright: ignore[reportCallIssue]  # the class behind it
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.base_class._from_config(config))
        for name, module in self.form.make(config).items():
            setattr(self, name, module)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: torch.LongTensor | None = None, labels: torch.LongTensor | None = None, **kwargs: Any
    ) -> Any:
        """While a parallel state is live: what is learned of packed rows. Else upstream's."""
        if parallel.current() is None:
            given = {} if labels is None else {"labels": labels}
            return self.form.generic.forward(self, input_ids=input_ids, **given, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in NOT_OF_TOKENS}
        hidden_states = getattr(self, self.base_model_prefix)(input_ids=input_ids, **kwargs).last_hidden_state
        if isinstance(dropout := getattr(self, "dropout", None), nn.Module):
            hidden_states = dropout(hidden_states)
        return self.learned(getattr(self, self.form.layer), hidden_states)


class Embedder(Learned):
    """A generated base model, of whose hidden states an objective learns."""


def _embedding(base: type[PreTrainedModel]) -> Callable[..., Any]:
    """The forward of an `Embedder`, with the parameters of its base's."""

    @functools.wraps(base.forward)
    def forward(self: Embedder, *args: Any, **kwargs: Any) -> Any:
        if parallel.current() is None or current_step().objective is None:
            return base.forward(self, *args, **kwargs)
        for name in NOT_OF_TOKENS:
            kwargs.pop(name, None)
        return self.learned(nn.Identity(), base.forward(self, *args, **kwargs).last_hidden_state)

    return forward
