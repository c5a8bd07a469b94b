"""Conversations with images, videos and sounds to samples, by the model's own processor and position function.

Messages have the content of transformers' chat templates: text, or a list of parts `{"type": "text", "text": ...}`,
`{"type": "image"}`, `{"type": "video"}`, `{"type": "audio"}`. A part brings its item (`{"type": "image", "image": PATH}`)
or takes the next one of the record's list of images, videos or sounds. A video that brings its sound says so, each for
itself: `{"type": "video", "video": PATH, "audio": true}`, or with the sound in the place of `true`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from patchgen.runtime.data.chat import assistant_spans, has_mask, mask_of_spans, require_messages
from patchgen.runtime.data.config import DataConfig, SourceConfig
from patchgen.runtime.data.media import MediaError, load_audio, load_image, load_video
from patchgen.runtime.data.prepare import Prepared
from patchgen.runtime.data.problems import BadSample, DataError, refuse_long, too_long
from patchgen.runtime.data.processors import ProcessorAdapter
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.text import required
from patchgen.runtime.parallel.batch import IGNORED

KINDS = {"image": "images", "video": "videos", "audio": "audios"}
NOT_FIELDS = ("attention_mask", "offset_mapping", "text_replacement_offsets", "video_metadata", "num_audio_tokens")


@dataclass
class Items:
    """The media of a sample in their order; `of_videos` says of each sound which video brings it, None: it stands alone."""

    images: list[Any] = field(default_factory=list)
    videos: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    of_videos: list[int | None] = field(default_factory=list)

    def add_audio(self, sound: Any, *, of_video: int | None) -> None:
        self.audios.append(sound)
        self.of_videos.append(of_video)

    def placed(self, kind: str) -> int:
        """How many items of a kind have a place of their own in the messages."""
        return {"image": len(self.images), "video": len(self.videos), "audio": self.of_videos.count(None)}[kind]


class PrepareMultimodal:
    """One sample per record.

    Args:
        config: limits, and the sources with the names of their fields.
        processor: of transformers, with a chat template.
        position_function: called with those of `input_ids` `(1, n)`, `attention_mask` `(1, n)`, the processor's fields,
            `audio_seqlens` and `second_per_grids` that it names; gives positions `(3, 1, n)` or `(3, n)`, alone or first
            in a tuple. None: positions are 0, 1, 2 ...
    """

    def __init__(self, config: DataConfig, processor: Any, position_function: Callable[..., Any] | None) -> None:
        if processor is None:
            raise DataError("data.kind = multimodal needs a processor: pass build_loader(processor=...).")
        self.config = config
        self.processor = ProcessorAdapter(processor)
        self.position_function = position_function
        self.template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
        if self.template is None:
            raise DataError(f"{type(processor).__name__} has no chat template, which data.kind = multimodal needs.")
        self.special = tuple(processor.tokenizer.get_added_vocab())

    def __call__(self, source: int, record: Record) -> Prepared:
        try:
            return self._prepare(self.config.sources[source], record)
        except BadSample as error:
            return Prepared(problem=("bad", error.where, error.reason))

    def _prepare(self, source: SourceConfig, record: Record) -> Prepared:
        fields = record.fields()
        messages = required(record.where, fields, source.messages_field, list)
        if isinstance(messages, BadSample):
            raise messages
        require_messages(record.where, messages)
        messages, items = self._items(record.where, source, fields, messages)
        try:
            text, spans = self._render(messages, fields.get(source.tools_field) or None)
        except (TemplateError, TypeError) as error:
            raise BadSample(record.where, f"the chat template refuses the messages: {error}") from error
        if not spans:
            raise BadSample(record.where, "no assistant turn to learn from")
        sample, is_media = self._process(record.where, text, spans, items)
        return self._fit(record.where, sample, is_media)

    # ------------------------------------------------------------------------------------------------- items

    def _items(
        self, where: str, source: SourceConfig, fields: dict[str, Any], messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], Items]:
        """The messages with bare parts, and the items in their order, loaded."""
        names = {"image": source.images_field, "video": source.videos_field, "audio": source.audios_field}
        lists = {kind: iter(as_list(fields.get(name))) for kind, name in names.items()}
        items = Items()
        out = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                parts = []
                for part in content:
                    kind = part.get("type") if isinstance(part, dict) else None
                    if kind in KINDS:
                        self._add(items, where, source, part, lists[kind])
                        part = {"type": kind}
                    parts.append(part)
                message = {**message, "content": parts}
            out.append(message)
        for kind, rest in lists.items():
            left = len(list(rest))
            if left:
                count = items.placed(kind)
                raise BadSample(
                    where, f"{count + left} {KINDS[kind]} in {names[kind]!r}, places for {count} in the messages"
                )
        return out, items

    def _add(self, items: Items, where: str, source: SourceConfig, part: dict[str, Any], rest: Iterator[Any]) -> None:
        """Loads the item of a part, and the sound that a video brings."""
        kind = part["type"]
        number = items.placed(kind)
        value = next((part[name] for name in (kind, "path", "url") if part.get(name) is not None), None)
        if value is None:
            value = next(rest, None)
        if value is None:
            raise BadSample(where, f"a place for {kind} {number} in the messages, and no {kind} for it")
        root = Path(source.media_root).expanduser() if source.media_root else folder_of(source.path)
        try:
            if KINDS[kind] not in self.processor.modalities:
                raise MediaError(f"{type(self.processor.processor).__name__} takes no {KINDS[kind]}")
            if kind == "image":
                items.images.append(load_image(value, root))
                return
            if kind == "audio":
                items.add_audio(load_audio(value, root, sampling_rate=self.processor.sampling_rate), of_video=None)
                return
            video = load_video(value, root, fps=self.config.video_fps, max_frames=self.config.max_frames)
            items.videos.append(video)
            if part.get("audio"):
                sound = value if part["audio"] is True else part["audio"]
                found = load_audio(sound, root, sampling_rate=self.processor.sampling_rate)
                items.add_audio(found, of_video=number)
        except MediaError as error:
            raise BadSample(where, f"{kind} {number}: {error}") from error

    # -------------------------------------------------------------------------------------------- text and labels

    def _render(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text with one placeholder per item, and the characters of the assistant's turns in it."""
        options = {
            **self.processor.processor.tokenizer.special_tokens_map,
            "chat_template": self.template,
            "tools": tools,
        }

        def render(part: list[dict[str, Any]], prompt: bool = False) -> str:
            return render_jinja_template([part], add_generation_prompt=prompt, **options)[0][0]

        if has_mask(self.template):
            texts, marks = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
            return texts[0], [tuple(span) for span in marks[0]]
        text = render(messages)
        return text, assistant_spans(render, messages, text, self.special)

    def _process(
        self, where: str, text: str, spans: Sequence[tuple[int, int]], items: Items
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The sample, and which of its tokens `(n,)` stand for an item."""
        options: dict[str, Any] = {"text_kwargs": {"return_offsets_mapping": True, "add_special_tokens": False}}
        if items.videos:
            options["videos_kwargs"] = {
                "video_metadata": [metadata for _, metadata in items.videos],
                "do_sample_frames": False,
                "fps": self.config.video_fps,
            }
        if any(video is not None for video in items.of_videos):
            options |= {"load_audio_from_video": True, "audio_from_video_indices": items.of_videos}
        found = self.processor(
            text,
            images=items.images,
            videos=[frames for frames, _ in items.videos],
            audios=items.audios,
            return_text_replacement_offsets=True,
            **options,
        )
        if "text_replacement_offsets" not in found:
            raise DataError(
                f"{type(self.processor.processor).__name__} does not say where it put the items into the text "
                "(text_replacement_offsets): data.kind = multimodal needs a transformers release whose processors do (5.23)."
            )
        places = (found["text_replacement_offsets"] or [[]])[0]
        offsets = found["offset_mapping"][0].tolist()
        is_media = torch.from_numpy(mask_of_spans(offsets, [place["new_span"] for place in places]))
        learned = torch.from_numpy(mask_of_spans(offsets, [moved(span, places) for span in spans])) & ~is_media
        ids = found["input_ids"][0]
        sample = {name: value for name, value in found.items() if isinstance(value, Tensor) and name not in NOT_FIELDS}
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in sample:
                sample[name] = sample[name][0]
        sample["input_ids"] = ids
        sample["labels"] = ids.masked_fill(~learned, IGNORED)
        sample["position_ids"] = self._positions(found)
        return sample, is_media

    def _positions(self, found: dict[str, Any]) -> Tensor:
        """`(n,)`; with a position function `(4, n)`: the text's, then time, height and width."""
        ids = found["input_ids"]
        text = torch.arange(ids.shape[1])
        if self.position_function is None:
            return text
        known = {**found, "attention_mask": torch.ones_like(ids)}
        if "feature_attention_mask" in found:
            known["audio_seqlens"] = found["feature_attention_mask"].sum(-1)
        if "video_second_per_grid" in found:
            known["second_per_grids"] = found["video_second_per_grid"]
        wanted = inspect.signature(self.position_function).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in wanted.values()):
            known = {name: value for name, value in known.items() if name in wanted}
        positions = self.position_function(**known)
        if isinstance(positions, dict):
            positions = positions["position_ids"]
        if isinstance(positions, tuple):
            positions = positions[0]
        # In their own dtype: seconds between frames may make positions that are no whole numbers.
        return torch.cat([text[None].to(positions.dtype), positions.reshape(3, -1)])

    # ------------------------------------------------------------------------------------------------- length

    def _fit(self, where: str, sample: dict[str, Tensor], is_media: Tensor) -> Prepared:
        length, limit = sample["input_ids"].shape[0], self.config.longest
        if length <= limit:
            return Prepared([sample])
        if self.config.on_long == "error":
            raise refuse_long(where, length, limit)
        if self.config.on_long == "truncate" and not is_media[limit:].any():
            tokens = ("input_ids", "labels", "position_ids", "mm_token_type_ids", "token_type_ids")
            cut = {name: value[..., :limit] if name in tokens else value for name, value in sample.items()}
            return Prepared([cut], ("truncated", where, too_long(length, limit)))
        reason = too_long(length, limit)
        return Prepared(
            problem=("skipped", where, reason if self.config.on_long == "skip" else f"{reason}, media among them")
        )


def moved(span: tuple[int, int], places: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """A span of the text with one placeholder per item, in the text where those are expanded."""

    def move(character: int) -> int:
        grown = [place for place in places if place["span"][1] <= character]
        return character + sum(
            (place["new_span"][1] - place["new_span"][0]) - (place["span"][1] - place["span"][0]) for place in grown
        )

    return move(span[0]), move(span[1])


def as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def folder_of(path: str) -> Path:
    """Where the relative paths in a data file start: its folder."""
    place = Path(path).expanduser()
    return place if place.is_dir() else place.parent
