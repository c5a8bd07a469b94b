"""What is learned of a conversation under a chat template, against TRL's training templates, into docs/chat_templates.md.

    python benchmarks/bench_chat_templates.py            # writes the page; exit 1 if a cell is wrong
    python benchmarks/bench_chat_templates.py qwen3      # shows the cells of one template that are not equal

TRL ships chat templates of models, and of many a twin for training that marks the assistant's turns (`{% generation %}`). Each
template is compared with its twin twice, conversation by conversation: as it is, where both write the same, and the twin
without its marks against the twin with them.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import trl
from chat_template_cases import CONVERSATIONS, TOKEN, TOOLS, WITH_TOOLS, Message, tokenizer_of
from transformers.utils.chat_template_utils import render_jinja_template

from patchgen.runtime.data.chat import make_renderer, render_with_spans
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.problems import BadSample

FOLDER = Path(trl.__file__).parent / "chat_templates"
PAGE = Path(__file__).parents[1] / "docs" / "chat_templates.md"
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError)
GENERATION = re.compile(r"(\{%-?\s*)(end)?generation(\s*-?%\})")
WORDS = re.compile(f"({TOKEN.pattern}|\\n)")
FORMS = ("as it is", "twin without marks")


@dataclass(frozen=True)
class Cell:
    """A conversation under a template.

    Attributes:
        outcome: "equal", "wrong", "refused" (by us) or "not taken" (by the template).
        detail: where it is wrong, or why it was refused.
        shared: the share of the text that template and twin both write; what is compared.
    """

    template: str
    form: str
    conversation: str
    outcome: str
    detail: str = ""
    shared: float = 1.0


def twins() -> dict[str, tuple[str, str]]:
    """Each template that has a training twin, with the twin."""
    pairs = {}
    for path in sorted(FOLDER.glob("*_training.jinja")):
        name = path.stem.removesuffix("_training")
        pairs[name] = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), path.read_text(encoding="utf-8")
    return pairs


def all_templates() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}


def without_marks(template: str) -> str:
    """A template without marks of the assistant's turns, that writes the same to the last space."""
    return GENERATION.sub(lambda match: f"{match[1]}{'endif' if match[2] else 'if true'}{match[3]}", template)


