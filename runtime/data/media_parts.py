"""Media in the messages of multimodal rows: marks in texts and parts of OpenAI's API as parts of chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from patchgen.runtime.data.problems import BadSample

MARKS = re.compile("<(image|video|audio)>")
MEDIA_COLUMNS = {"image": "images", "video": "videos", "audio": "audios"}

MEDIA_PARTS = (*MEDIA_COLUMNS, "image_url", "video_url", "audio_url", "input_audio")
"""Types of parts with an item, of chat templates and of OpenAI's API."""


def as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def messages_with_parts(
    where: str, messages: Sequence[Any], items: Mapping[str, Sequence[Any]], *, all_marks_are_media: bool
) -> list[Any]:
    """Messages with parts of chat templates.

    Args:
        items: the row's lists of media.
        all_marks_are_media: every mark, such as `<image>`, is a placeholder. Otherwise only those of a kind without parts and
            with as many items as marks: a question about `<video>` in HTML has no video.

    Raises:
        BadSample: a part of OpenAI's API lacks its item, or the type of a part is no text.
    """
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    marks = [mark for text in contents if isinstance(text, str) for mark in MARKS.findall(text)]
    kinds_of_parts = {
        part.get("type")
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, Mapping) and isinstance(part.get("type"), str)
    }
    kinds = {
        kind
        for kind, name in MEDIA_COLUMNS.items()
        if all_marks_are_media or (kind not in kinds_of_parts and marks.count(kind) == len(items.get(name, ())))
    }
    return [
        {**message, "content": _parts(where, message.get("content"), kinds)}
        if isinstance(message, Mapping)
        else message
        for message in messages
    ]


def _parts(where: str, content: Any, kinds: set[str]) -> Any:
    """Marks in a text as parts, and OpenAI's parts as those of templates; other content unchanged."""
    if isinstance(content, list):
        return [_part(where, part) for part in content]
    if not isinstance(content, str) or not any(mark in kinds for mark in MARKS.findall(content)):
        return content
    pieces = MARKS.split(content)  # text, kind, text, kind, ..., text
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        if index % 2 and piece in kinds:
            parts.append({"type": piece})
            continue
        text = f"<{piece}>" if index % 2 else piece
        if text and parts and "text" in parts[-1]:
            parts[-1]["text"] += text
        elif text:
            parts.append({"type": "text", "text": text})
    return parts


def _part(where: str, part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is not None and not isinstance(kind, str):
        raise BadSample(where, f"a part of the type {kind!r:.60} in the messages, expected a text such as 'image'")
    if kind in ("image_url", "video_url", "audio_url"):
        media = kind.removesuffix("_url")
        url = part.get(kind)
        url = url.get("url") if isinstance(url, Mapping) else url
        if not url:
            raise _lacks_item(where, kind, f'"{kind}": {{"url": ...}}')
        return {"type": media, media: url}
    if kind == "input_audio":
        sound = part.get(kind)
        data, suffix = (sound.get("data"), sound.get("format")) if isinstance(sound, Mapping) else (None, None)
        if not data or not suffix:
            raise _lacks_item(where, kind, '"input_audio": {"data": ..., "format": ...}')
        return {"type": "audio", "audio": f"data:audio/{suffix};base64,{data}"}
    return part


def _lacks_item(where: str, kind: str, expected: str) -> BadSample:
    return BadSample(
        where, f'a part {kind} in the messages without its item, expected {{"type": "{kind}", {expected}}}'
    )
