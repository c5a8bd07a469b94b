"""Does the chat template fit the tokenizer, and can the assistant's turns be found in what it writes?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.runtime.data.chat import make_renderer, render_with_spans
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.rendering import REFUSALS, Renderer
from patchgen.runtime.data.task_encoders import TASK_ENCODERS
from patchgen.runtime.data.template_forms import forms_of
from patchgen.runtime.data.turn_spans import LAST_TURN_WITHOUT_END, ends_turns
from patchgen.runtime.doctor.finding import Check, Finding, failed, not_checked, passed
from patchgen.runtime.doctor.tokens import stop_tokens

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

KINDS_WITHOUT_TEMPLATE = ("text", "classification", *TASK_ENCODERS)
"""Kinds of data that a tokenizer without a chat template can encode."""
QUESTION, ANSWER = "Where is the river?", "Behind the hill."
ADVICE = (
    "Take the chat template that comes with these weights (chat_template.jinja, or chat_template in "
    "tokenizer_config.json); a base model without one can learn any whose special tokens the tokenizer has."
)


@dataclass(frozen=True)
class Turn:
    """How a template writes the assistant's turn.

    Attributes:
        header: the text between question and answer, from which generation starts.
        header_ids: the tokens of the header.
        end_id: the special token that ends the part of the turn with a loss, which is the next role's marker if the template
            writes none after a turn; None: there is none.
    """

    header: str
    header_ids: tuple[int, ...]
    end_id: int | None


class ChatTemplate(Check):
    """Its markers are special tokens, its generation prompt begins its turns, and its turns end with a special token at which
    generation stops."""

    name = "chat template"

    def run(self, patient: Patient) -> Finding:
        kind = patient.recipe.data.kind
        if kind == "text":
            return not_checked("data.kind = text uses no chat template.")
        template = template_of(patient)
        if template is None and kind in KINDS_WITHOUT_TEMPLATE:
            return not_checked(
                f"the tokenizer has no chat template, and data.kind = {kind} needs none for plain texts."
            )
        if template is None:
            return failed(f"data.kind = {kind}, and the tokenizer has no chat template.", ADVICE)
        problems = [
            *_conflicting_files(patient.recipe.model.source),
            *_unknown_tokens(patient, template),
            *_turn_problems(patient, template),
        ]
        if problems:
            return failed(" ".join(problems), ADVICE)
        turn = find_turn(patient)
        if turn is None:
            return not_checked("the header of the assistant's turn cannot be found in what the template writes.")
        end = patient.tokenizer.convert_ids_to_tokens(turn.end_id)
        forms = forms_of(template, patient.tokenizer.special_tokens_map)
        dropped = "" if forms.wrapped_tools or forms.flat_tools else " It writes no schemas of tools."
        return passed(f"The assistant's turn begins after {turn.header!r} and ends with {end!r}.{dropped}")


def template_of(patient: Patient) -> str | None:
    """The template that the data are rendered with: the processor's where rows have media."""
    processor = patient.parts.processor if patient.recipe.data.kind == "multimodal" else None
    template = getattr(processor, "chat_template", None) or patient.tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def find_turn(patient: Patient) -> Turn | None:
    """How the template writes the assistant's turn; None if it cannot be found."""
    template, tokenizer = template_of(patient), patient.tokenizer
    if template is None:
        return None
    conversation = messages(patient, template)
    try:
        _, prompt, text = rendered_texts(tokenizer, template, conversation)
        _, spans = render_with_spans("probe", conversation, None, template=template, literals=Literals(tokenizer))
    except (*REFUSALS, BadSample):
        return None
    if not spans or not text.startswith(prompt):
        return None
    start, end = spans[-1]
    header = prompt[prompt.find(QUESTION) + len(QUESTION) :]
    turn_ids = tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
    header_ids = tokenizer(header, add_special_tokens=False)["input_ids"] if header else []
    end_id = turn_ids[-1] if turn_ids and turn_ids[-1] in special_ids(tokenizer) else None
    return Turn(header, tuple(header_ids), end_id)


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of the special and added tokens."""
    return set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())


def messages(patient: Patient, template: str) -> list[dict[str, Any]]:
    """A question and its answer, and another question if the template ends turns with the next role's marker, in the forms that the
    template takes."""
    asked = [
        {"role": role, "content": text}
        for role, text in (("user", QUESTION), ("assistant", ANSWER), ("user", QUESTION))
    ]
    literals = Literals(patient.tokenizer)
    render, conversation = make_renderer(asked, None, template=template, literals=literals, where="probe")
    return conversation[:2] if ends_turns(render, literals.added_tokens) else conversation


def rendered_texts(tokenizer: Any, template: str, conversation: list[dict[str, Any]]) -> tuple[str, str, str]:
    """The rendered question alone, with the generation prompt, and with the answer."""
    render = Renderer({**tokenizer.special_tokens_map, "chat_template": template, "tools": None})
    return render(conversation[:1]), render(conversation[:1], prompt=True), render(conversation)


def _conflicting_files(source: str) -> Iterable[str]:
    """Two different templates in one folder: it depends on the program which one it reads."""
    folder = Path(source)
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if not file.is_file() or not config.is_file():
        return
    other = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(other, str) and other.strip() != file.read_text(encoding="utf-8").strip():
        yield f"{file} and chat_template in {config} differ: transformers reads the first, other programs the second."


def _unknown_tokens(patient: Patient, template: str) -> Iterable[str]:
    """Special tokens that the template writes and this tokenizer splits, as when it is the template of another model."""
    try:
        text = rendered_texts(patient.tokenizer, template, messages(patient, template))[2]
    except REFUSALS as error:
        yield f"The template refuses a question with its answer: {error}."
        return
    unknown = Literals(patient.tokenizer).unknown_tokens(text)
    if unknown:
        pieces = len(patient.tokenizer(unknown[0], add_special_tokens=False)["input_ids"])
        yield (
            f"The template writes {', '.join(map(repr, unknown))}, for which the tokenizer has no token ({unknown[0]!r} "
            f"becomes {pieces} ordinary tokens): it is the template of another model."
        )


def _turn_problems(patient: Patient, template: str) -> Iterable[str]:
    """Why training on the assistant's turn would not teach what generation needs: where it begins, and where it ends."""
    tokenizer, conversation = patient.tokenizer, messages(patient, template)
    try:
        bare, prompt, text = rendered_texts(tokenizer, template, conversation)
    except REFUSALS:  # reported by `_unknown_tokens`
        return
    try:
        _, spans = render_with_spans("probe", conversation, None, template=template, literals=Literals(tokenizer))
    except BadSample as error:
        yield f"The assistant's turn cannot be located in what the template writes: {error.reason}."
        return
    if not text.startswith(prompt):
        yield (
            f"The generation prompt ({prompt[len(bare) :]!r} after the question) is not how the assistant's turn begins in "
            f"training ({text[len(bare) : len(prompt)]!r})."
        )
    answered = [span for span in spans if ANSWER in text[slice(*span)]]
    if not answered:
        yield "The assistant's turn is not found in what the template writes: no token would have a loss."
        return
    start, end = answered[-1]
    if text.startswith(prompt) and start < len(prompt):
        yield f"The template marks {text[start : len(prompt)]!r} as the assistant's, which is part of the generation prompt."
    after = text[start:end].partition(ANSWER)[2]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    if not ids or ids[-1] not in special_ids(tokenizer):
        yield (
            f"The part of the turn that has a loss ends with {after[-20:] or ANSWER[-8:]!r}, which is not a special token "
            f"({text[end:].strip()[:20]!r} follows): the model would not learn where to stop."
        )
        if len(conversation) == 2:  # the template ends turns that others follow
            yield LAST_TURN_WITHOUT_END
        return
    stops = stop_tokens(patient) | ({tokenizer.eos_token_id} - {None})
    if not stops.intersection(ids):
        names = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r}" for token in sorted(stops)) or "no token"
        yield (
            f"The template ends turns with {tokenizer.convert_ids_to_tokens(ids[-1])!r}, and generation stops at {names} "
            "(eos_token of the tokenizer, eos_token_id of config.json and generation_config.json): it would run past the end of "
            "an answer. Name the template's token there, if the template is the right one."
        )
