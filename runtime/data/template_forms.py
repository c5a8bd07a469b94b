"""Brings conversations into the forms that a chat template takes.

Data writes the same conversation in several forms, and a template often drops or misreads the forms that it does not know:

    content                       a text                         a list of parts `{"type": "text", "text": ...}`
    arguments of a call           a mapping                      its JSON as a text
    a call                        {"type", "function": {...}}    {"name", "arguments"}
    a call of one function        `tool_calls`, role tool        `function_call`, role function
    instructions                  role system                    role developer

Which of these a template takes is found once, by rendering short conversations with a word in the place in question: a form is
taken if the word is in what the template writes, and is not part of a printed list or of JSON inside JSON. A message keeps
the form that it has if the template takes it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from patchgen.runtime.data.rendering import Renderer

Message = dict[str, Any]
Form = Literal["text", "parts"]
WORD, NAME, KEY, RESULT, RESULT_KEY = "qzwordzq", "qznamezq", "qzkeyzq", "qzresultzq", "qzfieldzq"
"""Of the probes: in no template."""
UNKNOWN_ROLE = "qzrolezq"
CALL_ID = "call00001"  # Mistral's templates demand nine letters or digits
NAMED_ID = f"functions.{NAME}:0"
"""An id with the name of the function: Kimi's templates write it in the name's place."""
FORMS: tuple[Form, ...] = ("text", "parts")
ARGUMENTS = {"mapping": {KEY: WORD}, "text": json.dumps({KEY: WORD})}
EMPTY_CONTENTS: tuple[Message, ...] = ({}, {"content": ""}, {"content": None})
TOOL = {
    "name": NAME,
    "description": "d",
    "parameters": {"type": "object", "properties": {KEY: {"type": "string", "description": WORD}}, "required": [KEY]},
}


def forms_of(template: str, special_tokens: Mapping[str, Any]) -> TemplateForms:
    """The forms that a template takes, found once for each template.

    Args:
        special_tokens: the tokenizer's, by the names that templates use.
    """
    return _forms_of(template, json.dumps(dict(special_tokens), default=str, sort_keys=True))


@functools.lru_cache(maxsize=64)
def _forms_of(template: str, special_tokens: str) -> TemplateForms:
    return TemplateForms(template, json.loads(special_tokens))


class TemplateForms:
    """The forms that a template takes; each is found when a conversation first needs it."""

    def __init__(self, template: str, special_tokens: Mapping[str, Any]) -> None:
        self._options = {**special_tokens, "chat_template": template}
        self._content: dict[str, frozenset[Form]] = {}

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """The text in small letters, because some templates change them; empty if the template refuses the messages."""
        return (Renderer({**self._options, "tools": tools}).or_none(messages) or "").lower()

    # ------------------------------------------------------------------------------------------------------- content

    def content(self, role: str) -> frozenset[Form]:
        """The forms of the content that the template takes from a role; none: it does not write this role."""
        if role not in self._content:
            self._content[role] = self._probe_content(role)
        return self._content[role]

    def _probe_content(self, role: str) -> frozenset[Form]:
        for before, after in self._contexts(role):
            texts = {form: self._with_content(role, before, _in_form(RESULT, form), after) for form in FORMS}
            taken: tuple[Form, ...] = tuple(
                form for form in FORMS if RESULT in texts[form] and not _prints_part(texts[form])
            )
            if taken:
                return frozenset(taken)
        return frozenset()

    def _with_content(self, role: str, before: list[Message], content: Any, after: list[Message]) -> str:
        result = {"tool_call_id": CALL_ID, "name": NAME} if role == "tool" else {}
        return self.render([*before, {"role": role, **result, "content": content}, *after])

    def _contexts(self, role: str) -> Iterator[tuple[list[Message], list[Message]]]:
        """Messages before and after one of a role, the most usual ones first."""
        if role == "user":
            yield [], []
            return
        question = self._message("user")
        if role == "assistant":
            yield [question], []
            return
        answer = self._message("assistant")
        if role == "tool":
            for call in self._call_messages():
                yield [question, call], [answer]
                yield [question, call], []
            return
        yield [], [question, answer]
        yield [question, answer], [question, answer]
        yield [question], [answer]

    def _message(self, role: str) -> Message:
        return {"role": role, "content": self._in_taken_form(role, "a")}

    def _in_taken_form(self, role: str, text: str) -> Any:
        return _in_form(text, "text" if "text" in self.content(role) else "parts")

    def knows(self, role: str) -> bool:
        """Whether the template writes a role otherwise than one that no template knows."""
        if not self.content(role):
            return False
        message = {"content": self._in_taken_form(role, "a")}
        for before, after in self._contexts(role):
            found, unknown = (
                self.render([*before, {"role": name, **message}, *after]).replace(name, "")
                for name in (role, UNKNOWN_ROLE)
            )
            if found and found != unknown:
                return True
        return False

    @functools.cached_property
    def results(self) -> tuple[type, ...]:
        """The types, of `dict` and `list`, that results of tools may have, besides texts and parts."""
        result = {RESULT_KEY: RESULT}
        texts: dict[type, list[str]] = {
            type(value): [self._with_content("tool", before, value, after) for before, after in self._contexts("tool")]
            for value in (result, [result, result])
        }
        is_taken = {
            dict: any(_is_read(text, RESULT_KEY, RESULT) for text in texts[dict]),
            list: any(json.dumps([result, result]) in text for text in texts[list]),
        }
        return tuple(kind for kind, taken in is_taken.items() if taken)

    # --------------------------------------------------------------------------------------------------------- calls

    def _call_messages(self) -> Iterator[Message]:
        """A call in every form that a template may demand."""
        for arguments in ARGUMENTS.values():
            for content in EMPTY_CONTENTS:
                yield {"role": "assistant", **content, "tool_calls": [_call(arguments)]}
                yield {"role": "assistant", **content, "tool_calls": [_call(arguments)["function"]]}

    def _reads_call(self, message: Message) -> bool:
        result = {"role": "tool", "name": NAME, "content": self._in_taken_form("tool", "r")}
        for call_id in (CALL_ID, NAMED_ID):
            calls = [{**call, "id": call_id} if "id" in call else call for call in message["tool_calls"]]
            messages = [self._message("user"), {"role": "assistant", **message, "tool_calls": calls}]
            answered = [*messages, {**result, "tool_call_id": call_id}, self._message("assistant")]
            if any(NAME in text and _is_read(text) for text in map(self.render, (messages, answered))):
                return True
        return False

    def _reads_in_any_content(self, call: Any) -> bool:
        return any(self._reads_call({**content, "tool_calls": [call]}) for content in EMPTY_CONTENTS)

    @functools.cached_property
    def arguments(self) -> str | None:
        """The form of the arguments of calls: "mapping", or else "text", their JSON; None: the template writes neither."""
        for name, arguments in ARGUMENTS.items():
            call = _call(arguments)
            if self._reads_in_any_content(call) or self._reads_in_any_content(call["function"]):
                return name
        return None

    def _usual_call(self) -> dict[str, Any]:
        return _call(ARGUMENTS[self.arguments or "mapping"])

    @functools.cached_property
    def wrapped_calls(self) -> bool:
        """Whether the template writes calls `{"type": "function", "function": {"name", "arguments"}}`."""
        return self._reads_in_any_content(self._usual_call())

    @functools.cached_property
    def flat_calls(self) -> bool:
        """Whether the template writes calls `{"name", "arguments"}`."""
        return self._reads_in_any_content(self._usual_call()["function"])

    @functools.cached_property
    def typed_calls(self) -> bool:
        """Whether the template writes no call without `type`."""
        call = self._usual_call()
        untyped = {name: value for name, value in call.items() if name != "type"}
        return self._reads_in_any_content(call) and not self._reads_in_any_content(untyped)

    @functools.cached_property
    def empty_content(self) -> Message:
        """What stands for no content beside calls: nothing, unless the template writes calls only with a `content`."""
        if self.arguments is None:
            return {"content": self._in_taken_form("assistant", "")}
        call = self._usual_call() if self.wrapped_calls else self._usual_call()["function"]
        read = (content for content in EMPTY_CONTENTS if self._reads_call({**content, "tool_calls": [call]}))
        return next(read, {})

    @functools.cached_property
    def empty_content_of_reasoning(self) -> Message:
        """What stands for no content beside reasoning without calls: nothing, unless the template needs a `content`."""
        question, thought = self._message("user"), {"role": "assistant", "reasoning_content": WORD}
        texts = [(content, self.render([question, {**thought, **content}])) for content in EMPTY_CONTENTS]
        written = [content for content, text in texts if WORD in text and "none" not in text.partition(WORD)[2]]
        return next(iter(written), {"content": self._in_taken_form("assistant", "")})

    @functools.cached_property
    def old_calls(self) -> bool:
        """Whether the template writes `function_call` and the role function."""
        for arguments in ARGUMENTS.values():
            call = {"role": "assistant", "content": None, "function_call": {"name": NAME, "arguments": arguments}}
            result = {"role": "function", "name": NAME, "content": RESULT}
            text = self.render([self._message("user"), call, result, self._message("assistant")])
            if NAME in text and RESULT in text and _is_read(text):
                return True
        return False

    # --------------------------------------------------------------------------------------------------------- tools

    def _reads_tool(self, tool: Mapping[str, Any]) -> bool:
        conversation = [self._message("user"), self._message("assistant")]
        texts = [self.render(conversation, [tool])]
        if self.content("system"):
            texts.append(self.render([self._message("system"), *conversation], [tool]))
        return any(NAME in text and _is_read(text) for text in texts)

    @functools.cached_property
    def wrapped_tools(self) -> bool:
        """Whether the template writes schemas `{"type": "function", "function": {...}}`."""
        return self._reads_tool({"type": "function", "function": TOOL})

    @functools.cached_property
    def flat_tools(self) -> bool:
        """Whether the template writes schemas `{"name", "description", "parameters"}`."""
        return self._reads_tool(TOOL)


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": arguments}}


def _in_form(text: str, form: Form) -> Any:
    return text if form == "text" else [{"type": "text", "text": text}]


def _prints_part(text: str) -> bool:
    """Whether a part is written as Python or JSON prints it."""
    return re.search(rf"""text\\?["']\s*:\s*\\?["']{RESULT}""", text) is not None


def _is_read(text: str, key: str = KEY, value: str = WORD) -> bool:
    """Whether a key and its value are written, and neither as Python prints a dict nor as JSON inside JSON."""
    is_printed = re.search(rf"""'{key}'\s*:|\\["']{key}""", text) is not None
    return key in text and value in text and not is_printed
