"""Converts rows in common formats to the fields that a kind of data reads.

    text                {"text": "Once upon a time"}
    prompt_completion   {"prompt": "2 + 2 =", "completion": " 4"}                            texts or lists of messages
    messages            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    sharegpt            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}         or messages
    alpaca              {"instruction": "Add.", "input": "2 2", "output": "4"}               and system, history
    preference          {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}           texts, messages, one turn each
    tags                {"tokens": ["Ada", "wrote"], "tags": [1, 0]}                         a class per word
    question            {"question": "Who?", "context": "Ada wrote.", "answers": {"text": ["Ada"], "answer_start": [0]}}
    similar             {"anchor": "Who wrote?", "positive": "Ada wrote."}                   texts with similar meaning

The format of a row is determined by its columns and their types (`detect_row_format`). In multimodal rows, `<image>`,
`<video>` and `<audio>` in a text are placeholders of the items in `image` or `images` and so on, in order; parts of
OpenAI's API (`image_url`, `input_audio`) become parts of chat templates. Other columns of conversations are kept.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from patchgen.runtime.data.media_parts import MEDIA_COLUMNS, as_list, messages_with_parts
from patchgen.runtime.data.problems import BadSample

Row = Mapping[str, Any]
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
TEXT, MESSAGES, TURNS, TURN = "text", "list of {role, content}", "list of {from, value}", "{from, value}"
LABEL = "label"
PROMPT_COLUMNS = ("prompt", "conversations", "instruction")
"""The columns that could each be the prompt of a pair."""


class WrongColumns(BadSample):
    """The columns of a row match no format, or several; other rows probably have the same columns."""


@dataclass(frozen=True)
class RowFormat:
    """Required columns and optional ones, each with its possible types; none: what a chat template takes."""

    required: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict)


FORMATS = {
    "text": RowFormat({"text": (TEXT,)}),
    "prompt_completion": RowFormat({"prompt": (TEXT, MESSAGES), "completion": (TEXT, MESSAGES)}, {"tools": ()}),
    "messages": RowFormat({"messages": (MESSAGES,)}, {"system": (TEXT,), "tools": ()}),
    "sharegpt": RowFormat({"conversations": (TURNS, MESSAGES)}, {"system": (TEXT,), "tools": ()}),
    "alpaca": RowFormat(
        {"instruction": (TEXT,), "output": (TEXT,)},
        {"input": (TEXT,), "system": (TEXT,), "history": (f"list of list of {TEXT}",)},
    ),
    "preference": RowFormat(
        {"chosen": (TEXT, MESSAGES, TURNS, TURN), "rejected": (TEXT, MESSAGES, TURNS, TURN)},
        {
            "prompt": (TEXT, MESSAGES),
            "conversations": (TURNS, MESSAGES),
            "instruction": (TEXT,),
            "input": (TEXT,),
            "system": (TEXT,),
            "tools": (),
        },
    ),
    "tags": RowFormat({"tokens": (f"list of {TEXT}",), "tags": ("list of int",)}),
    "question": RowFormat({"question": (TEXT,), "context": (TEXT,), "answers": ("mapping",)}),
    "similar": RowFormat({"anchor": (TEXT,), "positive": (TEXT,)}),
}
CONVERSATIONS = ("messages", "sharegpt", "alpaca", "prompt_completion")
FORMATS_OF_KIND = {
    "text": ("text", "prompt_completion"),
    "chat": CONVERSATIONS,
    "multimodal": CONVERSATIONS,
    "preference": ("preference",),
    "classification": ("text", "messages", "sharegpt"),
    "token_classes": ("tags",),
    "answers": ("question",),
    "similar": ("similar",),
}
PAIR_COLUMNS = {"preference": ("chosen", "rejected"), "similar": ("anchor", "positive")}
"""The columns of the two documents of a sample, for kinds of data whose samples are pairs."""
COLUMNS = {
    *(name for form in FORMATS.values() for name in (*form.required, *form.optional)),
    *MEDIA_COLUMNS.values(),
    LABEL,
}
"""All columns of all formats, which `columns` may map to others."""


# --------------------------------------------------------------------------------------------------- which format


def rename_columns(where: str, row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with the column names of its format.

    Args:
        columns: name in the format -> name in the row.

    Raises:
        WrongColumns: the row has no such column.
    """
    missing = [f"{name}: {actual}" for name, actual in columns.items() if actual not in row]
    if missing:
        raise WrongColumns(where, f"columns maps {', '.join(missing)}, but the row has only {_columns_of(row)}")
    other_columns = {name: value for name, value in row.items() if name not in columns.values()}
    return other_columns | {name: row[actual] for name, actual in columns.items()}


