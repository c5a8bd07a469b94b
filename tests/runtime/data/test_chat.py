"""Labels of conversations: what is found by rendering is what the template's own mask says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from patchgen.runtime.data.chat import ChatEncoder
from patchgen.runtime.data.problems import BadSample, DataError

SPECIAL = ["<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "</s>", "<think>", "</think>"]

CHATML = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}"
    "<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{%- else -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{{ '\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
)
INSTRUCT = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}"
    "{% generation %}{{ ' ' + message.content }}</s>{% endgeneration %}"
    "{%- else -%}[INST] {{ message.content }} [/INST]{%- endif -%}{%- endfor -%}"
)
# Drops the reasoning of all turns but the last, as templates of reasoning models do.
REASONING = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{%- if loop.last -%}{{ '<think>\n' + message.reasoning + '\n</think>\n' }}{%- endif -%}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{%- else -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{{ '\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
)


# Shows the reasoning of the last turn only, so that a turn with calls is not a prefix of what follows it.
CALLS = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{%- if loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    '{{ \'\n<call>{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{ '}</call>' }}{%- endfor -%}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{%- elif message.role == 'tool' -%}CHECK{{ '<|im_start|>user\n<result>' + message.content + '</result><|im_end|>\n' }}"
    "{%- else -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{{ '\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
)
REFUSE = (
    "{%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' -%}"
    "{{ raise_exception('a result without a call') }}{%- endif -%}"
)


def byte_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: n for n, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.chat_template = template
    return fast


def without_marks(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


MARKED = {
    name: byte_tokenizer(template)
    for name, template in (("chatml", CHATML), ("instruct", INSTRUCT), ("reasoning", REASONING))
}
UNMARKED = {name: byte_tokenizer(without_marks(tokenizer.chat_template)) for name, tokenizer in MARKED.items()}

contents = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Co")), min_size=1, max_size=12).filter(
    lambda text: text == text.strip() and not any(token in text for token in SPECIAL)
)


def chat_tokens(tokenizer, messages):
    return ChatEncoder(tokenizer).encode_messages("messages", messages, {}, None)


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(MARKED)),
    system=st.booleans(),
    turns=st.lists(st.tuples(contents, contents, contents), min_size=1, max_size=4),
)
def test_rendering_finds_what_the_template_marks(name, system, turns):
    messages = [{"role": "system", "content": "Be kind."}] if system else []
    for question, answer, reasoning in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, "reasoning": reasoning},
        ]
    expected_ids, expected = chat_tokens(MARKED[name], messages)
    ids, found = chat_tokens(UNMARKED[name], messages)
    assert ids.tolist() == expected_ids.tolist()
    assert found.tolist() == expected.tolist()
    learned = MARKED[name].decode(ids[found])
    assert turns[-1][1] in learned


@pytest.mark.parametrize("check", ["", REFUSE], ids=["lenient", "strict"])
@pytest.mark.parametrize("content", ["", "Let me see."])
@pytest.mark.parametrize("count", [1, 2])
def test_calls_of_tools_are_learned_and_their_results_are_not(check, content, count):
    template = CALLS.replace("CHECK", check)
    calls = [
        {"type": "function", "id": f"call{n}", "function": {"name": "add", "arguments": {"a": n}}}
        for n in range(count)
    ]
    results = [{"role": "tool", "content": f"{n}", "tool_call_id": f"call{n}"} for n in range(count)]
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "Again?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "Still 2."},
    ]
    expected_ids, expected = chat_tokens(byte_tokenizer(template), messages)
    ids, found = chat_tokens(byte_tokenizer(without_marks(template)), messages)
    assert ids.tolist() == expected_ids.tolist()
    assert found.tolist() == expected.tolist()


def test_a_conversation_may_start_with_the_assistant():
    messages = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}]
    ids, found = chat_tokens(UNMARKED["chatml"], messages)
    assert UNMARKED["chatml"].decode(ids[found]) == "Hello<|im_end|>"


def test_a_turn_that_the_template_leaves_out_is_a_bad_sample():
    template = "{%- for message in messages if message.role == 'user' -%}{{ message.content }}{%- endfor -%}"
    encoder = ChatEncoder(byte_tokenizer(template))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (found,) = encoder.encode([("a.jsonl:3", {"messages": messages})])
    assert isinstance(found, BadSample)
    assert found.reason.startswith("the chat template drops the content of message 1 of 'assistant'")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": "x"}, "no field 'messages', only text"),
        ({"messages": "Hi"}, "field 'messages' is str, expected list"),
        ({"messages": ["Hi"]}, "message 0 is 'Hi', expected a dict"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 0 of 'assistant' has no content"),
    ],
)
def test_samples_that_are_no_conversation(fields, reason):
    encoder = ChatEncoder(byte_tokenizer("{{ messages[0].content + '' }}"))
    (found,) = encoder.encode([("a.jsonl:3", fields)])
    assert isinstance(found, BadSample)
    with pytest.raises(BadSample, match=f"a.jsonl:3: .*({reason})"):
        raise found


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(DataError, match="chat template"):
        ChatEncoder(byte_tokenizer(None))
