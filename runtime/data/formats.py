"""Rows in the formats that people have, to the fields that a kind of data reads.

    text                {"text": "Once upon a time"}
    prompt_completion   {"prompt": "2 + 2 =", "completion": " 4"}                            texts or lists of messages
    messages            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    sharegpt            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    alpaca              {"instruction": "Add.", "input": "2 2", "output": "4"}               and system, history
    preference          {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}           texts, messages, one turn each
    tags                {"tokens": ["Ada", "wrote"], "tags": [1, 0]}                         a class of each word
    question            {"question": "Who?", "context": "Ada wrote.", "answers": {"text": ["Ada"], "answer_start": [0]}}
    similar             {"anchor": "Who wrote?", "positive": "Ada wrote."}                   texts whose meaning is near

Which one a row has is seen by its columns and their types alone (`detect`). Of multimodal rows `<image>`, `<video>` and
`<audio>` in a text are the places of the row's `image` or `images`, and so on, in their order; parts of OpenAI's interface
(`image_url`, `input_audio`) become the parts of chat templates. What a row has besides stays.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from patchgen.runtime.data.problems import BadSample

Row = Mapping[str, Any]
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
    "function_call": "assistant",
}
ITEMS = {"image": "images", "video": "videos", "audio": "audios"}
TEXT, MESSAGES, TURNS, TURN = "text", "list of {role, content}", "list of {from, value}", "{from, value}"
LABEL = "label"


class WrongColumns(BadSample):
    """The columns of a row are of no format, or of several: so they are of its neighbours."""


@dataclass(frozen=True)
class RowFormat:
    """The columns that a row must have, each with the types that it may be of; and those that it may have."""

    required: dict[str, tuple[str, ...]]
    optional: tuple[str, ...] = ()


FORMATS = {
    "text": RowFormat({"text": (TEXT,)}),
    "prompt_completion": RowFormat({"prompt": (TEXT, MESSAGES), "completion": (TEXT, MESSAGES)}, ("tools",)),
    "messages": RowFormat({"messages": (MESSAGES,)}, ("system", "tools")),
    "sharegpt": RowFormat({"conversations": (TURNS,)}, ("system", "tools")),
    "alpaca": RowFormat({"instruction": (TEXT,), "output": (TEXT,)}, ("input", "system", "history")),
    "preference": RowFormat(
        {"chosen": (TEXT, MESSAGES, TURNS, TURN), "rejected": (TEXT, MESSAGES, TURNS, TURN)},
        ("prompt", "conversations", "instruction", "input", "system", "tools"),
    ),
    "tags": RowFormat({"tokens": (f"list of {TEXT}",), "tags": ("list of int",)}),
    "question": RowFormat({"question": (TEXT,), "context": (TEXT,), "answers": ("mapping",)}),
    "similar": RowFormat({"anchor": (TEXT,), "positive": (TEXT,)}),
}
CONVERSATIONS = ("messages", "sharegpt", "alpaca", "prompt_completion")
OF_KIND = {
    "text": ("text", "prompt_completion"),
    "chat": CONVERSATIONS,
    "multimodal": CONVERSATIONS,
    "preference": ("preference",),
    "classification": ("text", "messages", "sharegpt"),
    "token_classes": ("tags",),
    "answers": ("question",),
    "similar": ("similar",),
}
HALVES = {"preference": ("chosen", "rejected"), "similar": ("anchor", "positive")}
"""The two documents of a sample, by the kinds of data whose samples are pairs."""
COLUMNS = {
    *(name for form in FORMATS.values() for name in (*form.required, *form.optional)),
    *ITEMS.values(),
    LABEL,
}
"""Every name that `columns` may give to a column."""


# --------------------------------------------------------------------------------------------------- which format


def renamed(where: str, row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under the names of its format.

    Args:
        columns: name in the format -> name in the row.

    Raises:
        WrongColumns: the row has no such column.
    """
    missing = [f"{name}: {own}" for name, own in columns.items() if own not in row]
    if missing:
        raise WrongColumns(where, f"columns names {', '.join(missing)}, and the row has only {_columns_of(row)}")
    rest = {name: value for name, value in row.items() if name not in columns.values()}
    return rest | {name: row[own] for name, own in columns.items()}


