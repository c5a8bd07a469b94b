"""The images, videos and sounds of a sample: from the parts of its messages, and from its lists of media."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchgen.runtime.data.config import SourceConfig
from patchgen.runtime.data.media import MediaError, load_audio, load_image, load_video
from patchgen.runtime.data.media_parts import MEDIA_COLUMNS, as_list
from patchgen.runtime.data.problems import BadSample, as_bad_sample
from patchgen.runtime.data.processors import ProcessorAdapter


@dataclass
class MediaItems:
    """The media of a sample, in order; `video_of_audio` is the index of each sound's video, None for a separate sound."""

    images: list[Any] = field(default_factory=list)
    videos: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    video_of_audio: list[int | None] = field(default_factory=list)

    def add_audio(self, sound: Any, *, video: int | None) -> None:
        self.audios.append(sound)
        self.video_of_audio.append(video)

    @property
    def modalities(self) -> frozenset[str]:
        """Which of image, video and audio the sample has."""
        items_by_kind = {"image": self.images, "video": self.videos, "audio": self.audios}
        return frozenset(kind for kind, items in items_by_kind.items() if items)

    def num_parts(self, kind: str) -> int:
        """How many parts of the messages these items of a kind belong to; sounds of videos have no part of their own."""
        return {"image": len(self.images), "video": len(self.videos), "audio": self.video_of_audio.count(None)}[kind]


class MediaReader:
    """Reads the media of samples for a processor: videos as frames, sounds at one rate.

    Args:
        fps, max_frames: of videos.
        sampling_rate: of sounds; None: the processor takes no sounds.
    """

    def __init__(self, processor: ProcessorAdapter, *, fps: float, max_frames: int, sampling_rate: int | None) -> None:
        self.processor = processor
        self.fps = fps
        self.max_frames = max_frames
        self.sampling_rate = sampling_rate

    def __call__(
        self, where: str, source: SourceConfig, fields: dict[str, Any], messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], MediaItems]:
        """The messages with parts without values, and the loaded media, in order.

        Raises:
            BadSample: an item cannot be read, or there are more or fewer items than parts.
        """
        unused_items = {kind: iter(as_list(fields.get(name))) for kind, name in MEDIA_COLUMNS.items()}
        items = MediaItems()
        out = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                parts = []
                for part in content:
                    kind = part.get("type") if isinstance(part, dict) else None
                    if kind in MEDIA_COLUMNS:
                        self._add(items, where, source, part, unused_items[kind])
                        part = {"type": kind}
                    parts.append(part)
                message = {**message, "content": parts}
            out.append(message)
        for kind, remaining in unused_items.items():
            num_unused = len(list(remaining))
            if num_unused:
                count = items.num_parts(kind)
                raise BadSample(
                    where,
                    f"{count + num_unused} {MEDIA_COLUMNS[kind]} in {MEDIA_COLUMNS[kind]!r}, but {count} parts for them in the "
                    "messages",
                )
        return out, items

    def _add(
        self, items: MediaItems, where: str, source: SourceConfig, part: dict[str, Any], unused_items: Iterator[Any]
    ) -> None:
        """Loads the item of a part, and the sound of a video."""
        kind = part["type"]
        number = items.num_parts(kind)
        value = next((part[name] for name in (kind, "path", "url") if part.get(name) is not None), None)
        if value is None:
            value = next(unused_items, None)
        if value is None:
            raise BadSample(where, f"a part for {kind} {number} in the messages, but no {kind} for it")
        root = Path(source.media_root).expanduser() if source.media_root else folder_of(source.path)
        if MEDIA_COLUMNS[kind] not in self.processor.modalities:
            raise BadSample(where, f"{kind} {number}: {self.processor.name} takes no {MEDIA_COLUMNS[kind]}")
        with as_bad_sample("the media reader", where, f"{kind} {number}"):
            try:
                self._load(items, kind, value, root, part.get("audio"))
            except MediaError as error:
                raise BadSample(where, f"{kind} {number}: {error}") from error

    def _load(self, items: MediaItems, kind: str, value: Any, root: Path, sound: Any) -> None:
        if kind == "image":
            items.images.append(load_image(value, root))
            return
        if kind == "audio":
            items.add_audio(load_audio(value, root, sampling_rate=self.sampling_rate), video=None)
            return
        items.videos.append(load_video(value, root, fps=self.fps, max_frames=self.max_frames))
        if sound:
            sound_samples = load_audio(value if sound is True else sound, root, sampling_rate=self.sampling_rate)
            items.add_audio(sound_samples, video=len(items.videos) - 1)


def folder_of(path: str) -> Path:
    """The folder that relative paths in a data file start from."""
    place = Path(path).expanduser()
    # Of a glob, the last folder before its wildcards: `data` for data/**/*.jsonl.
    return next((folder for folder in (place, *place.parents) if folder.is_dir()), place.parent)
