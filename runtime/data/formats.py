"""Rows in the forms that people have, to messages: `transform: patchgen.runtime.data.formats:conversations`.

    conversations   LLaVA, ShareGPT: {"conversations": [{"from": "human", "value": "<image>\\nWhat?"}, ...], "image": "a.png"}
    marked          messages with marks in their texts: {"messages": [{"role": "user", "content": "<video>What?"}, ...],
                    "videos": ["a.mp4"]}
    openai          parts with addresses: {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}},
                    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}

`<image>`, `<video>` and `<audio>` in a text are the places of the row's `image` or `images`, and so on, in their order.
What a row has besides (`tools`, `system`) stays.
"""

from __future__ import annotations

import re
from typing import Any

MARKS = re.compile("<(image|video|audio)>")
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
ITEMS = {"image": "images", "video": "videos", "audio": "audios"}


def conversations(row: dict[str, Any]) -> dict[str, Any]:
    """Turns with `from` and `value`."""
    turns = row["conversations"]
    unknown = sorted({str(turn["from"]) for turn in turns} - ROLES.keys())
    if unknown:
        raise ValueError(f"turns from {', '.join(unknown)}; known are {', '.join(ROLES)}")
    return marked({**row, "messages": [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]})


def marked(row: dict[str, Any]) -> dict[str, Any]:
    """Messages with marks in their texts."""
    messages = [{**one, "content": _parts(one["content"])} for one in row["messages"]]
    if row.get("system"):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    return {**_rest(row), "messages": messages, **_items(row)}


def openai(row: dict[str, Any]) -> dict[str, Any]:
    """Messages with the parts of OpenAI's interface."""
    messages = []
    for message in row["messages"]:
        content = message.get("content")
        parts = [_part(part) for part in content] if isinstance(content, list) else content
        messages.append({**message, "content": parts})
    return {**_rest(row), "messages": messages}


def _parts(text: Any) -> Any:
    """A text with marks as parts; anything else as it is."""
    if not isinstance(text, str) or not MARKS.search(text):
        return text
    pieces = MARKS.split(text)  # text, kind, text, kind, ..., text
    parts = [{"type": piece} if number % 2 else {"type": "text", "text": piece} for number, piece in enumerate(pieces)]
    return [part for part in parts if part.get("text") != ""]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind in ("image_url", "video_url", "audio_url"):
        address = part[kind]
        own = kind.removesuffix("_url")
        return {"type": own, own: address["url"] if isinstance(address, dict) else address}
    if kind == "input_audio":
        sound = part[kind]
        return {"type": "audio", "audio": f"data:audio/{sound['format']};base64,{sound['data']}"}
    return part


def _items(row: dict[str, Any]) -> dict[str, list[Any]]:
    """The row's items under the names that sources have by default."""
    found = {}
    for kind, name in ITEMS.items():
        given = row.get(name) if row.get(name) is not None else row.get(kind)
        if given is not None:
            found[name] = list(given) if isinstance(given, list | tuple) else [given]
    return found


def _rest(row: dict[str, Any]) -> dict[str, Any]:
    """What of a row is neither the conversation nor its items."""
    taken = ("conversations", "messages", "system", *ITEMS, *ITEMS.values())
    return {name: value for name, value in row.items() if name not in taken}
