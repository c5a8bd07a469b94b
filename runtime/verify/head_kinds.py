"""Heads that are not language models: their inputs in a proof, and how they are compared on the training path.

classification   a class per row            labels (B,)
token            a class per token          labels (B, S)
answers          the span of an answer      start_positions, end_positions (B,)
base             the model without a head   no labels
conditional      an encoder-decoder         labels (B, S), which are the targets: they are not shifted

B rows   S tokens per row   n scores or hidden size of a token
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from patchgen.runtime import mask_functions, parallel
from patchgen.runtime.objectives.base import ANSWERS, BASE, CLASSIFICATION, TOKEN
from patchgen.runtime.parallel import loss
from patchgen.runtime.parallel.batch import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

CONDITIONAL = "conditional"
MAPPINGS = {
    CLASSIFICATION: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    TOKEN: "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    ANSWERS: "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    CONDITIONAL: "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    BASE: "MODEL_MAPPING_NAMES",
}
"""Kind -> transformers' mapping of its classes."""
UNPACKED_CHECKS = ("plain", "padded right", "padded left", "large weights", "bf16")
"""The checks of a head that takes unpacked rows only."""
PROJECTED_SIZE = 64
DOCUMENT_BOUNDS = "cu_seq_lens_q"


@functools.cache
def kind_of(class_name: str) -> str | None:
    """The kind of a class, by the mapping that lists it; None: a language model, or none of these kinds.

    An encoder-decoder with labels for its vocabulary is CONDITIONAL, whichever mapping lists it.
    """
    from transformers.models.auto import modeling_auto

    for kind, mapping in MAPPINGS.items():
        served = getattr(modeling_auto, mapping).values()
        if any(class_name in ((names,) if isinstance(names, str) else names) for names in served):
            if kind == CONDITIONAL:
                return kind if _is_encoder_decoder(class_name) else None
            if kind == BASE and _is_language_model(class_name):
                return None
            return CONDITIONAL if kind == BASE and _decodes_to_vocabulary(class_name) else kind
    return CONDITIONAL if _is_language_model(class_name) and _is_encoder_decoder(class_name) else None


def _is_encoder_decoder(class_name: str) -> bool:
    """Whether a class has a decoder with its own tokens: upstream's mapping also lists speech language models."""
    import transformers

    model_class = getattr(transformers, class_name, None)
    return model_class is not None and "decoder_input_ids" in inspect.signature(model_class.forward).parameters


def _decodes_to_vocabulary(class_name: str) -> bool:
    """Whether an encoder-decoder that AutoModel builds has a head over its vocabulary, and labels for it, all the same."""
    import transformers

    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        return False
    signature = inspect.signature(model_class.forward)
    returns = str(signature.return_annotation)
    return "Seq2SeqLMOutput" in returns and {"labels", "decoder_input_ids"} <= signature.parameters.keys()


