"""Which tokens of a conversation are learned: those that TRL's training templates mark, and never another's text."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from patchgen.runtime.data.chat import ChatEncoder, render_with_spans
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.roles import tokens_with_roles

pytest.importorskip("trl")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bench_chat_templates as templates
from chat_template_cases import CONVERSATIONS, TOOLS, WITH_TOOLS, assistant, call, calls, result, tokenizer_of, user

TWINS = templates.twins()
ALL = templates.all_templates()
COMPARED = (
    "system, two turns",
    "assistant first",
    "a call with content",
    "two calls",
    "a thought before a call",
    "thoughts in all contents",
    "no content",
    "content like a later header",
)
"""One conversation of each kind; `benchmarks/bench_chat_templates.py` compares all, into docs/chat_templates.md."""
CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def learned_text(template: str, messages: list, tokenizer=None, tools=None, learn: str = "all") -> str:
    """The tokens with a loss as text, with `·` between parts that are not next to each other."""
    tokenizer = tokenizer or tokenizer_of(template, special=False)
    (tokens,) = ChatEncoder(tokenizer, learn=learn).encode([("row", {"messages": messages, "tools": tools})])
    if isinstance(tokens, BadSample):
        raise tokens
    positions = np.flatnonzero(tokens.targets)
    parts = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return "·".join(tokenizer.decode(tokens.ids[part]) for part in parts)


@pytest.mark.parametrize("name", TWINS)
def test_what_is_learned_is_what_the_training_template_marks(name):
    outcomes = [templates.cell(name, "as it is", TWINS[name], conversation) for conversation in COMPARED]
    assert not [each for each in outcomes if each.outcome in ("wrong", "refused")]
    assert any(each.outcome == "equal" for each in outcomes)


def test_the_page_has_every_template_and_no_wrong_cell():
    page = templates.PAGE.read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| [a-z]\w+ \| \d", line)]
    assert [row[0].removeprefix("| ") for row in rows] == list(TWINS)
    assert {row[2] for row in rows} == {"0"}
    cells = 2 * len(TWINS) * len(CONVERSATIONS)
    assert sum(int(number) for row in rows for number in row[1:6]) == cells
    assert sum(int(row[3]) for row in rows) <= 0.05 * cells  # refused although the template writes them
    assert ", ".join(CONVERSATIONS) in page


@pytest.mark.parametrize("name", ALL)
def test_a_conversation_about_special_tokens_has_those_of_its_template_only(name):
    """Against the same conversation about nothing: as many of each special token, and the text of `apply_chat_template`."""
    template = ALL[name]
    tokenizer = tokenizer_of(template)
    special = tokenizer.all_special_tokens + [str(token) for token in tokenizer.added_tokens_decoder.values()]
    about = " ".join(token for token in dict.fromkeys(special) if "think" not in token and "channel" not in token)
    parts = name.removesuffix("_training") in ("llava_next", "idefics3", "smolvlm")
    messages, plain = (
        templates.in_a_form(
            [user(f"What is {text}?"), assistant(f"Is {text} it?")],
            content="parts" if parts else "text",
            text_arguments=False,
        )
        for text in (about, "that")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        literals = Literals(tokenizer)
        marked, spans = render_with_spans("row", messages, None, template=template, literals=literals)
        ids, learned = literals.encode("row", marked, spans)
        plain_ids, _ = ChatEncoder(tokenizer).encode_messages("row", plain, {}, None)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert marked.replace("\U000f0000", "").replace("\U000f0001", "") == text
    known = set(tokenizer.added_tokens_decoder)
    assert [token for token in ids.tolist() if token in known] == [
        token for token in plain_ids.tolist() if token in known
    ]
    assert f"Is {about} it?" in tokenizer.decode(ids[learned])
    assert f"What is {about}?" not in tokenizer.decode(ids[learned])


@pytest.mark.parametrize("name", ALL)
def test_no_text_of_another_role_is_learned(name):
    """Of all templates, with a twin or without: words of users and tools are not in what is learned, those of answers are."""
    taken = 0
    for conversation in ("one turn", "two calls", "thoughts in all turns", "calls in two turns"):
        tools = TOOLS if conversation in WITH_TOOLS else None
        words = [{**message, "content": f"word{n}"} for n, message in enumerate(CONVERSATIONS[conversation])]
        messages = templates.taken_form([ALL[name]] * 2, words, tools)
        if messages is None:
            continue
        taken += 1
        try:
            learned = learned_text(ALL[name], messages, tools=tools)
        except BadSample as error:
            assert "the chat template drops" in error.reason
            continue
        text = templates.rendered(ALL[name], messages, tools)
        for n, message in enumerate(messages):
            assert (f"word{n}" in learned) == (f"word{n}" in text and message["role"] == "assistant"), (n, learned)
    assert taken


def test_a_header_that_repeats_the_name_of_a_call_is_not_learned():
    """Exchanging the call changed the next header too: the learned span reached into it."""
    template = (
        "{%- for message in messages -%}{%- if message.role == 'tool' -%}"
        "{{ '<|im_start|>' + messages[loop.index0 - 1].tool_calls[0].function.name + '\n' }}"
        "{%- else -%}{{ '<|im_start|>' + message.role + '\n' }}{%- endif -%}"
        "{%- if loop.last and message.role == 'assistant' -%}<think></think>{%- endif -%}{{ message.content }}"
        "{%- for call in message.tool_calls or [] -%}{{ '[' + call.function.name + ']' }}{{ call.function.arguments | tojson }}"
        "{%- endfor -%}{{ '<|im_end|>\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    messages = [user("Hi"), calls(call(), content=""), result("R"), assistant("Yes")]
    arguments = json.dumps(call()["function"]["arguments"], ensure_ascii=False)
    assert learned_text(template, messages) == f"[look_up]{arguments}<|im_end|>·<think></think>Yes<|im_end|>"


def test_text_of_another_message_in_a_turn_makes_a_bad_sample():
    template = CHATML.replace(
        "message.content +", "(messages[loop.index0 - 1].content if loop.index0) ~ message.content +"
    )
    with pytest.raises(
        BadSample, match=r"row: the chat template writes text of message 0 \(user\) inside the turn of message 1"
    ):
        learned_text(template, [user("Where?"), assistant("There.")])


def test_an_answer_that_is_written_elsewhere_makes_a_bad_sample():
    template = "{{ messages[1].content }}" + CHATML
    with pytest.raises(BadSample, match="writes 'There.' of message 1 outside of its turn"):
        learned_text(template, [user("Where?"), assistant("There.")])


def test_a_template_that_changes_letters_makes_bad_samples_unless_it_marks_turns():
    template = CHATML.replace("message.content", "message.content | upper")
    with pytest.raises(BadSample, match=r"row: what the chat template writes cannot be traced to the messages"):
        learned_text(template, [user("Where?"), assistant("There.")])
    marked = (
        "{%- for message in messages -%}<{{ message.role }}>{% generation %}{{ message.content | upper }}{% endgeneration %}"
        "{%- endfor -%}"
    ).replace("{% generation %}", "{%- if message.role == 'assistant' -%}{% generation %}")
    marked = marked.replace("{% endgeneration %}", "{% endgeneration %}{%- else -%}{{ message.content }}{%- endif -%}")
    assert learned_text(marked, [user("Where?"), assistant("There.")]) == "THERE."


def test_a_conversation_of_too_many_letters_is_refused_for_that(monkeypatch):
    """It was said that the template changes letters."""
    messages = [user("Where is it?"), assistant("There.")]
    monkeypatch.setattr("patchgen.runtime.data.provenance.OTHER_LETTERS", (range(0x20000, 0x20006),))
    with pytest.raises(BadSample, match="cannot be traced to the messages: they have more different characters"):
        learned_text(CHATML, messages)


def test_marks_with_text_of_a_user_make_a_bad_sample():
    template = "{%- for message in messages -%}{% generation %}{{ message.content }}{% endgeneration %}{%- endfor -%}"
    with pytest.raises(BadSample, match=r"the chat template marks text of message 0 \(user\) as the assistant's"):
        learned_text(template, [user("Where?"), assistant("There.")])


def test_turns_are_found_in_loops_over_numbers_too():
    """Of pairs by index a template may write a turn without ever looping over messages."""
    template = (
        "{%- for i in range(messages | length) -%}{%- set message = messages[i] -%}{%- set before = messages[i - 1] -%}"
        "{{ '<|im_start|>' + message.role + '\n' }}"
        "{%- if i == messages | length - 1 -%}{{ '<think></think>' }}{%- endif -%}{{ message.content + '<|im_end|>\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    messages = [user("Where?"), assistant("There."), user("Oh?"), assistant("Yes.")]
    assert learned_text(template, messages) == "There.<|im_end|>·<think></think>Yes.<|im_end|>"
    pairs = (
        "{%- for i in range(0, messages | length, 2) -%}<|user|>{{ messages[i].content }}"
        "{%- if i + 1 < messages | length -%}<|assistant|>{{ messages[i + 1].content }}</s>{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
    )
    assert learned_text(pairs, messages) == "There.</s>·Yes.</s>"


@pytest.mark.parametrize("thought", [{"reasoning_content": "R"}, {}])
def test_a_turn_without_an_end_token_ends_with_the_next_marker(thought):
    """One rule for turns that are written otherwise once others follow (without their thought), and for those that are not."""
    messages = [user(), assistant("There.", **thought), user("Oh?"), assistant("Yes.", **thought)]
    found = learned_text(ALL["glm4moe"], messages)
    assert found == f"\n<think></think>\nThere.<|user|>·\n<think>{(thought and 'R') or ''}</think>\nYes."


# As the templates of Qwen1.5, Yi and OpenHermes: the last message has no end token.
ENDS_EARLIER_TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% if (loop.last and add_generation_prompt) or not loop.last %}{{ '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_that_ends_all_turns_but_the_last():
    """The start of the next turn was learned, and nobody was told that the last turn has no end."""
    messages = [user(), assistant("There."), user("Oh?"), assistant("Yes.")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learned_text(ENDS_EARLIER_TURNS, messages[:3]) == "There.<|im_end|>"
    for shown, expected in ((messages, "There.<|im_end|>·Yes."), (messages[:2], "There.")):
        with pytest.warns(UserWarning, match="but not of a conversation's last one"):
            assert learned_text(ENDS_EARLIER_TURNS, shown) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learned_text(CHATML, messages) == "There.<|im_end|>·Yes.<|im_end|>"


def test_calls_without_an_end_token_end_with_the_marker_of_their_result():
    messages = [user(), calls(call(place="x"), content=""), result("R"), assistant("Yes.")]
    found = learned_text(ALL["glm4moe"], messages, tools=TOOLS)
    assert found.endswith("</tool_call><|observation|>·\n<think></think>\nYes.")


def test_calls_of_a_template_that_forbids_content_beside_thinking():
    """The row is valid; what was exchanged for its missing content was not."""
    messages = [user(), calls(call(place="x"), thinking="T"), result("R"), assistant("Yes."), user(), assistant("No.")]
    found = learned_text(ALL["gptoss"], messages, tools=TOOLS)
    assert found == (
        ' to=functions.look_up<|channel|>commentary json<|message|>{"place": "x"}<|call|>·<|channel|>final<|message|>Yes.<|end|>'
        "·<|channel|>final<|message|>No.<|return|>"
    )


def test_a_template_sees_the_thought_in_an_answer_though_its_tokens_are_special():
    """Marks around `<think>` hid it from `'</think>' in content`: the template wrote an empty thought in front."""
    tokenizer = tokenizer_of(ALL["qwen3"])
    messages = [user(), assistant("<think>\nIt flows.\n</think>\n\nThere.")]
    found = learned_text(ALL["qwen3"], messages, tokenizer)
    assert found == "<think>\nIt flows.\n</think>\n\nThere.<|im_end|>"
    ids, _ = ChatEncoder(tokenizer).encode_messages("row", messages, {}, None)
    assert tokenizer.convert_tokens_to_ids("</think>") in ids


def test_special_tokens_of_tools_and_users_are_text_without_changing_the_template():
    tokenizer = tokenizer_of(CHATML + "<|box|>")
    tokenizer.chat_template = CHATML
    messages = [user("<|im_end|>\n<|im_start|>"), assistant("a<|box|> <|im_end|>")]
    with pytest.warns(UserWarning, match=r"in the data is encoded as plain text"):
        ids, learned = ChatEncoder(tokenizer).encode_messages("row", messages, {}, None)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (ids == end).sum() == 2
    assert tokenizer.decode(ids[learned]) == "a<|box|> <|im_end|><|im_end|>"
    assert learned[ids == end].tolist() == [False, True]


def test_a_template_of_another_vocabulary_is_learned_whole_and_warned_of():
    tokenizer = tokenizer_of("")
    with pytest.warns(
        UserWarning, match=r"The chat template writes '<\|im_end\|>', for which the tokenizer has no token"
    ):
        tokenizer.chat_template = CHATML
        found = learned_text(CHATML, [user(), assistant("There."), user(), assistant("Yes.")], tokenizer)
    assert found == "There.<|im_end|>\n·Yes.<|im_end|>\n"


@pytest.mark.parametrize("learn", [[True, False], [False, True]])
def test_marks_of_single_turns_are_learned_by_their_flags(learn):
    twin = TWINS["qwen3"][1]
    answers = [assistant(text, train=flag) for text, flag in zip(("There.", "Yes."), learn, strict=True)]
    found = learned_text(twin, [user(), answers[0], user("Oh?"), answers[1]])
    assert ("There." in found, "Yes." in found) == tuple(learn)


def test_each_token_has_the_role_of_the_message_it_comes_from():
    tokenizer = tokenizer_of(CHATML)
    messages = [user("Hello you"), assistant("Hello you"), user("Hello you")]
    ids, roles = tokens_with_roles(messages, None, template=CHATML, literals=Literals(tokenizer), where="row")
    by_role = {
        role: tokenizer.decode([t for t, r in zip(ids, roles, strict=True) if r == role]) for role in set(roles)
    }
    assert by_role["user"] == "Hello you" * 2
    assert by_role["assistant"] == "Hello you"
