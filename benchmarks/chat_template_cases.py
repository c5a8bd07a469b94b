"""Conversations and tokenizers with which the learned parts of chat templates are compared (`bench_chat_templates.py`)."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
TOKEN = re.compile(
    r"<\|[^<>|'\s]{1,40}\|>|<｜[^<>'\"\s]{1,40}｜>|<\|[a-z_\"]{1,30}>|<[a-z_]{1,30}\|>|</?s>|<(?:start|end)_of_\w{1,30}>"
    r"|</?think>|</?tool_call>|</?tool_response>|<image>|\[gMASK\]|<sop>|\[/?INST\]"
)
"""What tokens of a template look like."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name}.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "A value."} for key in keys},
                "required": list(keys),
            },
        },
    }
    for name, keys in (("look_up", ("place", "unit")), ("count", ("word",)))
]


def tokenizer_of(template: str, *, special: bool = True) -> PreTrainedTokenizerFast:
    """A token per byte, and one for each that the template seems to write.

    Args:
        special: whether these are special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes, bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(sorted(set(TOKEN.findall(template))), special_tokens=special)
    tokenizer.chat_template = template
    return tokenizer


def user(content: Any = "Where is the river?") -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any = "Behind the hill.", **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def system(content: str = "Be kind.") -> Message:
    return {"role": "system", "content": content}


def call(index: int = 0, name: str = "look_up", **arguments: Any) -> dict[str, Any]:
    arguments = arguments or {"place": "Dresden", "unit": "km"}
    return {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*found: dict[str, Any], **fields: Any) -> Message:
    return {"role": "assistant", "tool_calls": list(found), **fields}


def result(content: Any = '{"length": 1094}', index: int = 0, name: str = "look_up") -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{index}", "content": content}


THOUGHT = {"reasoning_content": "It flows north.\nSo it is there."}
SECOND = [user("And the sea?"), assistant("Far away.")]
CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [user(), assistant()],
    "system": [system(), user(), assistant()],
    "three turns": [user(), assistant(), *SECOND, user("Thanks"), assistant("Welcome.")],
    "system, two turns": [system(), user(), assistant(), *SECOND],
    "user at the end": [user(), assistant(), user("And the sea?")],
    "assistant first": [assistant("Hello."), user(), assistant()],
    "two assistants in a row": [user(), assistant(), assistant("Or in front of it."), *SECOND],
    "two users in a row": [user(), user("Please?"), assistant()],
    "a call": [user(), calls(call(), content=""), result(), assistant("1094 km.")],
    "a call without content": [user(), calls(call()), result(), assistant("1094 km.")],
    "a call with null content": [user(), calls(call(), content=None), result(), assistant("1094 km.")],
    "a call with content": [user(), calls(call(), content="Let me see."), result(), assistant("1094 km.")],
    "two calls": [
        user(),
        calls(call(), call(1, "count", word="Elbe"), content=""),
        result(),
        result("4", 1, "count"),
        assistant("1094 km, 4 letters."),
    ],
    "calls one after the other": [
        user(),
        calls(call(), content=""),
        result(),
        calls(call(1, "count", word="Elbe"), content=""),
        result("4", 1, "count"),
        assistant("1094 km, 4 letters."),
    ],
    "calls in two turns": [
        system(),
        user(),
        calls(call(), content=""),
        result(),
        assistant("1094 km."),
        user("And its letters?"),
        calls(call(1, "count", word="Elbe"), content=""),
        result("4", 1, "count"),
        assistant("4."),
    ],
    "a call at the end": [user(), calls(call(), content="")],
    "a result at the end": [user(), assistant(), user("How long?"), calls(call(), content=""), result()],
    "call and result alike": [
        user(),
        calls(call(place="Elbe", unit="km"), content=""),
        result("Elbe"),
        assistant("Elbe"),
    ],
    "arguments of many types": [
        user(),
        calls(call(place='a "b" \\ c\n', unit={"x": [1, 2.5, True]}), content=""),
        result(),
        assistant("Done."),
    ],
    "a thought": [user(), assistant(**THOUGHT)],
    "thoughts in all turns": [user(), assistant(**THOUGHT), user("And the sea?"), assistant("Far away.", **THOUGHT)],
    "a thought in an early turn": [user(), assistant(**THOUGHT), *SECOND],
    "a thought before a call": [
        user(),
        calls(call(), content="", **THOUGHT),
        result(),
        assistant("1094 km.", **THOUGHT),
    ],
    "a thought in the content": [user(), assistant("<think>\nIt flows north.\n</think>\n\nBehind the hill.")],
    "thoughts in all contents": [
        user(),
        assistant("<think>\nIt flows north.\n</think>\n\nBehind the hill."),
        user("And the sea?"),
        assistant("<think>\nNorth.\n</think>\n\nFar away."),
    ],
    "a thought without an opening": [user(), assistant("It flows north.\n</think>\n\nBehind the hill.")],
    "no content": [user(), assistant(""), *SECOND],
    "an empty thought": [user(), assistant("Behind the hill.", reasoning_content="")],
    "content like its header": [user("assistant"), assistant("assistant\nmodel\nAssistant:"), *SECOND],
    "content like a later header": [
        user("Say user"),
        assistant("\n<|im_start|>user\nuser"),
        user("user"),
        assistant("user\nuser"),
    ],
    "content like its neighbour's": [user("Yes"), assistant("Yes"), user("Yes"), assistant("Yes")],
    "content like the system's": [system("Yes"), user("Yes"), assistant("Yes")],
    "other scripts": [user("Где река? 川は？"), assistant("За холмом 🏞️ \u0301é שלום"), *SECOND],
    "white space at the ends": [user("  Where?\n"), assistant("\n Behind the hill. \n"), *SECOND],
    "many lines": [user("a\n\nb"), assistant("```python\nx = {'a': \"b\"}\n```\n\n- one\n- two")],
    "markup": [user("<b>&amp;</b>"), assistant("<answer>1 < 2 & 3 > 2</answer>"), *SECOND],
    "parts": [
        user([{"type": "text", "text": "Where is the river?"}]),
        assistant([{"type": "text", "text": "Behind the hill."}]),
    ],
    "two parts": [
        user([{"type": "text", "text": "Where is "}, {"type": "text", "text": "the river?"}]),
        assistant([{"type": "text", "text": "Behind "}, {"type": "text", "text": "the hill."}]),
    ],
}
WITH_TOOLS = frozenset(
    name for name, messages in CONVERSATIONS.items() if any("tool_calls" in each for each in messages)
)