def _is_language_model(class_name: str) -> bool:
    """Whether upstream lists a class as a language model, with labels for its vocabulary; AutoModel builds some of these."""
    from transformers.models.auto import modeling_auto

    names = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    return any(class_name in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").values() for name in names)


def with_special_tokens(config: PreTrainedConfig, kind: str | None) -> PreTrainedConfig:
    """Adds special tokens that are missing to the config, in place, and returns it.

    An encoder-decoder of any kind gets its pad and its first token, a classifier its pad token, since it reads the last token
    before padding.
    """
    text = config.get_text_config()
    if config.is_encoder_decoder:
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if kind == CLASSIFICATION and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0
    return config


def num_labels(config: PreTrainedConfig) -> int:
    """The number of classes of a head."""
    if config.num_labels is None:
        raise ValueError(f"{type(config).__name__}.num_labels is None: expected the number of classes.")
    return config.num_labels


def head_batch(kind: str, config: PreTrainedConfig, parameters: Collection[str], batch: Mapping[str, Any]) -> dict:
    """A text batch with the labels of a kind instead of language-model labels.

    Args:
        parameters: the names of those of the head's forward.
        batch: `input_ids`, `labels` int64 `(B, S)`, and perhaps a mask.
    """
    out = {name: value for name, value in batch.items() if name != "labels"}
    ids, labels, mask = batch["input_ids"], batch.get("labels"), batch.get("attention_mask")
    rows = torch.arange(len(ids))
    if kind == CLASSIFICATION:
        out["labels"] = rows % num_labels(config)
        out["input_ids"] = _with_end_token(config, ids, mask)
    elif kind == TOKEN:
        out["labels"] = torch.where(batch["labels"] == IGNORED, batch["labels"], ids % num_labels(config))
    elif kind == ANSWERS:
        out |= {"start_positions": 3 + rows, "end_positions": 5 + rows}
    elif kind == CONDITIONAL:
        out["labels"] = labels
    if kind == BASE and "decoder_input_ids" in parameters:
        out["decoder_input_ids"] = ids.roll(1, dims=1)
    return out


def _with_end_token(config: PreTrainedConfig, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Rows `(B, S)` as classifiers read them: each text ends with the end token, then come pad tokens.

    Left padding keeps its ids: `_reads_padding_upstream` (training_checks.py) changes them, to find a head that reads them
    (BERT's first position).
    """
    mask = torch.ones_like(ids) if mask is None else mask
    text = config.get_text_config()
    out = ids.masked_fill(mask == 0, text.pad_token_id or 0) if mask[:, 0].all() else ids
    end = getattr(text, "eos_token_id", None)
    if isinstance(end, int):
        places = torch.arange(ids.shape[1]).expand_as(ids)
        last = places.masked_fill(mask == 0, -1).amax(dim=1, keepdim=True)
        out = torch.where(places == last, end, out)
    return out


def takes_unpacked_only(upstream_class: type[PreTrainedModel], kind: str) -> bool:
    """Whether a head takes unpacked rows only, in upstream and in our runs: its decoder attends to all encoder states of a
    row, or it is a classifier that is not derived from transformers' GenericForSequenceClassification."""
    from transformers.modeling_layers import GenericForSequenceClassification

    return "decoder_input_ids" in inspect.signature(upstream_class.forward).parameters or (
        kind == CLASSIFICATION and not issubclass(upstream_class, GenericForSequenceClassification)
    )


def as_language_model(model_class: type[PreTrainedModel], kind: str, *, unpacked_only: bool) -> type[PreTrainedModel]:
    """A subclass with a language model's inputs and outputs, so that its training path is compared like a language model's.

    Its logits `(B, S, n)` are the hidden states or the scores of each token; scores of a row are repeated for all tokens.
    Its loss is the head's own, with labels derived from the tokens; of classes per row and of answers, in a packed row, that of
    the run's objective; of a base model the cross-entropy of a fixed projection of its hidden states. Its `nn.Dropout` modules
    drop nothing; other dropout is the config's.
    """
    from transformers.modeling_outputs import CausalLMOutput

    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(
        self: PreTrainedModel,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
        **rows: Any,
    ) -> CausalLMOutput:
        targets = shift_labels
        if targets is None and labels is not None:
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if targets is None:
            return CausalLMOutput(logits=_scores(self, model_class, kind, unpacked_only, rows))
        items = num_items(kind, rows | {"shift_labels": targets})
        share = 1.0 if num_items_in_batch is None else items / num_items_in_batch
        is_packed = DOCUMENT_BOUNDS in rows and kind in (CLASSIFICATION, ANSWERS)
        if kind != BASE and not is_packed:
            return CausalLMOutput(loss=_head_loss(self, model_class, kind, targets, rows, unpacked_only) * share)
        scores = _scores(self, model_class, kind, unpacked_only, rows)
        mean = _packed_loss(self, kind, targets, scores, rows) if is_packed else _projected_loss(scores, targets)
        return CausalLMOutput(loss=mean * share)

    signature = inspect.signature(model_class.forward)
    labels_parameter = inspect.signature(forward).parameters["labels"]
    inputs = [p for name, p in signature.parameters.items() if name != "labels"]
    at = next((i for i, p in enumerate(inputs) if p.kind in (p.VAR_KEYWORD, p.KEYWORD_ONLY)), len(inputs))
    forward.__signature__ = signature.replace(parameters=[*inputs[:at], labels_parameter, *inputs[at:]])
    members = {"__init__": __init__, "forward": forward, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


def num_items(kind: str | None, rows: Mapping[str, Any]) -> int:
    """The number of documents or labels that the loss of a kind is a mean over; `labels` are unshifted."""
    if kind in (CLASSIFICATION, ANSWERS):
        return len(rows[DOCUMENT_BOUNDS]) - 1 if DOCUMENT_BOUNDS in rows else len(rows["input_ids"])
    targets = rows["shift_labels"] if "shift_labels" in rows else rows["labels"][:, 1:]
    return int((targets != IGNORED).sum())


def _projected_loss(scores: Tensor, targets: Tensor) -> Tensor:
    projection = torch.randn(scores.shape[-1], PROJECTED_SIZE, generator=torch.Generator().manual_seed(0)).to(scores)
    targets = torch.where(targets == IGNORED, targets, targets % PROJECTED_SIZE)
    return cross_entropy((scores @ projection).flatten(0, 1), targets.flatten())


def _head_loss(
    model: PreTrainedModel, model_class: type, kind: str, targets: Tensor, rows: Mapping[str, Any], unpacked_only: bool
) -> Tensor:
    """The loss of the head itself, with labels derived from the targets `(B, S)` of the tokens.

    Labels of an encoder-decoder are the targets, the class of a token is its target modulo the number of classes, that of a
    row the sum of its targets modulo it, and an answer reaches from the first target to the last. Question answering
    upstream also scores padding, where values are undefined: with padding its loss is computed here, over the other tokens.
    """
    if kind == CONDITIONAL:
        labels = {"labels": targets}
    elif kind == TOKEN:
        labels = {"labels": torch.where(targets == IGNORED, targets, targets % num_labels(model.config))}
    elif kind == CLASSIFICATION:
        if unpacked_only or "attention_mask" in rows:  # else the same tokens as in a packed row
            rows = {**rows, "input_ids": _with_end_token(model.config, rows["input_ids"], rows.get("attention_mask"))}
        labels = {"labels": _row_classes(model, targets)}
    else:
        places = torch.arange(targets.shape[1]).expand_as(targets) + 1
        first = places.masked_fill(targets == IGNORED, targets.shape[1]).amin(dim=1)
        last = places.masked_fill(targets == IGNORED, 0).amax(dim=1)
        labels = {"start_positions": first, "end_positions": last}
        mask = rows.get("attention_mask")
        if mask is not None and not mask.all():
            scores = _scores(model, model_class, kind, False, rows).masked_fill(mask[..., None] == 0, float("-inf"))
            return cross_entropy(scores, torch.stack([first, last], dim=1))
    return model_class.forward(model, **labels, **rows).loss


def _row_classes(model: PreTrainedModel, targets: Tensor) -> Tensor:
    return targets.masked_fill(targets == IGNORED, 0).sum(dim=1) % num_labels(model.config)


def _packed_loss(
    model: PreTrainedModel, kind: str, targets: Tensor, scores: Tensor, rows: Mapping[str, Any]
) -> Tensor:
    """The mean over the documents of a packed row, by the objective of a run.

    Args:
        scores: of each token, `(1, S, n)`.
    """
    from patchgen.runtime.objectives import classification, tokens
    from patchgen.runtime.objectives.batch import loss_share, split

    state = parallel.current()
    if state is None:
        raise ValueError("The loss of a packed row needs an active parallel state (parallel.using).")
    document = mask_functions.document_of(rows[DOCUMENT_BOUNDS], *targets.shape)[0]
    per_document = [targets[:, document == number] for number in range(int(document.max()) + 1)]
    fields = {**rows, "shift_labels": targets, "document_sources": torch.zeros(len(per_document), dtype=torch.long)}
    if kind == CLASSIFICATION:
        objective = classification.Classification(num_labels(model.config))
        fields["document_labels"] = torch.cat([_row_classes(model, labels) for labels in per_document])
    else:
        objective = tokens.QuestionAnswering()
    _, batch = split(fields, state, targets.device, model.config.get_text_config().pad_token_id)
    with loss.step(len(per_document)):
        return loss_share(objective, batch)(nn.Identity(), scores)


def _scores(
    model: PreTrainedModel, model_class: type, kind: str, unpacked_only: bool, rows: Mapping[str, Any]
) -> Tensor:
    is_decoded = "decoder_input_ids" in inspect.signature(model_class.forward).parameters
    if kind == CLASSIFICATION and not unpacked_only:
        score: Any = model.score
        return score(getattr(model, model.base_model_prefix)(**rows).last_hidden_state)
    if is_decoded and kind in (BASE, CONDITIONAL):
        rows = {**rows, "decoder_input_ids": rows["input_ids"]}
    if kind == CLASSIFICATION:
        rows = {**rows, "input_ids": _with_end_token(model.config, rows["input_ids"], rows.get("attention_mask"))}
    output = model_class.forward(model, **rows)
    if kind == ANSWERS:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    if kind == CLASSIFICATION:
        return output.logits[:, None].expand(-1, rows["input_ids"].shape[1], -1)
    return output.last_hidden_state if kind == BASE else output.logits
