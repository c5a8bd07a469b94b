"""Generated data sets that need no download: for tests, benchmarks and first runs.

stdlib   the sources of Python's standard library, a document per file     kind text
chat     its documented functions: the signature asks, the docs answer     kind chat
prompts  the same as prompt and completion                                 kind text
pairs    the same; chosen: the docs, rejected: the docs in capitals        kind preference
labels   docs: 1 in capitals, 0 unchanged                                  kind classification
tags     the words of docs: 1 those that begin with a capital, 0 the rest  kind token_classes
answers  the first sentence of the docs is the answer                      kind answers
similar  a signature and its docs                                          kind similar
vision   generated images, no clips                                         kind multimodal
audio    generated tones                                                    kind multimodal
video    generated clips                                                    kind multimodal
omni     all of these, and text                                             kind multimodal
"""

from __future__ import annotations

import ast
import functools
import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchgen.runtime.data.builtin_media import MEDIA_SETS, NUM_SAMPLES, GeneratedSource
from patchgen.runtime.data.files import TextFiles
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.text import digest

VALIDATION_EVERY = 20
NUM_FUNCTIONS = 1000
FUNCTION_SETS = ("chat", "prompts", "pairs", "labels", "tags", "answers", "similar")
NAMES = ("stdlib", *FUNCTION_SETS, *MEDIA_SETS)
EXCLUDED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo",
}  # fmt: skip


def open_builtin(name: str, split: str) -> Any:
    """The data set `name`; one of twenty samples belongs to the split `validation`, the others to `train`."""
    if name not in NAMES:
        raise DataError(f"There is no built-in data set {name!r}; there are {', '.join(NAMES)}.")
    if split not in ("train", "validation"):
        raise DataError(f"The built-in data sets have the splits train and validation, not {split!r}.")
    if name == "stdlib":
        return TextFiles(items_of_split(library_files(), split))
    if name in FUNCTION_SETS:
        functions = documented_functions()
        numbers = items_of_split(range(len(functions)), split)
        make = functools.partial(function_sample, name, functions)
        # Docs depend on the version of Python, so cached tokens do as well.
        return GeneratedSource(f"builtin:{name}", make, numbers, contents_digest=digest([functions, make(numbers[0])]))
    # Not every twentieth: the kinds of sample alternate by number, and multiples of twenty are all of one kind.
    validation = list(range(NUM_SAMPLES, NUM_SAMPLES + NUM_SAMPLES // VALIDATION_EVERY))
    numbers = validation if split == "validation" else items_of_split(range(NUM_SAMPLES), split)
    return GeneratedSource(f"builtin:{name}", MEDIA_SETS[name], numbers)


def items_of_split(items: Sequence[Any], split: str) -> list[Any]:
    validation = split == "validation"
    return [item for number, item in enumerate(items) if (number % VALIDATION_EVERY == 0) is validation]


def library_files() -> list[Path]:
    """The readable sources of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        file
        for file in root.rglob("*.py")
        if not EXCLUDED_FOLDERS & set(file.relative_to(root).parts) and _is_text(file)
    )


def _is_text(file: Path) -> bool:
    try:
        return bool(file.read_text(encoding="utf-8").strip())
    except UnicodeDecodeError:
        return False


@functools.cache
def documented_functions() -> list[tuple[str, str]]:
    """Signature and docs of the first NUM_FUNCTIONS documented functions in the modules at the top of the standard library."""
    top = Path(sysconfig.get_path("stdlib"))
    functions = (
        (f"{file.stem}.{node.name}({ast.unparse(node.args)})", docs)
        for file in library_files()
        if file.parent == top
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (docs := ast.get_docstring(node))
    )
    return list(itertools.islice(functions, NUM_FUNCTIONS))


def function_sample(name: str, functions: list[tuple[str, str]], number: int) -> dict[str, Any]:
    """A sample of the data set `name` about the documented function `number`."""
    signature, docs = functions[number]
    question, words = f"What does {signature} do?", docs.split()
    match name:
        case "chat":
            return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": docs}]}
        case "prompts":
            return {"prompt": question, "completion": docs}
        case "pairs":
            return {"prompt": question, "chosen": docs, "rejected": docs.upper()}
        case "labels":
            every = VALIDATION_EVERY  # its multiples, the validation split, are all even
            label = (number if number % every else number // every) % 2
            return {"text": docs.upper() if label else docs, "label": label}
        case "tags":
            return {"tokens": words, "tags": [int(word[0].isupper()) for word in words]}
        case "answers":
            answers = {"text": [docs.partition(".")[0] or docs], "answer_start": [0]}
            return {"question": question, "context": docs, "answers": answers}
        case "similar":
            return {"anchor": signature, "positive": docs}
    raise ValueError(f"There is no built-in data set {name!r}.")
