"""Which characters of a rendered conversation an assistant's turn has to learn.

    written for the user        <|user|>Hi<|end|>
    written for the assistant                    <|assistant|>Hello<|end|>
    generation prompt                            <|assistant|>
    learned                                                   Hello<|end|>

A turn is what the template writes while its loop is at the turn's message (`rendering.py`), without the generation prompt
and without white space after the token that ends it. After the last message what follows the loop belongs to it (`</s>`
at the end of all). If a template ends no turn with a token of its own, a turn ends with the token that follows it: the next role's
marker, at which such models stop. Whether it does is seen at a turn that others follow; of one that ends all turns but the last
(`{% if not loop.last %}<|im_end|>{% endif %}`) the last turn has no end token, which is warned of.

Whatever a turn is found by, these hold, or the sample is a bad one:

    no text of another message is learned in a turn
    all text of the turn's message that the template writes is learned
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from patchgen.runtime.data.literals import TEMPLATE, Literals, Span
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.provenance import TOOLS, sources_of_characters
from patchgen.runtime.data.rendering import REFUSALS, Renderer, Segment

PROBE = "Qzwordzq"
"""An answer that is in no template."""
LAST_TURN_WITHOUT_END = (
    "The chat template writes a token at the end of assistant turns, but not of a conversation's last one, which then does not "
    "teach where to stop; conversations of one turn never do. To fix: take a template that ends every turn (in this one, write the "
    "token after the last message as well)."
)


@dataclass(frozen=True)
class Conversation:
    """A conversation as a template writes it.

    Attributes:
        segments: the parts of the text by the message they are written for; none: unknown.
        sources: `(len(text),)` the message that each character comes from (`provenance.py`); None: unknown, `why_unknown`.
        added_tokens: of the tokenizer; one of these may end a turn.
    """

    render: Renderer
    messages: list[dict[str, Any]]
    text: str
    segments: list[Segment]
    sources: np.ndarray | None
    added_tokens: tuple[str, ...]
    why_unknown: str = ""

    @functools.cached_property
    def words(self) -> re.Pattern[str]:
        """Where template text is split into words: at tokens and line ends."""
        longest_first = sorted(self.added_tokens, key=len, reverse=True)
        return re.compile("(" + "|".join([*map(re.escape, longest_first), "\n"]) + ")")

    @property
    def assistants(self) -> list[int]:
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def sources_in(self, spans: Sequence[Span]) -> set[int]:
        """The messages with text in `spans`, `TOOLS` if there is text of the tools' schemas; none if that is unknown."""
        if self.sources is None:
            return set()
        parts = [np.unique(self.sources[start:end]) for start, end in spans]
        return {int(index) for part in parts for index in part} - {TEMPLATE}


def read_conversation(render: Renderer, messages: list[dict[str, Any]], literals: Literals) -> Conversation:
    """Renders a conversation and finds where its text comes from.

    Raises:
        TemplateError, or whatever a template raises: it refuses the messages.
    """
    text = render(messages)
    followed_text, segments = render.with_segments(messages)
    sources, why_unknown = sources_of_characters(render, messages, text, literals.pattern)
    segments = segments if followed_text == text else []
    return Conversation(render, messages, text, segments, sources, literals.added_tokens, why_unknown)


def spans_of_turns(where: str, conversation: Conversation, wanted: Sequence[int]) -> dict[int, list[Span]]:
    """The spans of assistant turns in the text by the index of their messages; turns that the template leaves out have none.

    Raises:
        BadSample: the turn cannot be told from other text.
    """
    found: dict[int, list[Span]] = {}
    if conversation.sources is None and wanted:
        raise BadSample(
            where,
            f"what the chat template writes cannot be traced to the messages: {conversation.why_unknown} (a template that marks "
            "the assistant's turns by {% generation %} needs no such trace)",
        )
    for index in wanted:
        reasons = []
        for rule in (_by_segments, _by_prefixes):
            spans = rule(conversation, index)
            reason = _why_not(conversation, index, spans) if spans else ""
            if spans and not reason:
                found[index] = spans
                break
            reasons += [reason] if reason else []
        else:
            if reasons:
                raise BadSample(where, reasons[0])
            if _is_written(conversation, index):
                raise BadSample(where, f"the turn of message {index} is not found in what the chat template writes")
    if _last_turn_lacks_end(conversation, found):
        warnings.warn(LAST_TURN_WITHOUT_END, stacklevel=2)
    return found


def require_own_text(where: str, conversation: Conversation, marks: Sequence[Span]) -> None:
    """Raises BadSample if marks of a template, as of assistant turns, contain text of another role."""
    foreign = sorted(conversation.sources_in(marks) - set(conversation.assistants))
    if foreign:
        raise BadSample(
            where,
            f"the chat template marks {_described(conversation, foreign[0])} as the assistant's ({{% generation %}})",
        )


