"""The same conversation in two forms: a chat template writes the same text for both, or refuses both with a true reason."""

from __future__ import annotations

import json
import re
import warnings
from importlib import resources
from typing import Any

import pytest

from patchgen.runtime.data import DataConfig, SourceConfig, build_loader
from patchgen.runtime.data.chat import ChatEncoder, render_with_spans
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.problems import BadSample, DataError
from patchgen.runtime.doctor.samples import first_samples
from patchgen.runtime.train.setup import DataParts
from tests.runtime.data.test_chat import byte_tokenizer

TEMPLATES = {
    file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
    for file in resources.files("trl").joinpath("chat_templates").iterdir()
    if file.name.endswith(".jinja") and not file.name.endswith("_training.jinja")  # these differ only in their marks
}

SYSTEM, USER, ANSWER = (
    {"role": "system", "content": "Alpha system."},
    {"role": "user", "content": "Bravo question?"},
    {"role": "assistant", "content": "Charlie answer."},
)
MORE = [{"role": "user", "content": "Delta question?"}, {"role": "assistant", "content": "Echo answer."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
    },
}
ARGUMENTS = {"city": "Kilo", "days": 3, "more": {"list": [1, "é"]}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "Lima result."}


def call(arguments: Any, *, content: Any = "absent") -> dict[str, Any]:
    calls = [{"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls, **({} if content == "absent" else {"content": content})}


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if "content" in message else message
        for message in messages
    ]


JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CALLED = [USER, call(ARGUMENTS), RESULT, ANSWER]
OLD = [
    USER,
    {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": JSON}},
    {"role": "function", "name": "get_weather", "content": "Lima result."},
    ANSWER,
]
AS_TOOL = [
    USER,
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "name": "get_weather", "content": "Lima result."},
    ANSWER,
]
FLAT = {"role": "assistant", "tool_calls": [{"id": "call00001", "name": "get_weather", "arguments": ARGUMENTS}]}
TWO_PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "Bravo "}, {"type": "input_text", "text": "question?"}],
}
CASES = {
    "content as parts": ([SYSTEM, USER, ANSWER, *MORE], in_parts([SYSTEM, USER, ANSWER, *MORE])),
    "two parts": ([USER, ANSWER], [TWO_PARTS, ANSWER]),
    "results as parts": (CALLED, in_parts(CALLED)),
    "arguments as JSON": (CALLED, [USER, call(JSON), RESULT, ANSWER]),
    "arguments as JSON, last": ([USER, call(ARGUMENTS)], [USER, call(JSON)]),
    "no arguments": ([USER, call({}), RESULT, ANSWER], [USER, call("{}"), RESULT, ANSWER]),
    "null beside calls": (CALLED, [USER, call(ARGUMENTS, content=None), RESULT, ANSWER]),
    "empty text beside calls": (CALLED, [USER, call(ARGUMENTS, content=""), RESULT, ANSWER]),
    "calls without function": (CALLED, [USER, FLAT, RESULT, ANSWER]),
    "function_call": (AS_TOOL, OLD),
    "developer": ([SYSTEM, USER, ANSWER], [{**SYSTEM, "role": "developer"}, USER, ANSWER]),
    "no calls": ([USER, ANSWER], [USER, {**ANSWER, "tool_calls": []}]),
}
WITH_CALLS = {name for name, (messages, _) in CASES.items() if any("tool_calls" in message for message in messages)}


@pytest.fixture(scope="module")
def literals() -> Literals:
    tokenizer = byte_tokenizer(None)
    tokenizer.bos_token = "</s>"
    return Literals(tokenizer)


def rendered(template: str, messages: Any, tools: Any, literals: Literals) -> str | BadSample:
    try:
        return render_with_spans("rows.jsonl:1", messages, tools, template=template, literals=literals)[0]
    except BadSample as error:
        return error


