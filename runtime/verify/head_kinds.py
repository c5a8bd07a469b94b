"""The heads that are not language models: what they are given in a proof, and what is compared of them as a run computes.

classification   a class of each row        labels (B,)
token            a class of each token      labels (B, S)
answers          where an answer stands     start_positions, end_positions (B,)
base             the model without a head   no labels
conditional      an encoder-decoder         labels (B, S), which are the targets: they are not shifted

B rows   S tokens per row
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
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
"""Kind -> transformers' mapping of the classes that are of it."""
OF_ROWS = ("plain", "padded right", "padded left")
"""The checks of a head that reads one place of each row: upstream has no packed rows for it."""
VOCABULARY = 64
BOUNDS = "cu_seq_lens_q"


@functools.cache
def kind_of(class_name: str) -> str | None:
    """The kind of a class by the mapping that lists it; None: a language model, or of none of these kinds."""
    from transformers.models.auto import modeling_auto

    for kind, mapping in MAPPINGS.items():
        served = getattr(modeling_auto, mapping).values()
        if any(class_name in ((one,) if isinstance(one, str) else one) for one in served):
            is_one = {CONDITIONAL: _is_encoder_decoder, BASE: lambda name: not _is_language_model(name)}.get(kind)
            return kind if is_one is None or is_one(class_name) else None
    return CONDITIONAL if _is_language_model(class_name) and _is_encoder_decoder(class_name) else None


def _is_encoder_decoder(class_name: str) -> bool:
    """Whether a class has a decoder with tokens of its own: upstream's mapping lists language models of speech, too."""
    import transformers

    model_class = getattr(transformers, class_name, None)
    return model_class is not None and "decoder_input_ids" in inspect.signature(model_class.forward).parameters