def detect(where: str, row: Row, kind: str) -> str:
    """The one format of a kind whose columns the row has.

    Raises:
        WrongColumns: it has those of none, with the nearest, or of several.
        BadSample: it has those of one, and a type that does not go with it.
    """
    found = [name for name in OF_KIND[kind] if not lacking(name, row)]
    if len(found) == 1:
        return found[0]
    if found:
        raise WrongColumns(
            where,
            f"the columns {_columns_of(row)} are of {' and of '.join(found)}: set data.sources[].row_format to one of them",
        )
    named = [name for name in OF_KIND[kind] if FORMATS[name].required.keys() <= row.keys()]
    if len(named) == 1:
        raise BadSample(where, _wrong_types(named[0], row))
    raise (BadSample if named else WrongColumns)(
        where, f"the columns {_columns_of(row)} are of no row format that {_nearest(row, kind)}"
    )


def lacking(name: str, row: Row) -> list[str]:
    """What a row lacks of a format: a column, or its type."""
    wanted = FORMATS[name].required
    return [
        f"{column} ({' or '.join(types)}{f', found {type_of(row[column])}' if row.get(column) is not None else ''})"
        for column, types in wanted.items()
        if type_of(row.get(column)) not in types
    ]


def _wrong_types(name: str, row: Row) -> str:
    return "; ".join(
        f"column {column!r} holds {type_of(row[column])}, expected {' or '.join(types)} (row format {name})"
        for column, types in FORMATS[name].required.items()
        if type_of(row[column]) not in types
    )


def require_format(where: str, row: Row, name: str) -> None:
    """Raises WrongColumns where a row lacks a column of a format, BadSample where one is of another type."""
    lacks = lacking(name, row)
    if lacks and FORMATS[name].required.keys() <= row.keys():
        raise BadSample(where, _wrong_types(name, row))
    if lacks:
        raise WrongColumns(
            where,
            f"row_format = {name} needs {', '.join(lacks)}; the row has {_columns_of(row)}. data.sources[].columns maps "
            f"columns with other names, such as {{{lacks[0].split(' ')[0]}: {next(iter(row), 'name')}}}",
        )