def words(messages: list[dict[str, Any]]) -> set[str]:
    """The words of the contents, and of the arguments of calls."""
    return set(re.findall(r"[A-Z][a-z]+", json.dumps([message.get("content") for message in messages])))


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_both_forms_are_written_alike_or_refused(name, literals):
    template = TEMPLATES[name]
    for case, (first, second) in CASES.items():
        tools = [TOOL] if case in WITH_CALLS else None
        texts = [rendered(template, messages, tools, literals) for messages in (first, second)]
        must_refuse = (case in WITH_CALLS and "tool_calls" not in template) or (SYSTEM in first and name == "gemma")
        assert [isinstance(text, BadSample) for text in texts] == [must_refuse] * 2, f"{case}: {texts}"
        if must_refuse:
            continue
        assert texts[0] == texts[1], case
        assert words(first) <= set(re.findall(r"[A-Z][a-z]+", texts[0])), case
        assert '\\"city' not in texts[0] and "'city':" not in texts[0], f"{case}: JSON inside JSON, or Python"


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_what_a_template_drops_is_a_bad_sample(name, literals):
    """Whatever is accepted, its text has all of its words."""
    null = rendered(TEMPLATES[name], [{"role": "user", "content": None}, ANSWER], None, literals)
    assert isinstance(null, BadSample) and null.reason == "message 0 of 'user' has no content"
    for role in ("critic", "developer", "function", "tool"):
        for place in (0, 1, 2):
            messages = [USER, ANSWER, *MORE]
            messages.insert(place, {"role": role, "content": "Zulu advice."})
            text = rendered(TEMPLATES[name], messages, None, literals)
            if isinstance(text, BadSample):
                assert re.search("the chat template (refuses the messages|drops the content of message)", text.reason)
            else:
                assert words(messages) <= set(re.findall(r"[A-Z][a-z]+", text)), (role, place)


# Writes contents that are texts, of three roles, and no calls: as the templates of many models do.
ONLY_TEXT = (
    "{%- for message in messages if message.role in ['system', 'user', 'assistant'] -%}"
    "<|im_start|>{{ message.role }}\n{{ message.content if message.content is string else '' }}<|im_end|>{{ '\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
)
# Writes contents that are lists of parts, as the templates of many models with pictures do.
ONLY_PARTS = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- for part in message.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}<|im_end|>{{ '\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# Writes only the first part of a content, and only the first call.
ONLY_FIRST = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.tool_calls -%}{{ message.tool_calls[0].function.name }}{{ message.tool_calls[0].function.arguments | tojson }}"
    "{%- else -%}{{ message.content[0].text }}{%- endif -%}<|im_end|>{{ '\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


ONLY_ANSWERS = ONLY_TEXT.replace("'system', ", "")
# Writes the arguments of calls as a text, or as JSON of a mapping.
TEXT_CALLS, MAPPING_CALLS = (
    ONLY_TEXT.replace(
        "<|im_end|>",
        "{%- for call in message.tool_calls or [] -%}{{ call.function.name }} "
        + arguments
        + "{%- endfor -%}<|im_end|>",
    )
    for arguments in ("{{ 'JSON ' + call.function.arguments }}", "{{ call.function.arguments | tojson }}")
)
THOUGHT = {"role": "assistant", "reasoning_content": "Zulu thought."}


def in_a_part(kind: str, text: str = "", **fields: Any) -> dict[str, Any]:
    """An answer with a part of a type, and one of text if there is a text."""
    texts = [{"type": "text", "text": text}] if text else []
    return {"role": "assistant", "content": [{"type": kind, **fields}, *texts]}


def learned(tokenizer: Any, messages: Any, tools: Any = None) -> tuple[str, str] | BadSample:
    """The text that a conversation trains on, and the part with a loss."""
    (found,) = ChatEncoder(tokenizer).encode([("rows.jsonl:1", {"messages": messages, "tools": tools})])
    if isinstance(found, BadSample):
        return found
    return tokenizer.decode(found.ids), tokenizer.decode(found.ids[found.targets])


@pytest.mark.parametrize("template", [ONLY_TEXT, ONLY_PARTS], ids=["only text", "only parts"])
@pytest.mark.parametrize("given", [[USER, ANSWER], in_parts([USER, ANSWER]), [TWO_PARTS, ANSWER]])
def test_content_is_read_in_either_form(template, given):
    text, answer = learned(byte_tokenizer(template), given)
    assert text.startswith("<|im_start|>user\nBravo question?<|im_end|>")
    assert answer == "Charlie answer.<|im_end|>"


def test_developer_is_system_where_the_template_does_not_know_it():
    any_role = ONLY_TEXT.replace(" if message.role in ['system', 'user', 'assistant']", "")
    messages = [{**SYSTEM, "role": "developer"}, USER, ANSWER]
    for template in (ONLY_TEXT, any_role):
        tokenizer = byte_tokenizer(template)
        assert learned(tokenizer, messages) == learned(tokenizer, [SYSTEM, USER, ANSWER])
    knows = byte_tokenizer(ONLY_TEXT.replace("'assistant']", "'assistant', 'developer']"))
    assert learned(knows, messages)[0].startswith("<|im_start|>developer\nAlpha system.")


IMAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Bravo question?"}]}
TWO_CALLS = {
    "role": "assistant",
    "tool_calls": [*call(ARGUMENTS)["tool_calls"], *call({"city": "Lima"})["tool_calls"]],
}


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (ONLY_TEXT, [USER, {"role": "critic", "content": "Too short."}, ANSWER], "drops the content of message 1 of 'critic'"),
        (ONLY_TEXT, [USER, call(ARGUMENTS), RESULT, ANSWER], "drops call 0 ('get_weather') of message 1 of 'assistant'"),
        (ONLY_TEXT, [USER, ANSWER, {"role": "user"}], "message 2 of 'user' has no content"),
        (ONLY_TEXT, [{"role": "user", "content": None}, ANSWER], "message 0 of 'user' has no content"),
        (ONLY_PARTS, [USER, in_a_part("refusal", refusal="No.")], "drops the refusal in part 0 of the content of message 1"),
        (ONLY_PARTS, [USER, in_a_part("file", "Echo", file={"id": "1"})], "drops the file in part 0 of the content of message 1"),
        (ONLY_PARTS, [USER, in_a_part("thinking", "Echo", thinking="Hm.")], "drops the thinking in part 0 of the content"),
        (ONLY_TEXT, [USER, {**THOUGHT, "content": None}], "drops the reasoning of message 1 of 'assistant'"),
        (ONLY_TEXT, [USER, {**THOUGHT, "content": ""}], "drops the reasoning of message 1 of 'assistant'"),
        (ONLY_ANSWERS, [SYSTEM, USER, ANSWER], "a transform can put its text into the first user turn, or take another template"),
        (ONLY_TEXT, [{"role": "user", "content": {"text": "Hi"}}, ANSWER], "message 0 of 'user' has the content dict"),
        (ONLY_TEXT, [{"role": "user", "content": [{"type": "text"}]}, ANSWER], "part of the type 'text' without a text"),
        (ONLY_TEXT, [IMAGE, ANSWER], "message 0 of 'user' has a part of the type 'image', which only data.kind = multimodal reads"),
        (ONLY_TEXT, [USER, {"role": "assistant", "tool_calls": "none"}], "message 1 of 'assistant' has tool_calls = 'none'"),
        (ONLY_TEXT, [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}], "call 0 of message 1 of 'assistant' has no name"),
        (ONLY_FIRST, [*in_parts([USER]), TWO_CALLS], "drops call 1 ('get_weather') of message 1 of 'assistant'"),
        (ONLY_FIRST, [TWO_PARTS, *in_parts([ANSWER])], "drops part 1 of the content of message 0 of 'user'"),
        (ONLY_FIRST, [*in_parts([USER]), call("[1]")], "arguments of call 0 ('get_weather') of message 1 of 'assistant' are [1]"),
        (ONLY_FIRST, [*in_parts([USER]), call("city")], "are 'city', expected a mapping or a JSON object"),
    ],
)  # fmt: skip
def test_reasons(template, messages, reason):
    found = learned(byte_tokenizer(template), messages)
    assert isinstance(found, BadSample), found
    assert reason in found.reason


