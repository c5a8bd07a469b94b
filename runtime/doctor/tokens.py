"""Does the tokenizer belong to the model, and is padding told apart from text?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import GenerationConfig

from patchgen.runtime.data.media_parts import as_list
from patchgen.runtime.doctor.finding import Check, Finding, failed, passed
from patchgen.runtime.doctor.samples import first_texts

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

MEDIA = ("image", "video", "audio")


class Tokenizer(Check):
    """Its special tokens are those of the config, and its tokens have embeddings."""

    name = "tokenizer"

    def run(self, patient: Patient) -> Finding:
        tokenizer = patient.tokenizer
        problems = [*_stop_problems(patient), *_placeholder_problems(patient)]
        if problems:
            return failed(
                " ".join(problems),
                "Take tokenizer.json, tokenizer_config.json and special_tokens_map.json from where the weights come from; if "
                "tokens were added on purpose, add them to config.json and generation_config.json.",
            )
        size = patient.config.get_text_config().vocab_size
        return passed(f"{type(tokenizer).__name__}, {len(tokenizer)} tokens for {size} embeddings.")


def stop_tokens(patient: Patient) -> set[int]:
    """The tokens at which generation stops, from config.json and generation_config.json."""
    text = patient.config.get_text_config()
    named = [patient.config.eos_token_id, text.eos_token_id] if hasattr(patient.config, "eos_token_id") else []
    generation = _generation_config(patient)
    return {token for value in [*named, generation.get("eos_token_id")] for token in as_list(value)}


def _generation_config(patient: Patient) -> Mapping[str, Any]:
    """The generation config of the checkpoint; empty if it has none."""
    if patient.checkpoint is None:
        return {}
    try:
        return GenerationConfig.from_pretrained(patient.recipe.model.source).to_dict()
    except (OSError, ValueError):
        return {}


def _stop_problems(patient: Patient) -> Iterable[str]:
    """An end token that the model's configs do not have, which points to the tokenizer of another model."""
    end, stops = patient.tokenizer.eos_token_id, stop_tokens(patient)
    if patient.checkpoint is not None and end is not None and stops and end not in stops:
        names = ", ".join(f"{token} ({patient.tokenizer.convert_ids_to_tokens(token)!r})" for token in sorted(stops))
        yield (
            f"The tokenizer ends a text with {patient.tokenizer.eos_token!r} = {end}; the model's configs have {names}: this "
            "is the tokenizer of another model, or its special tokens were changed."
        )


def _placeholder_problems(patient: Patient) -> Iterable[str]:
    """Placeholders of media that the processor writes but the model does not look for."""
    processor, tokenizer = patient.parts.processor, patient.tokenizer
    for kind in MEDIA if processor is not None else ():
        expected = getattr(patient.config, f"{kind}_token_id", None)
        written = _placeholder_ids(processor, tokenizer, kind)
        if expected is not None and written and expected not in written:
            names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} = {token}" for token in sorted(written))
            yield f"The processor marks {kind}s with {names}; config.{kind}_token_id = {expected}."


def _placeholder_ids(processor: Any, tokenizer: Any, kind: str) -> set[int]:
    """All ids that may be the placeholder of a kind of media: gemma3's processor names the start of an image, its tokenizer the
    placeholder."""
    token = getattr(processor, f"{kind}_token", None)
    ids = [getattr(owner, f"{kind}_token_id", None) for owner in (processor, tokenizer)]
    ids.append(tokenizer.convert_tokens_to_ids(token) if token is not None else None)
    return {token for token in ids if token is not None}


class Padding(Check):
    """No token of the texts is mistaken for padding."""

    name = "padding"

    def run(self, patient: Patient) -> Finding:
        tokenizer = patient.tokenizer
        pad, token = tokenizer.pad_token_id, tokenizer.pad_token
        texts = list(first_texts(patient.recipe.data)) if pad is not None and pad != tokenizer.eos_token_id else []
        if count := sum(text.count(token) for text in texts):
            return failed(
                f"The pad token {token!r} = {pad} occurs {count} times in the texts of the first records: wherever padding is "
                "recognised by its id, these tokens are lost.",
                "Name a token that no text contains (pad_token in tokenizer_config.json): a reserved one, or a new one with an "
                "embedding.",
            )
        ids = [token for sample in patient.samples for token in sample.ids]
        for path, module in patient.blueprint.named_modules():
            row = module.padding_idx if isinstance(module, nn.Embedding) else None
            if row is not None and row in ids and row not in {pad, tokenizer.eos_token_id}:
                return failed(
                    f"config.pad_token_id = {row} is {tokenizer.convert_ids_to_tokens(row)!r}, which occurs {ids.count(row)} "
                    f"times among the first {len(ids)} tokens of the data: {path} gives that row no gradient, so the "
                    "embedding of this token never learns.",
                    f"Set pad_token_id in config.json to the tokenizer's ({pad}), or to null (model.overrides).",
                )
        if pad is None:
            return passed(
                "The tokenizer has no pad token; rows are filled with 0, which has no labels and is not attended to."
            )
        is_end = pad == tokenizer.eos_token_id
        what = " (also its end token: where labels are masked by id, the end token is never learned)" if is_end else ""
        return passed(f"{token!r} = {pad}{what}.")