def marks_with_loss(
    where: str, conversation: Conversation, marks: Sequence[Span], learned: frozenset[int]
) -> list[Span]:
    """A template's marks that belong to turns with a loss.

    Raises:
        BadSample: a mark contains turns with and without a loss, or its turn is unknown.
    """
    kept = []
    for mark in marks:
        written_for = {
            segment.index for segment in conversation.segments if segment.start < mark[1] and mark[0] < segment.end
        }
        turns = (written_for | conversation.sources_in([mark])) & set(conversation.assistants)
        have_loss = {index in learned for index in turns}
        if not have_loss and mark[1] < len(conversation.text):
            raise BadSample(where, "the chat template marks a span of which the turn is unknown")
        if len(have_loss) > 1:
            raise BadSample(where, "the chat template marks turns with and without a loss as one span")
        last = conversation.messages and len(conversation.messages) - 1 in learned
        if True in have_loss or (not have_loss and last):
            kept.append(mark)
    return kept


def text_by_message(conversation: Conversation) -> Iterator[tuple[int, Span]]:
    """Each message with a span of its own text; without sources, with all that the template writes for it."""
    for segment in conversation.segments or [Segment(0, len(conversation.text), None)]:
        if conversation.sources is None:
            if segment.index is not None:
                yield segment.index, (segment.start, segment.end)
            continue
        within = conversation.sources[segment.start : segment.end]
        for index in sorted(set(within.tolist()) - {TEMPLATE, TOOLS}):
            positions = np.flatnonzero(within == index) + segment.start
            yield index, (int(positions[0]), int(positions[-1]) + 1)


# ------------------------------------------------------------------------------------------------------------- rules


def _by_segments(conversation: Conversation, index: int) -> list[Span]:
    """A turn as what is written for its message."""
    own = [(part.start, part.end) for part in conversation.segments if part.index == index]
    if not own:
        return []
    if index == len(conversation.messages) - 1:
        own[-1] = (own[-1][0], _end_of_last_turn(conversation, index, own[-1]))
    own[0] = (_after_prompt(conversation, index, own[0]), own[0][1])
    own[-1] = (own[-1][0], _through_end_token(conversation, index, own[-1]))
    return [
        (start, _without_space_at_end(conversation, start, end)) for start, end in own if conversation.text[start:end]
    ]


def _by_prefixes(conversation: Conversation, index: int) -> list[Span]:
    """A turn as what the text has more than without it, of templates that write no message in a loop over messages."""
    text = conversation.text
    before = conversation.render.or_none(conversation.messages[:index], prompt=True)
    through = conversation.render.or_none(conversation.messages[: index + 1])
    if not index or not before or not through or not (text.startswith(before) and text.startswith(through)):
        return []
    if len(through) <= len(before):
        return []
    end = _through_end_token(conversation, index, (len(before), len(through)))
    return [(len(before), _without_space_at_end(conversation, len(before), end))]


def _why_not(conversation: Conversation, index: int, spans: Sequence[Span]) -> str:
    """The reason why spans are not the turn of a message; "": they are."""
    foreign = sorted(conversation.sources_in(spans) - {index})
    if foreign:
        return f"the chat template writes {_described(conversation, foreign[0])} inside the turn of message {index}"
    if conversation.sources is not None:
        own = [(part.start, part.end) for part in conversation.segments if part.index == index]
        outside = conversation.sources == index
        for start, end in [*spans, *own]:
            outside[start:end] = False
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            length = int(np.flatnonzero(~np.append(outside[first:], False))[0])
            part = conversation.text[first : first + min(length, 20)]
            return f"the chat template writes {part!r} of message {index} outside of its turn"
    return ""


def _described(conversation: Conversation, index: int) -> str:
    if index == TOOLS:
        return "text of the tools' schemas"
    return f"text of message {index} ({conversation.messages[index]['role']})"


def _is_written(conversation: Conversation, index: int) -> bool:
    """Whether the text has anything of a message."""
    return index in conversation.sources_in([(0, len(conversation.text))])


# ------------------------------------------------------------------------------------------------------------ borders


def _after_prompt(conversation: Conversation, index: int, turn: Span) -> int:
    """Where the text after the generation prompt begins in a turn."""
    start, end = turn
    shown = _rendered_beginning(conversation, index)
    if shown is None:
        return start
    before = conversation.render(shown, prompt=True)
    if index and conversation.text.startswith(before) and start < len(before) <= end:
        return len(before)
    # The turn is written in another way than the prompt, for example without its opening of a thought: whole words count,
    # up to the first that the message has brought.
    limit = end
    if conversation.sources is not None:
        own = np.flatnonzero(conversation.sources[start:end] == index)
        limit = start + int(own[0]) if len(own) else end
    first = conversation.messages[: max(min(conversation.assistants), 1)]
    for prompt in (_prompt(conversation.render, shown), _prompt(conversation.render, first)):
        words = [word for word in conversation.words.split(prompt) if word]
        for count in range(len(words), 0, -1):
            header = "".join(words[:count])
            place = conversation.text.find(header, start, limit)
            # The first message may have the template's own beginning before it (`<s>`, instructions).
            if place == start or (place > start and not index and count == len(words)):
                return place + len(header)
    return start


