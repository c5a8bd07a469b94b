"""Made-up data sets that every installation has: for tests, benches and first runs.

stdlib   the sources of Python's standard library, a file a document       kind text
chat     its documented functions: the signature asks, the docs answer     kind chat
prompts  the same as plain texts, of which the docs are learned            kind text
pairs    the same; docs are chosen before the same in capitals             kind preference
labels   docs: 1 in capitals, 0 as they are                                kind classification
tags     the words of docs: 1 those that begin with a capital, 0 the rest  kind token_classes
answers  the first sentence of docs answers                                kind answers
similar  a signature and its docs                                          kind similar
vision, audio, video, omni   generated images, tones, clips, all of them   kind multimodal
"""

from __future__ import annotations

import ast
import functools
import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchgen.runtime.data.builtin_media import MEDIA, SAMPLES, MadeUp
from patchgen.runtime.data.files import TextFiles
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.text import digest

VALIDATION_EVERY = 20
QUESTIONS = 1000
NAMES = ("stdlib", "chat", "prompts", "pairs", "labels", "tags", "answers", "similar", *MEDIA)
LEFT_OUT = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo",
}  # fmt: skip


def open_builtin(name: str, split: str) -> Any:
    """The made-up set `name`; of twenty samples one belongs to the split `validation`, the others to `train`."""
    if name not in NAMES:
        raise DataError(f"There is no built-in data set {name!r}; there are {', '.join(NAMES)}.")
    if split not in ("train", "validation"):
        raise DataError(f"The built-in data sets have the splits train and validation, not {split!r}.")
    if name == "stdlib":
        return TextFiles(part_of(library_files(), split))
    if name in OF_FUNCTIONS:
        questions = documented()
        numbers = part_of(range(len(questions)), split)
        make = functools.partial(OF_FUNCTIONS[name], questions)
        # Docs are those of this Python: tokens that another one's were made into are not theirs.
        return MadeUp(f"builtin:{name}", make, numbers, contents=digest([questions, make(numbers[0])]))
    return MadeUp(f"builtin:{name}", MEDIA[name], part_of(range(SAMPLES), split))


def part_of(items: Sequence[Any], split: str) -> list[Any]:
    validation = split == "validation"
    return [item for number, item in enumerate(items) if (number % VALIDATION_EVERY == 0) is validation]


def library_files() -> list[Path]:
    """The readable sources of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        file for file in root.rglob("*.py") if not LEFT_OUT & set(file.relative_to(root).parts) and _is_text(file)
    )


def _is_text(file: Path) -> bool:
    try:
        return bool(file.read_text(encoding="utf-8").strip())
    except UnicodeDecodeError:
        return False


@functools.cache
def documented() -> list[tuple[str, str]]:
    """Signature and docs of documented functions in the modules at the top of the standard library."""
    top = Path(sysconfig.get_path("stdlib"))
    found = (
        (f"{file.stem}.{node.name}({ast.unparse(node.args)})", docs)
        for file in library_files()
        if file.parent == top
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (docs := ast.get_docstring(node))
    )
    return list(itertools.islice(found, QUESTIONS))


def _question(questions: list[tuple[str, str]], number: int) -> dict[str, Any]:
    signature, docs = questions[number]
    ask = {"role": "user", "content": f"What does {signature} do?"}
    return {"messages": [ask, {"role": "assistant", "content": docs}]}


def _prompt(questions: list[tuple[str, str]], number: int) -> dict[str, Any]:
    signature, docs = questions[number]
    return {"prompt": f"What does {signature} do?", "completion": docs}


def _pair(questions: list[tuple[str, str]], number: int) -> dict[str, Any]:
    signature, docs = questions[number]
    return {"prompt": f"What does {signature} do?", "chosen": docs, "rejected": docs.upper()}


def _label(questions: list[tuple[str, str]], number: int) -> dict[str, Any]:
    docs = questions[number][1]
    return {"text": docs.upper() if number % 2 else docs, "label": number % 2}


def _tags(questions: list[tuple[str, str]], number: int) -> dict[str, Any]:
    words = questions[number][1].split()
    return {"tokens": words, "tags": [int(word[0].isupper()) for word in words]}


def _answer(questions: list[tuple[str, str]], number: int) -> dict[str, Any]:
    signature, docs = questions[number]
    answers = {"text": [docs.partition(".")[0] or docs], "answer_start": [0]}
    return {"question": f"What does {signature} do?", "context": docs, "answers": answers}


def _similar(questions: list[tuple[str, str]], number: int) -> dict[str, Any]:
    return dict(zip(("anchor", "positive"), questions[number], strict=True))


OF_FUNCTIONS = {
    "chat": _question,
    "prompts": _prompt,
    "pairs": _pair,
    "labels": _label,
    "tags": _tags,
    "answers": _answer,
    "similar": _similar,
}