def test_what_is_dropped_only_from_earlier_turns_is_no_bad_sample():
    """As templates drop reasoning: they write it while its turn is the last."""
    template = ONLY_TEXT.replace("message.content if", "message.content.split('|')[0 if loop.last else -1] if")
    text, _ = learned(byte_tokenizer(template), [USER, {**ANSWER, "content": "Zulu thought.|"}, MORE[0], ANSWER])
    assert "Zulu" not in text and text.count("Charlie") == 1


@pytest.mark.parametrize("arguments", [ARGUMENTS, JSON, json.dumps(ARGUMENTS, indent=1)])
def test_arguments_are_written_once(arguments):
    """A text is kept where the template takes one, and read and written again where it takes a mapping."""
    kept = arguments if isinstance(arguments, str) else JSON
    for template, expected in ((MAPPING_CALLS, JSON), (TEXT_CALLS, kept)):
        answer = learned(byte_tokenizer(template), [USER, call(arguments)])[1]
        assert answer.endswith(f" {expected}<|im_end|>"), template


def test_numbers_of_arguments_are_kept_as_they_are_written():
    answer = learned(byte_tokenizer(TEXT_CALLS), [USER, call('{"a": 1.50}')])[1]
    assert answer == 'get_weather JSON {"a": 1.50}<|im_end|>'


