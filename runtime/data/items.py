"""The images, videos and sounds of a sample: from the parts of its messages, and from the lists beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchgen.runtime.data.config import SourceConfig
from patchgen.runtime.data.media import MediaError, load_audio, load_image, load_video
from patchgen.runtime.data.problems import BadSample, refusals_of
from patchgen.runtime.data.processors import ProcessorAdapter

KINDS = {"image": "images", "video": "videos", "audio": "audios"}


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

    @property
    def modalities(self) -> frozenset[str]:
        """Those of image, video and audio that there are."""
        found = {"image": self.images, "video": self.videos, "audio": self.audios}
        return frozenset(kind for kind, items in found.items() if items)

    def placed(self, kind: str) -> int:
        """How many items of a kind have a place of their own in the messages."""
        return {"image": len(self.images), "video": len(self.videos), "audio": self.of_videos.count(None)}[kind]


class ItemReader:
    """Reads the items of samples as a processor takes them: frames of videos, sounds at one rate.

    Args:
        processor: says which kinds it takes.
        fps, max_frames: of videos.
        sampling_rate: of sounds; None: the processor takes none.
    """

    def __init__(self, processor: ProcessorAdapter, *, fps: float, max_frames: int, sampling_rate: int | None) -> None:
        self.processor = processor
        self.fps = fps
        self.max_frames = max_frames
        self.sampling_rate = sampling_rate

    def __call__(
        self, where: str, source: SourceConfig, fields: dict[str, Any], messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], Items]:
        """The messages with bare parts, and the items in their order, loaded.

        Raises:
            BadSample: an item cannot be read, or there are more or fewer than places for them.
        """
        lists = {kind: iter(as_list(fields.get(name))) for kind, name in KINDS.items()}
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
                    where, f"{count + left} {KINDS[kind]} in {KINDS[kind]!r}, places for {count} in the messages"
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
        if KINDS[kind] not in self.processor.modalities:
            raise BadSample(where, f"{kind} {number}: {self.processor.name} takes no {KINDS[kind]}")
        with refusals_of("the package that reads it", where, f"{kind} {number}"):
            try:
                self._load(items, kind, value, root, part.get("audio"))
            except MediaError as error:
                raise BadSample(where, f"{kind} {number}: {error}") from error

    def _load(self, items: Items, kind: str, value: Any, root: Path, sound: Any) -> None:
        if kind == "image":
            items.images.append(load_image(value, root))
            return
        if kind == "audio":
            items.add_audio(load_audio(value, root, sampling_rate=self.sampling_rate), of_video=None)
            return
        items.videos.append(load_video(value, root, fps=self.fps, max_frames=self.max_frames))
        if sound:
            found = load_audio(value if sound is True else sound, root, sampling_rate=self.sampling_rate)
            items.add_audio(found, of_video=len(items.videos) - 1)


def as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def folder_of(path: str) -> Path:
    """Where the relative paths in a data file start: its folder."""
    place = Path(path).expanduser()
    return place if place.is_dir() else place.parent