def type_of(value: Any) -> str:
    """What a column holds, for people and for `detect`: by its first entry where it is a list."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return TEXT
    if isinstance(value, Mapping):
        return TURN if {"from", "value"} <= value.keys() else "mapping"
    if isinstance(value, list | tuple):
        first = value[0] if len(value) else None
        if isinstance(first, Mapping):
            if "role" in first:
                return MESSAGES
            return TURNS if {"from", "value"} <= first.keys() else f"list of {{{', '.join(map(str, first))}}}"
        return f"list of {type_of(first)}"
    return type(value).__name__


def _columns_of(row: Row) -> str:
    return ", ".join(f"{name} ({type_of(value)})" for name, value in row.items()) or "none"


def _nearest(row: Row, kind: str) -> str:
    """The three formats that lack least, those of the kind first among equals; then those with the likest names."""

    def distance(name: str) -> tuple[float, ...]:
        missing = [column for column in FORMATS[name].required if row.get(column) is None]
        likeness = [
            max((difflib.SequenceMatcher(None, one, str(own)).ratio() for own in row), default=0) for one in missing
        ]
        share = (len(missing) + len(lacking(name, row))) / len(FORMATS[name].required)  # a wrong type is half a lack
        return share, name not in OF_KIND[kind], -sum(likeness) / max(1, len(likeness))

    told = []
    for name in sorted(FORMATS, key=distance)[:3]:
        lacks, kinds = lacking(name, row), [one for one, names in OF_KIND.items() if name in names]
        wants = f"lacks {', '.join(lacks)}" if lacks else "lacks nothing"
        told.append(
            f"{name} {wants}" + ("" if kind in kinds else f", and is read by data.kind = {' or '.join(kinds)}")
        )
    return (
        f"data.kind = {kind} reads ({', '.join(OF_KIND[kind])}). Nearest: {'; '.join(told)}. Map columns with "
        "other names in data.sources[].columns, or write a data.sources[].transform"
    )


# ------------------------------------------------------------------------------------------- to the fields of a kind


def fields_of(where: str, row: Row, name: str, kind: str) -> dict[str, Any]:
    """What encoders read of a row in the format `name`.

    Returns:
        of kind text: `text`, or `prompt` and `completion`; chat, multimodal: `messages`, `tools`, lists of media;
        preference: `chosen` and `rejected` (whole conversations), `tools`; classification: `text` or `messages`, `label`;
        of the other kinds the columns of their format.

    Raises:
        BadSample: a column holds what its format does not have.
    """
    if name == "text" or kind == "text":
        fields = {column: row[column] for column in (*FORMATS[name].required, LABEL) if column in row}
        if any(not isinstance(fields[column], str) for column in FORMATS[name].required):
            raise BadSample(where, f"prompt and completion are {MESSAGES}: set data.kind to chat")
    elif name not in _TO_MESSAGES:
        fields = {column: row[column] for column in FORMATS[name].required}
    else:
        fields = _TO_MESSAGES[name](where, row)
        if "tools" in row:
            fields["tools"] = _tools(where, row["tools"])
    if kind == "multimodal":
        fields = _with_items(fields, marks_mean=name == "sharegpt")
    if kind == "classification" and (isinstance(row.get(LABEL), bool) or not isinstance(row.get(LABEL), int | float)):
        raise BadSample(where, f"data.kind = classification needs label as a number; the row has {_columns_of(row)}")
    return fields


def _from_messages(where: str, row: Row) -> dict[str, Any]:
    return {**row, "messages": _with_system(where, row.get("system"), row["messages"])}


def _from_sharegpt(where: str, row: Row) -> dict[str, Any]:
    messages = [_message(where, turn) for turn in row["conversations"]]
    return {**row, "messages": _with_system(where, row.get("system"), messages)}


def _from_alpaca(where: str, row: Row) -> dict[str, Any]:
    messages = []
    for turn in row.get("history") or []:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise BadSample(where, f"history holds {turn!r:.60}, expected lists of a question and an answer")
        messages += [_said("user", turn[0]), _said("assistant", turn[1])]
    messages += [_said("user", _instruction(row)), _said("assistant", row["output"])]
    return {**row, "messages": _with_system(where, row.get("system"), messages)}


def _from_prompt(where: str, row: Row) -> dict[str, Any]:
    prompt, completion = _as_messages("user", row["prompt"]), _as_messages("assistant", row["completion"])
    # What the prompt has said by the assistant is not learned: the completion is.
    before = [{**one, "train": False} if one.get("role") == "assistant" else one for one in prompt]
    return {**row, "messages": before + completion}


def _from_preference(where: str, row: Row) -> dict[str, Any]:
    given = [name for name in ("prompt", "conversations", "instruction") if row.get(name) is not None]
    if len(given) > 1:
        raise BadSample(
            where,
            f"{' and '.join(given)} may each be the prompt: name the one that is, columns: {{prompt: {given[0]}}}",
        )
    if not given:
        prompt = []
    elif given == ["conversations"]:
        prompt = [_message(where, turn) for turn in row["conversations"]]
    else:
        prompt = _as_messages("user", _instruction(row) if given == ["instruction"] else row["prompt"])
    prompt = _with_system(where, row.get("system"), prompt)
    answers = {name: _answer(where, row[name]) for name in ("chosen", "rejected")}
    return {**row, **{name: _after(where, name, prompt, answer) for name, answer in answers.items()}}


_TO_MESSAGES: dict[str, Callable[[str, Row], dict[str, Any]]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": _from_prompt,
    "preference": _from_preference,
}


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _as_messages(role: str, value: Any) -> list[Any]:
    return [_said(role, value)] if isinstance(value, str) else list(value)


def _instruction(row: Row) -> str:
    """The instruction, and below it the input where there is one."""
    return "\n".join(part for part in (row["instruction"], row.get("input")) if part)


def _with_system(where: str, system: Any, messages: list[Any]) -> list[Any]:
    if not system:
        return list(messages)
    if messages and isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        raise BadSample(where, "a column system and a message of the system: one of them")
    return [_said("system", system), *messages]


def _message(where: str, turn: Any) -> dict[str, Any]:
    """A turn of ShareGPT with whatever it holds beside `from` and `value` (`train`, `weight`)."""
    if not isinstance(turn, Mapping) or turn.get("from") not in ROLES:
        who = turn.get("from") if isinstance(turn, Mapping) else turn
        raise BadSample(where, f"a turn from {who!r:.60}; known are {', '.join(ROLES)}")
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if turn["from"] != "function_call":
        return {**_said(ROLES[turn["from"]], turn.get("value")), **rest}
    calls = _json(where, "a function_call", turn.get("value"))
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadSample(where, "a function_call without a name; expected JSON with name and arguments")
    return {**_said("assistant", ""), "tool_calls": [{"type": "function", "function": call} for call in calls], **rest}


def _tools(where: str, tools: Any) -> Any:
    """Tools as a list; many data keep them as JSON."""
    return _json(where, "tools", tools) or None if isinstance(tools, str) and tools.strip() else tools or None


def _json(where: str, what: str, text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise BadSample(where, f"{what} as a text that is not JSON: {error}") from error


def _answer(where: str, value: Any) -> list[Any]:
    if type_of(value) in (TURN, TURNS):
        return [_message(where, turn) for turn in ([value] if isinstance(value, Mapping) else value)]
    return _as_messages("assistant", value)


def _after(where: str, name: str, prompt: list[Any], answer: list[Any]) -> list[Any]:
    """The whole conversation: the answer behind the prompt, unless it begins with the prompt itself."""
    if answer and isinstance(answer[0], Mapping) and answer[0].get("role") == "assistant":
        if not prompt:
            raise BadSample(where, f"{name} without a prompt: a column prompt, or the whole conversation in {name}")
        return [*prompt, *answer]
    if [_bare(one) for one in answer[: len(prompt)]] != [_bare(one) for one in prompt]:
        raise BadSample(where, f"{name} is a whole conversation and does not begin with the prompt of the row")
    return list(answer)


def _bare(message: Any) -> tuple[Any, Any]:
    return (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, message)


# ------------------------------------------------------------------------------------------------------------ media


def _with_items(row: Row, *, marks_mean: bool) -> dict[str, Any]:
    """The parts of chat templates, and lists of items.

    Args:
        marks_mean: every mark is a place. Otherwise those are of a kind that has no parts, and as many items as marks:
            who asks what `<video>` means in HTML brings none.
    """
    items = {}
    for kind, name in ITEMS.items():
        given = row.get(name) if row.get(name) is not None else row.get(kind)
        if given is not None:
            items[name] = list(given) if isinstance(given, list | tuple) else [given]
    contents = [one.get("content") for one in row["messages"] if isinstance(one, Mapping)]
    marks = [mark for text in contents if isinstance(text, str) for mark in MARKS.findall(text)]
    parts = {
        part.get("type") for some in contents if isinstance(some, list) for part in some if isinstance(part, Mapping)
    }
    kinds = {
        kind
        for kind, name in ITEMS.items()
        if marks_mean or (kind not in parts and marks.count(kind) == len(items.get(name, ())))
    }
    messages = [
        {**one, "content": _parts(one.get("content"), kinds)} if isinstance(one, Mapping) else one
        for one in row["messages"]
    ]
    rest = {name: value for name, value in row.items() if name not in (*ITEMS, *ITEMS.values())}
    return {**rest, "messages": messages, **items}


def _parts(content: Any, kinds: set[str]) -> Any:
    """A text with marks as parts, parts of OpenAI's as those of templates; anything else as it is."""
    if isinstance(content, list):
        return [_part(part) for part in content]
    if not isinstance(content, str) or not any(mark in kinds for mark in MARKS.findall(content)):
        return content
    pieces = MARKS.split(content)  # text, kind, text, kind, ..., text
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        if number % 2 and piece in kinds:
            parts.append({"type": piece})
            continue
        text = f"<{piece}>" if number % 2 else piece
        if text and parts and "text" in parts[-1]:
            parts[-1]["text"] += text
        elif text:
            parts.append({"type": "text", "text": text})
    return parts


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image_url", "video_url", "audio_url"):
        address, own = part[kind], kind.removesuffix("_url")
        return {"type": own, own: address["url"] if isinstance(address, Mapping) else address}
    if kind == "input_audio":
        sound = part[kind]
        return {"type": "audio", "audio": f"data:audio/{sound['format']};base64,{sound['data']}"}
    return part
