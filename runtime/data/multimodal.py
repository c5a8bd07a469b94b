"""Prepares conversations with images, videos and sounds, with the model's own processor and position function.

The content of messages is that of transformers' chat templates: text, or a list of parts `{"type": "text", "text": ...}`,
`{"type": "image"}`, `{"type": "video"}`, `{"type": "audio"}`. A part contains its item (`{"type": "image", "image": PATH}`)
or takes the next one of the record's list of images, videos or sounds. The sound of a video is used if the part says so:
`{"type": "video", "video": PATH, "audio": true}`, or with another sound instead of `true`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.runtime.data import token_alignment
from patchgen.runtime.data.chat import learned_turns, render_with_spans
from patchgen.runtime.data.config import DataConfig, SourceConfig
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.media_items import MediaItems
from patchgen.runtime.data.media_options import MediaOptions
from patchgen.runtime.data.prepare import PreparedRecord, Problem, refusal_of_long_sample
from patchgen.runtime.data.problems import (
    BadSample,
    DataError,
    Outcome,
    as_bad_sample,
    long_reason,
    too_long_reason,
)
from patchgen.runtime.data.processors import ProcessorAdapter
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.roles import role_spans, roles_of_tokens
from patchgen.runtime.data.transform import ModelInputs, mappers_of
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.batch_fields import RULES, rule_of
from patchgen.runtime.verify.media import INPUTS, OTHER_INPUTS

DROPPED_OUTPUTS = (
    "attention_mask",
    "offset_mapping",
    "text_replacement_offsets",
    "video_metadata",
    "num_audio_tokens",
)
"""Outputs of processors that batches do not contain."""


class PrepareMultimodal:
    """One sample per record.

    Args:
        processor: of transformers, with a chat template.
        position_function: called by keyword with what it has parameters for, of `input_ids` `(1, n)`, `attention_mask` `(1, n)`,
            the processor's fields, `audio_seqlens` and `second_per_grids`; returns positions `(3, 1, n)` or `(3, n)`,
            alone, first in a tuple, or as `position_ids` in a dict. None: positions are 0, 1, 2 ...

    Raises:
        DataError: no processor, or one without a chat template, without a default one among several, or without an option of
            `config.media`.
    """

    def __init__(self, config: DataConfig, processor: Any, position_function: Callable[..., Any] | None) -> None:
        if processor is None:
            raise DataError("data.kind = multimodal needs a processor: pass build_loader(processor=...).")
        self.config = config
        self.processor = ProcessorAdapter(processor)
        self.position_function = position_function
        self.template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
        if self.template is None:
            raise DataError(f"{self.processor.name} has no chat template, which data.kind = multimodal needs.")
        if isinstance(self.template, dict):
            self.template = self._default_template(self.template)
        self.placeholders_without_token = sorted(self.processor.placeholders - processor.tokenizer.get_vocab().keys())
        self.mappers = mappers_of(config)
        self.options = MediaOptions(config, self.processor)
        self.literals = Literals(
            self.processor.tokenizer, kept=config.special_tokens, placeholders=self.processor.placeholders
        )

    def _default_template(self, templates: dict[str, str]) -> str:
        if "default" not in templates:
            raise DataError(
                f"{self.processor.name} has the chat templates {', '.join(templates)}, and data.kind = multimodal needs one named "
                "default. To fix: set the processor's chat_template to the one to use."
            )
        return templates["default"]

    def __call__(self, source_index: int, record: Record) -> PreparedRecord:
        try:
            fields = self.mappers[source_index](record.where, record.fields())
            if isinstance(fields, ModelInputs):
                return self._prepare_model_inputs(record.where, fields.fields)
            return self._prepare_conversation(self.config.sources[source_index], record.where, fields)
        except BadSample as error:
            return PreparedRecord(problem=Problem("bad", error.where, error.reason))

    def _prepare_conversation(self, source: SourceConfig, where: str, fields: dict[str, Any]) -> PreparedRecord:
        turns = learned_turns(where, fields["messages"], self.config.learn)
        messages, items = self.options.media_reader(where, source, fields, fields["messages"])
        self._require_compatible_modalities(where, items.modalities)
        tools = fields.get("tools") or None
        text, spans = render_with_spans(
            where, messages, tools, template=self.template, literals=self.literals, learned=turns
        )
        if not spans:
            raise BadSample(where, "no assistant turn to learn from")
        sample, is_media = self._run_processor(where, text, spans, items)
        return replace(self._apply_limit(where, sample, is_media), modalities=items.modalities)

    def ids_and_roles(self, source_index: int, where: str, fields: dict[str, Any]) -> tuple[np.ndarray, list[str]]:
        """The ids `(n,)` of a sample, and the role of each; `fields` are those of the source's mapper.

        Raises:
            BadSample: it cannot be used.
        """
        messages, items = self.options.media_reader(
            where, self.config.sources[source_index], fields, fields["messages"]
        )
        text, by_role = role_spans(
            messages, fields.get("tools") or None, template=self.template, literals=self.literals, where=where
        )
        ids = self._run_processor(where, text, [], items)[0]["input_ids"].numpy()
        tokens_in = lambda spans: (self._run_processor(where, text, spans, items)[0]["labels"] != IGNORED).numpy()  # noqa: E731
        return ids, roles_of_tokens(len(ids), by_role, tokens_in)

    def _prepare_model_inputs(self, where: str, sample: dict[str, Tensor]) -> PreparedRecord:
        """A sample that a transform returned as model inputs: only its positions may be missing."""
        kind_of_input = {name: kind for kind, main in INPUTS.items() for name in (main, *OTHER_INPUTS.get(kind, ()))}
        modalities = frozenset(kind_of_input[name] for name in sample if name in kind_of_input)
        self._require_compatible_modalities(where, modalities)
        if "position_ids" not in sample:
            batched = {name: value[None] if RULES[name].pack_dim == -1 else value for name, value in sample.items()}
            sample = {**sample, "position_ids": self._positions(where, batched)}
        # Which tokens stand for media is unknown, so a sample with media is not truncated.
        is_media = None if modalities else torch.zeros(sample["input_ids"].shape, dtype=torch.bool)
        return replace(self._apply_limit(where, sample, is_media), modalities=modalities)

    def _require_compatible_modalities(self, where: str, modalities: frozenset[str]) -> None:
        """Refuses a sample with modalities that must not share a row: the model cannot distinguish them, or the recipe says so.

        Raises:
            BadSample: with the modalities.
        """
        for pair in self.config.separate_modalities or ():
            if modalities.issuperset(pair):
                raise BadSample(
                    where,
                    f"{' and '.join(pair)} in one sample, which data.separate_modalities keeps apart",
                )

    # -------------------------------------------------------------------------------------------- text and labels

    def _run_processor(
        self, where: str, text: str, spans: Sequence[tuple[int, int]], items: MediaItems
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The sample of a rendered conversation, and which of its tokens `(n,)` stand for media.

        Args:
            spans: the parts of the text that have a loss.
        """
        plain = self.literals.unmark(where, text, spans)
        with as_bad_sample(self.processor.name, where):
            outputs = self.processor(
                plain.text,
                images=items.images,
                videos=[frames for frames, _ in items.videos],
                audios=items.audios,
                return_text_replacement_offsets=True,
                **self.options.for_call(items),
            )
        ids = outputs["input_ids"][0].numpy()
        self._require_known_placeholders(where, plain.text, outputs)
        alignment = token_alignment.alignment_of_processor(where, outputs)
        if alignment is None:
            spans_to_find = [*plain.spans, *(span for span, _ in plain.literals)]
            alignment = token_alignment.alignment_by_matching(
                where, ids.tolist(), plain.text, self.processor.tokenizer, spans_to_find
            )
        has_loss, is_media = alignment.overlapping(plain.spans), alignment.is_media
        if plain.literals:
            expanded_literals = [(alignment.expanded(span), token) for span, token in plain.literals]
            ids, repeats = self.literals.restore_literals(where, ids, alignment.offsets, expanded_literals)
            has_loss, is_media = np.repeat(has_loss, repeats), np.repeat(is_media, repeats)
            for name in outputs.keys() & RULES.keys():
                if (rule := rule_of(name, outputs)).is_per_token:
                    outputs[name] = outputs[name].repeat_interleave(torch.from_numpy(repeats), dim=rule.pack_dim)
            outputs["input_ids"] = torch.from_numpy(ids)[None]
        sample = self._fields(where, outputs)
        sample["labels"] = sample["input_ids"].masked_fill(~torch.from_numpy(has_loss), IGNORED)
        sample["position_ids"] = self._positions(where, outputs)
        return sample, torch.from_numpy(is_media)

    def _require_known_placeholders(self, where: str, text: str, outputs: dict[str, Any]) -> None:
        """Refuses a sample whose media have placeholders that the tokenizer does not have.

        Raises:
            BadSample: with the token.
        """
        replacements = [
            entry["replacement"] for entries in outputs.get("text_replacement_offsets") or () for entry in entries
        ]
        for token in self.placeholders_without_token:
            if any(token in replacement for replacement in replacements or [text]):
                raise BadSample(
                    where,
                    f"{self.processor.name} uses the placeholder {token!r}, and the tokenizer has no such token. To fix: use the "
                    "tokenizer of the processor, or add the token to it",
                )

    def _fields(self, where: str, outputs: dict[str, Any]) -> dict[str, Tensor]:
        """The processor's outputs for the model: per-token fields as `(n,)`, media unchanged.

        Raises:
            BadSample: a field that batches contain is not a tensor, or not a list where it must be one.
            DataError: there is no rule for packing and slicing a field.
        """
        sample = {}
        for name, value in outputs.items():
            if name in DROPPED_OUTPUTS:
                continue
            expected = list if name in RULES and RULES[name].listed else Tensor
            if name in RULES and not isinstance(value, expected):
                kind = "list" if expected is list else "tensor"
                raise BadSample(
                    where,
                    f"{self.processor.name} returned {name} as a {type(value).__name__}, expected a {kind}; for example because "
                    "images differ in size",
                )
            if not isinstance(value, expected):
                continue
            try:
                rule = rule_of(name)
            except KeyError as error:
                raise DataError(
                    f"{where}: {self.processor.name} returns the field {name!r}. {error.args[0]}"
                ) from error
            sample[name] = value[0] if rule.pack_dim == -1 else value
        return sample

    def _positions(self, where: str, outputs: dict[str, Any]) -> Tensor:
        """`(n,)`; with a position function `(4, n)`: text, time, height and width."""
        ids = outputs["input_ids"]
        text_positions = torch.arange(ids.shape[1])
        if self.position_function is None:
            return text_positions
        available = {**outputs, "attention_mask": torch.ones_like(ids)}
        if "feature_attention_mask" in outputs:
            available["audio_seqlens"] = outputs["feature_attention_mask"].sum(-1)
        if "video_second_per_grid" in outputs:
            available["second_per_grids"] = outputs["video_second_per_grid"]
        parameters = inspect.signature(self.position_function).parameters
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            available = {name: value for name, value in available.items() if name in parameters}
        with as_bad_sample("the model's position function", where):
            positions = self.position_function(**available)
        if isinstance(positions, dict):
            positions = positions["position_ids"]
        if isinstance(positions, tuple):
            positions = positions[0]
        # In their own dtype: positions may be fractional, by the seconds between frames.
        return torch.cat([text_positions[None].to(positions.dtype), positions.reshape(3, -1)])

    # ------------------------------------------------------------------------------------------------- length

    def _apply_limit(self, where: str, sample: dict[str, Tensor], is_media: Tensor | None) -> PreparedRecord:
        """Skips, truncates or refuses a sample that is too long.

        Args:
            is_media: which of its tokens `(n,)` stand for media; None: unknown.
        """
        length, limit = sample["input_ids"].shape[0], self.config.length_limit
        if length <= limit:
            return PreparedRecord([sample])
        if self.config.on_long == "error":
            raise refusal_of_long_sample(where, length, limit, can_split=False)
        if self.config.on_long == "truncate" and is_media is not None and not is_media[limit:].any():
            rules = {name: rule_of(name, sample) for name in sample}
            cut = {
                name: value.split(limit, dim=rules[name].pack_dim)[0] if rules[name].is_per_token else value
                for name, value in sample.items()
            }
            outcome: Outcome = "truncated" if bool((cut["labels"][1:] != IGNORED).any()) else "skipped"
            problem = Problem(outcome, where, long_reason(length, limit, truncates=True, outcome=outcome))
            return PreparedRecord([cut] if outcome == "truncated" else [], problem)
        reason = too_long_reason(length, limit)
        if self.config.on_long == "truncate":
            reason += (
                ", and media are in the part to cut off"
                if is_media is not None
                else ", and which of its tokens stand for media is unknown"
            )
        return PreparedRecord(problem=Problem("skipped", where, reason))