def in_a_form(messages: list[Message], *, content: str, text_arguments: bool) -> list[Message]:
    """Messages with all contents "as they are", as "parts" or as "text", and with arguments of calls as JSON."""
    formed = []
    for message in messages:
        message = dict(message)
        given = message.get("content")
        if content == "parts" and isinstance(given, str):
            message["content"] = [{"type": "text", "text": given}]
        if content == "text" and isinstance(given, list):
            message["content"] = "".join(part["text"] for part in given)
        if text_arguments and "tool_calls" in message:
            message["tool_calls"] = [
                {**each, "function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}}
                for each in message["tool_calls"]
            ]
        formed.append(message)
    return formed


def rendered(template: str, messages: list[Message], tools: Any, *, prompt: bool = False) -> str:
    options = {"chat_template": template, "tools": tools, "bos_token": "<s>", "eos_token": "</s>"}
    return render_jinja_template([messages], add_generation_prompt=prompt, **options)[0][0]


def marked(template: str, messages: list[Message], tools: Any) -> tuple[str, list[tuple[int, int]]]:
    options = {"chat_template": template, "tools": tools, "bos_token": "<s>", "eos_token": "</s>"}
    texts, marks = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
    return texts[0], [(int(start), int(end)) for start, end in marks[0] if end > start]


def taken_form(pair: Sequence[str], messages: list[Message], tools: Any) -> list[Message] | None:
    """The first form of the messages that both templates take and write the contents of; None: there is none."""
    for content in ("as they are", "parts", "text"):
        for text_arguments in (False, True):
            formed = in_a_form(messages, content=content, text_arguments=text_arguments)
            try:
                texts = [rendered(template, formed, tools) for template in pair]
            except REFUSALS:
                continue
            if all(_writes_contents(text, formed) for text in texts):
                return formed
    return None


def _writes_contents(text: str, messages: list[Message]) -> bool:
    """Whether a text has the contents of all users, and no printed list of parts."""
    contents = [message["content"] for message in messages if message["role"] == "user"]
    texts = [part["text"] for content in contents if isinstance(content, list) for part in content]
    texts += [content for content in contents if isinstance(content, str)]
    return all(each.strip() in text for each in texts) and "'type': 'text'" not in text


def expected_characters(template: str, messages: list[Message], tools: Any, added: tuple[str, ...]) -> set[int]:
    """The characters that the marks of a template have, without white space after the last token of a mark, and without the
    generation prompt where marks begin in it: both are never generated."""
    text, marks = marked(template, messages, tools)
    prompts = list(_prompts(template, messages, tools))
    joined: list[tuple[int, int]] = []
    for start, end in marks:
        start = min(
            end, max([start, *(_end_of_prompt(text, start, end, before, prompt) for before, prompt in prompts)])
        )
        if joined and joined[-1][1] == start:  # a turn may have several marks, one after the other
            start = joined.pop()[0]
        joined.append((start, end))
    found: set[int] = set()
    for start, end in joined:
        stripped = text[start:end].rstrip()
        found |= set(range(start, start + len(stripped) if stripped.endswith(added) else end))
    return found


def _prompts(template: str, messages: list[Message], tools: Any) -> Iterator[tuple[str, str]]:
    """For each beginning of the messages: its text with the generation prompt, and the prompt alone."""
    for index in range(1, len(messages) + 1):
        try:
            without = rendered(template, messages[:index], tools)
            text = rendered(template, messages[:index], tools, prompt=True)
        except REFUSALS:
            continue
        yield text, text[len(without) :] if text.startswith(without) else ""


def _end_of_prompt(text: str, start: int, end: int, before: str, prompt: str) -> int:
    """Where the generation prompt ends in a mark from `start` to `end`.

    Args:
        before: the text up to a turn, with the prompt.
    """
    if text.startswith(before) and start < len(before) <= end:
        return len(before)
    # The turn is written otherwise after the role, as without a thought: whole words and tokens of the prompt count.
    words = [word for word in WORDS.split(prompt) if word]
    for known in range(len(words), -1, -1):
        if text[:start].endswith("".join(words[:known])):
            for word in words[known:]:
                if not text.startswith(word, start):
                    break
                start += len(word)
            return start
    return start


def cell(name: str, form: str, pair: tuple[str, str], conversation: str) -> Cell:
    """The comparison of a template with its twin on one conversation."""
    tools = TOOLS if conversation in WITH_TOOLS else None
    messages = taken_form(pair, CONVERSATIONS[conversation], tools)
    if messages is None:
        return Cell(name, form, conversation, "not taken")
    template, twin = pair
    tokenizer = tokenizer_of(template + twin, special=False)
    literals = Literals(tokenizer)
    try:
        _, shown = make_renderer(messages, tools, template=template, literals=literals)
        found_text, spans = render_with_spans("cell", messages, tools, template=template, literals=literals)
    except BadSample as error:
        return Cell(name, form, conversation, "refused", error.reason)
    text, twins_text = rendered(template, shown, tools), rendered(twin, shown, tools)
    expected = expected_characters(twin, shown, tools, literals.added_tokens)
    shared = aligned(text, twins_text)
    if literals.unmark("cell", found_text).text != text and literals.pattern.search(str(messages)) is None:
        return Cell(name, form, conversation, "wrong", "another text than the template's")
    learned = {position for start, end in spans for position in range(start, end)}
    wrong = sorted(here for here, there in shared.items() if (here in learned) != (there in expected))
    share = len(shared) / max(len(text), len(twins_text))
    if wrong:
        first, what = wrong[0], "learned" if wrong[0] in learned else "not learned"
        place = f"{text[max(0, first - 25) : first]!r} | {text[first : first + 30]!r}"
        detail = f"{len(wrong)} characters, the first {what}: {place}"
        return Cell(name, form, conversation, "wrong", detail, share)
    return Cell(name, form, conversation, "equal", "", share)


def aligned(text: str, other: str) -> dict[int, int]:
    """The words and tokens at the beginning and at the end that two texts share: their characters, with the places in the
    other text. White space beside what differs is left out: it may belong to either side."""
    if text == other:
        return {position: position for position in range(len(text))}
    words, others = ([word for word in WORDS.split(each) if word] for each in (text, other))
    first = _number_of_equal(words, others)
    last = _number_of_equal(words[first:][::-1], others[first:][::-1])
    beginning = "".join(words[:first]).rstrip()
    end = "".join(words[len(words) - last :]).lstrip()
    positions = {position: position for position in range(len(beginning))}
    return positions | {len(text) - 1 - n: len(other) - 1 - n for n in range(len(end))}


def _number_of_equal(words: Sequence[str], others: Sequence[str]) -> int:
    pairs = enumerate(zip(words, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(words), len(others)))


def cells(names: Sequence[str] | None = None) -> Iterator[Cell]:
    for name, (template, twin) in twins().items():
        if names and name not in names:
            continue
        for conversation in CONVERSATIONS:
            yield cell(name, FORMS[0], (template, twin), conversation)
            yield cell(name, FORMS[1], (without_marks(twin), twin), conversation)


def page(found: Sequence[Cell]) -> str:
    """The page of the results."""
    counts = Counter(each.outcome for each in found)
    compared = len(found) - counts["not taken"]
    rows = []
    for name in dict.fromkeys(each.template for each in found):
        own = [each for each in found if each.template == name]
        of = Counter(each.outcome for each in own)
        otherwise = sum(each.shared < 1 for each in own)
        rows.append(
            f"| {name} | {of['equal']} | {of['wrong']} | {of['refused']} | {of['not taken']} | {otherwise or ''} |"
        )
    refused = Counter((each.template, each.conversation, each.detail) for each in found if each.outcome == "refused")
    reasons = [f"- {name}, {conversation}: {reason}" for name, conversation, reason in refused]
    return PAGE_TEXT.format(
        num_templates=len(rows),
        num_conversations=len(CONVERSATIONS),
        compared=compared,
        equal=counts["equal"],
        wrong=counts["wrong"],
        refused=counts["refused"],
        share=counts["refused"] / compared,
        not_taken=counts["not taken"],
        trl=trl.__version__,
        rows="\n".join(rows),
        reasons="\n".join(["", *reasons]) if reasons else " None.",
        conversations=", ".join(CONVERSATIONS),
    )


PAGE_TEXT = """# What is learned under chat templates, against TRL's training templates

Written by `python benchmarks/bench_chat_templates.py`; [the rule](data.md#which-tokens-of-a-conversation-are-learned).

TRL {trl} ships {num_templates} chat templates with a twin for training, which marks the assistant's turns
(`{{% generation %}}`). Each is compared with its twin on {num_conversations} conversations, twice: the template as it is, and the
twin without its marks. A cell is equal if the learned characters are those that the twin marks.

- White space after the token that ends a turn does not count, nor does the part of the generation prompt that some twins mark:
  both are never generated.
- Where a twin writes another text than its template (reasoning of earlier turns, GLM's `<|user|>` at the end), the words that both
  share at the beginning and at the end are compared; the twin without marks is compared in full.
- A conversation that the template or its twin refuses to write, in all forms (text or parts, arguments as a mapping or as JSON), or
  writes without the user's text, is not taken and not counted.

**{compared} cells: {equal} equal, {wrong} wrong, {refused} refused ({share:.1%}); {not_taken} not taken.**

| template | equal | wrong | refused | not taken | of them with another text than the twin's |
| --- | --- | --- | --- | --- | --- |
{rows}

Refused, with the reason:{reasons}

The conversations: {conversations}.
"""


def main() -> int:
    warnings.simplefilter("ignore")
    names = sys.argv[1:]
    found = list(cells(names))
    for each in found:
        if each.outcome in ("wrong", "refused"):
            print(f"{each.outcome:8} {each.template} ({each.form}), {each.conversation}: {each.detail}")
    print(Counter(each.outcome for each in found))
    if not names:
        PAGE.write_text(page(found), encoding="utf-8")
    return int(any(each.outcome == "wrong" for each in found))


if __name__ == "__main__":
    sys.exit(main())
