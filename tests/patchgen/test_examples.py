"""The contract of a pass: its examples are what it does, once; it is short, and names no model."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from generation_cases import applied

import patchgen
from patchgen import upstream
from patchgen.passes import PASSES, hand_edits, prune
from patchgen.passes.base import Example, Pass
from patchgen.runtime.verify import source_closure, source_keys

ROOTS = {"prune": ("Model",)}
EXAMPLES = [(kind, example) for kind in PASSES for example in kind.EXAMPLES]
# Passes of more than 150 lines of code, with the reason; a new one has to give its own.
LONG = {
    "hand_edits": "seven verbs with their types, which users read in one place",
    "fused_loss": "reads the region from the logits to the loss, in every form that upstream has",
    "fused_ops": "three seams, with the table of known bodies",
}


def instance(kind: type[Pass]) -> Pass:
    return kind(ROOTS[kind.name]) if kind is prune.Prune else kind()


@pytest.mark.parametrize(("kind", "example"), EXAMPLES, ids=[f"{k.name}: {e.title}" for k, e in EXAMPLES])
def test_an_example_is_what_the_pass_does(kind: type[Pass], example: Example):
    outcome = applied(instance(kind), example.before)
    assert example.shows(outcome.module.text), outcome.module.text
    if example.before != example.after:
        assert outcome.hits


@pytest.mark.parametrize(("kind", "example"), EXAMPLES, ids=[f"{k.name}: {e.title}" for k, e in EXAMPLES])
def test_a_second_run_changes_nothing_and_claims_nothing(kind: type[Pass], example: Example):
    first = applied(instance(kind), example.before).module.text
    outcome = applied(instance(kind), first)
    assert outcome.module.text == first
    assert outcome.hits == ()
    assert all(isinstance(hit.line, int) and isinstance(hit.what, str) for hit in outcome.upstream)


def test_every_pass_has_an_example_and_its_own_name():
    assert [kind.name for kind in PASSES if not kind.EXAMPLES] == []
    assert len({kind.name for kind in PASSES}) == len(PASSES)
    for kind in PASSES:
        assert kind.purpose.endswith("."), kind.name
        assert Path(inspect.getfile(kind)).stem == kind.name


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, comments, docstrings, and no EXAMPLES."""
    text = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_examples = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXAMPLES"
        if is_text or is_examples:
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for i, line in lines if i not in skipped and line.strip() and not line.lstrip().startswith("#"))


@pytest.mark.parametrize("kind", PASSES, ids=lambda kind: kind.name)
def test_a_pass_is_short_or_says_why_not(kind: type[Pass]):
    if kind.name not in LONG:
        assert code_lines(Path(inspect.getfile(kind))) <= 150


def test_no_model_name_stands_in_general_code():
    """Names of folders under transformers/models, as words; those that are English words or terms are listed."""
    terms = {"align", "auto", "blip", "clip", "encoder_decoder", "mask", "plan", "time", "dit", "led", "rag", "beam"}
    names = {name for name in upstream.open_release().modeling_files if len(name) > 2} - terms
    package = Path(patchgen.__file__).parent
    files = [*(package / "anatomy").glob("*.py"), *(package / "passes").glob("*.py")]
    assert len(files) > len(PASSES)
    found = []
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            words = {word.lower() for word in re.findall(r"[A-Za-z][A-Za-z0-9_]*", line)}
            parts = {part.lower() for word in re.findall(r"[A-Za-z0-9_]+", line) for part in _camel_parts(word)}
            found += [f"{path.name}:{number}: {name}" for name in sorted(names & (words | parts))]
    assert found == []


def test_no_model_type_stands_in_what_generating_runs():
    """In strings and identifiers, as words or at the beginning of a class's name. Docstrings may give examples; the configs
    of single models are looked up by their names and are left out. What is an English word or a term, too, is listed.
    """
    terms = {"align", "auto", "clip", "codegen", "git"}
    release = upstream.open_release()
    types = {
        *release.modeling_files,
        *release.auto_map("CONFIG_MAPPING_NAMES"),
        *release.auto_map("MODEL_MAPPING_NAMES"),
    }
    assert {"llama", "gemma3_text", "qwen3_omni_moe_thinker"} <= types and len(types) > 400
    wanted = {_plain(name) for name in types if len(name) > 2} - terms
    files = source_closure.closure(source_keys.GENERATOR, (source_closure.PACKAGE,), without=source_closure.RUNTIME)
    assert len(files) > 2 * len(PASSES) and not any(name.startswith("patchgen.model_configs.") for name in files)
    found = [
        f"{name}: {word}"
        for name, path in files.items()
        for word in _words(ast.parse(path.read_text()))
        if wanted & {_plain(part) for part in (word, *_camel_parts(word))}
    ]
    assert found == []
    planted = ast.parse("def f(x):\n    return x if 'llama' in kinds else Qwen3MoeExperts(x, gemma3_text=1)")
    assert {"llama", "Qwen3MoeExperts", "gemma3_text"} <= {*_words(planted)}
    assert wanted >= {_plain(part) for part in ("llama", "Qwen3Moe", "gemma3_text")}


def _plain(name: str) -> str:
    return re.sub(r"[_-]", "", name).lower()


def _words(tree: ast.Module) -> list[str]:
    """The identifiers of code and the words of its strings, without docstrings."""
    stated = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            words += (
                re.findall(r"[\w-]+", node.value) if isinstance(node.value, str) and id(node) not in stated else []
            )
        else:
            values = (getattr(node, field) for field in node._fields)
            words += [value for value in values if isinstance(value, str)]
    return words


def _camel_parts(word: str) -> list[str]:
    """`ExampleModel` -> Example, ExampleModel...: every prefix that ends before a capital."""
    ends = [i for i in range(1, len(word)) if word[i].isupper() and word[i - 1].islower()]
    return [word[:end] for end in ends if word[0].isupper()]


def test_the_verbs_of_hand_edits_each_want_a_reason():
    for kind in hand_edits.Edit.__args__:
        assert "reason" in inspect.signature(kind).parameters