def with_chosen_prompt(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row of a pair without the columns that could also be its prompt, if `columns` names one to use."""
    if not any(name in columns for name in PROMPT_COLUMNS):
        return row
    return {name: value for name, value in row.items() if name not in PROMPT_COLUMNS or name in columns}


def detect_row_format(where: str, row: Row, kind: str) -> str:
    """The format of the kind that the columns of a row match.

    Raises:
        WrongColumns: they match none, with the nearest formats, or several.
        BadSample: they match one except for a type.
    """
    matching_formats = [name for name in FORMATS_OF_KIND[kind] if not missing_columns(name, row)]
    if len(matching_formats) == 1:
        return matching_formats[0]
    if matching_formats:
        raise WrongColumns(
            where,
            f"the columns {_columns_of(row)} match {' and '.join(matching_formats)}: set data.sources[].row_format to one of them",
        )
    named = [name for name in FORMATS_OF_KIND[kind] if FORMATS[name].required.keys() <= row.keys()]
    if len(named) == 1:
        raise BadSample(where, _wrong_types(named[0], row))
    raise (BadSample if named else WrongColumns)(
        where, f"the columns {_columns_of(row)} match no row format that {_describe_nearest(row, kind)}"
    )


def missing_columns(name: str, row: Row) -> list[str]:
    """The columns of a format that a row does not have, or has with another type."""
    required = FORMATS[name].required
    return [
        f"{column} ({' or '.join(types)}{f', found {type_of(row[column])}' if row.get(column) is not None else ''})"
        for column, types in required.items()
        if type_of(row.get(column)) not in types
    ]


def _wrong_types(name: str, row: Row) -> str:
    return "; ".join(
        _wrong_type(name, column, row[column], types)
        for column, types in FORMATS[name].required.items()
        if type_of(row[column]) not in types
    )


def _wrong_type(name: str, column: str, value: Any, types: tuple[str, ...]) -> str:
    return f"column {column!r} holds {type_of(value)}, expected {' or '.join(types)} (row format {name})"


def _require_optional_types(where: str, row: Row, name: str) -> None:
    """Raises BadSample if an optional column of a format has another type; None and an empty list are no value.

    An input is read only beside an instruction.
    """
    for column, types in FORMATS[name].optional.items():
        value = row.get(column)
        is_read = column != "input" or as_list(row.get("instruction"))
        if types and is_read and as_list(value) and type_of(value) not in types:
            raise BadSample(where, _wrong_type(name, column, value, types))


def require_format(where: str, row: Row, name: str) -> None:
    """Raises WrongColumns if a row lacks a column of a format, BadSample if one has another type."""
    missing = missing_columns(name, row)
    if missing and FORMATS[name].required.keys() <= row.keys():
        raise BadSample(where, _wrong_types(name, row))
    if missing:
        raise WrongColumns(
            where,
            f"row_format = {name} needs {', '.join(missing)}; the row has {_columns_of(row)}. data.sources[].columns maps "
            f"columns with other names, such as {{{missing[0].split(' ')[0]}: {next(iter(row), 'name')}}}",
        )


def type_of(value: Any) -> str:
    """The type of a column's value; of a list, by its entries, or by the first if that is a mapping."""
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
        types = dict.fromkeys("None" if entry is None else type_of(entry) for entry in value)
        return f"list of {' and '.join(types) or 'nothing'}"
    return "int" if isinstance(value, Integral) and not isinstance(value, bool) else type(value).__name__


def _columns_of(row: Row) -> str:
    return ", ".join(f"{name} ({type_of(value)})" for name, value in row.items()) or "none"


def _describe_nearest(row: Row, kind: str) -> str:
    """Names the three formats with the smallest share of missing columns, ties by kind, then by similar column names."""

    def distance(name: str) -> tuple[float, ...]:
        missing = [column for column in FORMATS[name].required if row.get(column) is None]
        similarities = [
            max((difflib.SequenceMatcher(None, column_name, str(column)).ratio() for column in row), default=0)
            for column_name in missing
        ]
        num_problems = len(missing) + len(missing_columns(name, row))  # a wrong type counts half
        share = num_problems / len(FORMATS[name].required)
        return share, name not in FORMATS_OF_KIND[kind], -sum(similarities) / max(1, len(similarities))

    descriptions = []
    for name in sorted(FORMATS, key=distance)[:3]:
        lacking, kinds = (
            missing_columns(name, row),
            [kind_name for kind_name, names in FORMATS_OF_KIND.items() if name in names],
        )
        difference = f"lacks {', '.join(lacking)}" if lacking else "lacks nothing"
        descriptions.append(
            f"{name} {difference}" + ("" if kind in kinds else f", and is read by data.kind = {' or '.join(kinds)}")
        )
    return (
        f"data.kind = {kind} reads ({', '.join(FORMATS_OF_KIND[kind])}). Nearest: {'; '.join(descriptions)}. Map columns with "
        "other names in data.sources[].columns, or write a data.sources[].transform"
    )


# ------------------------------------------------------------------------------------------- to the fields of a kind


def fields_of(where: str, row: Row, name: str, kind: str) -> dict[str, Any]:
    """The fields that encoders read, from a row in the format `name`.

    Returns:
        kind text: `text`, or `prompt` and `completion`; chat, multimodal: `messages`, `tools`, lists of media;
        preference: `chosen` and `rejected` (full conversations), `tools`; classification: `text` or `messages`, `label`;
        other kinds: the columns of their format.

    Raises:
        BadSample: a column has a value that its format does not allow.
        WrongColumns: two columns could be the same field.
    """
    _require_optional_types(where, row, name)
    if name == "text" or kind == "text":
        fields = {column: row[column] for column in (*FORMATS[name].required, LABEL) if column in row}
        if any(not isinstance(fields[column], str) for column in FORMATS[name].required):
            raise BadSample(where, f"prompt or completion is a {MESSAGES}, expected a text; or set data.kind to chat")
    elif name not in _TO_MESSAGES:
        fields = {column: row[column] for column in FORMATS[name].required}
    else:
        fields = _TO_MESSAGES[name](where, row)
        if "tools" in row:
            fields["tools"] = _tools(where, row["tools"])
    if kind == "multimodal":
        fields = _with_media(where, fields, all_marks_are_media=name == "sharegpt")
    label = row.get(LABEL)
    if kind == "classification" and (isinstance(label, bool) or not isinstance(label, Real)):
        raise BadSample(where, f"data.kind = classification needs label as a number; the row has {_columns_of(row)}")
    return fields


def _from_messages(where: str, row: Row) -> dict[str, Any]:
    return {**row, "messages": _with_system(where, row.get("system"), row["messages"])}


def _from_sharegpt(where: str, row: Row) -> dict[str, Any]:
    return {**row, "messages": _with_system(where, row.get("system"), _from_turns(where, row["conversations"]))}


def _from_alpaca(where: str, row: Row) -> dict[str, Any]:
    messages = []
    for turn in row.get("history") or []:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise BadSample(where, f"history has {turn!r:.60}, expected lists of a question and an answer")
        messages += [_message("user", turn[0]), _message("assistant", turn[1])]
    messages += [_message("user", _instruction(row)), _message("assistant", row["output"])]
    return {**row, "messages": _with_system(where, row.get("system"), messages)}


def _from_prompt(where: str, row: Row) -> dict[str, Any]:
    prompt, completion = _as_messages("user", row["prompt"]), _as_messages("assistant", row["completion"])
    # Assistant turns of the prompt have no loss: only the completion has one.
    before = [{**message, "train": False} if message.get("role") == "assistant" else message for message in prompt]
    return {**row, "messages": before + completion}


def _from_preference(where: str, row: Row) -> dict[str, Any]:
    present = [name for name in PROMPT_COLUMNS if as_list(row.get(name))]
    if len(present) > 1:
        raise WrongColumns(
            where,
            f"{' and '.join(present)} could each be the prompt, expected one of them. To fix: name the one to use in "
            f"data.sources[].columns, as {{{present[0]}: {present[0]}}}, or let data.sources[].transform return only one of them",
        )
    if not present:
        prompt = []
    elif present == ["conversations"]:
        prompt = _from_turns(where, row["conversations"])
    else:
        prompt = _as_messages("user", _instruction(row) if present == ["instruction"] else row["prompt"])
    prompt = _with_system(where, row.get("system"), prompt)
    answers = {name: _answer(where, row[name]) for name in ("chosen", "rejected")}
    return {**row, **{name: _conversation(where, name, prompt, answer) for name, answer in answers.items()}}


_TO_MESSAGES: dict[str, Callable[[str, Row], dict[str, Any]]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": _from_prompt,
    "preference": _from_preference,
}


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _as_messages(role: str, value: Any) -> list[Any]:
    return [_message(role, value)] if isinstance(value, str) else list(value)


def _instruction(row: Row) -> str:
    """The instruction, followed by the input if there is one."""
    return "\n".join(part for part in (row["instruction"], row.get("input")) if part)


def _with_system(where: str, system: Any, messages: list[Any]) -> list[Any]:
    if not system:
        return list(messages)
    if messages and isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        raise BadSample(where, "both a column system and a system message: expected only one")
    return [_message("system", system), *messages]


def _from_turns(where: str, turns: Any) -> list[Any]:
    """The messages of a column `conversations`: of ShareGPT's turns, or messages already."""
    return list(turns) if type_of(turns) == MESSAGES else [_from_turn(where, turn) for turn in turns]


def _from_turn(where: str, turn: Any) -> dict[str, Any]:
    """The message of a ShareGPT turn, with its other keys (`train`, `weight`)."""
    who = turn.get("from") if isinstance(turn, Mapping) else turn
    if not isinstance(turn, Mapping) or not isinstance(who, str) or who not in ROLES:
        raise BadSample(where, f"a turn from {who!r:.60}; expected one of {', '.join(ROLES)}")
    other_fields = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if turn["from"] != "function_call":
        return {**_message(ROLES[turn["from"]], turn.get("value")), **other_fields}
    calls = _json(where, "a function_call", turn.get("value"))
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadSample(where, "a function_call without a name; expected JSON with name and arguments")
    return {
        **_message("assistant", ""),
        "tool_calls": [{"type": "function", "function": call} for call in calls],
        **other_fields,
    }


def _tools(where: str, tools: Any) -> Any:
    """Tools as a list; many datasets store them as JSON."""
    return _json(where, "tools", tools) or None if isinstance(tools, str) and tools.strip() else tools or None


def _json(where: str, what: str, text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise BadSample(where, f"{what} is not valid JSON: {error}") from error


def _answer(where: str, value: Any) -> list[Any]:
    if type_of(value) in (TURN, TURNS):
        return _from_turns(where, [value] if isinstance(value, Mapping) else value)
    return _as_messages("assistant", value)


def _conversation(where: str, name: str, prompt: list[Any], answer: list[Any]) -> list[Any]:
    """The full conversation: the answer after the prompt, unless it already begins with the prompt."""
    if answer and isinstance(answer[0], Mapping) and answer[0].get("role") == "assistant":
        if not prompt:
            raise BadSample(
                where, f"{name} without a prompt: expected a column prompt, or the full conversation in {name}"
            )
        return [*prompt, *answer]
    if [_role_and_content(message) for message in answer[: len(prompt)]] != [
        _role_and_content(message) for message in prompt
    ]:
        raise BadSample(where, f"{name} is a full conversation that does not begin with the prompt of the row")
    return list(answer)


def _role_and_content(message: Any) -> tuple[Any, Any]:
    return (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, message)


# ------------------------------------------------------------------------------------------------------------ media


def _with_media(where: str, row: Row, *, all_marks_are_media: bool) -> dict[str, Any]:
    """Messages with parts of chat templates, and lists of media; arguments as of `messages_with_parts`."""
    items = {}
    for kind, name in MEDIA_COLUMNS.items():
        media = _media_of(where, row, kind)
        if media:
            items[name] = media
    messages = messages_with_parts(where, row["messages"], items, all_marks_are_media=all_marks_are_media)
    other_columns = {
        name: value for name, value in row.items() if name not in (*MEDIA_COLUMNS, *MEDIA_COLUMNS.values())
    }
    return {**other_columns, "messages": messages, **items}


def _media_of(where: str, row: Row, kind: str) -> list[Any]:
    """The items of a kind, from the column of one (`image`) or of several (`images`); an empty text is none beside the other.

    Raises:
        WrongColumns: both have items, and using one would drop the others silently.
    """
    columns = (MEDIA_COLUMNS[kind], kind)
    lists = [as_list(row.get(column)) for column in columns]
    filled = [items for items in lists if any(not isinstance(item, str) or item for item in items)]
    if len(filled) > 1:
        raise WrongColumns(
            where,
            f"both {kind} and {columns[0]} have media, expected one of them. To fix: with data.sources[].columns = "
            f"{{{columns[0]}: {kind}}} only {kind} is used; or drop one in a data.sources[].transform",
        )
    return max(filled or lists, key=len)
