"""The message that each character comes from, and whose turn a template writes, of templates and messages of all kinds."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from patchgen.runtime.data.literals import TEMPLATE
from patchgen.runtime.data.provenance import TOOLS, sources_of_characters
from patchgen.runtime.data.rendering import Renderer, Segment

PLAIN = "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}</>{%- endfor -%}{{ eos_token }}"
THOUGHTS = (
    "{%- for m in messages -%}<{{ m.role }}>{%- if '</think>' in m.content -%}{{ m.content }}{%- else -%}<think></think>"
    "{{ m.content | trim }}{%- endif -%}</>{%- endfor -%}"
)
NOTHING = re.compile("(?!)")
texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Co")), max_size=12)


def renderer(template: str, tools=None) -> Renderer:
    return Renderer({"chat_template": template, "tools": tools, "eos_token": "</s>"})


@settings(max_examples=60)
@given(contents=st.lists(texts, min_size=1, max_size=5), template=st.sampled_from([PLAIN, THOUGHTS]))
def test_each_printed_character_comes_from_its_message(contents, template):
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    render = renderer(template)
    text = render(messages)
    sources, _ = sources_of_characters(render, messages, text, NOTHING)
    assert sources is not None
    followed, segments = render.with_segments(messages)
    assert followed == text
    assert "".join(text[part.start : part.end] for part in segments) == text
    for part in segments:
        within = sources[part.start : part.end]
        assert set(within.tolist()) <= {TEMPLATE, part.index}
        if part.index is not None:
            own = "".join(text[part.start + n] for n in np.flatnonzero(within == part.index))
            expected = [c for c in contents[part.index] if c.isprintable() and c not in " \"'\\"]
            assert own == "".join(expected)


def test_what_a_template_looks_for_is_its_own():
    render, messages = renderer(THOUGHTS), [{"role": "assistant", "content": "<think>R</think>A"}]
    text = render(messages)
    assert text == "<assistant><think>R</think>A</>"
    sources, _ = sources_of_characters(render, messages, text, NOTHING)
    assert "".join(c for c, source in zip(text, sources, strict=True) if source == 0) == "<think>RA"


def test_marked_texts_of_tools_are_told_from_the_template():
    template = "{{ tools | tojson }}<end>" + PLAIN
    tools = [{"type": "function", "function": {"name": "f", "description": "Writes <end>."}}]
    render, messages = renderer(template, tools), [{"role": "user", "content": "Hi"}]
    text = render(messages)
    sources, _ = sources_of_characters(render, messages, text, re.compile("<end>"))
    first, second = (match.start() for match in re.finditer("<end>", text))
    assert set(sources[first : first + 5].tolist()) == {TOOLS}
    assert set(sources[second : second + 5].tolist()) == {TEMPLATE}


def test_letters_that_a_template_changes_have_no_source():
    render, messages = renderer(PLAIN.replace("m.content", "m.content | upper")), [{"role": "user", "content": "Hi"}]
    sources, reason = sources_of_characters(render, messages, render(messages), NOTHING)
    assert sources is None and "changes their letters" in reason


def test_a_loop_within_a_loop_belongs_to_its_own_messages():
    """As templates that write the results of tools into the turn of their call."""
    template = (
        "A{%- for m in messages if m.role != 'tool' -%}[{{ m.content }}{%- for r in messages -%}{%- if r.role == 'tool' -%}"
        "({{ r.content }}){%- endif -%}{%- endfor -%}]{%- endfor -%}Z"
    )
    messages = [{"role": "user", "content": "u"}, {"role": "tool", "content": "t"}]
    text, segments = renderer(template).with_segments(messages)
    assert text == "A[u(t)]Z"
    assert segments == [Segment(0, 1, None), Segment(1, 3, 0), Segment(3, 6, 1), Segment(6, 7, 0), Segment(7, 8, None)]
