"""A conversation and its tools in the forms that a chat template takes (`template_forms`), message by message.

    {"role": "developer", ...}                          {"role": "system", ...}
    {"content": [{"type": "text", "text": "Hi"}]}       {"content": "Hi"}
    {"function": {"arguments": '{"a": 1}', ...}}        {"function": {"arguments": {"a": 1}, ...}}
    {"function_call": {...}}, {"role": "function"}      {"tool_calls": [...]}, {"role": "tool"}

A form that the template takes stays; only arguments of calls are a mapping wherever the template takes one. No arguments are `{}`.
A content `[]` is an empty text, and so is null of a system message; null of any other is no content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from patchgen.runtime.data.media_parts import MEDIA_PARTS
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.template_forms import Message, TemplateForms

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts with a `text`; the last two are of OpenAI's Responses."""
RESULT_ROLES = ("tool", "function")
INSTRUCTION_ROLES = ("system", "developer")
CALL_KEYS = ("name", "arguments", "parameters")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of the reasoning of a message, of which transformers makes one."""


def adapted_messages(where: str, messages: Sequence[Message], forms: TemplateForms) -> list[Message]:
    """The messages in the forms that a template takes, as many as there were.

    Raises:
        BadSample: a message has no content, or one of a type that is no content; calls or their arguments are in no known form.
    """
    has_old_calls = any(message.get("function_call") for message in messages)
    return [
        _MessageAdapter(where, index, message["role"], forms).adapted(message, has_old_calls=has_old_calls)
        for index, message in enumerate(messages)
    ]


class _MessageAdapter:
    """Adapts one message."""

    def __init__(self, where: str, index: int, role: str, forms: TemplateForms) -> None:
        self.where = where
        self.name = f"message {index} of {role!r}"
        self.role = role
        self.forms = forms

    def adapted(self, message: Message, *, has_old_calls: bool) -> Message:
        """The message without keys that have no value.

        Args:
            has_old_calls: whether the conversation has a `function_call`.
        """
        # Templates would write "None" for keys with no value, and test whether there are calls by the key.
        message = {name: value for name, value in message.items() if value is not None}
        if message.get("content") == [] and self.role not in RESULT_ROLES:
            message["content"] = ""
        if self.role in INSTRUCTION_ROLES:
            message.setdefault("content", "")
        message = self._with_known_role(message, has_old_calls)
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        else:
            message["tool_calls"] = self._calls(message["tool_calls"])
        if "content" in message:
            message["content"] = self._content(message["role"], message["content"])
        elif "tool_calls" not in message and "function_call" not in message and not any(map(message.get, REASONING)):
            raise BadSample(self.where, f"{self.name} has no content")
        if "tool_calls" in message and not message.get("content"):
            message = self._with_empty_content(message)
        elif "content" not in message and "function_call" not in message:  # reasoning alone
            message |= self.forms.empty_content_of_reasoning
        return message

    def _with_known_role(self, message: Message, has_old_calls: bool) -> Message:
        """The message with the role and the key of calls that the template writes."""
        role = message["role"]
        if role == "developer" and self.forms.content("system") and not self.forms.knows(role):
            return {**message, "role": "system"}
        if self.forms.old_calls:
            return message
        if role == "function" and (has_old_calls or not self.forms.content(role)):
            return {**message, "role": "tool"}
        if message.get("function_call") and not message.get("tool_calls"):
            others = {name: value for name, value in message.items() if name != "function_call"}
            call = _parsed(message["function_call"])
            return {**others, "tool_calls": [{"type": "function", "function": call}]}
        return message

    # ------------------------------------------------------------------------------------------------------- content

    def _content(self, role: str, content: Any) -> Any:
        if role == "tool" and not _is_result_in_parts(content):
            return content if type(content) in self.forms.results else _json_text(content)
        if not _is_text_or_parts(content):
            found = f"{type(content).__name__} {content!r:.60}"
            raise BadSample(self.where, f"{self.name} has the content {found}, expected a text or a list of parts")
        taken = self.forms.content(role) or self.forms.content("user")
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if taken == {"parts"} else content
        parts = [_plain_part(part) for part in content]
        texts = [part.get("text") for part in parts if part.get("type") == "text"]
        if not all(isinstance(text, str) for text in texts):
            raise BadSample(self.where, f"{self.name} has a part of the type 'text' without a text")
        if "text" not in taken:
            return parts
        if len(texts) == len(parts):  # as one text, because some templates change the white space around parts
            return "".join(part["text"] for part in parts)
        if "parts" not in taken:
            other = next(part.get("type") for part in parts if part.get("type") != "text")
            raise BadSample(
                self.where,
                f"{self.name} has a part of the type {other!r}, and the chat template takes only text from this role",
            )
        return parts

    def _with_empty_content(self, message: Message) -> Message:
        """The message, whose calls have no content, with what the template needs instead."""
        empty = self.forms.empty_content
        if "content" in message and empty != {"content": None}:
            return message
        return {**{name: value for name, value in message.items() if name != "content"}, **empty}

    # --------------------------------------------------------------------------------------------------------- calls

    def _calls(self, calls: Any) -> list[Any]:
        calls = _parsed(calls)
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            raise BadSample(self.where, f"{self.name} has tool_calls = {calls!r:.80}, expected a list of calls")
        return [self._call(number, call) for number, call in enumerate(calls)]

    def _call(self, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        is_flat = function is None and "name" in call
        if is_flat:
            function = {name: call[name] for name in CALL_KEYS if name in call}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadSample(self.where, f"call {number} of {self.name} has no name: {dict(call)!r:.80}")
        function = self._with_arguments(number, function)
        forms = self.forms
        if is_flat and (forms.flat_calls or not forms.wrapped_calls):
            return {**{name: value for name, value in call.items() if name not in CALL_KEYS}, **function}
        others = {name: value for name, value in call.items() if name not in ("function", *CALL_KEYS)}
        if not is_flat and forms.flat_calls and not forms.wrapped_calls:
            return {**others, **function}
        has_type = {"type": "function"} if is_flat or forms.typed_calls else {}
        return {**has_type, **others, "function": function}

    def _with_arguments(self, number: int, function: Mapping[str, Any]) -> dict[str, Any]:
        """The function with its arguments in the form that the template takes."""
        if "arguments" not in function and "parameters" in function:  # as Llama writes calls
            others = {name: value for name, value in function.items() if name != "parameters"}
            function = {**others, "arguments": function["parameters"]}
        given = function.get("arguments")
        arguments = {} if given in (None, "") else _parsed(given)
        if not isinstance(arguments, Mapping):
            raise BadSample(
                self.where,
                f"the arguments of call {number} ({function['name']!r}) of {self.name} are {arguments!r:.80}, expected a "
                "mapping or a JSON object",
            )
        if self.forms.arguments == "text":
            return {**function, "arguments": given if given and isinstance(given, str) else _json_text(arguments)}
        return {**function, "arguments": arguments}


def adapted_tools(where: str, tools: Any, forms: TemplateForms) -> list[Any] | None:
    """Schemas of tools in the form that a template takes; None: there are no tools.

    Raises:
        BadSample: `tools` is no list of schemas.
    """
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise BadSample(where, f"tools are {tools!r:.80}, expected a list of JSON schemas")
    return [_adapted_tool(where, number, tool, forms) for number, tool in enumerate(tools)]


def _adapted_tool(where: str, number: int, tool: Any, forms: TemplateForms) -> dict[str, Any]:
    schema = _parsed(tool)
    if not isinstance(schema, Mapping):
        raise BadSample(where, f"tool {number} is {tool!r:.80}, expected a JSON schema")
    function = schema.get("function")
    is_flat = not isinstance(function, Mapping)
    function = {**(schema if is_flat else function)}
    if isinstance(function.get("parameters"), str):
        function["parameters"] = _parsed(function["parameters"])
    if is_flat and "name" in function and forms.wrapped_tools and not forms.flat_tools:
        return {"type": "function", "function": {name: value for name, value in function.items() if name != "type"}}
    if not is_flat and forms.flat_tools and not forms.wrapped_tools:
        return function
    return function if is_flat else {**schema, "function": function}


def _is_text_or_parts(content: Any) -> bool:
    """Whether a content is a text, or a list of texts and of parts, which have a type or a text."""
    return isinstance(content, str) or (
        isinstance(content, list | tuple)
        and all(isinstance(part, str) or (isinstance(part, Mapping) and _is_part(part)) for part in content)
    )


def _is_result_in_parts(content: Any) -> bool:
    """Whether the result of a tool is a text or a list of parts of templates; other lists are values, whatever their keys."""
    known = (*TEXT_PARTS, *MEDIA_PARTS)
    return isinstance(content, str) or (
        isinstance(content, list | tuple)
        and len(content) > 0
        and all(isinstance(part, Mapping) and part.get("type") in known for part in content)
    )


def _is_part(part: Mapping[str, Any]) -> bool:
    return part.keys() == {"text"} or isinstance(part.get("type"), str)


def _plain_part(part: Any) -> dict[str, Any]:
    """A part; of a text, of a part without a type and of OpenAI's parts with a text, a part of the type text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str):
        return {**part, "type": "text"}
    return dict(part)


def _parsed(value: Any) -> Any:
    """The value of a text that is JSON; all others as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