@pytest.mark.parametrize("arguments", ["not json", '"x"', "{'a': 1}", '{"a": 1', "[1]", 3])
@pytest.mark.parametrize("template", [TEXT_CALLS, MAPPING_CALLS], ids=["text", "mapping"])
def test_arguments_that_are_no_json_object_are_refused(template, arguments):
    """Templates that take a text wrote them as they were."""
    found = learned(byte_tokenizer(template), [USER, call(arguments)])
    assert isinstance(found, BadSample) and "expected a mapping or a JSON object" in found.reason


@pytest.mark.parametrize("template", [TEXT_CALLS, MAPPING_CALLS], ids=["text", "mapping"])
def test_calls_without_arguments_have_empty_ones(template):
    """They were written as `null` or `None`, or refused."""
    tokenizer = byte_tokenizer(template)
    expected = learned(tokenizer, [USER, call({})])
    assert expected[1].endswith(" {}<|im_end|>")
    missing = call(None)
    del missing["tool_calls"][0]["function"]["arguments"]
    for message in (call(None), call(""), call("{}"), missing):
        assert learned(tokenizer, [USER, message]) == expected


def test_an_id_with_the_name_of_the_function_stands_for_it():
    """As in the templates of Kimi, which write `functions.get_weather:0` and no name."""
    template = TEXT_CALLS.replace("call.function.name", "call.id")
    answer = {**call(ARGUMENTS)}
    answer["tool_calls"] = [{**answer["tool_calls"][0], "id": "functions.get_weather:0"}]
    assert learned(byte_tokenizer(template), [USER, answer])[1] == f"functions.get_weather:0 JSON {JSON}<|im_end|>"
    without_name = learned(byte_tokenizer(template), [USER, call(ARGUMENTS)])
    assert isinstance(without_name, BadSample) and "drops call 0 ('get_weather')" in without_name.reason


def test_a_content_that_is_empty_is_an_empty_text():
    tokenizer = byte_tokenizer(ONLY_TEXT)
    expected = learned(tokenizer, [{**SYSTEM, "content": ""}, {**USER, "content": ""}, ANSWER])
    assert not isinstance(expected, BadSample)
    for system in (None, []):
        for user in ("", []):
            assert learned(tokenizer, [{**SYSTEM, "content": system}, {**USER, "content": user}, ANSWER]) == expected


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_reasoning_without_content_is_learned_or_refused_for_a_true_reason(name, literals):
    """Many templates need the key `content`: the rows were refused with an error of Jinja."""
    text = rendered(TEMPLATES[name], [USER, {**THOUGHT, "content": None}], None, literals)
    if isinstance(text, BadSample):
        assert text.reason.startswith("the chat template drops the reasoning of message 1 of 'assistant'")
    else:
        assert "Zulu thought." in text and "None" not in text


def test_reasoning_that_is_never_written_is_warned_of():
    """Of earlier turns alone templates drop it on purpose."""
    with pytest.warns(UserWarning, match="does not write the reasoning of assistant turns"):
        assert learned(byte_tokenizer(ONLY_TEXT), [USER, {**THOUGHT, **ANSWER}])[1] == "Charlie answer.<|im_end|>"
    only_last = ONLY_TEXT.replace(
        "{{ message.content", "{{ message.reasoning_content if loop.last }}{{ message.content"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learned(byte_tokenizer(only_last), [USER, {**THOUGHT, **ANSWER}, *MORE])


def test_loader_and_doctor_refuse_the_same_sample(tmp_path):
    """`data` and `train` read the loader, `doctor` the first samples."""
    bad = [USER, {"role": "critic", "content": "Too short."}, ANSWER]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in ([USER, ANSWER], bad))
    )
    sources = (SourceConfig(str(tmp_path / "rows.jsonl")),)
    config = DataConfig(sources=sources, kind="chat", cache_dir=str(tmp_path / "cache"), tokens_per_batch=512)
    tokenizer = byte_tokenizer(ONLY_TEXT)
    reason = "rows.jsonl:2: the chat template drops the content of message 1 of 'critic'"
    with pytest.raises(DataError, match=reason):
        build_loader(config, tokenizer=tokenizer, batch_index=0, num_batches=1)
    with pytest.raises(DataError, match=reason):
        first_samples(config, DataParts(tokenizer))


def test_a_template_that_writes_no_tools_is_warned_of():
    with pytest.warns(UserWarning, match="does not write the schemas of tools"):
        assert learned(byte_tokenizer(ONLY_TEXT), [USER, ANSWER], [TOOL])[1] == "Charlie answer.<|im_end|>"