def _is_language_model(class_name: str) -> bool:
    """Whether a class that AutoModel builds is also one that has labels for its vocabulary."""
    from transformers.models.auto import modeling_auto

    names = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    return any(class_name in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").values() for name in names)


def prepared(config: PreTrainedConfig, kind: str | None) -> PreTrainedConfig:
    """A small config with what heads of a kind need: the token that fills rows, behind which no row is classified."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if kind == CLASSIFICATION and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0
    return config


def num_labels(config: PreTrainedConfig) -> int:
    """How many classes a head tells apart."""
    if config.num_labels is None:
        raise ValueError(f"{type(config).__name__} does not say how many labels there are (num_labels).")
    return config.num_labels


def batch_of(kind: str, config: PreTrainedConfig, parameters: Mapping[str, Any], batch: Mapping[str, Any]) -> dict:
    """A text batch with the labels of a kind in place of the next tokens.

    Args:
        parameters: of the head's forward.
        batch: `input_ids`, `labels` int64 `(B, S)`, and perhaps a mask.
    """
    out = {name: value for name, value in batch.items() if name != "labels"}
    ids, labels, mask = batch["input_ids"], batch.get("labels"), batch.get("attention_mask")
    rows = torch.arange(len(ids))
    if kind == CLASSIFICATION:
        out["labels"] = rows % num_labels(config)
        out["input_ids"] = _ended(config, ids, mask)
    elif kind == TOKEN:
        out["labels"] = torch.where(batch["labels"] == IGNORED, batch["labels"], ids % num_labels(config))
    elif kind == ANSWERS:
        out |= {"start_positions": 3 + rows, "end_positions": 5 + rows}
    elif kind == CONDITIONAL:
        out["labels"] = labels
    if kind == BASE and "decoder_input_ids" in parameters:
        out["decoder_input_ids"] = ids.roll(1, dims=1)
    return out


def _ended(config: PreTrainedConfig, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Rows `(B, S)` as classifiers read them: the token that ends a text as its last one, then those that fill.

    What stands before a text stays: whether a head reads it (its first place, of BERT's) shows when it is changed.
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


def is_of_rows(upstream_class: type[PreTrainedModel], kind: str) -> bool:
    """Whether upstream takes a head's rows unpacked only, and no run of ours computes them otherwise: it reads one place of
    each row (but `objectives/heads.py`), or its decoder reads all of what its encoder made of the row."""
    from transformers.modeling_layers import GenericForSequenceClassification

    return "decoder_input_ids" in inspect.signature(upstream_class.forward).parameters or (
        kind == CLASSIFICATION and not issubclass(upstream_class, GenericForSequenceClassification)
    )


def scored(model_class: type[PreTrainedModel], kind: str, *, of_rows: bool) -> type[PreTrainedModel]:
    """The class with a language model's outputs, so that what a run computes is compared as that of language models is.

    Its logits `(B, S, n)` are the hidden states, or the scores of each token; a head of rows says the same of all tokens.
    Its loss is its own, of labels that follow from the rows; in a packed row that of the objective that a run has for it. A
    base model has none: the cross-entropy of a fixed projection of its hidden states. Without dropout.
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
            return CausalLMOutput(logits=_scores(self, model_class, kind, of_rows, rows))
        items = num_items(kind, rows | {"shift_labels": targets})
        share = 1.0 if num_items_in_batch is None else items / num_items_in_batch
        is_packed = BOUNDS in rows and kind in (CLASSIFICATION, ANSWERS)
        if kind != BASE and not is_packed:
            return CausalLMOutput(loss=_own_loss(self, model_class, kind, targets, rows, of_rows) * share)
        scores = _scores(self, model_class, kind, of_rows, rows)
        mean = _of_documents(self, kind, targets, scores, rows) if is_packed else _projected(scores, targets)
        return CausalLMOutput(loss=mean * share)

    theirs = inspect.signature(model_class.forward)
    own = [one for name, one in inspect.signature(forward).parameters.items() if name == "labels"]
    given = [one for name, one in theirs.parameters.items() if name != "labels"]
    at = next((i for i, one in enumerate(given) if one.kind in (one.VAR_KEYWORD, one.KEYWORD_ONLY)), len(given))
    forward.__signature__ = theirs.replace(parameters=[*given[:at], *own, *given[at:]])
    members = {"__init__": __init__, "forward": forward, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


def num_items(kind: str | None, rows: Mapping[str, Any]) -> int:
    """What a loss of a kind is a mean over, of rows with `labels` not yet shifted or `shift_labels`: documents, or labels."""
    if kind in (CLASSIFICATION, ANSWERS):
        return len(rows[BOUNDS]) - 1 if BOUNDS in rows else len(rows["input_ids"])
    targets = rows["shift_labels"] if "shift_labels" in rows else rows["labels"][:, 1:]
    return int((targets != IGNORED).sum())


def _projected(scores: Tensor, targets: Tensor) -> Tensor:
    projection = torch.randn(scores.shape[-1], VOCABULARY, generator=torch.Generator().manual_seed(0)).to(scores)
    targets = torch.where(targets == IGNORED, targets, targets % VOCABULARY)
    return cross_entropy((scores @ projection).flatten(0, 1), targets.flatten())


def _own_loss(
    model: PreTrainedModel, model_class: type, kind: str, targets: Tensor, rows: Mapping[str, Any], of_rows: bool
) -> Tensor:
    """The loss of the head itself, whose labels follow from the targets `(B, S)` of the tokens.

    An encoder-decoder's are the targets, a token's class the remainder of its target, a row's that of their sum, and an answer
    goes from the first token that is a target to the last. What upstream reads of answers in padding no mask keeps equal: of
    padded rows the same loss, over the others.
    """
    if kind == CONDITIONAL:
        given = {"labels": targets}
    elif kind == TOKEN:
        given = {"labels": _classes(model, targets)}
    elif kind == CLASSIFICATION:
        if of_rows or "attention_mask" in rows:  # else the same tokens as in a packed row
            rows = {**rows, "input_ids": _ended(model.config, rows["input_ids"], rows.get("attention_mask"))}
        given = {"labels": _class_of(model, targets)}
    else:
        places = torch.arange(targets.shape[1]).expand_as(targets) + 1
        first = places.masked_fill(targets == IGNORED, targets.shape[1]).amin(dim=1)
        last = places.masked_fill(targets == IGNORED, 0).amax(dim=1)
        given = {"start_positions": first, "end_positions": last}
        mask = rows.get("attention_mask")
        if mask is not None and not mask.all():
            scores = _scores(model, model_class, kind, False, rows).masked_fill(mask[..., None] == 0, float("-inf"))
            return cross_entropy(scores, torch.stack([first, last], dim=1))
    return model_class.forward(model, **given, **rows).loss


def _classes(model: PreTrainedModel, targets: Tensor) -> Tensor:
    return torch.where(targets == IGNORED, targets, targets % num_labels(model.config))


def _class_of(model: PreTrainedModel, targets: Tensor) -> Tensor:
    return targets.masked_fill(targets == IGNORED, 0).sum(dim=1) % num_labels(model.config)


def _of_documents(
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
        raise ValueError("The share of a step is asked for where no parallel state is live.")
    document = mask_functions.document_of(rows[BOUNDS], *targets.shape)[0]
    alone = [targets[:, document == number] for number in range(int(document.max()) + 1)]
    told = {"document_sources": torch.zeros(len(alone), dtype=torch.long)}
    if kind == CLASSIFICATION:
        objective = classification.Classification(num_labels(model.config))
        told["document_labels"] = torch.cat([_class_of(model, one) for one in alone])
    else:
        objective = tokens.QuestionAnswering()
    handed = {**rows, "shift_labels": targets, **told}
    _, batch = split(handed, state, targets.device, model.config.get_text_config().pad_token_id)
    with loss.step(len(alone)):
        return loss_share(objective, batch)(nn.Identity(), scores)


def _scores(model: PreTrainedModel, model_class: type, kind: str, of_rows: bool, rows: Mapping[str, Any]) -> Tensor:
    is_decoded = "decoder_input_ids" in inspect.signature(model_class.forward).parameters
    if kind == CLASSIFICATION and not of_rows:
        score: Any = model.score
        return score(getattr(model, model.base_model_prefix)(**rows).last_hidden_state)
    if is_decoded and kind in (BASE, CONDITIONAL):
        rows = {**rows, "decoder_input_ids": rows["input_ids"]}
    if kind == CLASSIFICATION:
        rows = {**rows, "input_ids": _ended(model.config, rows["input_ids"], rows.get("attention_mask"))}
    output = model_class.forward(model, **rows)
    if kind == ANSWERS:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    if kind == CLASSIFICATION:
        return output.logits[:, None].expand(-1, rows["input_ids"].shape[1], -1)
    return output.last_hidden_state if kind == BASE else output.logits