def _rendered_beginning(conversation: Conversation, index: int) -> list[dict[str, Any]] | None:
    """The messages before a turn, or others if the template refuses these; None: it refuses all with a generation prompt."""
    for shown in (conversation.messages[: max(index, 1)], conversation.messages):
        if conversation.render.or_none(shown, prompt=True) is not None:
            return shown
    return None


def _prompt(render: Renderer, messages: list[dict[str, Any]]) -> str:
    """The generation prompt after messages; "": the template writes none, or refuses these messages."""
    text, without = render.or_none(messages, prompt=True), render.or_none(messages)
    if text is None or without is None:
        return ""
    if text.startswith(without):
        return text[len(without) :]
    text, segments = render.with_segments(messages, prompt=True)  # something else is written in the prompt's place
    return text[segments[-1].start :] if segments[-1].index is None else ""


def _end_of_last_turn(conversation: Conversation, index: int, turn: Span) -> int:
    """The end of the turn of the last message: with what follows the loop over messages. Without what the template writes for
    results of calls, which it writes without results as well, if it writes them into the turn."""
    start, end = turn
    if "tool_calls" in conversation.messages[index]:
        result = {"role": "tool", "content": PROBE}
        try:
            text, segments = conversation.render.with_segments([*conversation.messages, result])
        except REFUSALS:
            segments = []
        own = [part for part in segments if part.index == index]
        if own and own[0].start == start and own[0].end < end and conversation.text.startswith(text[: own[0].end]):
            return own[0].end
    after = conversation.segments[-1]
    return after.end if after.index is None and after.start == end else end


def _through_end_token(conversation: Conversation, index: int, turn: Span) -> int:
    """The end of a turn; if the template has no end token of its own, with the token that follows the turn."""
    end = turn[1]
    if index == len(conversation.messages) - 1 or ends_turns(conversation.render, conversation.added_tokens):
        return end
    following = conversation.text[end:].lstrip()
    token = _longest(token for token in conversation.added_tokens if following.startswith(token))
    return len(conversation.text) - len(following) + len(token)


def _last_turn_lacks_end(conversation: Conversation, turns: dict[int, list[Span]]) -> bool:
    """Whether the turn of the last message has no end token, though the template ends turns that others follow with one. Calls
    are not looked at: their end token may be the template's own mark of a call."""
    last = len(conversation.messages) - 1
    if last not in turns or conversation.sources is None or conversation.messages[last].get("tool_calls"):
        return False
    own = np.flatnonzero(conversation.sources == last)
    after = conversation.text[own[-1] + 1 : turns[last][-1][1]] if len(own) else ""
    has_end = not len(own) or any(token in after for token in conversation.added_tokens)
    return not has_end and ends_turns(conversation.render, conversation.added_tokens)


def _without_space_at_end(conversation: Conversation, start: int, end: int) -> int:
    """The end of a span, without white space after a token."""
    stripped = conversation.text[start:end].rstrip()
    return start + len(stripped) if stripped.endswith(conversation.added_tokens) else end


def _longest(tokens: Iterator[str]) -> str:
    return max(tokens, key=len, default="")


def ends_turns(render: Renderer, added_tokens: tuple[str, ...]) -> bool:
    """Whether the template writes a token of the tokenizer after an answer that other messages follow."""
    options = {name: value for name, value in render.options.items() if name not in ("chat_template", "tools")}
    return _ends_turns(render.options["chat_template"], json.dumps(options, default=str, sort_keys=True), added_tokens)


@functools.lru_cache(maxsize=32)
def _ends_turns(template: str, options: str, added_tokens: tuple[str, ...]) -> bool:
    render = Renderer({**json.loads(options), "chat_template": template, "tools": None})
    for in_form in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
        messages = [
            {"role": role, "content": in_form(text)}
            for role, text in (("user", "a"), ("assistant", PROBE), ("user", "b"))
        ]
        after = _after_answer(render, messages)
        if after is not None:
            return any(token in after for token in added_tokens)
    return True


def _after_answer(render: Renderer, messages: list[dict[str, Any]]) -> str | None:
    """What the template writes in the turn of message 1 after its content; of a template that writes no messages in a loop, after
    the answer at the end of a conversation. None: it does not write the answer."""
    try:
        text, segments = render.with_segments(messages)
        turn = "".join(text[part.start : part.end] for part in segments if part.index == 1)
    except REFUSALS:
        turn = ""
    if PROBE in turn:
        return turn.rpartition(PROBE)[2]
    alone = render.or_none(messages[:2])
    return alone.rpartition(PROBE)[2] if alone is not None and PROBE in alone else None


def common_prefix_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many characters, tokens or messages at the beginning are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
